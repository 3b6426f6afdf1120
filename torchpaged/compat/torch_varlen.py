"""``torch.nn.attention.varlen`` (torch 2.12 and newer) on the kernels of torchpaged, with any torch."""

from typing import Any

from torch import Tensor

from torchpaged.compat.arguments import by_their_names, is_eager, options_of, refuse_invariant_splits
from torchpaged.compat.packed import PackedTokens
from torchpaged.custom_ops.checks import reads_values
from torchpaged.custom_ops.errors import ArgumentError

#: Ours and FlashAttention's -> torch's.
_NAMES = {
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
    packed = PackedTokens(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)
    if is_eager():
        by_their_names(_NAMES, packed.check)
        _check_torch(packed, enable_gqa)
    options = options_of(scale, False, window_size)
    wants_lse = bool(return_aux is not None and return_aux.lse)
    return by_their_names(_NAMES, lambda: packed.run(options, out, wants_lse))


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


def _check_torch(packed: PackedTokens, enable_gqa: bool) -> None:
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
