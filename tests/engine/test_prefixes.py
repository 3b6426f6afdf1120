"""Requests of an engine that begin alike: they share blocks, decode steps read these once where that pays,
and their tokens are those of each alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchpaged import CaptureError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.prefixes import CascadeCosts

FREE = CascadeCosts(0.0, 0.0, 1.0, 1e9, "whatever is shared pays")
SYSTEM = [3 + i * 7 % 90 for i in range(21)]
PROMPTS = [[*SYSTEM, 5, 6, 7], [*SYSTEM, 9], SYSTEM[:9], [*SYSTEM, 5, 6, 7, 8, 9], [40, *SYSTEM], SYSTEM]
TEN = SamplingParams(max_new_tokens=10)


@pytest.fixture(scope="module")
def alone(model: Any) -> list[list[int]]:
    generator = Generator(model, block_size=4, max_batch_size=1, share_prefixes=False)
    return [output.token_ids for output in generator.generate(PROMPTS, TEN)]


def free_again(generator: Generator) -> bool:
    cache = generator.prefix_cache
    assert cache is not None
    assert len(cache) == len(generator.pool.idle), "what is known has no holders"
    return generator.pool.num_free == generator.pool.num_usable


# ----------------------------------------------------------------------------------------- through the engine
@pytest.mark.parametrize(
    "options",
    [{}, {"graphs": False}, {"steps_per_launch": 3}, {"max_batch_size": 2}, {"prefill_chunk_size": 5}],
    ids=str,
)
def test_tokens_are_those_of_each_alone(
    model: Any, alone: list[list[int]], passes: list[int], options: dict[str, Any]
) -> None:
    options = {"max_batch_size": 6, "block_size": 4, "cascade": FREE, **options}
    generator = Generator(model, **options)
    assert [output.token_ids for output in generator.generate(PROMPTS, TEN)] == alone
    # Of the prompts that begin with all 21 tokens, one computes their 5 full blocks and the others don't;
    # the short one takes 2.
    assert generator.stats.shared_tokens >= 20
    assert generator.stats.preemptions == 0
    assert generator.stats.prefill_tokens < sum(map(len, PROMPTS))
    assert passes
    assert free_again(generator)
    if options.get("graphs", True):
        graphs = generator.loop.runner.prefix_graphs  # type: ignore[union-attr]
        assert graphs is not None
        assert sum(report.hits for report in graphs.report()) > 0


def test_one_graph_for_all_groups_and_lengths(model: Any, alone: list[list[int]], passes: list[int]) -> None:
    """Requests join and end in the middle; the second graph of a bucket is captured once."""
    generator = Generator(model, block_size=4, max_batch_size=4, buckets=[4], cascade=FREE)
    for order in ([0, 1, 3], [5, 4, 1, 0, 2]):
        outputs = generator.generate([PROMPTS[i] for i in order], TEN)
        assert [output.token_ids for output in outputs] == [alone[i] for i in order]
    (report,) = generator.loop.runner.prefix_graphs.report()  # type: ignore[union-attr]
    (plain,) = generator.loop.runner.report()  # type: ignore[union-attr]
    assert report.hits > 5
    assert plain.hits > 0
    assert set(passes) == {4}
    assert free_again(generator)


def test_what_does_not_pay_is_read_row_by_row(model: Any, alone: list[list[int]], passes: list[int]) -> None:
    """By the device's own costs such short prefixes never pay; blocks are shared all the same."""
    generator = Generator(model, block_size=4, max_batch_size=6)
    assert [output.token_ids for output in generator.generate(PROMPTS, TEN)] == alone
    assert not passes
    assert generator.stats.shared_tokens
    assert "where it pays" in generator.cascade_reason
    assert not any(generator.loop.runner.prefix_graphs.is_captured(n) for n in range(1, 7))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"cascade": False}, "switched off"), ({"share_prefixes": False, "cascade": FREE}, "no requests share")],
    ids=str,
)
def test_it_can_be_switched_off(
    model: Any, alone: list[list[int]], passes: list[int], options: dict[str, Any], reason: str
) -> None:
    generator = Generator(model, block_size=4, max_batch_size=6, **options)
    assert [output.token_ids for output in generator.generate(PROMPTS, TEN)] == alone
    assert not passes
    assert reason in generator.cascade_reason and generator.loop.runner.prefix_graphs is None  # type: ignore[union-attr]
    assert bool(generator.stats.shared_tokens) == ("cascade" in options and len(options) == 1)


def test_samples_of_one_prompt(model: Any, passes: list[int]) -> None:
    """As with num_return_sequences: the prompt is computed once, and each sample has its seed's tokens."""
    each = [SamplingParams(max_new_tokens=8, temperature=1.0, seed=seed) for seed in range(4)]
    plain = Generator(model, block_size=4, max_batch_size=4, share_prefixes=False, cascade=False)
    want = [output.token_ids for output in plain.generate([SYSTEM] * 4, each)]
    generator = Generator(model, block_size=4, max_batch_size=4, cascade=FREE)
    assert [output.token_ids for output in generator.generate([SYSTEM] * 4, each)] == want
    assert generator.stats.shared_tokens == 3 * 20
    assert generator.stats.prefill_tokens == 21
    assert passes
    assert free_again(generator)


