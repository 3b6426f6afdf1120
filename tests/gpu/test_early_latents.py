"""Latent attention on Hopper that asks for the context's latents before the kernels ahead have ended never
gets one too early, whichever kernel writes it. Pools are NaN before each replay, and what writes them ends
late: a kernel that lets others begin at once stands in front of it, or in its place (late_end.py).

Each of these made wrong fails here, every time: attention in clusters that lets others begin before its wait,
a tile asked for early though it has a query token's key, a write of other tokens that is said to be one of
query tokens. The last one only where the write leaves multiprocessors free: one that holds programs of it has
no room for attention's shared memory. So what is written late is a token of each request. Attention in ranges
that lets others begin before its wait does not fail: its CTAs are on all multiprocessors until they have
waited."""

from collections.abc import Callable
from typing import Any

import late_end
import pytest
import torch
from captured import captured
from gpus import CAPABILITY
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, row_bytes, unpack
from torchpaged.testing import BatchSpec
from torchpaged.testing.batches import make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (9, 0), reason="no kernel begins early before compute capability 9.0"),
]
CUDA, REFERENCE = BACKEND_OPS["cuda"], BACKEND_OPS["reference"]
RANK, ROPE, HEADS, NOPE, BLOCK = 512, 64, 4, 16, 16
REPLAYS, STEPS = 20, 2
TILE = 64  # keys that attention asks for at once
LATE = 5  # position of a token of the context that is a part of its own, the last one


class Steps:
    """Some steps of one token per request, behind a context; new latents and queries for each replay."""

    def __init__(self, num_reqs: int, context: int, columns: int, fp8: bool) -> None:
        make: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        length = context + STEPS
        spec = BatchSpec("steps", (length,) * num_reqs, (1,) * num_reqs)
        self.batch = make_batch(
            spec,
            num_heads=HEADS,
            num_kv_heads=1,
            head_dim=RANK + ROPE,
            head_dim_v=RANK,
            extra_columns=columns - -(-length // BLOCK),
            **make,
        )
        position = torch.arange(length, device="cuda")
        slots = self.batch.block_table[:, position // BLOCK].long() * BLOCK + position % BLOCK
        late = torch.arange(context, device="cuda") == LATE
        self.slots = [slots[:, :context][:, ~late].reshape(-1), *slots[:, context:].T.contiguous()]
        self.slots.append(slots[:, LATE].contiguous())
        shape = *self.batch.k_cache.shape[:3], row_bytes(RANK, ROPE)
        self.pool = (
            torch.empty(shape, dtype=torch.uint8, device="cuda").view(ROW_DTYPE)
            if fp8
            else self.batch.k_cache
        )
        self.positions = [torch.zeros_like(s) for s in self.slots]
        self.rows = [torch.empty(len(s), RANK + ROPE, **make) for s in self.slots]
        self.queries = [torch.empty(len(s), HEADS, NOPE + ROPE, **make) for s in self.slots]
        self.lens = [
            torch.full((num_reqs,), context + 1 + step, dtype=torch.int32, device="cuda")
            for step in range(STEPS)
        ]
        self.up_keys = torch.randn(HEADS, NOPE, RANK, **make) / 4
        self.cos_sin = (torch.arange(ROPE, device="cuda") < ROPE // 2).float()[None]  # angles of 0
        self.attended = [torch.empty_like(self.batch.q) for _ in range(STEPS)]
        self.outs = [torch.empty(num_reqs, HEADS, RANK, **make) for _ in range(STEPS)]
        self.refill()

    def refill(self) -> None:
        for x in (*self.rows, *self.queries):
            x.normal_()
        self.pool.view(torch.uint8).fill_(0xFF)
        for x in (*self.attended, *self.outs):
            x.fill_(float("nan"))

    def write(self, part: int, q_out: Tensor, **options: Any) -> None:
        kv_c, k_pe = self.rows[part].split((RANK, ROPE), dim=1)
        given = (self.positions[part], self.cos_sin, self.slots[part], self.up_keys, q_out, self.pool)
        CUDA.rope_write_latent(self.queries[part], kv_c, k_pe, *given, **options)

    def attend(self, step: int) -> None:
        table, starts = self.batch.block_table, self.batch.query_start_loc
        given = (self.attended[step], self.pool, table, self.lens[step], starts, self.outs[step])
        CUDA.mla_attention(*given, max_query_len=1, scale=self.batch.scale)

    def check(self, steps: int) -> None:
        for step, out in enumerate(self.outs[:steps]):
            pool = (
                unpack(self.pool, RANK, torch.float32) if self.pool.dtype == ROW_DTYPE else self.pool.float()
            )
            want = torch.empty_like(out, dtype=torch.float32)
            table, starts = self.batch.block_table, self.batch.query_start_loc
            given = (self.attended[step].float(), pool, table, self.lens[step], starts, want)
            REFERENCE.mla_attention(*given, max_query_len=1, scale=self.batch.scale)
            assert out.isfinite().all()
            torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)


def replay_often(steps: Steps, launch: Callable[[], None], count: int) -> None:
    graph, _ = captured(launch)
    for _ in range(REPLAYS):
        steps.refill()
        graph.replay()
        steps.check(count)


def by_write_latent(steps: Steps, part: int = -1) -> None:
    kv_c, k_pe = steps.rows[part].split((RANK, ROPE), dim=1)
    CUDA.write_latent(kv_c, k_pe, steps.pool, steps.slots[part])


def by_rope_write_latent(steps: Steps) -> None:
    steps.write(-1, torch.empty_like(steps.attended[0]))


#: Requests, context, columns.
SHAPES = {"clusters": (2, 70, 20), "one cluster": (1, 130, 20), "ranges": (1, 130, 300), "many": (9, 66, 20)}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("writer", [by_write_latent, by_rope_write_latent])
def test_context_written_right_before(writer: Callable[[Steps], None], shape: str, fp8: bool) -> None:
    """Tokens that are no query tokens, written last and late."""
    steps = Steps(*SHAPES[shape], fp8)

    def launch() -> None:
        by_write_latent(steps, 0)
        steps.write(1, steps.attended[0], are_query_tokens=True)
        late_end.launch()
        writer(steps)
        steps.attend(0)

    replay_often(steps, launch, 1)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_query_tokens_are_context_of_the_next_step(shape: str, fp8: bool) -> None:
    """The first step's token is the last one of a tile, which the second step's attention asks for early; it
    is written late, by a kernel that lets others begin at once."""
    num_reqs, context, columns = SHAPES[shape]
    steps = Steps(num_reqs, context // TILE * TILE - 1, columns, fp8)
    rows, slots = steps.pool.view(torch.uint8).flatten(0, 2), steps.slots[1]

    def launch() -> None:
        by_write_latent(steps, 0)
        by_write_latent(steps)
        for step in range(STEPS):
            steps.write(step + 1, steps.attended[step], are_query_tokens=True)
        written = rows.index_select(0, slots)
        rows.index_fill_(0, slots, 0xFF)
        late_end.write(written, rows, slots)
        for step in range(STEPS):
            steps.attend(step)

    replay_often(steps, launch, STEPS)
