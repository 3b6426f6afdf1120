"""Which calls of ``mla_attention`` the Hopper kernel takes, and how its work is cut: by shapes and dtypes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.routes import not_hopper, unaligned
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda.pool_map import pool_box

#: Most rows (query tokens x heads) of a request, two tiles of 64, and the widths: as far as it was timed
#: against the Triton kernel, in bfloat16, with blocks of 64 and one query token (docs/log/latent_cuda.md).
#: float16, smaller blocks and several query tokens were compared with the oracle only.
MAX_ROWS = 128
WIDTHS = ((512, 64),)
#: Of float16 with rows of fp8, whose rotated keys are bfloat16.
MAX_FP8_HALF_ROWS = 32
#: latent_fp8.cu has so many CTAs of a multiprocessor, and tiles of up to so many rows, whose queries still
#: fit registers; of 8 where tables have room for at most so many tokens, but in clusters no more than two
#: (docs/log/latent_fp8.md).
FP8_CTAS, FP8_TILE_ROWS, FP8_TOKENS = 2, 16, 65536
_SHARED = 227 * 1024
_DTYPES = (torch.bfloat16, torch.float16)
_TILE_KV, _MAX_STAGES = 64, 4
_OWN = 676  # latent_scheduler.cuh's OWN_BYTES, and two barriers
_MIN_TILES = 2
#: CTAs that share a request, of how many at most (a part of the chip holds two such clusters at a time), and
#: how long contexts may get there, by the table's width, for each request, of which 4 are counted at least:
#: as far as it was faster than ranges of all keys with a merge behind (docs/log/latent_launches.md).
CLUSTER, MAX_CLUSTERS, TOKENS_PER_CLUSTER = 8, 8, 512
#: The same of fewer requests, of up to 16 rows that are not of fp8, which would spill registers; on at most
#: half of a device's multiprocessors (docs/log/latent_room.md).
WIDE_CLUSTER, MAX_WIDE_CLUSTERS = 16, 2
_MAX_COORDINATE = 2**31 - 1
#: What each CTA notes of a cut request behind the partial results, as the source counts it.
CUT_FLOATS = 8


class LatentSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    rank: int
    rope: int
    num_heads: int
    block_size: int
    half: bool
    fp8: bool
    causal: bool
    lse: bool
    rows: int
    max_groups: int
    cluster: int

    @classmethod
    def of(cls, call: LatentCall, num_sms: int) -> LatentSpec:
        """Of a call that `why_not` lets pass."""
        num_heads, fp8 = call.q.shape[1], call.kv_cache.dtype == torch.float8_e4m3fn
        rows = rows_of(num_heads * call.max_query_len)
        (num_reqs, columns), block_size = call.block_table.shape, call.kv_cache.shape[1]
        clustered = rows <= 32 and num_reqs <= MAX_CLUSTERS <= num_sms // CLUSTER
        clustered = clustered and columns * block_size <= TOKENS_PER_CLUSTER * max(num_reqs, 4)
        wide = rows <= 16 and not fp8 and num_reqs <= min(MAX_WIDE_CLUSTERS, num_sms // (2 * WIDE_CLUSTER))
        if fp8 and rows <= 32:
            few = (rows <= FP8_TILE_ROWS or not clustered) and num_reqs * columns * block_size <= FP8_TOKENS
            rows = 8 if few or call.q.dtype == torch.float16 else min(rows, FP8_TILE_ROWS)
        return cls(
            rank=call.rank,
            rope=call.q.shape[2] - call.rank,
            num_heads=num_heads,
            block_size=call.kv_cache.shape[1],
            half=call.q.dtype == torch.float16,
            fp8=fp8,
            causal=call.causal,
            lse=call.lse is not None,
            rows=rows,
            max_groups=num_sms * (FP8_CTAS if fp8 and rows < 64 else 1),
            cluster=1 if not clustered else WIDE_CLUSTER if wide else CLUSTER,
        )


LATENT = Table.of_file("mla/cuda/latent_config.cuh")


def rows_of(most: int) -> int:
    """Rows of a tile, for requests of at most so many (query tokens x heads)."""
    return next((rows for rows in (8, 16, 32) if most <= rows), 64)


def why_not(call: LatentCall, capability: tuple[int, int]) -> str | None:
    """Why the kernel can't take a call, or None. Shapes, dtypes, strides and addresses only."""
    q, pool, out, rank = call.q, call.kv_cache, call.out, call.rank
    if reason := not_hopper(capability):
        return reason
    if call.indices is not None:
        return "indices: each query token attends to keys of its own"
    if call.output_scale is not None:
        return "output_scale: it writes 16 bits"
    if q.dtype not in _DTYPES:
        return f"{q.dtype}, not bfloat16 or float16"
    fp8, rows = pool.dtype == torch.float8_e4m3fn, call.max_query_len * q.shape[1]
    if not fp8 and pool.dtype != q.dtype:
        return f"a pool of {pool.dtype}"
    if fp8 and q.dtype == torch.float16 and rows > MAX_FP8_HALF_ROWS:
        return f"rows of fp8 for {rows} rows of float16 queries, not {MAX_FP8_HALF_ROWS}"
    if (rank, q.shape[2] - rank) not in WIDTHS:
        return f"{rank} + {q.shape[2] - rank} columns"
    if pool.shape[1] not in (16, 32, 64):
        return f"blocks of {pool.shape[1]} tokens, not 16, 32 or 64"
    if rows > MAX_ROWS:
        return f"queries of up to {call.max_query_len} tokens x {q.shape[1]} heads, not {MAX_ROWS} rows"
    if reason := unaligned(("q", q, 2), ("out", out, 2), ("kv_cache", pool, 3)):
        return reason
    if fp8:
        return None
    box = pool_box(tuple(pool.shape), pool.stride())
    if box is None:
        return f"kv_cache with strides {tuple(pool.stride())}: tokens of a block must be contiguous"
    if max(box.sizes) > _MAX_COORDINATE or pool.shape[0] * box.block_group > _MAX_COORDINATE:
        return f"kv_cache with {pool.shape[0]} blocks"
    return None