@pytest.mark.slow
def test_compiled_steps(model: Any, alone: list[list[int]], no_codegen: None) -> None:
    """One compile for each graph that ran: both, or the one that reads prefixes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    generator = Generator(model, block_size=4, max_batch_size=3, buckets=[3], compile=True, cascade=FREE)
    outputs = generator.generate([PROMPTS[i] for i in (0, 1, 3)], TEN)
    assert [output.token_ids for output in outputs] == [alone[i] for i in (0, 1, 3)]
    assert generator.loop.runner.prefix_graphs.report()[0].hits > 0  # type: ignore[union-attr]
    reports = [*generator.loop.runner.report(), *generator.loop.runner.prefix_graphs.report()]  # type: ignore[union-attr]
    captured = sum(report.captured for report in reports)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == captured > 0


def test_a_fused_model(make_llama: Callable[..., Any], passes: list[int]) -> None:
    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    plain = Generator(model, block_size=4, max_batch_size=3, share_prefixes=False, fuse=True)
    want = [output.token_ids for output in plain.generate(PROMPTS[:2], TEN)]
    generator = Generator(model, block_size=4, max_batch_size=3, fuse=True, cascade=FREE)
    assert [output.token_ids for output in generator.generate(PROMPTS[:2], TEN)] == want
    assert passes


def test_who_is_put_back_computes_again(model: Any, alone: list[list[int]]) -> None:
    """A pool too small for all: shared blocks outlive those that leave, and only those."""
    generator = Generator(model, block_size=4, max_batch_size=6, num_blocks=17, cascade=FREE)
    assert [output.token_ids for output in generator.generate(PROMPTS, TEN)] == alone
    assert generator.stats.preemptions
    assert generator.stats.shared_tokens
    assert free_again(generator)


def test_more_requests_fit_a_pool_that_they_share(model: Any, alone: list[list[int]]) -> None:
    """Each alone would need 9 blocks of the 20 that there are."""
    prompts, want = [PROMPTS[i] for i in (0, 1, 3, 5)], [alone[i] for i in (0, 1, 3, 5)]
    generator = Generator(model, block_size=4, max_batch_size=4, num_blocks=21)
    ids = [generator.submit(prompt, TEN) for prompt in prompts]
    most = 0
    tokens: dict[int, list[int]] = {}
    while generator.has_unfinished:
        for event in generator.step():
            if event.token_id is not None:
                tokens.setdefault(event.request_id, []).append(event.token_id)
        most = max(most, len(generator.scheduler.running))
    assert [tokens[i] for i in ids] == want
    assert most == 4
    assert generator.stats.preemptions == 0
    assert free_again(generator)


def test_a_graph_that_can_not_be_captured(
    model: Any, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then steps read row by row, and say so."""
    generator = Generator(model, block_size=4, max_batch_size=6, cascade=FREE)

    def full(*args: Any) -> None:
        raise CaptureError("no memory is left")

    monkeypatch.setattr(generator.loop.runner.prefix_graphs, "_capture_one", full)  # type: ignore[union-attr]
    assert [output.token_ids for output in generator.generate(PROMPTS, TEN)] == alone
    assert [record.getMessage() for record in caplog.records].count(
        "shared prefixes are read request by request from now on: no memory is left"
    ) == 1


def test_a_broken_step_forgets_what_was_shared(model: Any, alone: list[list[int]]) -> None:
    generator = Generator(model, block_size=4, max_batch_size=6, cascade=FREE)
    find, broken = generator.loop.runner.find_groups, iter([True])  # type: ignore[union-attr]

    def once(*args: Any) -> bool:
        if next(broken, False):
            raise KeyboardInterrupt
        return find(*args)

    generator.loop.runner.find_groups = once  # type: ignore[union-attr, method-assign]
    ids = [generator.submit(prompt, TEN) for prompt in PROMPTS]
    with pytest.raises(KeyboardInterrupt):
        while True:
            generator.step()
    tokens: dict[int, list[int]] = {}
    for event in generator.stream():
        if event.token_id is not None:
            tokens.setdefault(event.request_id, []).append(event.token_id)
    assert {len(tokens[i]) for i in ids} <= {9, 10}
    assert all(want[-len(tokens[i]) :] == tokens[i] for i, want in zip(ids, alone, strict=True))
    assert free_again(generator)


def test_nothing_is_captured_while_requests_run(
    model: Any, alone: list[list[int]], passes: list[int]
) -> None:
    """With ``capture_ahead`` the graphs of steps in groups are there, of every bucket that may need one."""
    seen: list[str] = []
    options: dict[str, Any] = {"block_size": 4, "max_batch_size": 6, "buckets": [1, 2, 4, 6], "cascade": FREE}
    generator = Generator(
        model, **options, capture_ahead=True, progress=lambda done, total, text: seen.append(text)
    )
    names = ["batch 6", "batch 4", "batch 2", "batch 1"]
    assert seen == [*names, *(name.replace("batch", "batch in groups") for name in names[:3])]
    runner = generator.loop.runner  # type: ignore[union-attr]
    runner._capture_one = runner.prefix_graphs._capture_one = None  # type: ignore[assignment, method-assign, union-attr]
    for _ in range(2):
        assert [output.token_ids for output in generator.generate(PROMPTS, TEN)] == alone
    assert sum(report.hits for report in runner.prefix_graphs.report()) > 5 and free_again(generator)  # type: ignore[union-attr]


def test_graphs_that_can_never_pay_are_not_captured_ahead(model: Any) -> None:
    generator = Generator(model, block_size=4, max_batch_size=4, max_seq_len=16, capture_ahead=True)
    runner = generator.loop.runner  # type: ignore[union-attr]
    assert all(report.captured for report in runner.report())
    assert not any(report.captured for report in runner.prefix_graphs.report())  # type: ignore[union-attr]
