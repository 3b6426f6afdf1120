"""Prefills in graphs through the engine: the tokens of the engine without graphs, whatever shares a step;
options, reasons and reports."""

import weakref
from typing import Any

import pytest
import torch
from engine_requests import drawn, sized

from torchpaged import ArgumentError, CaptureError
from torchpaged.backends import GraphSupport
from torchpaged.engine import Generator, SamplingParams, one_request, step_graphs
from torchpaged.engine.decisions import decide_prefill_buckets
from torchpaged.engine.one_request import OneRequestGraphs
from torchpaged.engine.step_graphs import PrefillGraphs
from torchpaged.graphs import TapeCapture
from torchpaged.graphs.capture import Captured
from torchpaged.graphs.report import BucketReport


def generator(model: Any, **options: Any) -> Generator:
    return sized(model, **{"prefill_buckets": [8, 12, 16], **options})


@pytest.fixture(scope="module")
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of one step, of several, and several to a step."""
    return drawn(12, (1, 2, 3, 5, 13, 40), seed=5)


@pytest.fixture(scope="module")
def want(model: Any, requests: Any) -> list[list[int]]:
    return [o.token_ids for o in generator(model, graphs=False, prefill_buckets=None).generate(*requests)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_buckets": [3, 8, 16], "mixed_steps": False},
        {"prefill_buckets": [16], "steps_per_launch": 4},
        {"prefill_buckets": [5], "max_batch_size": 2},
        {"num_blocks": 20, "lookahead": 8},
        {"capture_ahead": True, "buckets": [4]},
        {"capture": TapeCapture(), "backend": "reference", "buckets": [2, 4]},
    ],
    ids=["late", "apart", "one-bucket", "long-steps-from-python", "preempted", "ahead", "tape"],
)
def test_tokens_equal_the_engine_without_graphs(
    model: Any, requests: Any, want: Any, options: dict[str, Any]
) -> None:
    g = generator(model, **options)
    assert [o.token_ids for o in g.generate(*requests)] == want
    alone, other = (runner.report() for runner in g.prefill_runners)
    reports, steps = [*alone, *other], g.stats
    for own in (alone, other):
        assert [r.bucket for r in own] == options.get("prefill_buckets", [8, 12, 16])
        assert all(r.captured for r in own if r.hits)
    assert all(a.hits or b.hits for a, b in zip(alone, other, strict=True))
    assert sum(r.padded_rows for r in reports) > 0
    replayed = sum(r.hits * r.bucket - r.padded_rows for r in reports)
    assert (replayed < steps.prefill_tokens) == (options.get("prefill_buckets") == [5])
    assert (steps.preemptions > 0) == ("num_blocks" in options)
    assert g.pool.num_free == g.pool.num_usable


def test_a_graph_takes_all_requests_that_run_at_once(model: Any) -> None:
    """Those of a bucket of fewer tokens are fewer, too: each has one at least."""
    prompts, params = [[8 + i] * (1 + i % 2) for i in range(10)], SamplingParams(max_new_tokens=5)
    want = [
        o.token_ids for o in generator(model, graphs=False, prefill_buckets=None).generate(prompts, params)
    ]
    g = generator(model, max_batch_size=10, buckets=[10], capture=TapeCapture(), backend="reference")
    assert [o.token_ids for o in g.generate(prompts, params)] == want
    *_, runner = g.prefill_runners
    assert runner is not None
    assert runner.histogram() == {15: 1}  # five of one token decode, beside five prompts of two
    assert [runner.view(bucket)[1].num_reqs for bucket in runner.buckets] == [8, 10, 10]


def test_a_request_alone_has_graphs_of_its_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose attention has no launch for short queries; up to a number of tokens, and not beside others."""
    monkeypatch.setattr(step_graphs, "MOST_ALONE", 8)
    prompts, params = [[8] * 5, [9] * 11, [10] * 6, [11] * 3], SamplingParams(max_new_tokens=3)
    want = [
        o.token_ids for o in generator(model, graphs=False, prefill_buckets=None).generate(prompts, params)
    ]
    g = generator(model, prefill_buckets=[8, 16], capture=TapeCapture(), backend="reference")
    found = [o.token_ids for prompt in prompts[:2] for o in g.generate([prompt], params)]
    found += [o.token_ids for o in g.generate(prompts[2:], params)]
    assert found == want
    alone, other = g.prefill_runners
    assert [runner.histogram() for runner in (alone, other)] == [{5: 1}, {9: 1, 11: 1}]
    assert isinstance(alone, OneRequestGraphs)
    assert alone.buckets == [8] and alone.view(8)[1].num_reqs == 1
    assert len(generator(model, max_batch_size=1).prefill_runners) == 1


