"""`Kind`: what the choice of a backend for a call of a function follows from."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.spec import GIVEN, AttentionSpec, attention_spec
from torchpaged.custom_ops.attention.call import AttentionCall

_GIVEN_TENSORS = tuple(name for name in GIVEN if name in AttentionCall._fields)


class Kind(NamedTuple):
    """What the choice for a call follows from, all of it constants: a key for what was chosen before. In a
    trace sizes become constants by that, which they are in any model; of the numbers that an attention is
    given, which need not be, the cap is a yes or no, and the scale is left out.

    Attributes:
        given: names in `GIVEN`.
        the others: as in `attention_spec`.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    block_size: int
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    chunk_size: int = 0
    logits_soft_cap: float = 0.0
    given: tuple[str, ...] = ()
    scale: float | None = None
    batch_invariant: bool = False

    @classmethod
    def of(cls, call: AttentionCall, batch_invariant: bool = False) -> Kind:
        """That of an attention."""
        given = [name for name in _GIVEN_TENSORS if getattr(call, name) is not None]
        if call.fp8_queries:
            given.append("fp8_queries")
        scale: float | None = call.scale
        window, chunk_size, soft_cap = (call.window_left, call.window_right), call.chunk_size, 0.0
        if torch.compiler.is_compiling():
            scale, chunk_size = None, operator.index(chunk_size)
            window = operator.index(window[0]), operator.index(window[1])
            if call.logits_soft_cap != 0:  # a symbol perhaps, which a branch makes a constant
                soft_cap = 1.0
        else:
            soft_cap = call.logits_soft_cap
        sizes = _sizes(call.q, call.k_cache, call.v_cache)
        return cls(
            call.out.dtype,
            call.k_cache.dtype,
            *sizes,
            call.causal,
            window,
            chunk_size,
            soft_cap,
            tuple(given),
            scale,
            batch_invariant,
        )

    @classmethod
    def written(cls, k: Tensor, v: Tensor, k_cache: Tensor) -> Kind:
        """The attention that reads what is written; as many query heads as kv heads, since the queries are
        not known here."""
        # all values are said: defaults of a named tuple are no constants to every Dynamo
        return cls(k.dtype, k_cache.dtype, *_sizes(k, k_cache, v), True, (-1, -1), 0, 0.0, (), None, False)

    def spec(self, device: torch.device) -> AttentionSpec:
        """As a backend is asked."""
        values: dict[str, Any] = self._asdict()
        values |= dict.fromkeys(values.pop("given"), True)
        return attention_spec(device=device, **values)


def _sizes(x: Tensor, k_cache: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """From ``num_heads`` to ``block_size``."""
    heads, kv_heads, dim, dim_v = x.shape[1], k_cache.shape[2], x.shape[2], v.shape[-1]
    index = operator.index  # of a symbol: a constant
    return index(heads), index(kv_heads), index(dim), index(dim_v), index(k_cache.shape[1])
