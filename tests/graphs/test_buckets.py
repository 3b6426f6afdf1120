"""Buckets by cost against every choice there is, reports, and what a failed capture says."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from torchpaged import ArgumentError, AttentionMetadata, CaptureError
from torchpaged.graphs import DecodeGraphRunner, TapeCapture, bucket_table, buckets_by_cost
from torchpaged.graphs.capture import EagerCapture


def step_ms(rows: int) -> float:
    return 1 + rows / 64


def total(buckets: tuple[int, ...], seen: dict[int, float]) -> float:
    return 100 * len(buckets) + sum(
        count * step_ms(min(b for b in buckets if b >= n)) for n, count in seen.items()
    )


def test_no_other_choice_costs_less() -> None:
    rng = random.Random(0)
    for _ in range(20):
        seen = {n: rng.random() * 300 for n in range(1, 10) if rng.random() < 0.7}
        got = buckets_by_cost(9, step_ms, seen=seen)
        others = [(*c, 9) for r in range(9) for c in itertools.combinations(range(1, 9), r)]
        assert got == sorted(set(got))
        assert got[-1] == 9
        assert total(tuple(got), seen) == pytest.approx(min(total(c, seen) for c in others))


def test_what_was_seen_decides() -> None:
    assert buckets_by_cost(64, step_ms, seen={3: 1e5, 64: 5}) == [3, 64]
    assert buckets_by_cost(64, step_ms, seen={}) == [64]
    assert buckets_by_cost(1, step_ms) == [1]
    for options, argument in (({"seen": {65: 1}}, "seen"), ({"seen": {3: -1}}, "seen")):
        with pytest.raises(ArgumentError, match=argument):
            buckets_by_cost(64, step_ms, **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="max_batch_size"):
        buckets_by_cost(0, step_ms)


def make_runner(step: object, capture: object) -> DecodeGraphRunner:
    return DecodeGraphRunner(
        step,
        max_batch_size=4,
        max_blocks_per_req=2,
        block_size=4,
        buckets=[1, 4],
        compile=False,
        capture=capture,  # type: ignore[arg-type]
    )


def test_report_table_and_histogram() -> None:
    runner = make_runner(lambda ids, metadata: ids.float(), EagerCapture())
    runner.run([1, 2, 3], [1, 1, 1], [[1], [2], [3]])
    runner.run([1, 2], [1, 1], [[1], [2]])
    small, large = runner.report()
    assert (large.hits, large.padded_rows, large.captured, small.captured) == (2, 3, True, False)
    assert large.capture_ms >= large.record_ms > 0
    heading, first, second = bucket_table([small, large]).splitlines()
    assert first.split() == ["1", "-", "-", "-", "0", "0"]
    assert second.split()[-2:] == ["2", "3"]
    assert len(heading) == len(first) == len(second)
    assert runner.histogram() == {2: 1, 3: 1}


def test_a_failed_capture_names_bucket_and_op_and_eager_works() -> None:
    def step(ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        kept = ids[metadata.seq_lens > 0]  # a size that only the device knows
        return torch.zeros_like(ids).index_add(0, torch.arange(kept.shape[0]), kept)

    runner = make_runner(step, TapeCapture())
    with pytest.raises(
        CaptureError, match=r"bucket 4: .* at aten\.index\.Tensor: .*run_eager\(\) still works"
    ):
        runner.capture()
    assert not any(report.captured for report in runner.report())
    assert runner.run_eager([5, 6], [1, 1], [[1], [2]]).tolist() == [5, 6]


WORKS = r"; run_eager\(\) still works"


def refusing(ids: Tensor, metadata: AttentionMetadata) -> Tensor:
    raise ArgumentError("k_cache", "a pool", "none", "give one")


def failing(ids: Tensor, metadata: AttentionMetadata) -> Tensor:
    raise RuntimeError("plain words\nand more of them")


def untraceable(ids: Tensor, metadata: AttentionMetadata) -> Tensor:
    print(ids.shape)
    return ids.float()


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (refusing, "k_cache: expected a pool, got none; give one"),
        (failing, rf"plain words{WORKS}"),
        (
            lambda ids, metadata: ids.float() @ torch.zeros(3, 3),
            r"at aten\.m.*cannot be multiplied.*" + WORKS,
        ),
        (untraceable, f".*`print`.*{WORKS}"),
    ],
    ids=["refused", "failed", "op", "untraceable"],
)
def test_a_compiled_step_that_fails_says_why(step: Any, reason: str) -> None:
    """Dynamo's own message may say no more than that it observed an exception."""
    runner = DecodeGraphRunner(
        step, max_batch_size=4, max_blocks_per_req=2, block_size=4, buckets=[4], capture=EagerCapture()
    )
    with pytest.raises(CaptureError, match=f"bucket 4: .* captured:? {reason}$"):
        runner.capture()


def test_a_step_that_fails_names_the_failing_op() -> None:
    runner = make_runner(lambda ids, metadata: ids.view(2, 2).float() @ torch.zeros(3, 3), TapeCapture())
    with pytest.raises(CaptureError, match=r"bucket 4: .* at aten\.m"):
        runner.capture()
