"""Which kernel and specialisation serve a linear layer: constants and launch shape, from shapes and
dtypes alone.

``linear.cu`` runs anywhere, ``linear_wide.cu`` on Hopper. Figures behind the choices: docs/log/linear.md.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchpaged.custom_ops.cuda.activations import ACTIVATIONS
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.layers.call import LinearCall

LINEAR = Table.of_file("layers/cuda/linear_config.cuh")
NORM = Table.of_file("layers/cuda/norm_config.cuh")
MAX_TOKENS = 64
NORM_THREADS = 256  # of a token's norm
_KEPT = 2048  # bytes of a CTA's shared memory, by the hardware and for small things
_LINE = 128  # bytes of a chunk's 64 numbers
# of a chunk, times chunks: 48 KB of weights that a wide CTA asks for before the kernels in front
# have finished
_EARLY_ROWS = 384


@dataclass(frozen=True)
class LinearShape:
    """How a linear kernel is cut.

    Attributes:
        row_tiles: tiles of weight rows per warp (16 rows) or, if wide, per CTA (64 rows).
        row_warps: warps that share a chunk of 64 k, each with its own rows; 1 if wide.
        k_warps: such groups per CTA, the chunks go round them; 1 if wide.
        stages: chunks on their way or in use, per group.
        ctas_per_sm: CTAs that registers must suffice for on one multiprocessor; two, if the next kernel is to
            start early.
        cluster: CTAs that share a tile's k, a power of two or 3; 1 where there are no clusters.
        wide: ``linear_wide.cu`` instead of ``linear.cu``.
        early_stages: if wide, chunks of weights asked for before the kernels in front have finished; the
            others follow x.
    """

    row_tiles: int
    row_warps: int
    k_warps: int
    stages: int
    ctas_per_sm: int
    cluster: int = 1
    wide: bool = False
    early_stages: int = 0

    @property
    def rows(self) -> int:
        """Weight rows of a CTA."""
        return self.row_tiles * (64 if self.wide else 16 * self.row_warps)

    @property
    def threads(self) -> int:
        """Threads of a CTA; if wide, a warpgroup per tile and a warp that fetches."""
        return self.row_tiles * 128 + 32 if self.wide else self.row_warps * self.k_warps * 32

    def shared_bytes(self, bucket: int, norm: bool) -> int:
        """Dynamic shared memory of a CTA: the rings, or the sums that lie there afterwards; if wide, the ring
        and what other CTAs send."""
        tokens = max(bucket, 8)
        if self.wide:
            # tokens that a CTA finishes: whole groups of 8, or those of a share of its rows
            whole = tokens >= 8 * self.cluster
            finished = -(-tokens // 8 // self.cluster) * 8 if whole else tokens // self.cluster
            ring = self.stages * (self.rows + tokens) * _LINE
            return ring + self.rows * finished * 4 * (self.cluster - 1)
        rings = self.k_warps * self.stages * (self.rows + bucket + norm) * _LINE
        return max(rings, self.k_warps * tokens * (self.rows + 4) * 4)

    def grid(self, out_features: int) -> int:
        """CTAs of a launch."""
        return -(-out_features // self.rows) * self.cluster


def token_bucket(tokens: int) -> int:
    """The power of two at or above: a layer's specialisations are those of 1, 2, 4 ... 64 tokens."""
    return 1 << (tokens - 1).bit_length()


