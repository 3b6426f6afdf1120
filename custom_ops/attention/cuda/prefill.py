"""Prefill attention of the ``cuda`` backend on Hopper: which calls ``prefill.cu`` takes, and its launches."""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.cuda.call_params import call_params, refuse_sinks
from torchpaged.custom_ops.attention.cuda.prefill_shape import (
    Mode,
    PrefillShape,
    late_ctas,
    may_split,
    merge_items,
    most_tiles,
    partial_numbers,
    prefill_config,
    refuse,
    shape_for,
    shared_bytes,
)
from torchpaged.custom_ops.attention.cuda.tensor_maps import pool_map, queries_map, refuse_layout
from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.params import struct_of


class Suffixes(NamedTuple):
    """What a launch over shared prefixes is merged with: attention over the rest of each request, of the
    decode launch behind it, which leaves its output where the merged one goes.

    Attributes:
        order: ``[T]`` int64, the token rows in the order in which ``query_start_loc`` counts them.
        own_lse: ``[T, num_heads]`` float32, contiguous, of that launch.
        ctas: for the prefixes; the other multiprocessors are the decode launch's from the beginning.
    """

    order: Tensor
    own_lse: Tensor
    ctas: int


#: Prepares a decode launch: what launches it, and numbers of its semaphore for each request.
Behind = Callable[[], tuple[Callable[[], None], int]]


def why_not(call: AttentionCall, spec: Specialisation) -> str | None:
    """Why the kernel can't take a call, or None. Shapes, dtypes, strides and addresses only."""
    compute = gpu.capability(call.q.device.index or 0)
    return refuse(spec, compute, scale=call.scale) or refuse_sinks(call, spec) or refuse_layout(call)


def prefill(
    call: AttentionCall,
    spec: Specialisation,
    *,
    short: int = 0,
    behind: Behind | None = None,
    suffixes: Suffixes | None = None,
    every_lane: bool = False,
) -> None:
    """Launch a call that `why_not` lets pass, checked and as `AttentionCall.for_launch` gives it.

    Args:
        call: its semaphore gives out tickets: None, or zeros that no launch shares which may run at the same
            time; the kernel leaves zeros behind. With ``behind`` it is that launch's too.
        spec: of the call.
        short: as in `Mode`; then there is a launch ``behind``.
        behind: prepares the decode launch behind, while this kernel is compiled if it has to be. Gives what
            launches it, and nothing else, and how many numbers of the semaphore a request has: the kernel
            uses the first one of a request that is its own.
        suffixes: then the requests here are groups' prefixes, seen by all their queries (not ``causal``, no
            masks, sinks or slopes), and ``behind`` the decode launch over the rest; ``out`` and ``lse`` get
            both together.
        every_lane: as in `Mode`.
    """
    num_tokens, index = call.q.shape[0], call.q.device.index or 0
    if not num_tokens:
        return
    shape, sms = shape_for(spec), gpu.num_sms(index)
    split = suffixes is not None or may_split(call, spec, short, sms)
    mode, late = Mode(short, split, suffixes is not None, every_lane), late_ctas(sms, short, split)
    decodes, ticket_row = None, 0
    if behind is not None:
        _begin(index, spec, mode)
        decodes, ticket_row = behind()
    kernel, merge = _specialised(index, spec, mode)
    early = gpu.launches_early(index)
    ctas = sms if suffixes is None else suffixes.ctas
    tiles = most_tiles(num_tokens, call.num_reqs, shape.rows // spec.group) * spec.num_kv_heads
    params, device = _params(call, spec, shape, suffixes), call.q.device
    if params.tickets is None:  # of no requests: padding is served, too
        tickets = torch.zeros(1, dtype=torch.int32, device=device)
        params.tickets = tickets.data_ptr()
    if split:
        count = partial_numbers(shape, spec.dim_v, ctas, tiles if suffixes else 0)
        partials = torch.empty(count, dtype=torch.float32, device=device)
        params.partials = partials.data_ptr()
    params.ticket_row, params.ctas, params.late = ticket_row, ctas, late
    if decodes is None:
        kernel.launch(ctas, shape.threads, params, early=early)
    else:  # which waits for nothing: all ahead must have ended when this one begins
        kernel.launch(ctas - late, shape.threads, params, early=False)
        decodes()
    if late:
        params.is_late = 1
        kernel.launch(late, shape.threads, params, early=early)
        params.is_late = 0
    if merge is not None:
        merge.launch(min(merge_items(shape, spec.dim_v) * tiles, 2 * ctas), 128, params, early=early)


def _params(
    call: AttentionCall, spec: Specialisation, shape: PrefillShape, suffixes: Suffixes | None
) -> ctypes.Structure:
    """What the record says; the rest is the launch's."""
    q, semaphore = call.q, call.semaphore
    rows = shape.rows if suffixes is None else spec.group  # of a box: a tile, or a token
    (keys, k_at), (values, v_at) = (
        pool_map(pool.data_ptr(), pool.dtype, tuple(pool.shape), pool.stride(), spec.fp8_queries)
        for pool in (call.k_cache, call.v_cache)
    )
    return struct_of("prefill.cu")(
        **call_params(call),
        q=queries_map(q.data_ptr(), q.dtype, tuple(q.shape), q.stride(0), q.stride(1), spec.group, rows),
        k=keys,
        v=values,
        tickets=None if semaphore is None or not semaphore.numel() else semaphore.data_ptr(),
        num_blocks=call.k_cache.shape[0],
        k_at=k_at,
        v_at=v_at,
        order=0 if suffixes is None else suffixes.order.data_ptr(),
        own_lse=0 if suffixes is None else suffixes.own_lse.data_ptr(),
    )


@functools.cache
def _begin(index: int, spec: Specialisation, mode: Mode) -> None:
    """Compile in threads what `_specialised` will load."""
    config = prefill_config(spec, mode)
    for file in ("prefill.cu", "prefill_merge.cu") if mode.split else ("prefill.cu",):
        jit.compile_ahead(file, config, gpu.capability(index))


@functools.cache
def _specialised(index: int, spec: Specialisation, mode: Mode) -> tuple[jit.Kernel, jit.Kernel | None]:
    """The kernel of these shapes and features, and the one that merges its splits."""
    config, device = prefill_config(spec, mode), torch.device("cuda", index)
    if mode.split:
        jit.compile_ahead("prefill_merge.cu", config, gpu.capability(index))
    kernel = jit.kernel("prefill.cu", "paged_prefill", config, device, shared_bytes=shared_bytes(config))
    if not mode.split:
        return kernel, None
    return kernel, jit.kernel("prefill_merge.cu", "paged_prefill_merge", config, device, shared_bytes=0)