@pytest.mark.parametrize("processes", [False, True])
def test_a_graph_draws_the_first_token_of_a_request_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch, processes: bool
) -> None:
    """Which begins its row, too. Sampling is launched only beside others, for a penalty, whose tokens are no
    input of the graph, and where a logits processor is called."""
    options: dict[str, Any] = {"capture": TapeCapture(), "backend": "reference", "capture_ahead": True}
    options |= {"logits_processor": lambda logits, rows: logits} if processes else {}
    prompts = [[8] * 5, [9, 3], [10] * 7, [11] * 3, [12] * 30]
    params = [
        SamplingParams(3, temperature=0.9, seed=5, repetition_penalty=1.4),
        SamplingParams(1),
        *[SamplingParams(9, temperature=0.7, seed=n, ignore_eos=True) for n in (7, 8)],
        SamplingParams(4, temperature=1.2, seed=3, top_p=0.8),
    ]
    plain = generator(model, graphs=False, prefill_buckets=None)
    want = [plain.generate([prompt], one)[0].token_ids for prompt, one in zip(prompts, params, strict=True)]
    g = generator(model, prefill_buckets=[8, 16], **options)
    assert g.loop is not None
    finish, launched = g.loop.rows.finish_rows, list[int]()
    monkeypatch.setattr(
        g.loop.rows, "finish_rows", lambda logits, rows: (launched.append(len(rows)), finish(logits, rows))[1]
    )
    found = [g.generate([prompt], one)[0].token_ids for prompt, one in zip(prompts, params, strict=True)]
    assert found == want
    assert launched == ([1] * 5 if processes else [1])
    found = [output.token_ids for output in g.generate(prompts[2:4], params[2:4])]
    assert found == want[2:4] and launched[-1] == 2


def test_both_graphs_of_a_request_alone_are_in_the_report(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second one takes, and nothing of a bucket whose second one failed."""
    options: dict[str, Any] = {"capture": TapeCapture(), "backend": "reference", "prefill_buckets": [8, 16]}
    capture, fails = one_request.capture_bucket, False

    def costly(
        launch: Any, backend: Any, pool: Any, report: BucketReport, *rest: Any, **more: Any
    ) -> Captured:
        if fails:
            raise CaptureError("no memory is left")
        graph = capture(launch, backend, pool, report, *rest, **more)
        report.capture_ms, report.record_ms, report.num_bytes = 2e6, 1e6, 1 << 20
        return graph

    monkeypatch.setattr(one_request, "capture_bucket", costly)
    alone, *_ = generator(model, capture_ahead=True, **options).prefill_runners
    for report in alone.report():
        assert report.captured and report.num_bytes == 1 << 20
        assert report.capture_ms > 2e6 and report.record_ms > 1e6
    fails = True
    g = generator(model, capture_ahead=False, **options)
    alone, *_ = g.prefill_runners
    with pytest.raises(CaptureError, match="no memory"):
        alone.capture([8])
    assert not alone.is_captured(8) and not any(report.captured for report in alone.report())


def test_requests_of_the_step_before_are_freed_behind_the_replay(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of a long prompt take a while, in which the device would have nothing to do."""
    g, lived = generator(model), list[bool]()
    g.generate([[8] * 5], SamplingParams(max_new_tokens=1))
    plan = g._stepper._steps.plan
    assert plan is not None
    before = weakref.ref(plan.chunks[0][0])
    del plan
    for runner in g.prefill_runners:
        monkeypatch.setattr(
            runner, "_replay", lambda graph: (lived.append(before() is not None), graph.replay())
        )
    g.generate([[9] * 5], SamplingParams(max_new_tokens=1))
    assert lived == [True] and before() is None


@pytest.mark.parametrize("ahead", [True, False])
def test_one_pool_for_both_runners_if_captured_ahead(model: Any, ahead: bool) -> None:
    """Else the prefills come first, and their failure would leave the decodes a pool that is gone."""

    class Pools(TapeCapture):
        def __init__(self) -> None:
            self.used: list[Any] = []

        def new_pool(self) -> Any:
            return object()

        def capture(self, step: Any, pool: Any) -> Any:
            self.used.append(pool)
            return super().capture(step, pool)

    capture = Pools()
    generator(model, capture=capture, backend="reference", buckets=[4], capture_ahead=ahead).generate(
        [[8, 9]]
    )
    assert len(capture.used) == (10 if ahead else 3)
    assert len({id(pool) for pool in capture.used}) == (1 if ahead else 2)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("most", "left"), [(2, []), (40, [16, 32])])
