"""Launches of ``selected.cu``: ``mla_attention`` with ``indices``, which calls it takes and how their work is
cut, by shapes and dtypes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.loaded_kernel import Kernel
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.cuda.routes import not_hopper, unaligned
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda.call_params import call_params

THREADS, WARPS, TILE = 256, 8, 32  # with one tile of heads
#: Positions of a CTA of ``selected_few.cu``, blocks that it has room for; CTAs of the merge behind it for a
#: token, and parts of a token that this has room for.
PART_KEYS, TABLE_ROOM, MERGE_SHARES, MAX_PARTS = 128, 3072, 16, 128
#: Positions that a CTA has room for, fewest that are worth one, and CTAs that share those of a token: 16 with
#: one tile of heads, of which two fit a multiprocessor, so that clusters of 16 do.
MAX_KEYS, MIN_KEYS, MAX_CLUSTER = 2048, 64, 8
_KEPT = 1024  # bytes of a CTA's shared memory, by the hardware
#: With more than 16 heads the Triton kernel is faster until so many CTAs have work without a cluster: with up
#: to 32 heads, and with more (docs/log/sparse_cuda.md, docs/log/sparse_many.md).
_MANY, _MANY_OF_MANY_HEADS = 128, 64
_DTYPES = (torch.bfloat16, torch.float16)


class SelectedSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    rank: int
    rope: int
    num_heads: int
    block_size: int
    half: bool
    causal: bool
    lse: bool
    m_tiles: int
    cluster: int
    max_parts: int

    @classmethod
    def of(cls, call: LatentCall, num_sms: int) -> SelectedSpec:
        """Of a call that `why_not` lets pass: as many CTAs for each token as fill the device, with a tile of
        positions each at least."""
        assert call.indices is not None
        (tokens, heads, width), top_k = call.q.shape, call.indices.shape[1]
        m_tiles = 1 if heads <= 16 else 2
        programs, cluster = tokens * -(-heads // (16 * m_tiles)), 1
        most = MAX_CLUSTER * 2 // m_tiles
        two_per_sm = num_sms * 2 // m_tiles  # which pays where a CTA has all positions
        while cluster < most and (
            cluster * MAX_KEYS < top_k
            or (
                cluster * MIN_KEYS < top_k
                and programs * cluster * 2 <= (two_per_sm if cluster == 1 else num_sms)
            )
        ):
            cluster *= 2
        return cls(
            rank=call.rank,
            rope=width - call.rank,
            num_heads=heads,
            block_size=call.kv_cache.shape[1],
            half=call.q.dtype == torch.float16,
            causal=call.causal,
            lse=call.lse is not None,
            m_tiles=m_tiles,
            cluster=cluster,
            max_parts=8,
        )

    def config(self) -> Config:
        """The constants."""
        return SELECTED.of(self)


SELECTED = Table.of_file("mla/cuda/selected_config.cuh")


def why_none(call: LatentCall, capability: tuple[int, int]) -> str | None:
    """Why no kernel for Hopper can take a call with indices, or None. Shapes, dtypes, strides and addresses
    only."""
    q, pool, indices = call.q, call.kv_cache, call.indices
    if reason := not_hopper(capability):
        return reason
    if indices is None or indices.dim() != 2 or q.dtype not in _DTYPES:
        return f"{q.dtype} and {pool.dtype}, not bfloat16 or float16"
    if call.output_scale is not None:
        return "output_scale: numbers of e4m3"
    if indices.stride(1) != 1:
        return "positions that are not contiguous"
    if pool.shape[0] * pool.shape[1] >= 2**31:
        return f"kv_cache with {pool.shape[0]} blocks"
    return unaligned(("q", q, 2), ("out", call.out, 2), ("kv_cache", pool, 3))


def why_not(call: LatentCall) -> str | None:
    """Why ``selected.cu`` can't take a call that `why_none` lets pass, or None."""
    q, rank, indices = call.q, call.rank, call.indices
    assert indices is not None
    if call.kv_cache.dtype != q.dtype:
        return f"{q.dtype} and {call.kv_cache.dtype}, not bfloat16 or float16"
    if rank % 128 or not 0 < rank <= 512 or q.shape[2] % 64 or not 0 < q.shape[2] - rank <= 64:
        return f"{rank} + {q.shape[2] - rank} columns"
    if indices.shape[1] > MAX_KEYS * MAX_CLUSTER:
        return f"{indices.shape[1]} positions: at most {MAX_KEYS * MAX_CLUSTER}"
    return None


