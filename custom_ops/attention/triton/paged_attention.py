"""paged_attention: chooses between the decode and the prefill kernel by shapes and launches it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation, head_stride
from torchpaged.custom_ops.attention.check import check_paged_attention
from torchpaged.custom_ops.attention.triton import config
from torchpaged.custom_ops.triton import launching
from torchpaged.custom_ops.triton.compile_together import Launch, compile_together
from torchpaged.custom_ops.triton.kernel_store import KernelRef

_PREFILL = KernelRef(
    "attention.triton.prefill",
    "prefill_kernel",
    constants=frozenset({22, 23, 25, 26}),
    unspecialised=frozenset({15, 16, 18, 19}),
)
_DECODE = KernelRef("attention.triton.decode", "decode_kernel", unspecialised=frozenset({18, 19, 26}))


def paged_attention(call: AttentionCall) -> None:
    """Launch; arguments as in ``custom_ops/attention/schema.py``. Every choice here depends on shapes, never
    on lengths."""
    launching.require_launchable(call.q)
    check_paged_attention(call)
    attend(call)


def attend(call: AttentionCall) -> None:
    """The launches of a checked call."""
    launching.require_fp8(call.k_cache)
    if not call.num_reqs:
        call.empty()
        return
    if not call.q.shape[0]:
        return
    call = call.for_launch()
    arguments, longest = _arguments(call), call.max_query_len
    if longest <= config.MAX_DECODE_QUERY_LEN and longest * call.group <= config.MAX_DECODE_ROWS:
        _decode(call, arguments, longest)()
        return
    skip = config.decode_len_in_mixed(call.group, call.num_reqs, call.q.shape[0], longest)
    # prepared ahead: the launch must follow that of the other queries with no kernel between them
    decode = _decode(call, arguments, skip, skip) if skip else None
    prefill = _prefill(call, arguments, skip)
    if decode is not None:
        key = (call.q.device, call.q.dtype, call.q.shape[1], Specialisation.of(call), longest, skip)
        compile_together(key, call.q.device, prefill, decode)
    prefill()
    if decode is not None:
        decode()


class _Arguments(NamedTuple):
    """What both kernels are launched with: positional arguments in their order, and constants by name.

    Attributes:
        tensors: pointers, of the record's tensors.
        q_strides, cache_strides, strides: in numbers; those of the pools are constants of the decode kernel.
        flags: constants.
    """

    tensors: tuple[Tensor | None, ...]
    q_strides: tuple[int, ...]
    cache_strides: tuple[int, ...]
    strides: tuple[int, ...]
    flags: dict[str, Any]


def _arguments(call: AttentionCall) -> _Arguments:
    spec = Specialisation.of(call)
    tensors = (
        *call[:8],
        call.alibi_slopes,
        call.sinks,
        call.k_scale,
        call.v_scale,
        call.tree_mask,
    )
    strides = (
        *call.out.stride()[:2],
        *(call.lse.stride() if call.lse is not None else (0, 0)),
        call.block_table.stride(0),
        head_stride(call.k_scale),
        head_stride(call.v_scale),
    )
    dim_pad, dim_v_pad = config.padded_widths(spec.dim, spec.dim_v, spec.kv_dtype.itemsize)
    flags: dict[str, Any] = {
        "GROUP": spec.group,
        "DIM": spec.dim,
        "DIM_PAD": dim_pad,
        "DIM_V": spec.dim_v,
        "DIM_V_PAD": dim_v_pad,
        "BLOCK_SIZE": spec.block_size,
        "CAUSAL": spec.causal,
        "WINDOW_LEFT": spec.window_left,
        "WINDOW_RIGHT": spec.window_right,
        "CHUNK": spec.chunk_size,
        "SOFT_CAP": spec.soft_cap,
        "INTERPRET": launching.INTERPRET,
    }
    cache_strides = spec.k_strides + spec.v_strides
    return _Arguments(tensors, call.q.stride()[:2], cache_strides, strides, flags)


def _prefill(call: AttentionCall, arguments: _Arguments, skip: int) -> Launch:
    """What launches the prefill kernel; ``skip``: longest query that is left to a decode launch behind it."""
    device, group, num_reqs, num_tokens = call.q.device, call.group, call.num_reqs, call.q.shape[0]
    low = call.window_left >= 0 or call.chunk_size > 0
    tiles = config.prefill_tiles(
        max(call.q.shape[2], call.dim_v),
        group,
        call.q.element_size(),
        call.max_query_len,
        call.capacity,
        config.has_large_tiles(device),
        call.tree_mask is not None and (low or call.alibi_slopes is not None),
    )
    tokens = tiles.rows // group
    if skip:
        single, shared = config.programs_for_longer(num_reqs, num_tokens, skip, tokens)
    else:
        single, shared = num_tokens // tokens + num_reqs, 0
    positional = (
        *arguments.tensors,
        call.scale,
        call.logits_soft_cap,
        num_reqs,
        num_tokens,
        call.num_kv_heads,
        single,
        launching.num_sms(device),
        *arguments.q_strides,
        *arguments.cache_strides,
        *arguments.strides,
    )
    options = dict(
        TOKENS=tokens,
        TILE_M=tiles.rows,
        TILE_KV=tiles.keys,
        SKIP_DECODES=skip,
        **arguments.flags,
        **launching.early_launch(device),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return Launch(_PREFILL, ((single + shared) * call.num_kv_heads,), positional, options)


def _decode(call: AttentionCall, arguments: _Arguments, max_query_len: int, longest: int = 0) -> Launch:
    """What launches the decode kernel; every allocation is made here, ahead of the launch. ``longest``:
    requests with more query tokens are left to the prefill launch ahead; 0: there is none."""
    device, num_reqs, flags = call.q.device, call.num_reqs, arguments.flags
    query_len = launching.next_power_of_2(max_query_len)
    rows = launching.next_power_of_2(query_len * call.group)
    tiles = config.decode_tiles(
        max(call.q.shape[2], call.dim_v), rows, call.k_cache.element_size(), call.q.element_size()
    )
    programs = config.num_programs(device, tiles)
    part_acc = torch.empty(programs * 2 * rows * flags["DIM_V_PAD"], dtype=torch.float32, device=device)
    part_state = torch.empty(programs * 4 * rows, dtype=torch.float32, device=device)
    reqs = next((size for size in config.SCANS if num_reqs <= size), config.SCANS[-1])
    positional = (
        *arguments.tensors,
        part_acc,
        part_state,
        call.with_semaphore().semaphore,
        call.scale,
        call.logits_soft_cap,
        num_reqs,
        call.q.shape[0],
        *arguments.q_strides,
        *arguments.strides,
    )
    names = ("K_BLOCK", "K_SLOT", "K_HEAD", "V_BLOCK", "V_SLOT", "V_HEAD")
    options = dict(
        **dict(zip(names, arguments.cache_strides, strict=True)),
        NUM_KV_HEADS=call.num_kv_heads,
        QUERY_LEN=query_len,
        TILE_M=tiles.rows,
        TILE_KV=tiles.keys,
        SLICES=tiles.slices,
        REQS=reqs,
        ONE_SCAN=num_reqs <= reqs,
        MIN_TILES=tiles.min_tiles,
        ROWS=rows,
        PARTS=config.merged_parts(flags["DIM_V"]),
        PDL=launching.launches_early(device),
        LONGEST=longest,
        **flags,
        **config.decode_options(device, tiles),
    )
    return Launch(_DECODE, (programs,), positional, options)
