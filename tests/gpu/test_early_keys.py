"""Attention that starts before the kernels ahead have ended never reads a key or value too early, whichever
kernel writes it.

Before each replay the pools are NaN, so that one stale number makes a whole row NaN; the graph itself writes
what attention reads. A linear layer of one long CTA stands first. It is launched early and lets others be: so
all that may begin early does, long before anything is written.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import captured
from torch import Tensor

from torchpaged.backends.semaphore import make_semaphore
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BatchSpec, make_batch

pytestmark = pytest.mark.gpu
REFERENCE = BACKEND_OPS["reference"]
BACKENDS = ("triton", "cuda")
REPLAYS = 25


class Steps:
    """Some steps of some requests, whose metadata is made ahead; new keys, values and queries for
    each replay."""

    def __init__(
        self, num_reqs: int, context: int, num_steps: int, query_len: int = 1, head_dim: int = 128
    ) -> None:
        self.num_steps = num_steps
        shape: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        length = context + num_steps * query_len
        spec = BatchSpec("steps", (length,) * num_reqs, (query_len,) * num_reqs)
        batch = make_batch(spec, num_heads=16, num_kv_heads=4, head_dim=head_dim, **shape)
        self.table, self.starts = batch.block_table, batch.query_start_loc
        self.sizes: dict[str, Any] = {"max_query_len": query_len, "scale": batch.scale}
        self.pools = (batch.k_cache, batch.v_cache)
        position = torch.arange(length, device="cuda")
        slots = self.table[:, position // 16].long() * 16 + position % 16  # [num_reqs, length]
        self.slots = [slots[:, :context].reshape(-1)]
        self.lens = []
        for step in range(num_steps):
            begin = context + step * query_len
            self.slots.append(slots[:, begin : begin + query_len].reshape(-1))
            self.lens.append(torch.full((num_reqs,), begin + query_len, dtype=torch.int32, device="cuda"))
        self.keys, self.values = (
            [torch.empty(len(s), 4, head_dim, **shape) for s in self.slots] for _ in range(2)
        )
        self.queries = [torch.empty_like(batch.q) for _ in range(num_steps)]
        self.outs = [torch.empty_like(batch.q) for _ in range(num_steps)]
        # an op that makes its own has a memset in front of it
        self.semaphore = make_semaphore(num_reqs * 4, torch.device("cuda"))
        self.slow = (
            torch.randn(1, 131072, **shape),
            torch.randn(16, 131072, **shape),
            torch.empty(1, 16, **shape),
        )
        self.refill()

    def refill(self) -> None:
        for x in (*self.keys, *self.values, *self.queries):
            x.normal_()
        for x in (*self.pools, *self.outs):
            x.fill_(float("nan"))

    def begin(self) -> None:
        BACKEND_OPS["cuda"].linear(*self.slow)

    def attend(self, ops: Any, step: int) -> None:
        batch = self.table, self.lens[step], self.starts
        call = self.queries[step], *self.pools, *batch, self.outs[step]
        ops.paged_attention(*call, **self.sizes, semaphore=self.semaphore)

    def check(self) -> None:
        for step, out in enumerate(self.outs):
            want = torch.empty_like(out, dtype=torch.float32)
            wide = (x.float() for x in (self.queries[step], *self.pools))
            batch = self.table, self.lens[step], self.starts
            REFERENCE.paged_attention(*wide, *batch, want, **self.sizes)
            torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)


def replay_often(steps: Steps, launch: Callable[[], None]) -> None:
    graph, _ = captured(launch)
    for _ in range(REPLAYS):
        steps.refill()
        graph.replay()
        steps.check()


def by_write_kv(ops: Any, steps: Steps) -> None:
    ops.write_kv(steps.keys[0], steps.values[0], *steps.pools, steps.slots[0])


def by_rope_write_kv(ops: Any, steps: Steps) -> None:
    """Angles of 0: what is stored is k as it came."""
    k, slots = steps.keys[0], steps.slots[0]
    cos_sin = (torch.arange(k.shape[2], device="cuda") < k.shape[2] // 2).float()[None]
    positions, q_out = torch.zeros_like(slots), torch.empty_like(k)
    ops.rope_write_kv(k, k, steps.values[0], positions, cos_sin, slots, q_out, *steps.pools)


def by_torch(ops: Any, steps: Steps) -> None:
    for new, pool in zip((steps.keys[0], steps.values[0]), steps.pools, strict=True):
        pool.view(-1, *new.shape[1:]).index_copy_(0, steps.slots[0], new)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "queries_apart"])
@pytest.mark.parametrize(
    "num_reqs, context", [(1, 400), (8, 48), (32, 12), (8, 2047)]
)  # a write of the last is no single wave
@pytest.mark.parametrize("writer", [by_write_kv, by_rope_write_kv, by_torch])
@pytest.mark.parametrize("backend", BACKENDS)
def test_context_written_right_before(
    backend: str, writer: Callable[[Any, Steps], None], num_reqs: int, context: int, apart: bool
) -> None:
    """Tokens that are no query tokens, and those of the queries: by a write behind it that lets attention
    start early, or before it."""
    ops, steps = BACKEND_OPS[backend], Steps(num_reqs, context, num_steps=1)

    def write_queries() -> None:
        ops.write_kv(steps.keys[1], steps.values[1], *steps.pools, steps.slots[1], are_query_tokens=apart)

    def launch() -> None:
        if not apart:
            write_queries()
        steps.begin()
        writer(ops, steps)
        if apart:
            write_queries()
        steps.attend(ops, 0)

    replay_often(steps, launch)


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("num_reqs, context", [(1, 40), (8, 50), (300, 17)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_query_tokens_are_context_of_the_next_step(
    backend: str, num_reqs: int, context: int, query_len: int
) -> None:
    """Steps with nothing but these two ops in them, of which both are launched early: each step reads what
    the ones before wrote.

    head_dim 32: two of these attentions fit a multiprocessor together.
    """
    ops, steps = BACKEND_OPS[backend], Steps(num_reqs, context, num_steps=6, query_len=query_len, head_dim=32)

    def launch() -> None:
        ops.write_kv(steps.keys[0], steps.values[0], *steps.pools, steps.slots[0])
        steps.begin()
        for step in range(steps.num_steps):
            ops.write_kv(
                steps.keys[step + 1],
                steps.values[step + 1],
                *steps.pools,
                steps.slots[step + 1],
                are_query_tokens=True,
            )
            steps.attend(ops, step)

    replay_often(steps, launch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_context_copied_right_before(backend: str) -> None:
    """copy_blocks into the blocks that attention reads."""
    ops, steps = BACKEND_OPS[backend], Steps(8, 63, num_steps=1)
    blocks = steps.table[:, :4].reshape(-1).long()
    sources = [torch.empty(len(blocks), 16, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    pools = tuple(torch.cat([pool, source]) for pool, source in zip(steps.pools, sources, strict=True))
    first = steps.pools[0].shape[0]
    steps.pools = (pools[0], pools[1])
    pairs = torch.stack([torch.arange(len(blocks), device="cuda") + first, blocks], dim=1)

    def launch() -> None:
        for pool in pools:
            pool[first:].normal_()
        ops.copy_blocks(*pools, pairs)
        steps.attend(ops, 0)

    replay_often(steps, launch)


def test_the_writers_store_what_they_should() -> None:
    """The tests above compare with what is in the pools; this one with what was to be there."""
    for writer in (by_write_kv, by_rope_write_kv, by_torch):
        steps = Steps(3, 100, num_steps=1)
        writer(BACKEND_OPS["cuda"], steps)
        for pool, want in zip(steps.pools, (steps.keys[0], steps.values[0]), strict=True):
            got: Tensor = pool.view(-1, *want.shape[1:])[steps.slots[0]]
            torch.testing.assert_close(got, want)