def norm_is_fused(shape: LinearShape, dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Whether RMSNorm is part of the kernel; else it is a launch of its own before it.

    float16 is not: the kernel divides by the root mean square last, and the product before might not fit its
    range. Wide kernels don't: scaling x in shared memory on its way to wgmma cost more than a launch.
    """
    return not shape.wide and shape.row_warps == 1 and dtype == weight_dtype == torch.bfloat16


def linear_shape(
    bucket: int,
    out_features: int,
    in_features: int,
    sms: int,
    hopper: bool,
    clusters: bool,
    shared_per_sm: int,
    shared_per_cta: int,
) -> LinearShape:
    """The shape for these tokens and weight [out_features, in_features] on a device of ``sms``
    multiprocessors.

    ``hopper``: compute capability 9.0. ``clusters``: 9.0 and later. ``shared_per_sm``, ``shared_per_cta``:
    bytes of shared memory that a multiprocessor has, and that a CTA may ask for.
    """
    wide = _wide(bucket, out_features, in_features, sms) if hopper and bucket >= 16 else None
    # At 16 tokens too, where CTAs share k and two have a place on each multiprocessor, so that those of the
    # next kernel find one.
    if wide is not None and (bucket > 16 or (wide.cluster > 1 and wide.ctas_per_sm == 2)):
        return wide
    if bucket <= 16:
        return _narrow(bucket, out_features, in_features, sms, shared_per_sm, shared_per_cta)
    shape = LinearShape(4, 1, 4, 2, 2) if bucket == 32 else LinearShape(4, 2, 2, 2, 2)
    return _clustered(shape, out_features, in_features, sms * 3 // 4) if clusters else shape


def _clustered(shape: LinearShape, out_features: int, in_features: int, least: int) -> LinearShape:
    """The shape in clusters of up to 8 CTAs, so that there are ``least`` of them, as long as each has enough
    of k."""
    chunks = -(-in_features // 64)
    while (
        shape.cluster < 8 and shape.grid(out_features) < least and chunks >= 4 * shape.cluster * shape.k_warps
    ):
        shape = dataclasses.replace(shape, cluster=shape.cluster * 2)
    return shape


def _wide(bucket: int, out_features: int, in_features: int, sms: int) -> LinearShape:
    """For up to 64 tokens on Hopper: where tiles of 64 or 128 rows fill the multiprocessors about once, one
    CTA on each with a large ring, else two.

    CTAs of a cluster share k. As many as multiprocessors lose in clusters of three and more: where a part of
    the chip has no room for another whole one, multiprocessors stay empty. From 17 tokens on half as many
    CTAs with large rings are best for narrow products. For others of up to 32 their parts are small, and
    clusters of four, two CTAs per multiprocessor, beat half as many CTAs.
    """

    def shape(row_tiles: int, stages: int, ctas_per_sm: int, cluster: int = 1) -> LinearShape:
        early = min(_EARLY_ROWS // (row_tiles * 64), stages)
        return LinearShape(row_tiles, 1, 1, stages, ctas_per_sm, cluster, wide=True, early_stages=early)

    tiles, tall, most, half = -(-out_features // 64), -(-out_features // 128), sms * 3 // 4, sms * 9 // 20
    enough = half if bucket == 64 else most
    if enough <= tiles * 2 <= sms and in_features >= 512:
        # eight ninths of the multiprocessors have a place in clusters of three
        thirds = bucket == 64 and tiles * 27 <= sms * 8 and in_features >= 2048
        return shape(1, 10, 1, cluster=3 if thirds else 2)
    if enough <= tiles <= sms:
        return shape(1, 13, 1)
    if tiles < enough:
        if bucket > 16 and tiles * 2 < half:
            return _clustered(shape(1, 10, 1), out_features, in_features, half)
        return _clustered(shape(1, 6 if bucket == 64 else 8, 2), out_features, in_features, most)
    if bucket == 64 and most <= tall <= sms:
        return shape(2, 5, 1)
    return (
        shape(2, 4, 2)
        if bucket == 64 and _evenness(tall, sms * 2) >= _evenness(tiles, sms * 2)
        else shape(1, 7, 2)
    )


def _evenness(ctas: int, places: int) -> float:
    """Share of the places that are taken on average, when CTAs come in waves."""
    return ctas / (-(-ctas // places) * places)


def _narrow(
    bucket: int, out_features: int, in_features: int, sms: int, shared_per_sm: int, shared_per_cta: int
) -> LinearShape:
    """For few tokens: short tiles with 8 warps along k where their CTAs all find a place at once, else taller
    ones with 4.

    Besides the kernel's own CTAs a multiprocessor keeps a place for one of the next kernel, unless they fill
    all places evenly. Where k is short they don't need all of the memory either: the weights of what comes
    next are then on their way while this kernel ends. Where tiles of 16 rows don't fill the multiprocessors
    more than once, more warps go along k at one token, and from 8 tokens on the tiles stay taller.
    """
    chunks, tiles = -(-in_features // 64), -(-out_features // 16)
    few = chunks >= 16 and tiles * 10 < sms * 9
    of_one = bucket == 1 and 16 <= chunks <= (32 if few else 128) and sms * 9 <= tiles * 20 <= sms * 20
    if of_one or (few and bucket >= 8):
        stages = 2 if chunks <= 32 else 3
        shape = LinearShape(1, 1, 16, stages, 2) if of_one else LinearShape(2, 1, 8, 3, 2)
        if shape.shared_bytes(bucket, True) + _KEPT <= shared_per_cta:
            return shape
    for row_tiles, k_warps in ((1, 8), (2, 4)):
        shape = LinearShape(row_tiles, 1, k_warps, 2, 2)
        grid = shape.grid(out_features)
        places = -(-grid // sms)
        even = grid * 10 >= places * sms * 9
        deepest = 3 if even and row_tiles == 2 and chunks <= 6 * k_warps else 5
        if (places <= 2 and (even or few or bucket == 1 or row_tiles == 2)) or (places == 3 and bucket == 1):
            places = max(2, places + (not even))
            break
    else:
        shape, places, deepest = LinearShape(4, 1, 4, 2, 2), 2, 5

    def fits(shape: LinearShape) -> bool:
        needed = shape.shared_bytes(bucket, True) + _KEPT
        return needed <= shared_per_cta and places * needed <= shared_per_sm

    deeper = [dataclasses.replace(shape, stages=stages) for stages in range(deepest, 2, -1)]
    return next(filter(fits, deeper), shape)


@functools.cache
def norm_config(dtype: torch.dtype, weight_dtype: torch.dtype, in_features: int, early: bool) -> Config:
    """The constants of ``norm.cu``."""
    return NORM.config(
        {
            "IN_FEATURES": in_features,
            "WEIGHT_BYTES": weight_dtype.itemsize,
            "THREADS": NORM_THREADS,
            "HALF": dtype == torch.float16,
            "PDL": early,
        }
    )


class LinearSpec(NamedTuple):
    """What a linear kernel is compiled for, whatever its tiles: the cache key of a compiled kernel, together
    with its `LinearShape`.

    Attributes:
        bucket: `token_bucket`.
        out_features, in_features, row_stride: of the weight, in numbers.
        norm: x is normalised on its way in.
        aligned: four numbers of out are stored at once.
    """

    dtype: torch.dtype
    bucket: int
    out_features: int
    in_features: int
    row_stride: int
    activation: str
    norm: bool
    bias: bool
    scaled: bool
    residual: bool
    aligned: bool

    @classmethod
    def of(cls, call: LinearCall) -> LinearSpec:
        """That of a call."""
        aligned = call.out.shape[1] % 4 == 0 and all(
            t is None or ((t.stride(0) % 4 == 0 or t.dim() == 1) and t.data_ptr() % 8 == 0)
            for t in (call.out, call.residual, call.bias, call.scale)
        )
        return cls(
            call.x.dtype,
            token_bucket(call.x.shape[0]),
            call.weight.shape[0],
            call.weight.shape[1],
            call.weight.stride(0),
            call.activation,
            call.norm_weight is not None,
            call.bias is not None,
            call.scale is not None,
            call.residual is not None,
            aligned,
        )

    def constants(self, early: bool) -> dict[str, int]:
        """Those of every kernel; ``early``: it is launched early."""
        return {
            "OUT_FEATURES": self.out_features,
            "IN_FEATURES": self.in_features,
            "W_ROW": self.row_stride,
            "HALF": self.dtype == torch.float16,
            "ACTIVATION": ACTIVATIONS[self.activation],
            "NORM": self.norm,
            "BIAS": self.bias,
            "SCALED": self.scaled,
            "RESIDUAL": self.residual,
            "ALIGNED": self.aligned,
            "PDL": early,
            "LAUNCH_FIRST": self.bucket <= 8,
        }


def linear_config(spec: LinearSpec, shape: LinearShape, *, early: bool) -> Config:
    """The constants of the kernel."""
    values = {
        **spec.constants(early),
        "X_ROWS": spec.bucket,
        "NT": max(spec.bucket // 8, 1),
        "MT": shape.row_tiles,
        "ROW_WARPS": shape.row_warps,
        "K_WARPS": shape.k_warps,
        "STAGES": shape.stages,
        "EARLY_STAGES": shape.early_stages,
        "CTAS_PER_SM": shape.ctas_per_sm,
        "K_PARTS": 1,
        "CLUSTER": shape.cluster,
    }
    return LINEAR.config(values, exact=shape.wide)
