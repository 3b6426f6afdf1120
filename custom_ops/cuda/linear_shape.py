"""Which specialisation of ``linear.cu`` serves a layer: macros and launch shape, from shapes and dtypes alone.

Figures behind the choices: docs/kernels.md.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

MAX_TOKENS = 64
ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
NORM_THREADS = 256  # of a token's norm
_LINE = 128  # bytes of a chunk's 64 numbers


@dataclass(frozen=True)
class LinearShape:
    """How the linear kernel is cut.

    Attributes:
        row_tiles: tiles of 16 weight rows per warp.
        row_warps: warps that share a chunk of 64 k, each with its own rows.
        k_warps: such groups per CTA; the chunks go round them.
        stages: chunks on their way or in use, per group.
        ctas_per_sm: CTAs that registers must suffice for on one multiprocessor; twice, if the next kernel is to start early.
        cluster: CTAs that share a tile's k, a power of two; 1 where there are no clusters.
        wgmma: products by warpgroups of 4 row_warps, 64 rows for each of row_tiles (compute capability 9.0 only).
    """

    row_tiles: int
    row_warps: int
    k_warps: int
    stages: int
    ctas_per_sm: int
    cluster: int = 1
    wgmma: bool = False

    @property
    def rows(self) -> int:
        """Weight rows of a CTA."""
        return self.row_tiles * self.row_warps * 16

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.row_warps * self.k_warps * 32

    def shared_bytes(self, token_tiles: int, norm: bool) -> int:
        """Dynamic shared memory of a CTA: the rings, or the sums that lie there afterwards."""
        rings = self.k_warps * self.stages * (self.rows + token_tiles * 8 + norm) * _LINE
        return max(rings, self.k_warps * token_tiles * 8 * (self.rows + 4) * 4)

    def grid(self, out_features: int) -> int:
        """CTAs of a launch."""
        return -(-out_features // self.rows) * self.cluster


def token_tiles(tokens: int) -> int:
    """Tiles of 8 tokens, a power of two: the specialisations of a layer are those of 8, 16, 32 and 64 tokens."""
    return max(1, 1 << (-(-tokens // 8) - 1).bit_length())


def norm_is_fused(tiles: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Whether RMSNorm is part of the kernel; else it is a launch of its own before it.

    float16 is not: the kernel divides by the root mean square last, and the product before might not fit its range.
    """
    return tiles <= 2 and dtype == weight_dtype == torch.bfloat16


@functools.cache
def linear_shape(tiles: int, out_features: int, in_features: int, sms: int, hopper: bool, clusters: bool) -> LinearShape:
    """The shape for these token tiles and weight [out_features, in_features] on a device of ``sms`` multiprocessors.

    ``hopper``: compute capability 9.0. ``clusters``: 9.0 and later.
    """
    if tiles <= 2:  # the tallest tile that leaves a CTA for every place: all start at once, and none waits for a second round
        few = (LinearShape(1, 1, 8, 4, 2), LinearShape(2, 1, 4, 4, 2), LinearShape(4, 1, 4, 3, 2))
        return next((shape for shape in few[:2] if shape.grid(out_features) <= 2 * sms), few[2])
    if hopper:
        shape = LinearShape(2, 4, 1, 4, 2, wgmma=True)
    else:
        shape = LinearShape(4, 1, 4, 2, 2) if tiles == 4 else LinearShape(4, 2, 2, 2, 2)
    chunks = -(-in_features // 64)
    while clusters and shape.cluster < 8 and shape.grid(out_features) < sms * 3 // 4 and chunks >= 4 * shape.cluster * shape.k_warps:
        shape = dataclasses.replace(shape, cluster=shape.cluster * 2)
    return shape


def norm_macros(dtype: torch.dtype, weight_dtype: torch.dtype, in_features: int, early: bool) -> dict[str, int]:
    """The macros of ``norm.cu``."""
    half = dtype == torch.float16
    macros = {"IN_FEATURES": in_features, "WEIGHT_BYTES": weight_dtype.itemsize, "THREADS": NORM_THREADS, "PDL": early, "HALF": half,
              "Q_HALF": half, "KV_BYTES": 2, "E5M2": 0, "CLUSTER": 1}  # fmt: skip
    return {name: int(value) for name, value in macros.items()}


def linear_macros(
    dtype: torch.dtype, tiles: int, out_features: int, in_features: int, row_stride: int, activation: str, norm: bool, bias: bool,
    residual: bool, aligned: bool, early: bool, shape: LinearShape,
) -> dict[str, int]:  # fmt: skip
    """The macros of ``linear.cu``. ``row_stride`` of the weight in numbers; ``aligned``: four numbers of out are stored at once."""
    macros = {
        "OUT_FEATURES": out_features, "IN_FEATURES": in_features, "W_ROW": row_stride, "NT": tiles, "ACTIVATION": ACTIVATIONS[activation],
        "NORM": norm, "BIAS": bias, "RESIDUAL": residual, "ALIGNED": aligned, "PDL": early,
        "HALF": dtype == torch.float16, "Q_HALF": dtype == torch.float16, "KV_BYTES": 2, "E5M2": 0,
        "MT": shape.row_tiles, "ROW_WARPS": shape.row_warps, "K_WARPS": shape.k_warps, "STAGES": shape.stages,
        "CTAS_PER_SM": shape.ctas_per_sm, "CLUSTER": shape.cluster, "WGMMA": shape.wgmma,
    }  # fmt: skip
    return {name: int(value) for name, value in macros.items()}
