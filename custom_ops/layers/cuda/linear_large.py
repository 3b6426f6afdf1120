"""Which products of more than 64 tokens ``linear_large.cu`` makes on Hopper, and in which shape: from sizes
and dtypes alone. The others are cuBLAS's. Figures behind the choice: docs/log/linear_large.md.
"""

from __future__ import annotations

from typing import NamedTuple

from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.layers.cuda.linear_shape import LINEAR, LinearSpec

MAX_TOKENS = 256
SUM_THREADS = 128  # of linear_sum.cu
_LINE = 128  # bytes of a chunk's 64 numbers
_RING = 226 << 10  # bytes of shared memory that a ring may take: a CTA's, but for its barriers


class LargeShape(NamedTuple):
    """How ``linear_large.cu`` is cut.

    Attributes:
        tokens: columns of a product, a multiple of 16.
        warpgroups: that multiply, each with rows of its own.
        row_tiles: tiles of 64 weight rows of a warpgroup, 1 or 2; with 2 a further warpgroup gives them its
            registers.
        k_parts: CTAs that share out a tile's k; several leave parts, which ``linear_sum.cu`` adds.
    """

    tokens: int
    warpgroups: int
    row_tiles: int
    k_parts: int

    @property
    def rows(self) -> int:
        """Weight rows of a CTA."""
        return self.warpgroups * self.row_tiles * 64

    @property
    def threads(self) -> int:
        """Threads of a CTA; a warp of them fetches."""
        return self.warpgroups * 128 + (128 if self.row_tiles > 1 else 32)

    @property
    def stages(self) -> int:
        """Chunks of k on their way or in use."""
        return min(8, _RING // ((self.rows + self.tokens) * _LINE))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: the ring."""
        return self.stages * (self.rows + self.tokens) * _LINE

    def grid(self, out_features: int) -> int:
        """CTAs of a launch."""
        return -(-out_features // self.rows) * self.k_parts

    def parts(self, out_features: int) -> int:
        """Float32 numbers of all parts; none of a single one."""
        return self.grid(out_features) * self.rows * self.tokens if self.k_parts > 1 else 0

    def sum_grid(self, out_features: int) -> int:
        """CTAs of ``linear_sum.cu``, whose warps add 16 rows of 16 tokens each."""
        return self.grid(out_features) // self.k_parts * self.rows * self.tokens * 32 // (256 * SUM_THREADS)


def large_shape(tokens: int, out_features: int, in_features: int, sms: int) -> LargeShape | None:
    """The shape for 65 to 256 tokens and weight [out_features, in_features] on a device of ``sms``
    multiprocessors; None where cuBLAS is faster.

    Tiles of 128 rows that fill one or two rounds of the multiprocessors have all of k. In place of two rounds
    tiles of 256 rows, which read x half as often, do from 129 to 192 tokens, and cuBLAS with more. Of fewer
    tiles, of 128 or 64 rows, with a long k four CTAs share k out.
    """
    padded, tall = -(-tokens // 16) * 16, -(-out_features // 128)
    rounds = -(-tall // sms)
    if rounds <= 2 and tall * 100 >= rounds * sms * 84 and in_features >= 2048:
        if rounds == 2 and padded > 192:
            return None
        return LargeShape(padded, 2, 2 if rounds == 2 and padded > 128 else 1, 1)
    for warpgroups in (2, 1):
        tiles = -(-out_features // (64 * warpgroups))
        if sms * 9 <= tiles * 40 <= sms * 10 and in_features >= 8192:
            return LargeShape(padded, warpgroups, 1, 4)
    return None


def large_config(spec: LinearSpec, shape: LargeShape, *, early: bool) -> Config:
    """The constants of ``linear_large.cu``."""
    return _config(spec, shape, 1, early)


def sum_config(spec: LinearSpec, shape: LargeShape, *, early: bool) -> Config:
    """The constants of ``linear_sum.cu``, whose warps finish 16 tokens."""
    return _config(spec, shape, shape.tokens // 16, early)


def _config(spec: LinearSpec, shape: LargeShape, cluster: int, early: bool) -> Config:
    values = {
        **spec.constants(early),
        "X_ROWS": 0,
        "NT": shape.tokens // 8,
        "MT": shape.row_tiles,
        "ROW_WARPS": shape.warpgroups,
        "K_WARPS": 1,
        "STAGES": shape.stages,
        "EARLY_STAGES": min(2, shape.stages),
        "CTAS_PER_SM": 1,
        "K_PARTS": shape.k_parts,
        "CLUSTER": cluster,
    }
    return LINEAR.config(values, exact=True)