def test_a_model_whose_prefill_can_not_be_captured(
    model: Any, ahead: bool, most: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name it is an error that names the op; "auto" goes on without, or with the graphs of at
    most a chunk, and says why. What was captured until then is freed ahead of these."""
    from torchpaged.hf import PagedModel

    given_up, kept, give_up = list[weakref.ref[Any]](), list[Any](), PrefillGraphs._give_up

    def giving_up(graphs: PrefillGraphs, error: CaptureError) -> None:
        before = [*map(weakref.ref, graphs.runners)]
        give_up(graphs, error)  # or raises
        given_up.extend(before)

    monkeypatch.setattr(PrefillGraphs, "_give_up", giving_up)

    class Reading(PagedModel):
        def __call__(self, input_ids: Any, metadata: Any, logits_indices: Any = None) -> Any:
            kept.extend(runner for each in given_up if (runner := each()) is not None)
            if len(input_ids) > most:
                torch.ones(1).item()
            return super().__call__(input_ids, metadata, logits_indices)

    paged = Reading(model, num_blocks=60, block_size=4, backend="reference")
    options: dict[str, Any] = {
        "max_batch_size": 2,
        "max_seq_len": 96,
        "compile": False,
        "buckets": [2],
        "capture": TapeCapture(),
        "capture_ahead": ahead,
        "prefill_chunk_size": 32,
    }
    prompt, params = [*range(8, 78)], SamplingParams(max_new_tokens=4)
    plain = Generator(paged, max_batch_size=2, max_seq_len=96, compile=False, graphs=False)
    want = plain.generate([prompt], params)[0].token_ids
    with pytest.raises(CaptureError, match=r"bucket 64: the prefill step could not be captured at aten"):
        Generator(paged, **options, prefill_buckets=[64]).generate([prompt])

    def on_a_gpu(*given: Any) -> tuple[list[int], str]:
        *head, support = given
        assert support is paged.choice.backend.capabilities.graph_support
        return decide_prefill_buckets(*head[:2], True, *head[3:])

    monkeypatch.setattr("torchpaged.engine.decisions.decide_prefill_buckets", on_a_gpu)
    g = Generator(paged, **options)
    assert [runner.buckets for runner in g.prefill_runners] == (
        [[16, 32, 64, 128]] * 2 if not ahead else [left] * 2 if left else []
    )
    for _ in range(2):
        assert g.generate([prompt, prompt[:3]], params)[0].token_ids == want
    assert [runner.buckets for runner in g.prefill_runners] == ([left] * 2 if left else [])
    assert "automatic: bucket" in g.prefill_graph_reason
    assert "at aten" in g.prefill_graph_reason
    assert given_up and not kept


def test_what_is_captured_and_why() -> None:
    assert decide_prefill_buckets("auto", (64, 64), True, True, "") == (
        [16, 32, 64],
        "automatic: on a GPU with graphs",
    )
    assert decide_prefill_buckets("auto", (24, 96), True, True, "")[0] == [16, 24, 32, 64, 96]
    assert decide_prefill_buckets("auto", (64, 64), False, True, "")[0] == []
    assert (
        decide_prefill_buckets("auto", (64, 64), True, False, "switched off")[1]
        == "automatic: graphs: switched off"
    )
    assert decide_prefill_buckets(None, (64, 64), True, True, "") == (
        [],
        "switched off by prefill_buckets=None",
    )
    assert decide_prefill_buckets([], (64, 64), True, False, "")[0] == []
    assert decide_prefill_buckets([64, 8, 8], (64, 64), False, True, "")[0] == [8, 64]


@pytest.mark.parametrize(
    "support", [GraphSupport.SINGLE_TOKEN_DECODE, GraphSupport.UNIFORM_BATCH], ids=lambda s: s.name
)
def test_a_backend_that_can_only_replay_decodes(support: GraphSupport) -> None:
    """Its prefills might be captured without an error, and replays give wrong numbers."""
    buckets, reason = decide_prefill_buckets("auto", (64, 64), True, True, "", support)
    assert buckets == []
    assert reason == f"automatic: the backend declares graph support {support.name}, prefills need ALWAYS"
    with pytest.raises(
        ArgumentError, match=f"prefill_buckets: expected None or 'auto' with this backend.*{support.name}"
    ):
        decide_prefill_buckets([8], (64, 64), True, True, "", support)