def latent_config(spec: LatentSpec) -> Config:
    """The constants."""
    # of a cluster, so that it finds room beside the kernel ahead
    stages = 2 if spec.rows == 64 or spec.cluster > 1 or spec.fp8 else _MAX_STAGES
    while _count(spec.rank, spec.rope, spec.rows, spec.half, stages, spec.fp8) > _SHARED:
        stages -= 1
    merge_share = 1 if spec.rows <= 16 else 2
    return LATENT.of(spec, exact=True, STAGES=stages, MIN_TILES=_MIN_TILES, MERGE_SHARE=merge_share)


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of `kernel_of`, as its source counts it."""
    return _count(*(config[name] for name in ("RANK", "ROPE", "ROWS", "HALF", "STAGES", "FP8")))


def _count(rank: int, rope: int, rows: int, half: int, stages: int, fp8: int) -> int:
    if fp8 and rows < 64:
        scales = rank // 128
        keys = stages * _TILE_KV * (rank + scales * 4 + rope * 2)
        queries = rows * 128 * (scales * (3 if half else 2) + 1)
        return keys + queries + rows * (scales * (_TILE_KV * 2 + 8) + 16) + stages * 16 + 212
    width = rank + rope
    tiles = stages * _TILE_KV * width * 2 + rows * width * 2 + rows * 24 + 212
    return tiles + (width // 4 + 56 + _OWN if rows == 64 else rows * 128 + stages * 16)


def slot_floats(config: Config) -> int:
    """Numbers of a partial result, ``SLOT_FLOATS``."""
    return config["ROWS"] * (config["RANK"] + 2)


def kernel_of(config: Config) -> tuple[str, str]:
    """Source and name of the kernel that works on keys."""
    if config["ROWS"] == 64:
        return "latent_pairs.cu", "latent_pairs"
    if config["FP8"]:
        return "latent_fp8.cu", "latent_fp8"
    return "latent.cu", "latent_decode"


def threads_of(config: Config) -> int:
    """Threads of a CTA of `kernel_of`, ``THREADS``."""
    if config["ROWS"] == 64:
        return 512 if config["FP8"] else 384
    return 384 if config["FP8"] else 160
