"""Exceptions at each point of a capture or launch: the next launch is right once rows are written again, host
and device agree, semaphores are zero."""

import contextlib
from typing import Any

import pytest
import torch
from sessions import kept_session, semaphore_of
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.errors import CaptureError, SemaphoreError
from torchpaged.engine.device import DecodeRows, RowState, WholeStepRunner
from torchpaged.graphs import CudaCapture, PackedGraphRunner, TapeCapture
from torchpaged.graphs.capture import EagerCapture

VOCAB, BLOCK = 70, 4
REQUEST = {0: RowState(5, 6, [3, 9, 4, 5, 6, 7], seed=11, counter=0, remaining=100)}


def successor(input_ids: Tensor, metadata: Any) -> Tensor:
    """Logits whose greatest is ``(7 * token + 3 * position + 1) % VOCAB``."""
    best = (7 * input_ids + 3 * metadata.positions + 1) % VOCAB
    return -(torch.arange(VOCAB)[None] - best[:, None]).abs().float()


def packed_runner(step: Any, **options: Any) -> PackedGraphRunner:
    sizes: dict[str, Any] = {"max_num_reqs": 2, "max_blocks_per_req": 4, "block_size": BLOCK}
    return PackedGraphRunner(step, buckets=[8], debug=True, session=SESSION, **sizes, **options)


class Interrupted(TapeCapture):
    """Raises KeyboardInterrupt once, at a chosen point."""

    def __init__(self, point: str) -> None:
        self.point = point

    def _at(self, point: str) -> None:
        if self.point == point:
            self.point = ""
            raise KeyboardInterrupt

    def warmup(self, step: Any, iterations: int) -> None:
        self._at("before the warm-up")
        super().warmup(step, iterations)
        self._at("behind the warm-up")

    def capture(self, step: Any, pool: Any) -> Any:
        captured = super().capture(step, pool)
        self._at("behind the capture")
        replay = captured.replay

        def replay_interrupted() -> None:
            self._at("before the replay")
            replay()
            self._at("behind the replay")

        captured.replay = replay_interrupted  # type: ignore[method-assign]
        return captured


# of the steps here, which have no attention: what is in its semaphore is a test's doing
SESSION = kept_session()


def runner_of(step: Any, rows: DecodeRows, capture: Any, buckets: tuple[int, ...] = (2,)) -> WholeStepRunner:
    options: dict[str, Any] = {"compile": False, "debug": True, "session": SESSION}
    return WholeStepRunner(step, rows, buckets=[*buckets], capture=capture, **options)


def make(point: str, steps: int = 2) -> tuple[DecodeRows, WholeStepRunner]:
    rows = DecodeRows(2, 8, BLOCK, VOCAB, "cpu", BACKEND_OPS["reference"], steps)
    rows.write(REQUEST)
    return rows, runner_of(successor, rows, Interrupted(point))


def tokens_of(rows: DecodeRows, runner: WholeStepRunner, launches: int) -> list[int]:
    tokens = []
    for _ in range(launches):
        runner.launch(1)
        tokens += [step[0] for step in rows.ring.read(rows.ring.take(), 1)]
    return tokens


WANT = tokens_of(*make(""), launches=4)


@pytest.mark.parametrize("point", ["before the warm-up", "behind the warm-up", "behind the capture"])
def test_an_interrupted_capture_leaves_the_rows_as_they_were(point: str) -> None:
    rows, runner = make(point)
    before = {name: tensor.clone() for name, tensor in rows.tensors().items() if name != "ring"}
    semaphore_of(SESSION)[7] = 2
    with pytest.raises(KeyboardInterrupt):
        runner.capture()
    after = rows.tensors()
    assert [name for name, tensor in before.items() if not torch.equal(after[name], tensor)] == []
    assert tokens_of(rows, runner, 4) == WANT


@pytest.mark.parametrize("point", ["before the replay", "behind the replay"])
@pytest.mark.parametrize("unread", [False, True])
def test_behind_a_launch_that_broke_off_rows_are_written_again(point: str, unread: bool) -> None:
    """Whether it ran or not; tokens of launches before it stay where they are."""
    rows, runner = make("")
    runner.capture_for(1)
    backend: Any = runner.capture_backend
    tokens_of(rows, runner, 1)
    if unread:
        runner.launch(1)
        taken = rows.ring.take()
    backend.point = point
    with pytest.raises(KeyboardInterrupt):
        runner.launch(1)
    semaphore_of(SESSION)[3] = 1
    rows.write(REQUEST)
    assert tokens_of(rows, runner, 3) == WANT[:6]
    assert not semaphore_of(SESSION).any()
    assert rows.ring.launched == int(rows.ring.launches[0])
    assert int(rows.ring.launches[1]) == 0
    if unread:
        assert [step[0] for step in rows.ring.read(taken, 1)] == WANT[2:4]


def test_a_capture_behind_a_launch_that_broke_off() -> None:
    """The device has begun a launch that the host did not count."""
    rows, _ = make("")
    backend = Interrupted("")
    runner = runner_of(successor, rows, backend, (1, 2))
    runner.capture_for(1)
    backend.point = "behind the replay"
    with pytest.raises(KeyboardInterrupt):
        runner.launch(1)
    runner.capture_for(2)
    rows.write(REQUEST)
    assert tokens_of(rows, runner, 4) == WANT


