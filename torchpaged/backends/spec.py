"""What an attention asks of a backend: `AttentionSpec`, and `attention_spec`, the one function that makes it
from a layer's arguments.

Every door comes through here: the module from its options, the checked functions from their arguments, a
HuggingFace cache and the engine's model from what their layers really call with. So a feature that a layer
uses and a backend lacks meet in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch


class GraphSupport(IntEnum):
    """Which batches a backend can serve from a captured CUDA graph whose lengths change between replays.

    Declared support is proved by ``tests/test_graph_conformance.py``: capture at the bucket's maximum, replay
    with others.
    """

    NEVER = 0
    SINGLE_TOKEN_DECODE = 1  # every query_len is 1 (or 0, padding)
    UNIFORM_BATCH = 2  # all query lengths equal
    ALWAYS = 3


@dataclass(frozen=True)
class AttentionSpec:
    """The attention somebody wants to run; a backend answers with the reasons why it can't.

    Attributes:
        device: where it runs.
        dtype: of queries and outputs.
        head_dim, head_dim_v: width of keys and of values (None = ``head_dim``).
        num_heads, num_kv_heads: query and kv heads.
        block_size: tokens per block; None = not known yet, the cache that comes says it.
        kv_dtype: of the pools (None = ``dtype``).
        causal: hide keys after the query.
        window_size: ``(left, right)`` keys visible beside the own one; -1 = open.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``; 0 = off.
        chunk_size: keys of the query's own chunk of that many positions only; 0 = off.
        scale: softmax scale; None = ``head_dim ** -0.5``.
        alibi, sinks, lse, tree_mask: features it uses.
        graphs: the least graph support it needs.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int | None = 16
    head_dim_v: int | None = None
    kv_dtype: torch.dtype | None = None
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    logits_soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    chunk_size: int = 0
    lse: bool = False
    graphs: GraphSupport = GraphSupport.NEVER
    scale: float | None = None
    tree_mask: bool = False

    @property
    def window(self) -> bool:
        """Whether keys are hidden by their distance."""
        return self.window_size != (-1, -1)

    @property
    def chunked(self) -> bool:
        """Whether keys are hidden by chunks."""
        return self.chunk_size > 0


def attention_spec(
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    block_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    chunk_size: int | None = None,
    lse: bool = False,
    scale: float | None = None,
    tree_mask: Any = None,
) -> AttentionSpec:
    """The spec of a layer that attends with these arguments.

    Args:
        device, dtype, num_heads, num_kv_heads, head_dim, head_dim_v, block_size, kv_dtype, causal, lse: as in
            `AttentionSpec`.
        window_size: ``(left, right)``; -1 = open.
        logits_soft_cap, chunk_size: None or 0 = off.
        alibi_slopes, sinks, tree_mask: None = off; anything else counts as given.
        scale: None = ``head_dim ** -0.5``.
    """
    return AttentionSpec(
        device=device,
        dtype=dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        kv_dtype=dtype if kv_dtype is None else kv_dtype,
        causal=causal,
        window_size=(window_size[0], window_size[1]),
        logits_soft_cap=float(logits_soft_cap or 0.0),
        alibi=alibi_slopes is not None,
        sinks=sinks is not None,
        chunk_size=chunk_size or 0,
        lse=lse,
        scale=head_dim**-0.5 if scale is None else float(scale),
        tree_mask=tree_mask is not None,
    )
