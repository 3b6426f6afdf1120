"""Packed queries over packed or paged keys: FlashAttention's call, as vLLM's build of it has it, and torch's
``torch.nn.attention.varlen`` (torch 2.12 and newer), with any torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchpaged.compat.arguments import (
    by_their_names,
    check_out,
    check_zero,
    is_eager,
    note_hints,
    options_of,
    refuse,
    refuse_invariant_splits,
)
from torchpaged.compat.call import Descales, PackedCall
from torchpaged.compat.dense import packed_pools
from torchpaged.custom_ops.batch_values import check_starts
from torchpaged.custom_ops.checks import check_dims, check_dtype, check_tensors, is_int, reads_values
from torchpaged.custom_ops.errors import ArgumentError

#: Our words -> FlashAttention's.
_FLASH_ATTENTION = {
    "k_cache": "k",
    "v_cache": "v",
    "query_start_loc": "cu_seqlens_q",
    "seq_lens": "seqused_k",
    "max_query_len": "max_seqlen_q",
    "logits_soft_cap": "softcap",
    "scale": "softmax_scale",
    "sinks": "s_aux",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}
#: Ours and FlashAttention's -> torch's.
_TORCH = {
    "q": "query",
    "k": "key",
    "v": "value",
    "k_cache": "key",
    "v_cache": "value",
    "cu_seqlens_q": "cu_seq_q",
    "cu_seqlens_k": "cu_seq_k",
    "query_start_loc": "cu_seq_q",
    "seq_lens": "seqused_k",
    "max_query_len": "max_q",
    "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k",
}


@dataclass
class _Packed:
    """Which tokens attend to which, in FlashAttention's words: see `flash_attn_varlen_func`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Tensor | None
    block_table: Tensor | None

    def check(self) -> None:
        """What only these functions ask; the rest is checked with the op's arguments."""
        check_tensors(q=self.q, k=self.k, v=self.v, cu_seqlens_q=self.cu_seqlens_q)
        check_dims("q", self.q, None, None, None)
        check_dims("cu_seqlens_q", self.cu_seqlens_q, None)
        for name in ("max_seqlen_q", "max_seqlen_k"):
            size = getattr(self, name)
            if not is_int(size) or size < 0:
                raise ArgumentError(name, "an int, an upper bound of the lengths", repr(size))
        num_reqs = self.cu_seqlens_q.shape[0] - 1
        for name, lens, count in (
            ("cu_seqlens_k", self.cu_seqlens_k, num_reqs + 1),
            ("seqused_k", self.seqused_k, num_reqs),
        ):
            if lens is not None:
                check_tensors(**{name: lens})
                check_dims(name, lens, count)
                check_dtype(name, lens, torch.int32)
        if self.block_table is None:
            check_dims("k", self.k, None, None, None)
            check_dims("v", self.v, *self.k.shape[:2], None)
        else:
            check_tensors(block_table=self.block_table)
            check_dims("k", self.k, None, None, None, None)
        if self.cu_seqlens_k is not None and reads_values(self.q.device):
            end = self.k.shape[0] if self.block_table is None else 2**31
            check_starts("cu_seqlens_k", self.cu_seqlens_k, end)

    def lens(self) -> Tensor:
        """``[num_reqs]`` int32: keys of each request."""
        if self.seqused_k is not None:
            return self.seqused_k
        if self.cu_seqlens_k is None:
            raise ArgumentError("seqused_k", "the keys of each request, together with a block_table", "None")
        return self.cu_seqlens_k.diff()

    def run(
        self,
        options: dict[str, Any],
        out: Tensor | None,
        return_lse: bool,
        descales: Descales = (None, None, None),
    ) -> Any:
        """Attend; returns what the functions return."""
        k_cache, v_cache, table = self.k, self.v, self.block_table
        if table is None:
            if self.cu_seqlens_k is None:
                expected = "where each request's keys lie, since they are packed"
                raise ArgumentError("cu_seqlens_k", expected, "None", "or pass block_table and seqused_k")
            k_cache, v_cache, table = packed_pools(self.k, self.v, self.cu_seqlens_k[:-1], self.max_seqlen_k)
        call = PackedCall.of(
            self.q,
            k_cache,
            v_cache,
            table,
            self.lens(),
            self.cu_seqlens_q,
            max_query_len=self.max_seqlen_q,
            options=options,
            descales=descales,
        )
        call.same_lens = self.cu_seqlens_k is self.cu_seqlens_q and self.seqused_k is None
        if out is not None and is_eager():
            check_out(out, self.q, self.v.shape[-1])
        result, lse = call.run(out, return_lse)
        return result if lse is None else (result, lse.transpose(0, 1).contiguous())


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | list[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int | None = None,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
) -> Any:
    """Attention of packed queries over paged or packed keys and values. Inference only.

    Causal alignment is bottom-right: query ``i`` of a request with S queries and L keys stands at position
    ``L - S + i``. A query that sees no key gives zeros and LSE -inf, as do tokens of ``q`` behind
    ``cu_seqlens_q[-1]``. (Some builds of FlashAttention give LSE +inf there.) The window is
    ``[position - left, position + right]``, both ends seen; -1 is open. Causal closes the right side whatever
    the window says.

    Args:
        q: ``[total_q, num_heads, head_dim]``; float8_e4m3fn is computed and returned in bfloat16.
        k: ``[num_blocks, block_size, num_kv_heads, head_dim]`` with a ``block_table``, else
            ``[total_k, num_kv_heads, head_dim]``.
        v: as ``k``; its last dimension, head_dim_v, may differ.
        max_seqlen_q: host int, an upper bound of the queries of a request; 1 chooses the decode kernels.
        cu_seqlens_q: ``[num_reqs + 1]`` int32.
        max_seqlen_k: host int, an upper bound of the keys of a request. With a block table the kernels read
            the lengths on the device, and only a CPU, where values are checked, looks at it.
        cu_seqlens_k: ``[num_reqs + 1]`` int32, where each request's keys lie in packed ``k``; with a block
            table, as upstream calls it, their differences are the keys of each request.
        seqused_k: ``[num_reqs]`` int32, keys of each request; with a block table, instead of
            ``cu_seqlens_k``.
        q_v: refused.
        dropout_p: must be 0.
        softmax_scale: default ``head_dim ** -0.5``.
        causal, window_size, softcap: as above; softcap 0 is off.
        alibi_slopes: float32 ``[num_heads]``, or ``[num_reqs, num_heads]`` with equal rows (one, or
            expanded). Refused unless causal.
        deterministic: accepted: the forward pass always is.
        return_attn_probs: refused; ``return_softmax_lse`` returns the LSE.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32. Block 0 is a block like any other.
        return_softmax_lse: also return the LSE.
        out: ``[total_q, num_heads, head_dim_v]`` to write into, which is returned.
        q_descale, k_descale, v_descale: float32 of one number or ``[num_reqs, num_kv_heads]``; those of keys
            and values with fp8 ``k`` and ``v`` only, that of queries with fp8 ``q`` only. Ones that differ
            between requests cost one more rounding of ``q`` or ``out``.
        scheduler_metadata, num_splits, fa_version: tune the original and change no result; they change
            nothing here. ``num_splits=1``, which asks for results that do not depend on the batch's other
            requests, is refused.
        s_aux: ``[num_heads]``, one logit per head that takes part in the softmax without a value.
        cp_world_size, cp_rank, cp_tot_seqused_k: refused unless 1, 0 and None.

    Returns:
        ``[total_q, num_heads, head_dim_v]``; with ``return_softmax_lse`` a pair of it and float32
        ``[num_heads, total_q]``, natural logarithm.

    Raises:
        ArgumentError: an argument does not fit or is not honoured. In a traced call dynamo's own error.
        BackendUnavailableError: the backend that was asked for can't serve the call.
    """
    name = "flash_attn_varlen_func"
    if isinstance(max_seqlen_q, Tensor):
        raise ArgumentError(
            "max_seqlen_q",
            "an int, as in vLLM's order: max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k",
            "a tensor, as in flash_attn's own order: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k",
            "pass them by name: both orders have the same names",
        )
    refuse(name, q_v=q_v, cp_tot_seqused_k=cp_tot_seqused_k)
    refuse(
        name,
        "pass return_softmax_lse=True for the LSE",
        return_attn_probs=True if return_attn_probs else None,
    )
    check_zero(name, dropout_p=dropout_p, cp_rank=cp_rank, cp_world_size=cp_world_size - 1)
    refuse_invariant_splits(num_splits)
    note_hints(name, scheduler_metadata=scheduler_metadata, num_splits=num_splits or None)
    packed = _Packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, block_table)
    if is_eager():
        packed.check()
        _check_lens(packed)
        if fa_version not in (None, 2, 3, 4):
            raise ArgumentError("fa_version", "2, 3, 4 or None", repr(fa_version))
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    descales = (q_descale, k_descale, v_descale)
    return by_their_names(_FLASH_ATTENTION, lambda: packed.run(options, out, return_softmax_lse, descales))


