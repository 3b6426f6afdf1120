"""Latent attention as dense attention over numbers, for the reference and the CPU's kernels: each query token
that selects keys becomes a request of its own, over a pool of these rows; rows of fp8 become numbers."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, of_numbers, rows_at, unpack

#: Most numbers of a pool of selected rows: as many tokens at once as have fewer.
_AT_ONCE = 1 << 24


def attend_densely(call: LatentCall, attend: Callable[..., None]) -> None:
    """A checked call by ``attend``, a handle of ``paged_attention``."""
    out, scale = call.out, call.output_scale
    if scale is not None:
        call = call._replace(out=torch.empty_like(out, dtype=call.q.dtype))
    for dense in dense_calls(call):
        tensors, options = dense.as_attention().flat()
        attend(*tensors, **options)
    if scale is not None:
        most = torch.finfo(out.dtype).max
        out.copy_((call.out / scale.to(call.out.dtype)).clamp(-most, most))


def dense_calls(call: LatentCall) -> Iterator[LatentCall]:
    """A checked call, or calls without indices that together are one with them; over pools of the queries'
    dtype."""
    if call.indices is None:
        yield of_numbers(call) if call.kv_cache.dtype == ROW_DTYPE else call
        return
    num_tokens, num_reqs = call.q.shape[0], call.block_table.shape[0]
    if not num_tokens or not num_reqs:
        call.as_attention().empty()
        return
    requests, ends = _requests_and_ends(call)
    visible = (call.indices >= 0) & (call.indices < ends[:, None])
    counts = visible.sum(1)
    most = max(int(counts.max()), 1)
    first = visible.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    positions = call.indices.gather(1, first).where(visible.gather(1, first), 0).long()
    at_once = max(1, _AT_ONCE // (most * call.q.shape[2]))
    for begin in range(0, num_tokens, at_once):
        part = slice(begin, begin + at_once)
        yield _over_rows(call, part, requests[part], positions[part], counts[part].int())


def _requests_and_ends(call: LatentCall) -> tuple[Tensor, Tensor]:
    """Of each query token its request, and the end of what it sees of that."""
    starts, lengths = call.query_start_loc.long(), call.seq_lens.long()
    token = torch.arange(call.q.shape[0], device=call.q.device)
    requests = torch.searchsorted(starts[1:], token, right=True).clamp_max(len(lengths) - 1)
    position = lengths[requests] - starts[requests + 1] + token
    ends = torch.minimum(lengths[requests], position + 1) if call.causal else lengths[requests]
    return requests, ends.masked_fill((token >= starts[-1]) | (position < 0), 0)


def _over_rows(
    call: LatentCall, part: slice, requests: Tensor, positions: Tensor, counts: Tensor
) -> LatentCall:
    block_size, num_tokens = call.kv_cache.shape[1], len(requests)
    selected = torch.arange(positions.shape[1], device=positions.device) < counts[:, None]
    if call.block_table.shape[1]:
        blocks = call.block_table[requests].gather(1, positions // block_size)
    else:
        blocks = torch.zeros_like(positions)
    # A token that selects fewer has the null block's row in their places: nothing reads it.
    rows = rows_at(call.kv_cache, blocks.where(selected, 0).long(), positions % block_size)
    if rows.dtype == ROW_DTYPE:
        rows = unpack(rows, call.rank, call.q.dtype)
    numbers = torch.arange(num_tokens + 1, dtype=torch.int32, device=positions.device)
    return LatentCall(
        call.q[part],
        rows,
        numbers[:num_tokens, None],
        counts,
        numbers,
        call.out[part],
        None if call.lse is None else call.lse[part],
        1,
        call.scale,
        causal=False,
    )
