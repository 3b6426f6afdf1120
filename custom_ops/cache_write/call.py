"""Calls of the cache writes as records: made once where torch's flat arguments end (registry.py).
Shapes, dtypes and meanings: schema.py."""

from typing import Any, NamedTuple, Self

from torch import Tensor

from torchpaged.custom_ops.pools import KVScales


class WriteCall(NamedTuple):
    """The arguments of ``write_kv``, with the schema's defaults."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    scales: KVScales = KVScales()
    are_query_tokens: bool = False

    @classmethod
    def of(cls, *tensors: Any, **options: Any) -> Self:
        """The call of flat arguments, as torch's dispatcher gives them."""
        options["scales"] = KVScales.taken(options, *tensors[5:])
        return cls(*tensors[:5], **options)


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
    scales: KVScales = KVScales()
    are_query_tokens: bool = False

    @classmethod
    def of(cls, *tensors: Any, **options: Any) -> Self:
        """As `WriteCall.of`."""
        options["scales"] = KVScales.taken(options)
        return cls(*tensors, **options)

    def write(self) -> WriteCall:
        """The write alone."""
        pools = self.k_cache, self.v_cache
        return WriteCall(self.k, self.v, *pools, self.slot_mapping, self.scales)