def _check_lens(packed: _Packed) -> None:
    """One of two ways to say them, and none over the maximum."""
    if packed.cu_seqlens_k is not None and packed.seqused_k is not None:
        raise ArgumentError("cu_seqlens_k", "None together with seqused_k", "both")
    if packed.cu_seqlens_k is None and packed.seqused_k is None:
        return
    lens, most = packed.lens(), packed.max_seqlen_k
    if lens.numel() and reads_values(packed.q.device) and int(lens.max()) > most:
        raise ArgumentError(
            "max_seqlen_k", f"at least the longest request's keys ({int(lens.max())})", str(most)
        )


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn`. Inference only; float32 and a CPU are served too, and so is a
    trace with any lengths.

    Args:
        query: ``[total_q, num_heads, head_dim]``.
        key: ``[total_k, num_kv_heads, head_dim]``, or ``[num_blocks, block_size, num_kv_heads, head_dim]``
            with a ``block_table``.
        value: as ``key``; its last dimension, head_dim_v, may differ.
        cu_seq_q: ``[num_reqs + 1]`` int32.
        cu_seq_k: ``[num_reqs + 1]`` int32; None with a block table.
        max_q, max_k: host ints, upper bounds. With a block table the kernels read the keys' lengths on the
            device, and not ``max_k``.
        return_aux: anything with a true ``lse``, such as torch's ``AuxRequest(lse=True)``: also return the
            LSE.
        scale: softmax scale; default ``head_dim ** -0.5``.
        window_size: ``(left, right)``: (-1, -1) is full attention, (-1, 0) causal, (W, 0) causal with a
            window of W keys before the own one. Alignment is bottom-right.
        enable_gqa: must be True where there are fewer key heads than query heads.
        seqused_k: ``[num_reqs]`` int32, keys of each request that count. Needed with a block table.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32. Block 0 is a block like any other.
        num_splits: None. 1, with which torch promises results that do not depend on the batch's other
            requests, is refused.
        out: ``[total_q, num_heads, head_dim_v]`` to write into, which is returned; torch has it in
            `varlen_attn_out`.

    Returns:
        ``[total_q, num_heads, head_dim_v]``; with ``return_aux.lse`` a pair of it and float32
        ``[num_heads, total_q]``, natural logarithm.

    Raises:
        ArgumentError: an argument does not fit or is not honoured. In a traced call dynamo's own error.
    """
    refuse_invariant_splits(num_splits)
    packed = _Packed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)
    if is_eager():
        by_their_names(_TORCH, packed.check)
        _check_torch(packed, enable_gqa)
    options = options_of(scale, False, window_size)
    wants_lse = bool(return_aux is not None and return_aux.lse)
    return by_their_names(_TORCH, lambda: packed.run(options, out, wants_lse))


def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn_out`: `varlen_attn` into ``out``, of its arguments."""
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, out=out, **options)


def _check_torch(packed: _Packed, enable_gqa: bool) -> None:
    """What torch's call asks besides."""
    q, k, used, starts = packed.q, packed.k, packed.seqused_k, packed.cu_seqlens_k
    if packed.block_table is not None and starts is not None:
        raise ArgumentError("cu_seq_k", "None together with block_table", "a tensor")
    if starts is not None and used is not None and reads_values(q.device):
        counts = starts.diff()
        if bool(((used < 0) | (used > counts)).any()):
            raise ArgumentError(
                "seqused_k", f"at most each request's keys, {counts.tolist()[:64]}", str(used.tolist()[:64])
            )
    if not enable_gqa and q.shape[1] != k.shape[-2]:
        raise ArgumentError(
            "enable_gqa", f"True for {q.shape[1]} query heads and {k.shape[-2]} key heads", "False"
        )
