"""`Generator.metrics`: what is counted is what happened, and Prometheus reads the text."""

import re
from typing import Any

import pytest

from torchpaged import ArgumentError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.outputs import BOUNDS, LatencyHistogram

pytestmark = pytest.mark.timeout(300)
SAMPLE = re.compile(r'[a-z_]+(\{(le|reason)="([^"\\\n]|\\[\\"n])+"\})? [\d.e+-]+')


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The steps' clock, in seconds; tests move it."""
    now = [100.0]
    monkeypatch.setattr("torchpaged.engine.stepper.time.perf_counter", lambda: now[0])
    return now


def engine(llama: Any, **options: Any) -> Generator:
    return Generator(llama, **{"max_batch_size": 2, "max_seq_len": 64, "block_size": 4, **options})


@pytest.mark.parametrize("graphs", [True, False])
def test_load_and_memory(llama: Any, graphs: bool) -> None:
    with engine(llama, graphs=graphs, compile=False) as generator:
        idle = generator.metrics()
        assert (idle.running, idle.waiting, idle.blocks_used, idle.utilisation) == (0, 0, 0, 1.0)
        assert idle.first_token.percentile(0.5) is None
        params = SamplingParams(max_new_tokens=9, ignore_eos=True)
        for _request in range(3):
            generator.submit(list(range(10, 23)), params)
        generator.step()
        busy = generator.metrics()
        assert (busy.running, busy.waiting, busy.finished) == (2, 1, {})
        assert busy.blocks_used == generator.pool.num_used > 0
        assert 0 < busy.useful_tokens <= 4 * busy.blocks_used
        assert busy.utilisation == busy.useful_tokens / (4 * busy.blocks_used)
        generator.generate([[5]], params)
        done = generator.metrics()
        assert (done.running, done.waiting, done.finished) == (0, 0, {"length": 4})
        assert (done.prompt_tokens, done.new_tokens) == (3 * 13 + 1, 4 * 9)
        assert done.prefix_hit_rate == generator.stats.shared_tokens / done.prompt_tokens > 0
        assert done.first_token.count == 4
        assert done.between_tokens.count == 4 * 8
        assert done.queue.count == done.end_to_end.count == 4
        assert sum(done.missed_tokens.values()) == done.prompt_tokens - generator.stats.shared_tokens
        assert busy.first_token.count < 4, "a snapshot counts no further"


def test_a_counter_of_one_name_in_both_records_is_refused(llama: Any) -> None:
    with engine(llama, graphs=False) as generator:
        generator.stats.prefix_cache.new_tokens = 1  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="multiple values.*new_tokens"):
            generator.metrics()


def test_shared_blocks_count_once(llama: Any) -> None:
    """Two requests with a common beginning hold its blocks once: places in use are never fewer than
    tokens."""
    with engine(llama, graphs=False) as generator:
        for last in (50, 51):
            generator.submit([*range(10, 30), last], SamplingParams(max_new_tokens=5, ignore_eos=True))
        for _step in range(3):
            generator.step()
        metrics = generator.metrics()
        assert metrics.running == 2
        tokens = [sequence.num_computed for sequence in generator.scheduler.running]
        assert metrics.useful_tokens == sum(tokens) - 20
        assert metrics.utilisation <= 1


def test_a_request_that_is_put_back_looks_up_its_prompt_once(llama: Any) -> None:
    """What it finds of its own when it runs again is no hit."""
    with engine(llama, graphs=False, num_blocks=20) as generator:
        params = SamplingParams(max_new_tokens=40, ignore_eos=True)
        generator.generate([list(range(10 * i, 10 * i + 9)) for i in range(1, 4)], params)
        metrics, stats = generator.metrics(), generator.stats.prefix_cache
    assert metrics.preemptions
    assert metrics.swapped == 0
    assert metrics.evicted_blocks == stats.evicted_blocks > 0
    assert (stats.queried_tokens, stats.hit_tokens) == (metrics.prompt_tokens, 0)
    assert metrics.prefix_hit_rate == 0


