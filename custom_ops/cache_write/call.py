"""Calls of the cache writes as records: made once where torch's flat arguments end (registry.py).
Shapes, dtypes and meanings: schema.py."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torchpaged.custom_ops.pools import KVScales


class WriteCall(NamedTuple):
    """The arguments of ``write_kv``, with the schema's defaults."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    are_query_tokens: bool = False

    @property
    def scales(self) -> KVScales:
        """Of the pools."""
        return KVScales(self.k_scale, self.v_scale)


class RotatedWriteCall(NamedTuple):
    """The arguments of ``rope_write_kv``, with the schema's defaults."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    cos_sin: Tensor
    slot_mapping: Tensor
    q_out: Tensor
    k_cache: Tensor
    v_cache: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    interleaved: bool = False
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    are_query_tokens: bool = False

    def write(self) -> WriteCall:
        """The write alone."""
        pools = self.k_cache, self.v_cache
        return WriteCall(self.k, self.v, *pools, self.slot_mapping, *KVScales.of(self))
