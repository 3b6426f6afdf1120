"""fp8 pools of a `PagedCache`: which dtype they have, and by which scales keys and values go in and out.

Scales are given, or found in the first forward's keys and values (padding included): the largest magnitude,
per kv head or per layer, times two, stands at the dtype's end. The factor leaves room for what comes later,
which would be cut off at the end of the range; fp8 numbers are floating-point, so that it costs only their
smallest.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.custom_ops.pools import KVScales

KV_DTYPES: dict[str, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
HEADROOM = 2.0
Scales = Sequence[tuple[Any, Any]]


class KVQuantization:
    """The dtype and the scales of one cache.

    Args:
        kv_dtype: "fp8_e4m3", "fp8_e5m2" or torch's dtype of that name; None = the keys' dtype, without
            scales.
        scales: "head" or "tensor": found in the first forward, one per kv head or one per layer. Or, for each
            paged layer, ``(k_scale, v_scale)``: numbers, or float32 tensors of one element or one per kv
            head.
        num_layers: paged layers of the cache.

    Attributes:
        dtype: of the pools; None = the keys'.

    Raises:
        ArgumentError: another dtype, scales without one, or scales of another form or number.
    """

    def __init__(self, kv_dtype: str | torch.dtype | None, scales: str | Scales, num_layers: int) -> None:
        self.dtype = KV_DTYPES.get(kv_dtype) if isinstance(kv_dtype, str) else kv_dtype
        if kv_dtype is not None and self.dtype not in KV_DTYPES.values():
            raise ArgumentError("kv_dtype", f"None or one of {', '.join(KV_DTYPES)}", repr(kv_dtype))
        self._by_head = scales == "head"
        self._given: list[tuple[Any, Any]] | None = None
        if isinstance(scales, str):
            if scales not in ("head", "tensor"):
                raise ArgumentError(
                    "kv_scales", "'head', 'tensor' or scales for each paged layer", repr(scales)
                )
            return
        try:
            pairs = [tuple(pair) for pair in scales]
        except TypeError:
            pairs = [()]
        if any(len(pair) != 2 for pair in pairs):
            raise ArgumentError(
                "kv_scales", "'head', 'tensor' or (k_scale, v_scale) for each paged layer", repr(scales)
            )
        self._given = [(_scale(k), _scale(v)) for k, v in pairs]
        if self.dtype is None:
            raise ArgumentError(
                "kv_scales", "None without a kv_dtype", f"{len(pairs)} pairs", "give kv_dtype too"
            )
        if len(self._given) != num_layers:
            raise ArgumentError(
                "kv_scales", f"a pair for each of {num_layers} layers", f"{len(self._given)} pairs"
            )

    def of(self, position: int, key_states: Tensor, value_states: Tensor) -> KVScales:
        """The scales of the paged layer at ``position``, float32 ``[1]`` or ``[num_kv_heads]`` on the keys'
        device.

        Args:
            position: among the paged layers.
            key_states, value_states: the first ones ``[batch, num_kv_heads, query_len, head_dim(_v)]``;
                empty: scales that are not given are not known yet, and there are none in the result.

        Raises:
            ArgumentError: given scales of another number of heads.
        """
        if self.dtype is None or (self._given is None and not key_states.shape[2]):
            return KVScales()
        found = []
        for index, states in enumerate((key_states, value_states)):
            heads = states.shape[1]
            if self._given is not None:
                scale = self._given[position][index].to(states.device)
                if scale.numel() not in (1, heads):
                    raise ArgumentError(
                        "kv_scales", f"1 or {heads} numbers for layer {position}", str(scale.numel())
                    )
            else:
                scale = self._found(states)
            found.append(static(scale))
        return KVScales(*found)

    def _found(self, states: Tensor) -> Tensor:
        assert self.dtype is not None
        most = states.detach().float().abs().amax((0, 2, 3))
        most = most if self._by_head else most.amax(0, keepdim=True)
        scale = most * (HEADROOM / torch.finfo(self.dtype).max)
        return torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))


def static(scale: Tensor) -> Tensor:
    """``scale``, whose address compiled code may know."""
    torch._dynamo.mark_static_address(scale, guard=False)  # a new cache must not recompile the model
    return scale


def _scale(value: Any) -> Tensor:
    try:
        device = value.device if isinstance(value, Tensor) else torch.device("cpu")
        scale = torch.as_tensor(value, dtype=torch.float32, device=device).detach().clone().reshape(-1)
    except (TypeError, ValueError):
        raise ArgumentError("kv_scales", "numbers, or float32 tensors", repr(value)) from None
    if not scale.numel() or not bool(((scale > 0) & scale.isfinite()).all()):
        raise ArgumentError("kv_scales", "positive finite numbers", str(value))
    return scale


def require_paged(name: str, kinds: set[str]) -> None:
    """Refuse fp8 pools where keys are gathered, or where a layer keeps more than keys and values."""
    if kinds:
        raise UnsupportedModelError(
            f"{name} cannot have fp8 pools: {', '.join(sorted(kinds))}; leave kv_dtype out"
        )