@pytest.mark.parametrize("options", [{"graphs": False}, {"steps_per_launch": 2, "compile": False}])
def test_latencies(llama: Any, clock: list[float], options: dict[str, Any]) -> None:
    """A step takes two seconds; none passes while there is no request; launches share their seconds."""
    with engine(llama, **options) as generator:
        for _turn in range(2):
            generator.submit([5, 6, 7], SamplingParams(max_new_tokens=5, ignore_eos=True))
            while generator.has_unfinished:
                clock[0] += 2.0
                generator.step()
            clock[0] += 1000.0
        metrics = generator.metrics()
        assert metrics.first_token.count == 2
        assert 2 <= metrics.first_token.total / 2 <= 4
        assert metrics.between_tokens.count == 8
        assert metrics.between_tokens.total / 8 == (1.0 if "steps_per_launch" in options else 2.0)


@pytest.mark.parametrize("graphs", [True, False])
def test_times_of_each_request(llama: Any, clock: list[float], graphs: bool) -> None:
    """One runs behind the other, with two seconds between their steps."""
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    with engine(llama, max_batch_size=1, graphs=graphs, compile=False) as generator:
        sequences = [generator._requests[generator.submit([5, 6, 7], params)] for _request in range(3)]
        events = []
        while len(generator._requests) > 1:
            clock[0] += 2.0
            events += generator.step()
        generator.cancel(sequences[2].request_id)
        events += generator.step()
        ends = {event.request_id: event.times for event in events if event.finish_reason}
        assert [event.times for event in events if event.finish_reason is None] == [None] * 8
        first, second, cancelled = (sequence.result().times for sequence in sequences)
        assert [ends[sequence.request_id] for sequence in sequences] == [first, second, cancelled]
        metrics = generator.metrics()
        [unmeasured] = generator.generate([[5, 6, 7]], params)
    for times in (first, second):
        assert times.first_token - times.queue <= 2.0
        assert times.between_tokens == pytest.approx((times.end_to_end - times.first_token) / 4)
        assert times.end_to_end - times.queue == pytest.approx(first.end_to_end - first.queue, abs=2.0)
    assert first.queue == 2.0
    assert second.queue == pytest.approx(first.end_to_end, abs=2.0)
    assert (cancelled.queue, cancelled.first_token, cancelled.between_tokens) == (None, None, None)
    assert cancelled.end_to_end >= second.end_to_end
    assert (metrics.queue.count, metrics.queue.total) == (2, first.queue + second.queue)
    assert (metrics.end_to_end.count, metrics.end_to_end.total) == (2, first.end_to_end + second.end_to_end)
    assert unmeasured.times.end_to_end == 0.0, "the clock stood still"


def test_percentiles() -> None:
    histogram = LatencyHistogram()
    for milliseconds in range(1, 1001):
        histogram.add(milliseconds / 1e3)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        found = histogram.percentile(share)
        assert found is not None
        assert found == pytest.approx(share, rel=0.26)
    assert histogram.total == pytest.approx(500.5)
    histogram.add(5000.0, count=10_000)
    assert histogram.percentile(0.99) == BOUNDS[-1]
    for wrong in (-0.1, 1.1, 99):
        with pytest.raises(ArgumentError, match="share"):
            histogram.percentile(wrong)


def test_prometheus_text(llama: Any) -> None:
    with engine(llama, graphs=False) as generator:
        generator.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, ignore_eos=True))
        generator.stats.late_compiles = 2
        generator.stats.prefix_cache.missed_tokens['a "reason"\n'] = 5
        text = generator.metrics().prometheus()
    assert text.endswith("\n")
    lines = text.splitlines()
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert set(kinds.values()) == {"gauge", "counter", "histogram"}
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    for line in lines:
        assert line.startswith("# ") or SAMPLE.fullmatch(line), line
    assert 'torchpaged_requests_finished_total{reason="length"} 1' in lines
    assert "torchpaged_new_tokens_total 4" in lines
    assert "torchpaged_late_compiles_total 2" in lines
    assert 'torchpaged_missed_tokens_total{reason="a \\"reason\\"\\n"} 5' in lines
    buckets = [
        int(line.split()[1]) for line in lines if line.startswith("torchpaged_between_tokens_seconds_b")
    ]
    assert buckets == sorted(buckets)
    assert len(buckets) == len(BOUNDS) + 1
    assert buckets[-1] == 3
    assert "torchpaged_between_tokens_seconds_count 3" in lines
    assert "torchpaged_queue_seconds_count 1" in lines
    assert "torchpaged_end_to_end_seconds_count 1" in lines
