"""Launches of ``latent_selected.cu``: ``mla_attention`` with ``indices``, of many heads of many tokens."""

from __future__ import annotations

import functools

import torch

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.loaded_kernel import Kernel
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda.call_params import call_params
from torchpaged.custom_ops.mla.cuda.shape import WIDTHS, LatentSpec, latent_config, shared_bytes

#: Heads of a CTA. Fewer than `MIN_HEADS` leave most of its products empty.
ROWS, MIN_HEADS = 64, 33
#: Tiles of heads, of all tokens, from which on it is faster than other kernels; the second one with rows of
#: fp8 (docs/log/sparse_many.md).
MIN_CTAS, MIN_FP8_CTAS = 16, 24


def why_not(call: LatentCall) -> str | None:
    """Why a call that `selected.why_none` lets pass goes to another kernel, or None."""
    (tokens, heads, width), rank, block_size = call.q.shape, call.rank, call.kv_cache.shape[1]
    dtypes = call.q.dtype, call.kv_cache.dtype
    if dtypes[0] != dtypes[1] and dtypes != (torch.bfloat16, torch.float8_e4m3fn):
        return f"queries of {dtypes[0]} over rows of {dtypes[1]}"
    if (rank, width - rank) not in WIDTHS:
        return f"{rank} + {width - rank} columns"
    if block_size not in (16, 32, 64):
        return f"blocks of {block_size} tokens, not 16, 32 or 64"
    few = MIN_FP8_CTAS if dtypes[1] == torch.float8_e4m3fn else MIN_CTAS
    if heads < MIN_HEADS or tokens * -(-heads // ROWS) < few:
        return f"{tokens} tokens of {heads} heads"
    return None


def spec_of(call: LatentCall, num_sms: int) -> LatentSpec:
    """What the kernel of a call that `why_not` lets pass is compiled for. Where there is room for twice as
    many CTAs, two of a cluster take turns at the tiles of positions."""
    row_tiles = -(-call.q.shape[1] // ROWS)
    return LatentSpec(
        rank=call.rank,
        rope=call.q.shape[2] - call.rank,
        num_heads=call.q.shape[1],
        block_size=call.kv_cache.shape[1],
        half=call.q.dtype == torch.float16,
        fp8=call.kv_cache.dtype == torch.float8_e4m3fn,
        causal=call.causal,
        lse=call.lse is not None,
        rows=ROWS,
        max_groups=1,  # no ranges, no merge
        cluster=2 if call.q.shape[0] * row_tiles * 2 <= num_sms else 1,
    )


def attend(call: LatentCall) -> None:
    """Launch a checked call that `why_not` lets pass."""
    q, pool, indices = call.q, call.kv_cache, call.indices
    assert indices is not None
    index, row_tiles = q.device.index or 0, -(-q.shape[1] // ROWS)
    spec = spec_of(call, gpu.num_sms(index))
    kernel, threads = _specialised(index, spec)
    params = struct_of("latent_selected.cu")(
        **call_params(call),
        indices=indices.data_ptr(),
        rows=pool.data_ptr(),
        indices_row=indices.stride(0),
        rows_block=pool.stride(0) * pool.element_size(),
        rows_slot=pool.stride(1) * pool.element_size(),
        num_tokens=q.shape[0],
        num_blocks=pool.shape[0],
        row_tiles=row_tiles,
        groups=1,
        top_k=indices.shape[1],
    )
    kernel.launch(q.shape[0] * row_tiles * spec.cluster, threads, params, early=gpu.launches_early(index))


def threads_of(spec: LatentSpec) -> int:
    """Threads of a CTA, ``THREADS``."""
    return 512 if spec.fp8 else 384


@functools.cache
def _specialised(index: int, spec: LatentSpec) -> tuple[Kernel, int]:
    """The kernel, and threads of a CTA."""
    config, device = latent_config(spec), torch.device("cuda", index)
    kernel = jit.kernel(
        "latent_selected.cu",
        "latent_selected",
        config,
        device,
        # rows of fp8 are converted on their way: there, too, stand 16-bit numbers
        shared_bytes=shared_bytes(latent_config(spec._replace(fp8=False))),
    )
    return kernel, threads_of(spec)
