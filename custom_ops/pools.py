"""What every op that takes a pair of pools asks of it: of real tensors, and of the fake ones of a trace."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_dtype,
    check_last_dim,
    reads_values,
    shape_of,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.facts import expect, expect_dtype
from torchpaged.custom_ops.memory import is_latent, pools_meet

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INF = float("inf")
FEW = 256  # numbers: so many Python has looked at before a dozen ops of torch have begun


class KVScales(NamedTuple):
    """What the numbers of a pair of fp8 pools are multiplied by, under the names that the ops have.

    Made where a layer's scales are declared, opened where an op computes with them; what lies between hands
    it on: ``*scales``, ``**scales.by_name``. A further fact of this kind is a field here: schemas have it
    from `SCALES`, and records have all of them as ``scales``.

    Attributes:
        k_scale, v_scale: float32 ``[1]`` or ``[num_kv_heads]``; None: 1.
    """

    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def of(cls, holder: Any) -> Self:
        """Those of a layer's pools; none where it has none."""
        return cls._make(getattr(holder, name, None) for name in cls._fields)

    @classmethod
    def taken(cls, options: dict[str, Any], *given: Tensor | None) -> Self:
        """Those of an op's flat arguments: ``given`` by place, the others taken out of ``options``."""
        return cls(*given, **{name: options.pop(name) for name in cls._fields if name in options})

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Those that are given, as keyword arguments of an op."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None}


#: They as arguments in the schemas of ops.
SCALES = ", ".join(f"Tensor? {name}=None" for name in KVScales._fields)


def check_pools(k_cache: Tensor, v_cache: Tensor, *, stores: bool = False) -> None:
    """A pair of pools ``[num_blocks, block_size, num_kv_heads, head_dim(_v)]`` fits together and shares
    no element.

    Values that are the first columns of the keys (`is_latent`) are let through unless the op ``stores``
    tokens.
    """
    if k_cache.dim() != 4:
        raise ArgumentError(
            "k_cache", "shape [num_blocks, block_size, num_kv_heads, head_dim]", shape_of(k_cache)
        )
    check_dims("v_cache", v_cache, k_cache.shape[0], k_cache.shape[1], k_cache.shape[2], None)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if min(cache.shape) < 1:
            raise ArgumentError(name, "at least one block, token per block, head and column", shape_of(cache))
    if k_cache.dtype not in FLOATS + FP8:
        raise ArgumentError(
            "k_cache",
            "a floating point dtype of 16, 32 or 64 bits, float8_e4m3fn or float8_e5m2",
            str(k_cache.dtype),
        )
    check_dtype("v_cache", v_cache, k_cache.dtype)
    check_device(k_cache.device, v_cache=v_cache)
    check_last_dim(k_cache=k_cache, v_cache=v_cache)
    if pools_meet(k_cache, v_cache) and (stores or not is_latent(k_cache, v_cache)):
        raise ArgumentError(
            "v_cache", "memory apart from k_cache's", "pools that share memory", "allocate one pool for each"
        )


def check_cache_dtype(x: Tensor, cache: Tensor, scales: KVScales) -> None:
    """``cache`` holds tokens of x's dtype, or of fp8, and only then are there ``scales``: one, or one per kv
    head."""
    fp8 = cache.dtype in FP8
    if not fp8 and cache.dtype != x.dtype:
        raise ArgumentError(
            "k_cache", f"the dtype of the tokens ({x.dtype}) or an fp8 dtype", str(cache.dtype)
        )
    for name, scale in scales.by_name.items():
        if not fp8:
            raise ArgumentError(
                name, f"None for a {cache.dtype} cache", "a tensor", "scales belong to fp8 caches"
            )
        check_scale(name, scale, cache.shape[2])


def check_scale(name: str, scale: Tensor, num_kv_heads: int) -> None:
    """``scale``: float32, one number or one per kv head."""
    check_dtype(name, scale, torch.float32)
    if scale.dim() > 1 or scale.numel() not in (1, num_kv_heads):
        words = f"one scale or one per kv head ({num_kv_heads})" if num_kv_heads > 1 else "one scale"
        raise ArgumentError(name, words, shape_of(scale))
    check_scale_values(name, scale)


def head_stride(scale: Tensor | None) -> int:
    """Numbers from one kv head's scale to the next: 0 where there is one for all."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(-1)


def check_scale_values(name: str, scale: Tensor) -> None:
    """Each number of ``scale`` is positive and finite, where values may be read."""
    if reads_values(scale.device) and not bool(((scale > 0) & (scale < INF)).all()):
        raise ArgumentError(name, "positive finite numbers", str(scale.tolist()))


def expect_pools(k_cache: Tensor, v_cache: Tensor) -> None:
    """What a fake kernel states of its pools: sizes may be symbols, so that nothing is decided."""
    expect(k_cache.dim() == v_cache.dim() == 4, "k_cache, v_cache: expected 4 dimensions")
    text = "v_cache: expected memory apart from k_cache's, got the same tensor"
    expect(k_cache is not v_cache, text)
    floats = k_cache.dtype.is_floating_point
    expect(floats, f"k_cache: expected a floating point dtype, got {k_cache.dtype}")
    expect_dtype(k_cache.dtype, v_cache=v_cache)
