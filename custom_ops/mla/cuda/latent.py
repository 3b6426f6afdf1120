"""Launches of ``latent.cu``, ``latent_pairs.cu`` or ``latent_fp8.cu`` and, behind it, of
``latent_merge.cu``."""

import functools

import torch

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.cuda.loaded_kernel import Map
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda.call_params import call_params
from torchpaged.custom_ops.mla.cuda.pool_map import pool_map
from torchpaged.custom_ops.mla.cuda.shape import (
    CLUSTER,
    CUT_FLOATS,
    WIDE_CLUSTER,
    LatentSpec,
    kernel_of,
    latent_config,
    shared_bytes,
    slot_floats,
    threads_of,
)

MERGE_THREADS = 512


def attend(call: LatentCall, spec: LatentSpec) -> None:
    """Launch a checked call that `shape.why_not` lets pass."""
    q, pool = call.q, call.kv_cache
    index, num_reqs = q.device.index or 0, call.block_table.shape[0]
    kernel, merge, config = _specialised(index, spec)
    early = gpu.launches_early(index)
    row_tiles = -(-call.max_query_len * spec.num_heads // config["ROWS"])
    cluster = config["CLUSTER"]  # perhaps a narrower one than was asked for
    groups = num_reqs * cluster if cluster > 1 else spec.max_groups // row_tiles
    if config["ROWS"] == 64:
        groups -= groups % 2  # of CTAs in pairs
    parts = torch.empty(
        groups * row_tiles * (2 * slot_floats(config) + CUT_FLOATS) if groups > 1 and cluster == 1 else 0,
        dtype=torch.float32,
        device=q.device,
    )
    keys, block_group = Map(), 0
    if not spec.fp8:
        keys, block_group = pool_map(
            pool.data_ptr(), pool.dtype, tuple(pool.shape), pool.stride(), int(config["ROWS"] == 64)
        )
    params = struct_of("latent.cu")(
        **call_params(call),
        kv=keys,
        parts=parts.data_ptr(),
        rows=pool.data_ptr(),
        rows_block=pool.stride(0),
        rows_slot=pool.stride(1),
        num_tokens=q.shape[0],
        num_blocks=pool.shape[0],
        block_group=block_group,
        row_tiles=row_tiles,
        groups=groups,
    )
    kernel.launch(groups * row_tiles, threads_of(config), params, early=early)
    if groups > 1 and merge is not None:
        merge.launch(groups * row_tiles * config["MERGE_SHARE"], MERGE_THREADS, params, early=early)


@functools.cache
def _specialised(index: int, spec: LatentSpec) -> tuple[jit.Kernel, jit.Kernel | None, Config]:
    """The kernel, its merge unless parts meet in a cluster, and what they are compiled for: in clusters of
    `CLUSTER` where the device has no room for a wide one."""
    config, device = latent_config(spec), torch.device("cuda", index)
    if spec.cluster == 1:
        jit.compile_ahead("latent_merge.cu", config, gpu.capability(index))
    kernel = jit.kernel(*kernel_of(config), config, device, shared_bytes=shared_bytes(config))
    if spec.cluster == WIDE_CLUSTER:
        try:  # the device must be set to allow it
            kernel.resident(threads_of(config), spec.cluster, spec.cluster)
        except BackendUnavailableError:  # no part of the chip has so many multiprocessors
            return _specialised(index, spec._replace(cluster=CLUSTER))
    if spec.cluster > 1:
        return kernel, None, config
    return kernel, jit.kernel("latent_merge.cu", "latent_merge", config, device, shared_bytes=0), config
