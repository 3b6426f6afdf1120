"""Proof of a backend's declared graph support: capture once at the largest batch, replay with other lengths, compare.

    for case in conformance_cases(backend.capabilities.graph_support):
        check_replays(backend.ops, case, TapeCapture(), device="cpu")   # or CudaCapture("cuda"), device="cuda"

A backend that decides anything from the live lengths on the host fails here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends import GraphSupport
from torchpaged.custom_ops import BackendOps
from torchpaged.graphs import CaptureBackend
from torchpaged.testing import Batch, BatchSpec, assert_attention_close, make_batch


class Case(NamedTuple):
    """Batches of one static shape: the first is captured, all are replayed."""

    name: str
    batches: tuple[BatchSpec, ...]
    options: dict[str, Any]


_ONE = (1, 1, 1, 1)
_DECODE = (
    BatchSpec("full", (96, 96, 96, 96), _ONE),
    BatchSpec("short", (1, 2, 3, 4), _ONE),
    BatchSpec("skewed", (96, 1, 33, 16), _ONE),
    BatchSpec("padded", (50, 17, 0, 0), (1, 1, 0, 0), padded_tokens=2),
    BatchSpec("empty_row", (0, 96, 0, 5), _ONE),
    BatchSpec("block_edges", (15, 16, 17, 64), _ONE),
)
_UNIFORM = (
    BatchSpec("full", (96, 96, 96), (4, 4, 4)),
    BatchSpec("short", (4, 5, 6), (4, 4, 4)),
    BatchSpec("skewed", (96, 4, 31), (4, 4, 4)),
    BatchSpec("padded", (40, 0, 0), (4, 0, 0), padded_tokens=8),
    BatchSpec("block_edges", (15, 16, 17), (4, 4, 4)),
    BatchSpec("left_padded", (2, 16, 90), (4, 4, 4)),
)
_MIXED = (
    BatchSpec("full", (96, 96, 96), (1, 20, 11)),
    BatchSpec("prefill", (30, 1, 1), (30, 1, 1)),
    BatchSpec("decodes", (50, 96, 3), _ONE[:3], padded_tokens=29),
    BatchSpec("padded", (40, 12, 0), (9, 12, 0), padded_tokens=11),
    BatchSpec("even", (16, 17, 32), (10, 11, 11)),
    BatchSpec("contexts", (96, 33, 60), (2, 25, 5)),
)


def conformance_cases(support: GraphSupport) -> list[Case]:
    """What a backend of this level must pass."""
    cases = []
    if support >= GraphSupport.SINGLE_TOKEN_DECODE:
        cases += [Case("decode", _DECODE, {}), Case("decode_window", _DECODE, {"window_left": 20})]
    if support >= GraphSupport.UNIFORM_BATCH:
        cases += [Case("uniform", _UNIFORM, {})]
    if support >= GraphSupport.ALWAYS:
        cases += [Case("mixed", _MIXED, {}), Case("mixed_window", _MIXED, {"window_left": 20})]
    return cases


def check_replays(ops: BackendOps, case: Case, capture: CaptureBackend, device: torch.device | str, **shape: Any) -> int:
    """Capture the case's first batch, replay all of them by changing tensors only; returns how many replays were compared.

    Raises:
        AssertionError: a replay differs from the oracle beyond its error budget, or from its own repetition at all, or leaves the semaphore other
            than zero.
    """
    batches = [make_batch(spec, seed=i, device=device, **shape) for i, spec in enumerate(case.batches)]
    first, blocks = batches[0], max(b.k_cache.shape[0] for b in batches)
    width = max(b.block_table.shape[1] for b in batches)
    with torch.inference_mode(False):
        q, lens, starts = torch.zeros_like(first.q), torch.zeros_like(first.seq_lens), torch.zeros_like(first.query_start_loc)
        pools = [torch.zeros(blocks, *c.shape[1:], dtype=c.dtype, device=c.device) for c in (first.k_cache, first.v_cache)]
        table = torch.zeros(len(lens), width, dtype=torch.int32, device=device)
        out = torch.zeros(*q.shape[:2], first.v_cache.shape[-1], dtype=q.dtype, device=device)
        lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=device)
        semaphore = torch.zeros(len(lens) * first.k_cache.shape[2], dtype=torch.int32, device=device)
    longest = max(max(spec.query_lens) for spec in case.batches)

    def load(batch: Batch) -> None:
        q.copy_(batch.q)
        for pool, source in zip(pools, (batch.k_cache, batch.v_cache), strict=True):
            pool[: source.shape[0]].copy_(source)
        table.zero_()
        table[:, : batch.block_table.shape[1]].copy_(batch.block_table)
        lens.copy_(batch.seq_lens)
        starts.copy_(batch.query_start_loc)

    def step() -> Tensor:
        ops.paged_attention(q, *pools, table, lens, starts, out, lse, max_query_len=longest, scale=first.scale, semaphore=semaphore,
                            **case.options)  # fmt: skip
        return out

    load(first)
    capture.warmup(step, 2)
    graph = capture.capture(step, capture.new_pool())
    for batch in (*batches, first):
        load(batch)
        out.fill_(float("nan")), lse.fill_(float("nan"))
        graph.replay()
        once = out.clone()
        assert_attention_close(out, lse, batch, **case.options)
        graph.replay()
        assert torch.equal(out, once), f"{case.name}[{batch.spec.name}]: a second replay gave other bits"
        assert not semaphore.any(), f"{case.name}[{batch.spec.name}]: the semaphore is not zero after a replay"
    return len(batches) + 1
