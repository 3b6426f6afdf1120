"""What one fuzzed kernel is compiled for."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from pool_layouts import PoolLayout


@dataclass(frozen=True)
class Configuration:
    """What one fuzzed kernel is compiled for, and the sizes of its tensors. Widths and paddings in numbers,
    dtypes by their names in torch.

    Attributes:
        seed: all else follows from it, from the backends to choose from and from ``small``.
        kernel: "decode" (queries of 1 to 8 tokens), "prefill" (all longer) or "mixed".
        num_tokens: rows of q, those of padding included; None: as many as a batch has.
        num_reqs: rows of the block table, those of padding included.
        max_query_len: what the op is told; ``longest_query`` is what batches have at most.
        columns: of the block table; its capacity may be far above the longest request.
        num_blocks: of the pools.
        most_scores: bounds queries x keys x heads of a request, so that the oracle stays fast.
        captured: into a CUDA graph that is replayed with every batch.
        tree: query tokens are trees, at most 64 of a request.
        groups: of requests that share a prefix, at most: `cascade_attention`; 0: `paged_attention`.
    """

    seed: int
    backend: str
    kernel: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    kv_dtype: str
    scales: str
    block_size: int
    layout: PoolLayout
    q_padding: tuple[int, int, int]
    out_padding: tuple[int, int, int]
    num_reqs: int
    num_tokens: int | None
    max_query_len: int
    longest_query: int
    columns: int
    num_blocks: int
    most_scores: int
    options: dict[str, Any]
    sinks: str
    alibi: bool
    lse: bool
    semaphore: bool
    scale: float | None
    captured: bool
    tree: bool = False
    groups: int = 0

    def describe(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dataclasses.asdict(self)
