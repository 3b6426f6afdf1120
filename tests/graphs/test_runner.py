"""The graph runner on a CPU: buckets, padding, buffers, capture semantics, refusals, compile counts."""

from typing import Any, ClassVar

import numpy
import pytest
import torch
from sessions import kept_session, semaphore_of
from small_gpt import BLOCK, BLOCKS, DIM, GPT, HEADS, KV_HEADS, TABLES, VOCAB, WIDTH
from torch import Tensor

import torchpaged
from torchpaged import ArgumentError, AttentionMetadata, CaptureError
from torchpaged.graphs import DecodeGraphRunner, TapeCapture
from torchpaged.graphs.buckets import bucket_for, default_buckets, default_prefix_buckets
from torchpaged.graphs.buffers import DecodeBatch, DecodeBuffers
from torchpaged.graphs.capture import Captured, EagerCapture


class Toy(GPT):
    """Counts its steps."""

    calls = 0

    def step(self, input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self(input_ids, metadata)


def runner(toy: Any, capture: Any = None, **options: Any) -> DecodeGraphRunner:
    settings = {
        "max_batch_size": 4,
        "max_blocks_per_req": WIDTH,
        "block_size": BLOCK,
        "num_blocks": BLOCKS,
        "buckets": [1, 2, 4],
        "compile": False,
    }
    step = getattr(toy, "step", toy)
    return DecodeGraphRunner(step, **{**settings, "capture": capture or EagerCapture(), **options})


def drive(run: Any) -> list[list[int]]:
    """Rows join and leave; each feeds its own greedy tokens back."""
    rows = [[3 + i] for i in range(4)]
    life = [range(40), range(5, 30), range(11, 38), range(7)]
    for step in range(40):
        live = [i for i in range(4) if step in life[i]]
        if live:
            logits = run([rows[i][-1] for i in live], [len(rows[i]) for i in live], [TABLES[i] for i in live])
            for row, i in enumerate(live):
                rows[i].append(int(logits[row].argmax()))
    return rows


def oracle(backend: str = "reference") -> list[list[int]]:
    """Each row alone, with metadata built from scratch every step: no runner, no padding."""
    with torchpaged.use_backend(backend):
        toy = Toy()

    def run(ids: list[int], lens: list[int], tables: list[list[int]]) -> Tensor:
        with torch.inference_mode():
            rows = []
            for token, length, table in zip(ids, lens, tables, strict=True):
                batch = AttentionMetadata.from_lists([1], [length], [table], block_size=BLOCK)
                rows.append(toy(torch.tensor([token]), batch)[0])
            return torch.stack(rows)

    return drive(run)


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("compile", [False, True])
def test_eager_capture_equals_the_oracle(compile: bool) -> None:
    torch._dynamo.reset()
    toy = Toy()
    r = runner(toy, compile=compile)
    r.capture()
    assert drive(r.run) == oracle()
    assert {b.bucket: b.hits > 0 for b in r.report()} == {1: True, 2: True, 4: True}
    assert sum(b.padded_rows for b in r.report()) > 0


def test_compiles_once_per_bucket(no_codegen: None) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    toy = Toy()
    r = runner(toy, compile=True, buckets=[2, 4])
    r.capture()
    drive(r.run)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_many_buckets_stay_under_dynamos_recompile_limit(no_codegen: None) -> None:
    torch._dynamo.reset()
    r = runner(Toy(), max_batch_size=11, buckets=range(1, 12), compile=True, warmup_iters=0)
    r.capture()
    assert len(r.report()) == 11
    assert all(b.capture_ms > 0 for b in r.report())


def test_tape_replays_without_python_and_equals_the_oracle() -> None:
    session = kept_session(4, HEADS, KV_HEADS, DIM)
    toy = Toy(session)
    r = runner(toy, TapeCapture(), debug=True, watch={"k": toy.cache[0].k_cache}, session=session)
    r.capture()
    calls, addresses = toy.calls, {n: t.data_ptr() for n, t in r.buffers.tensors().items()}
    assert drive(r.run) == oracle()
    assert toy.calls == calls, "Python ran at replay"
    assert {n: t.data_ptr() for n, t in r.buffers.tensors().items()} == addresses
    assert not semaphore_of(session).any()


def test_a_semaphore_left_set_is_noticed() -> None:
    """Every bucket attends with the session's semaphore, and loading a batch does not hide that it was
    left set."""
    session = kept_session(4, HEADS, KV_HEADS, DIM)
    r = runner(Toy(session), EagerCapture(), session=session)
    r.capture()
    for call in (r.run, r.run_eager):
        for rows in (1, 2, 4):
            semaphore_of(session)[0] = 1
            with torch.inference_mode(), r.buffers.padding(4):
                pass
            with pytest.raises(ArgumentError, match="semaphore: expected zeros"):
                call([3] * rows, [1] * rows, [[1 + i] for i in range(rows)])
            call([3] * rows, [1] * rows, [[1 + i] for i in range(rows)])  # the failed one left nothing behind


def test_capture_writes_nothing_and_goes_largest_first() -> None:
    class Spy(EagerCapture):
        order: ClassVar[list[tuple[int, Any]]] = []

        def new_pool(self) -> Any:
            return object()

        def capture(self, step: Any, pool: Any) -> Captured:
            captured = super().capture(step, pool)
            self.order.append((captured.output.shape[0], pool))
            return captured

    toy, seen = Toy(), []
    for pools in toy.cache:
        pools.k_cache.fill_(7.0), pools.v_cache.fill_(7.0)
    spy = Spy()
    runner(toy, spy, progress=lambda *a: seen.append(a)).capture()
    assert [n for n, _ in spy.order] == [4, 2, 1]
    assert len({id(pool) for _, pool in spy.order}) == 1
    assert [a[:2] for a in seen] == [(1, 3), (2, 3), (3, 3)]
    assert "batch 4" in seen[0][2]
    assert all(torch.all(t == 7.0) for pools in toy.cache for t in pools[:2])


class Cold(EagerCapture):
    """Captures fail in buckets that lack a kernel, which a run loads."""

    def __init__(self, lacking: int) -> None:
        self.lacking, self.warmed, self.tries = lacking, list[int](), list[int]()

    def warmup(self, step: Any, iterations: int) -> None:
        self.warmed += [len(step())] * iterations

    def capture(self, step: Any, pool: Any) -> Captured:
        captured = super().capture(step, pool)
        self.tries.append(len(captured.output))
        if len(captured.output) == self.lacking and self.lacking not in self.warmed:
            raise RuntimeError("operation not permitted when stream is capturing")
        return captured


def test_few_buckets_are_warmed_up() -> None:
    """The largest, and those whose capture fails without."""
    toy, backend = Toy(), Cold(lacking=2)
    buckets = [1, 2, 3, 4, 5, 6]
    r = runner(toy, backend, max_batch_size=6, buckets=buckets, warmup_iters=1, warms_each=False)
    r.capture()
    assert backend.warmed == [6, 2]
    assert backend.tries == [6, 5, 4, 3, 2, 2, 1]
    assert [report.captured for report in r.report()] == [True] * 6
    for batch in range(1, 7):
        assert r.run([5] * batch, [1] * batch, [[3 + i] for i in range(batch)]).shape == (batch, VOCAB)


def test_a_frozen_host_value_shows() -> None:
    """What CUDA graphs would get wrong, the tape gets wrong too: a Python number baked in at capture."""
    ticks = iter(range(100))
    r = runner(lambda ids, m: (ids + next(ticks)).float(), TapeCapture(), buckets=[1], max_batch_size=1)
    assert float(r.run([10], [1], [[1]])) == float(r.run([10], [2], [[1]]))
    assert float(r.run_eager([10], [1], [[1]])) != float(r.run([10], [1], [[1]]))


def test_moved_memory_is_noticed() -> None:
    toy = Toy()
    pools = {"k_cache": toy.cache[0].k_cache}
    r = runner(toy, TapeCapture(), debug=True, watch=lambda: pools)
    r.run([3], [1], [[1]])
    r.run([3], [2], [[1]])
    pools["k_cache"] = toy.cache[0].k_cache.clone()
    with pytest.raises(CaptureError, match="k_cache: expected at 0x"):
        r.run([3], [2], [[1]])


def test_advance_step_inside_the_graph_needs_no_host() -> None:
    """Sampling and advance_step captured with the step: replays generate on their own."""
    toy = Toy()

    def step(ids: Tensor, m: AttentionMetadata) -> Tensor:
        tokens = toy(ids, m).argmax(-1)
        torchpaged.advance_step(
            tokens, m.block_table, ids, m.positions, m.seq_lens, m.slot_mapping, block_size=BLOCK
        )
        return tokens

    r = runner(step, TapeCapture(), max_batch_size=2, buckets=[2])
    rows = [[3], [4]]
    first = r.run([3, 4], [1, 1], TABLES[:2]).tolist()
    for row, token in zip(rows, first, strict=True):
        row.append(token)
    for _ in range(20):
        for row, token in zip(rows, r.replay(2).tolist(), strict=True):
            row.append(token)
    want = Toy()
    for i, row in enumerate(rows):
        got = [row[0]]
        with torch.inference_mode():
            for n in range(21):
                batch = AttentionMetadata.from_lists([1], [n + 1], [TABLES[i]], block_size=BLOCK)
                got.append(int(want(torch.tensor([got[-1]]), batch)[0].argmax()))
        assert row == got
    assert r.buffers.seq_lens.tolist() == [22, 22]


BAD: dict[str, tuple[str, Any]] = {
    "too_many_rows": ("input_ids", ([1] * 5, [1] * 5, [[1]] * 5)),
    "no_rows": ("input_ids", ([], [], [])),
    "ids": ("input_ids", ([1, 2], [1], [[1]])),
    "length_zero": ("seq_lens", ([1], [0], [[1]])),
    "table_short": ("block_tables", ([1], [5], [[1]])),
    "table_wide": ("block_tables", ([1], [1], [list(range(1, 20))])),
    "null_block": ("block_tables", ([1], [1], [[0]])),
    "block_unknown": ("block_tables", ([1], [1], [[BLOCKS]])),
    "id_truncated": ("input_ids: expected integers, got", ([1.5], [1], [[1]])),
    "id_whole_float": ("input_ids: expected integers, got", (numpy.array([2.0]), [1], [[1]])),
    "id_none": ("input_ids: expected integers, got", ([None], [1], [[1]])),
    "id_huge": ("input_ids: expected integers, got", ([2**63], [1], [[1]])),
    "length_float": ("seq_lens: expected integers, got", ([1], [1.0], [[1]])),
    "lengths_none": ("seq_lens: expected a list of integers, got None", ([1], None, [[1]])),
    "length_text": ("seq_lens: expected integers, got", ([1], ["1"], [[1]])),
    "block_truncated": ("block_tables: expected integers, got", ([1], [1], [[1.5]])),
    "block_truncated_later": ("block_tables: expected integers, got", ([1], [1], [[1, 2.5]])),
}


def test_a_bad_batch_does_not_even_capture() -> None:
    r = runner(Toy())
    before = {n: t.clone() for n, t in r.buffers.tensors().items()}
    for ids in ([3], torch.tensor([[3]]), torch.tensor([3.5])):
        with pytest.raises(ArgumentError):
            r.run(ids, [1], [[1, BLOCKS]])
    assert all(torch.equal(t, before[n]) for n, t in r.buffers.tensors().items())
    assert not any(b.capture_ms for b in r.report())


@pytest.mark.parametrize("step", ["item", "unique", "boolean_index", "branch"])
def test_the_tape_refuses_host_reads(step: str) -> None:
    steps = {
        "item": lambda ids, m: ids * m.seq_lens.max().item(),
        "unique": lambda ids, m: ids[: m.seq_lens.unique().shape[0]],
        "boolean_index": lambda ids, m: ids[m.seq_lens > 0],
        "branch": lambda ids, m: ids if m.seq_lens.any() else -ids,
    }
    r = runner(steps[step], TapeCapture(), max_batch_size=2, buckets=[2])
    with pytest.raises(CaptureError, match="bucket 2"):
        r.capture()


def test_refused_settings() -> None:
    with pytest.raises(ArgumentError, match="compile"):
        runner(Toy(), TapeCapture(), compile=True)
    for bad in ("cuda", 3, EagerCapture):
        with pytest.raises(ArgumentError, match="capture: expected 'auto' or a CaptureBackend, got"):
            runner(Toy(), bad)
    with pytest.raises(ArgumentError, match="compile: expected True or False, got 'no'"):
        runner(Toy(), compile="no")
    with pytest.raises(ArgumentError, match="debug: expected True, False or None, got 1"):
        runner(Toy(), debug=1)
    with pytest.raises(ArgumentError, match=r"progress: expected a function, .*, got 3"):
        runner(Toy(), progress=3)
    with pytest.raises(ArgumentError, match="buckets: expected batch sizes .*, got 3"):
        runner(Toy(), buckets=3)


@pytest.mark.parametrize("name", BAD)
def test_bad_batches_change_no_buffer(name: str) -> None:
    r = runner(Toy())
    r.run([3], [2], [[1]])
    before = {n: t.clone() for n, t in r.buffers.tensors().items()}
    argument, call = BAD[name]
    for run in (r.run, r.run_eager)[: 1 if name.endswith("_rows") else 2]:  # these have no bucket
        with pytest.raises(ArgumentError, match=argument):
            run(*call)
    assert all(torch.equal(t, before[n]) for n, t in r.buffers.tensors().items())


def test_integers_of_numpy_and_tensors_are_taken() -> None:
    r = runner(Toy())
    want = r.run([3, 4], [2, 1], [[1], [2]]).clone()
    for make in (numpy.array, torch.tensor, lambda x: [numpy.int32(i) for i in x]):
        tables = [make(table) for table in ([1], [2])]
        assert torch.equal(r.run(make([3, 4]), make([2, 1]), tables), want)


def test_buffers_by_hand() -> None:
    buffers = DecodeBuffers(4, 3, BLOCK, "cpu", BLOCKS)
    buffers.put(DecodeBatch([7, 8], [5, 1], [[2, 9], [3]]), padded_to=4)
    ids, m = buffers.view(4)
    assert ids.tolist() == [7, 8, 0, 0]
    assert m.positions.tolist() == [4, 0, 0, 0]
    assert m.slot_mapping.tolist() == [36, 12, -1, -1]
    assert m.seq_lens.tolist() == [5, 1, 0, 0]
    assert m.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert m.max_query_len == 1
    assert m.block_table.tolist() == [[2, 9, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]]
    buffers.put(DecodeBatch(torch.tensor([1]), [1], [[4]]), padded_to=2)
    assert buffers.view(2)[0].tolist() == [1, 0]
    assert buffers.view(2)[1].query_start_loc.tolist() == [0, 1, 1]


def test_buckets() -> None:
    assert default_buckets(1) == [1]
    assert default_buckets(5) == [1, 2, 4, 5]
    assert default_buckets(30) == [1, 2, 4, 8, 16, 24, 30]
    assert default_buckets(300)[-4:] == [256, 272, 288, 300]
    assert default_prefix_buckets(60) == [1, 2, 4, 8, 16, 32, 48, 60]
    assert set(default_prefix_buckets(300)) < set(default_buckets(300))
    assert [bucket_for([1, 2, 4], n) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    with pytest.raises(ArgumentError, match="buckets"):
        runner(Toy(), buckets=[1, 2])


def test_what_ends_a_failed_capture_exists() -> None:
    """A private function of torch, of which a CPU build has a stand-in: CudaCapture calls it,
    tests/gpu/test_models.py shows what for."""
    from torch.cuda import memory

    assert hasattr(memory, "_cuda_endAllocateToPool")