def test_a_failed_step_does_not_poison_the_next() -> None:
    rows, runner = make("")
    fail = [True]

    def step(input_ids: Tensor, metadata: Any) -> Tensor:
        if fail and rows.ring.launches[0] >= 0:
            semaphore_of(SESSION)[5] = 3
            fail.clear()
            raise RuntimeError("a launch that fails")
        return successor(input_ids, metadata)

    runner = runner_of(step, rows, EagerCapture())
    with pytest.raises(RuntimeError, match="a launch that fails"):
        runner.launch_eager(1)
    assert tokens_of(rows, runner, 4) == WANT


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("at", range(4))
def test_a_launch_that_breaks_off_between_its_steps(at: int, eager: bool) -> None:
    """Without a graph the steps of a launch run one by one: the next launch begins with the first again."""
    rows, _ = make("", steps=4)
    calls: list[None] = []

    def step(input_ids: Tensor, metadata: Any) -> Tensor:
        if rows.ring.launches[0] >= 0:
            calls.append(None)
            if len(calls) == 1 + at:
                raise KeyboardInterrupt
        return successor(input_ids, metadata)

    runner = WholeStepRunner(step, rows, buckets=[2], compile=False, capture=EagerCapture())
    with pytest.raises(KeyboardInterrupt):
        runner.launch_eager(1) if eager else runner.launch(1)
    rows.write(REQUEST)
    assert tokens_of(rows, runner, 2) == WANT


def test_a_semaphore_that_is_left_set_is_reported() -> None:
    def step(input_ids: Tensor, metadata: Any) -> Tensor:
        semaphore_of(SESSION)[13].fill_(left[0])
        return successor(input_ids, metadata)

    left = [torch.tensor(0, dtype=torch.int32)]
    rows = DecodeRows(2, 8, BLOCK, VOCAB, "cpu", BACKEND_OPS["reference"])
    runner = runner_of(step, rows, EagerCapture())
    runner.launch(1)
    left[0] += 4
    with pytest.raises(
        SemaphoreError, match=r"expected zeros after a replay of bucket 2, got \[4\] at \[13\].*reset\(\)"
    ):
        runner.launch(1)
    left[0] -= 4
    runner.reset()
    assert not semaphore_of(SESSION).any()
    runner.launch(1)

    def prefill(input_ids: Tensor, metadata: Any, logits_indices: Tensor) -> Tensor:
        semaphore_of(SESSION)[1].fill_(left[0])
        return input_ids.float()

    packed = packed_runner(prefill)
    packed.run([5], [1], [1], [[1]], [0])
    left[0] += 2
    with pytest.raises(SemaphoreError, match="expected zeros after a replay of bucket 8"):
        packed.run([5], [1], [1], [[1]], [0])
    packed.reset()
    assert not semaphore_of(SESSION).any()


def test_a_prefill_begins_with_a_clear_semaphore() -> None:
    """Behind a capture, and behind a replay that failed."""
    fail: list[bool] = []

    def prefill(input_ids: Tensor, metadata: Any, logits_indices: Tensor) -> Tensor:
        semaphore = semaphore_of(SESSION)
        assert not semaphore.any()
        semaphore[1] = 1
        if fail.pop():
            raise KeyboardInterrupt
        semaphore[1] = 0
        return input_ids.float()

    runner = packed_runner(prefill, warmup_iters=1)
    fail[:] = [True]
    with pytest.raises(KeyboardInterrupt):
        runner.capture()
    fail[:] = [True, False, False]  # a replay, the capture, the warm-up
    with pytest.raises(KeyboardInterrupt):
        runner.run([5], [1], [1], [[1]], [0])
    fail[:] = [False]
    runner.run([5], [1], [1], [[1]], [0])


class FakeStream:
    def __init__(self, *_: Any) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """CUDA without a GPU, as far as a `CudaCapture` uses it; gives the caller's stream."""
    current = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    return current


def raises(error: BaseException) -> Any:
    def step() -> Tensor:
        raise error

    return step


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("a step that fails")], ids=["interrupt", "error"]
)
def test_a_warmup_is_waited_for_however_it_ends(fake_cuda: FakeStream, error: BaseException) -> None:
    backend = CudaCapture("cuda:0")
    with pytest.raises(type(error)):
        backend.warmup(raises(error), 2)
    assert fake_cuda.waited == [backend._stream]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("a step that fails")], ids=["interrupt", "error"]
)
@pytest.mark.parametrize("ends_badly", [False, True])
def test_a_capture_is_put_right_however_it_ends(
    fake_cuda: FakeStream, monkeypatch: pytest.MonkeyPatch, error: BaseException, ends_badly: bool
) -> None:
    """An interrupt stays one, though ending the capture fails as well."""

    @contextlib.contextmanager
    def graph(*_: Any, **__: Any) -> Any:
        try:
            yield
        finally:
            if ends_badly:
                raise CaptureError("operation failed due to a previous error during capture")

    put_right: list[Any] = []
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(CudaCapture, "_after_failure", lambda self, pool: put_right.append(pool))
    want = CaptureError if ends_badly and isinstance(error, Exception) else type(error)
    with pytest.raises(want):
        CudaCapture("cuda:0").capture(raises(error), "pool")
    assert put_right == ["pool"]