def why_slower(call: LatentCall) -> str | None:
    """Why the Triton kernel is faster for a call that `why_not` lets pass, or None."""
    tokens, heads, _ = call.q.shape
    slower = heads > 16 and tokens * -(-heads // 32) < (_MANY if heads <= 32 else _MANY_OF_MANY_HEADS)
    return f"{tokens} tokens of {heads} heads: too few tokens for so many heads" if slower else None


def few_parts(call: LatentCall, num_sms: int) -> int:
    """Parts of `PART_KEYS` positions for each token and 16 heads, where there are `MAX_PARTS` at most and all
    of them fit the device at once; else 0."""
    assert call.indices is not None
    parts = -(-call.indices.shape[1] // PART_KEYS)
    programs = call.q.shape[0] * -(-call.q.shape[1] // 16) * parts
    return parts if parts <= MAX_PARTS and programs <= num_sms else 0


def attend(call: LatentCall, num_sms: int) -> None:
    """Launch a checked call that `why_not` lets pass."""
    q, pool, indices = call.q, call.kv_cache, call.indices
    assert indices is not None
    index, top_k, parts = q.device.index or 0, indices.shape[1], few_parts(call, num_sms)
    spec = SelectedSpec.of(call, num_sms)
    if parts:
        spec = spec._replace(m_tiles=1, cluster=1, max_parts=-(-parts // 8) * 8)
    head_tiles = -(-spec.num_heads // (16 * spec.m_tiles))
    items = q.shape[0] * head_tiles
    part_bytes = 16 * spec.rank * 2 + WARPS * 16 * 16  # as selected_parts.cuh counts
    left = torch.empty(items * parts * part_bytes, dtype=torch.uint8, device=q.device)
    params = struct_of("selected.cu")(
        **call_params(call),
        kv=pool.data_ptr(),
        parts=left.data_ptr(),
        indices=indices.data_ptr(),
        kv_block=pool.stride(0),
        kv_slot=pool.stride(1),
        indices_row=indices.stride(0),
        top_k=top_k,
        part_keys=-(-top_k // (16 * spec.cluster)) * 16,
        head_tiles=head_tiles,
        num_items=items,
    )
    early = gpu.launches_early(index)
    if parts:
        few, merge = _specialised_few(index, spec)
        few.launch(items * parts, THREADS, params, early=early)
        merge.launch(items * MERGE_SHARES, spec.rank // 4, params, early=early)
    else:
        _specialised(index, spec).launch(items * spec.cluster, THREADS, params, early=early)


@functools.cache
def _specialised(index: int, spec: SelectedSpec) -> Kernel:
    device, config = torch.device("cuda", index), spec.config()
    kernel = jit.kernel("selected.cu", "attend_selected", config, device, shared_bytes=shared_bytes(spec))
    if spec.cluster > 8:
        kernel.resident(THREADS, spec.cluster, spec.cluster)  # a size that the device must be set to allow
    return kernel


@functools.cache
def _specialised_few(index: int, spec: SelectedSpec) -> tuple[Kernel, Kernel]:
    """The kernel of parts, and their merge."""
    device, config = torch.device("cuda", index), spec.config()
    jit.compile_ahead("selected_few_merge.cu", config, gpu.capability(index))
    few = jit.kernel("selected_few.cu", "attend_few", config, device, shared_bytes=few_shared_bytes(spec))
    unused = merge_shared_bytes(spec, gpu.shared_per_sm(index))
    merge = jit.kernel("selected_few_merge.cu", "merge_few", config, device, shared_bytes=unused)
    few.leave_room()
    merge.leave_room()
    return few, merge


def few_shared_bytes(spec: SelectedSpec) -> int:
    """Dynamic shared memory of ``selected_few.cu``, as selected_parts.cuh counts it."""
    return (PART_KEYS + 16) * (spec.rank + spec.rope) * 2 + PART_KEYS * 32 + 512 + 4 * TABLE_ROOM


def merge_shared_bytes(spec: SelectedSpec, shared_per_sm: int) -> int:
    """Dynamic shared memory of the merge, which it does not use: what a CTA of ``selected_few.cu`` leaves, so
    that one of the merge's fits beside each, and few crowd where there is none (docs/log/latent_room.md)."""
    of_weights = 16 * (spec.max_parts + 12) * 4  # at most, as selected_few_merge.cu counts them
    return max(shared_per_sm - few_shared_bytes(spec) - 2 * _KEPT - of_weights, 0) // 1024 * 1024


def shared_bytes(spec: SelectedSpec) -> int:
    """Dynamic shared memory, as selected_params.cuh counts it."""
    rows, group = spec.m_tiles * 16, (spec.rank + spec.rope) * 16
    tile = TILE * spec.m_tiles
    scores = rows * 128 + THREADS // 32 * 16 // tile * rows * (tile + 8) * 4
    return 2 * tile // 8 * group + rows // 8 * group + scores + MAX_KEYS * 4 + rows * 12 + 32
