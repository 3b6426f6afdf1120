"""FlashAttention's call of packed queries over packed or paged keys, as vLLM's build of it has it."""

from typing import Any

from torch import Tensor

from torchpaged.compat.arguments import (
    NAMES,
    by_their_names,
    is_eager,
    note_hints,
    options_of,
    refuse,
    refuse_invariant_splits,
)
from torchpaged.compat.packed import PackedTokens
from torchpaged.custom_ops.checks import reads_values
from torchpaged.custom_ops.errors import ArgumentError

_NAMES = NAMES | {"k_cache": "k", "v_cache": "v", "seq_lens": "seqused_k", "sinks": "s_aux"}


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
    refuse(name, expected=0, dropout_p=dropout_p, cp_rank=cp_rank, cp_world_size=cp_world_size - 1)
    refuse_invariant_splits(num_splits)
    note_hints(name, scheduler_metadata=scheduler_metadata, num_splits=num_splits or None)
    starts, most = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    packed = PackedTokens(q, k, v, *starts, *most, seqused_k, block_table)
    if is_eager():
        packed.check()
        _check_lens(packed)
        if fa_version not in (None, 2, 3, 4):
            raise ArgumentError("fa_version", "2, 3, 4 or None", repr(fa_version))
    options = options_of(softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    descales = (q_descale, k_descale, v_descale)
    return by_their_names(_NAMES, lambda: packed.run(options, out, return_softmax_lse, descales))


def _check_lens(packed: PackedTokens) -> None:
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
