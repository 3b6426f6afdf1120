"""`Kind`: what the choice of a backend for a call of a function follows from."""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.spec import AttentionSpec, attention_spec, given_in
from torchpaged.custom_ops.attention.call import AttentionCall


class Kind(NamedTuple):
    """What the choice for a call follows from, all of it constants: a key for what was chosen before. In a
    trace sizes become constants by that, which they are in any model; of the numbers that an attention is
    given, which need not be, the cap is a yes or no, and the scale is left out.

    Attributes:
        device: where the call runs.
        given: names in `GIVEN`.
        the others: as in `attention_spec`.
    """

    device: torch.device
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
    def of(cls, call: AttentionCall, batch_invariant: bool = False) -> "Kind":
        """That of an attention."""
        scale: float | None = call.scale
        soft_cap = call.logits_soft_cap
        if torch.compiler.is_compiling():
            scale = None
            soft_cap = 1.0 if soft_cap != 0 else 0.0  # a symbol perhaps, which a branch makes a constant
        index = operator.index  # of a symbol: a constant
        return cls(
            call.q.device,
            call.dtype,
            call.k_cache.dtype,
            *_sizes(call.q, call.k_cache, call.v_cache),
            call.causal,
            (index(call.window_left), index(call.window_right)),
            index(call.chunk_size),
            soft_cap,
            given_in(call),
            scale,
            batch_invariant,
        )

    @classmethod
    def written(cls, k: Tensor, v: Tensor, k_cache: Tensor) -> "Kind":
        """The attention that reads what is written; as many query heads as kv heads, since the queries are
        not known here."""
        # all values are said: defaults of a named tuple are no constants to every Dynamo
        unmasked: tuple[Any, ...] = (True, (-1, -1), 0, 0.0, (), None, False)
        return cls(k.device, k.dtype, k_cache.dtype, *_sizes(k, k_cache, v), *unmasked)

    def spec(self) -> AttentionSpec:
        """As a backend is asked."""
        values: dict[str, Any] = self._asdict()
        values |= dict.fromkeys(values.pop("given"), True)
        return attention_spec(**values)


def _sizes(x: Tensor, k_cache: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """From ``num_heads`` to ``block_size``."""
    heads, kv_heads, dim, dim_v = x.shape[1], k_cache.shape[2], x.shape[2], v.shape[-1]
    index = operator.index  # of a symbol: a constant
    return index(heads), index(kv_heads), index(dim), index(dim_v), index(k_cache.shape[1])
