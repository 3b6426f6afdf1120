"""The seam: a small GPT, and every door, on a backend that plans each step and serves attention alone."""

import copy
import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from sessions import KEPT, PLANNING, PlanningSession
from small_gpt import (
    BLOCK,
    BLOCKS,
    DIM,
    GPT,
    HEADS,
    KV_HEADS,
    STEPS,
    TABLES,
    TOKENS,
    VOCAB,
    WIDTH,
    batch,
    check_packed_steps,
    close_to_dense,
    decode_runner,
    fed,
)
from torch._dynamo.testing import CompileCounterWithBackend
from wrapper_backend import WRAPPER

import torchpaged
from torchpaged import (
    ArgumentError,
    AttentionMetadata,
    BackendUnavailableError,
    CaptureError,
    Limits,
    PagedAttention,
    PlanError,
)
from torchpaged.backends import (
    Backend,
    GraphSupport,
    HostLengths,
    Planning,
    Session,
    get_backend,
    register_backend,
)
from torchpaged.backends import semaphore as semaphore_module
from torchpaged.backends.choose import names as names_module
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.graphs import DecodeGraphRunner, TapeCapture
from torchpaged.graphs.capture import EagerCapture

LIMITS = Limits(max_num_reqs=4, max_blocks_per_req=WIDTH)


@pytest.fixture
def session() -> PlanningSession:
    opened = PLANNING.open([], LIMITS, "cpu")
    assert isinstance(opened, PlanningSession)
    return opened


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(names_module, "REGISTERED", {})
    register_backend(PLANNING)
    yield PLANNING.name


@torch.no_grad()
def test_a_gpt_runs_eagerly(session: PlanningSession) -> None:
    gpt = GPT(session)
    for query_lens, seq_lens in STEPS:
        metadata = batch(query_lens, seq_lens)
        session.plan(metadata)
        close_to_dense(gpt, gpt(fed(query_lens, seq_lens), metadata), query_lens, seq_lens)
    assert session.plans_made == len(STEPS), "one plan for all layers"


@torch.no_grad()
def test_a_gpt_is_one_graph_for_all_batches(session: PlanningSession) -> None:
    torch._dynamo.reset()
    gpt, counter = GPT(session), CompileCounterWithBackend("aot_eager")
    compiled, frames = torch.compile(gpt, fullgraph=True, dynamic=True, backend=counter), set()
    for query_lens, seq_lens in STEPS:
        metadata = batch(query_lens, seq_lens)
        metadata.max_query_len = 9  # an upper bound: a constant of the trace
        session.plan(metadata)
        close_to_dense(gpt, compiled(fed(query_lens, seq_lens), metadata), query_lens, seq_lens)
        # the first compile may trace twice: dynamo starts again where it has seen a symbolic float
        frames.add(counter.frame_count)
    assert len(frames) == 1, "a later batch was compiled anew"
    with pytest.raises(RuntimeError, match="plan: expected one for this batch"):
        compiled(fed([1, 1], [18, 12]), batch([1, 1], [18, 12]))


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("compile", [False, True])
def test_a_gpt_is_captured(session: PlanningSession, compile: bool) -> None:
    """A plan before each capture and each replay, from the host's lengths, and none inside."""
    torch._dynamo.reset()
    gpt = GPT(session)
    capture = EagerCapture() if compile else TapeCapture()
    runner = decode_runner(
        gpt, num_blocks=BLOCKS, buckets=[2, 4], compile=compile, capture=capture, debug=True
    )
    runner.capture()
    assert session.plans_made == 2
    for length in range(1, 20):
        rows = 1 + length % 3
        logits = runner.run(TOKENS[:rows, length - 1], [length] * rows, TABLES[:rows]).clone()
        # row 0 is in every step
        torch.testing.assert_close(logits[:1], gpt.dense(TOKENS[0, :length])[-1:], rtol=1e-4, atol=1e-4)
    assert session.plans_made == 2 + 19
    assert session.plans_from_host == 19
    torch.testing.assert_close(
        runner.run_eager(TOKENS[:1, 19], [20], TABLES[:1]),
        gpt.dense(TOKENS[0, :20])[-1:],
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("compile", [False, True])
def test_a_library_whose_state_is_an_object(compile: bool) -> None:
    """Its op gets an int64 tensor, and a trace nothing else: a wrapper per bucket, made and planned ahead of
    the capture."""
    torch._dynamo.reset()
    gpt = GPT(WRAPPER.open([], Limits(max_num_reqs=4, max_blocks_per_req=WIDTH, block_size=BLOCK), "cpu"))
    session: Any = gpt.session
    if compile:
        compiled = torch.compile(gpt, fullgraph=True, dynamic=False, backend="aot_eager")
        with torch.no_grad():
            for length in (1, 2, 3):
                metadata = batch([1, 1], [length] * 2)
                session.plan(metadata)
                close_to_dense(gpt, compiled(fed([1, 1], [length] * 2), metadata), [1, 1], [length] * 2)
        return
    runner = decode_runner(gpt, buckets=[2, 4], capture=TapeCapture())
    runner.capture()
    assert sorted(session.wrappers) == [2, 4]
    for length in range(1, 8):
        logits = runner.run(TOKENS[:3, length - 1], [length] * 3, TABLES[:3])
        close_to_dense(gpt, logits, [1] * 3, [length] * 3)
    assert sorted(session.wrappers) == [2, 4]


def test_a_plan_of_shapes_alone_is_made_once_at_each_capture() -> None:
    """And it lasts: steps of one bucket need no plan behind those of another, also where a replay runs
    Python again."""

    class OfShapes(Session):
        seen: ClassVar[list[int]] = []

        def _plan(self, planned: Any, host: Any) -> None:
            self.seen.append(planned.seq_lens.shape[0])

    reference = get_backend("reference")
    backend = Backend(
        "shapes",
        dataclasses.replace(reference.capabilities, planning=Planning.AT_CAPTURE),
        reference.ops,
        lambda: None,
        OfShapes,
    )
    gpt = GPT(backend.open([], LIMITS, "cpu"))
    runner = decode_runner(gpt, buckets=[2, 4], capture=EagerCapture())
    runner.capture()
    OfShapes.seen.clear()
    for length in range(1, 7):
        rows = 1 + length % 4
        runner.run(TOKENS[:rows, length - 1], [length] * rows, TABLES[:rows])
    assert OfShapes.seen == []
    with torch.no_grad(), pytest.raises(PlanError):
        gpt(fed([1] * 3, [7] * 3), batch([1] * 3, [7] * 3))


def test_a_layer_that_comes_later_is_planned_for_every_shape() -> None:
    """Plans of shapes that were made before it do not know it: they are refused, not run."""

    class OfShapes(Session):
        seen: ClassVar[list[tuple[int, int]]] = []

        def _plan(self, planned: Any, host: Any) -> None:
            self.seen.append((planned.seq_lens.shape[0], len(self._workspaces)))

    reference = get_backend("reference")
    able = dataclasses.replace(reference.capabilities, planning=Planning.AT_CAPTURE)
    backend = Backend("shapes", able, reference.ops, lambda: None, OfShapes)
    session, spec = backend.open([], LIMITS, "cpu"), PagedAttention(HEADS, DIM, KV_HEADS).spec
    session.workspace(spec)
    one, two = batch([1], [3]), batch([1, 1], [3, 3])
    session.plan(one)
    session.plan(two)
    session.require(one)
    session.workspace(dataclasses.replace(spec, head_dim=2 * spec.head_dim))
    assert OfShapes.seen == [(1, 1), (2, 1), (2, 2)]
    session.require(two)
    with pytest.raises(PlanError):
        session.require(one)
    session.plan(one)
    session.require(one)


def test_packed_prefills_are_captured(session: PlanningSession) -> None:
    check_packed_steps(GPT(session))
    assert session.plans_from_host == len(STEPS)


# ---------------------------------------------------------------------------------- a plan that was forgotten
@torch.no_grad()
def test_a_forgotten_plan_raises_before_anything_is_written(session: PlanningSession) -> None:
    gpt, first = GPT(session), batch([2, 2], [2, 2])
    with pytest.raises(PlanError, match=r"call session\.plan\(metadata\) before the step"):
        gpt(fed([2, 2], [2, 2]), first)
    assert not any(pools.k_cache.any() for pools in gpt.cache)
    session.plan(first)
    gpt(fed([2, 2], [2, 2]), first)
    with pytest.raises(PlanError):
        gpt(fed([1, 1], [3, 3]), batch([1, 1], [3, 3]))
    first.seq_lens[0] = 1  # in place: the host can't see it
    with pytest.raises(RuntimeError, match="plan: expected one for this batch"):
        gpt(fed([2, 2], [2, 2]), first)


def test_lengths_of_the_host_that_are_not_the_batch_s(
    session: PlanningSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = batch([2, 1], [5, 3])
    monkeypatch.setenv("TORCHPAGED_CHECK", "1")
    session.plan(metadata, HostLengths([2, 1], [5, 3]))
    for host, said in (
        (HostLengths([2, 1], [5, 4]), r"host\.seq_lens: expected \[5, 3\], as the batch says, got \[5, 4\]"),
        (HostLengths([1, 2], [5, 3]), r"host\.query_lens: expected \[2, 1\]"),
        (HostLengths([2], [5]), r"host\.seq_lens"),
    ):
        with pytest.raises(ArgumentError, match=said):
            session.plan(metadata, host)
    assert session.planned is metadata, "the plan before it stays"
    assert session.plans_made == 1, "the plan before it stays"


def test_a_runner_that_does_not_know_the_session_can_not_capture(session: PlanningSession) -> None:
    sizes: dict[str, Any] = {
        "max_batch_size": 2,
        "max_blocks_per_req": WIDTH,
        "block_size": BLOCK,
        "compile": False,
    }
    runner = DecodeGraphRunner(GPT(session), **sizes, capture=TapeCapture())
    with pytest.raises(CaptureError, match="expected a batch that was planned"):
        runner.capture()


def test_a_replay_by_hand_without_a_plan_raises(session: PlanningSession) -> None:
    """The runner plans by itself; a graph that is replayed without it must notice."""
    gpt, metadata = GPT(session), batch([1, 1], [3, 3])
    with torch.inference_mode():
        session.plan(metadata)
        graph = TapeCapture().capture(lambda: gpt(fed([1, 1], [3, 3]), metadata), None)
        graph.replay()
        metadata.seq_lens.add_(1)
        with pytest.raises(RuntimeError, match="plan: expected one for this batch"):
            graph.replay()


# -------------------------------------------------------------------------------------------- the other doors
def test_a_function_plans_for_its_one_call(planning: str) -> None:
    m, q = batch([1, 2], [9, 7]), torch.randn(3, HEADS, DIM)
    pools = [torch.randn(BLOCKS, BLOCK, KV_HEADS, DIM) for _ in range(2)]
    arguments = (q, *pools, m.block_table, m.seq_lens, m.query_start_loc)
    got = torchpaged.paged_attention(*arguments, max_query_len=2, ops=PLANNING.ops)
    assert torch.equal(got, torchpaged.paged_attention(*arguments, max_query_len=2))
    layer = PagedAttention(HEADS, DIM, KV_HEADS, backend=planning, limits=LIMITS)
    workspace = layer.session.workspace(layer.spec)
    layer.session.plan(m)
    assert torch.equal(
        torchpaged.paged_attention(*arguments, max_query_len=2, ops=PLANNING.ops, workspace=workspace), got
    )


PROMPTS = [[5, 9, 11, 20, 3], [8, 30], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    "options",
    [{"graphs": False}, {}, {"prefill_buckets": [4, 8], "capture": TapeCapture()}],
    ids=["eager", "loop", "tape"],
)
def test_the_engine(planning: str, make_llama: Any, options: dict[str, Any]) -> None:
    from torchpaged.engine import Generator, SamplingParams

    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "prefill_chunk_size": 8}
    want = [o.token_ids for o in Generator(copy.deepcopy(model), **sizes).generate(PROMPTS, params)]
    generator = Generator(model, backend=planning, **sizes, **options)
    assert [o.token_ids for o in generator.generate(PROMPTS, params)] == want
    made: Any = generator.model.session
    assert made.limits == Limits(2, 32, 4, 9, 16)  # four chunks where nothing decodes
    assert made.plans_made > 12
    assert made.plans_from_host > 0


def test_several_steps_per_launch_can_not_be_planned(
    planning: str, make_llama: Any, session: PlanningSession
) -> None:
    from torchpaged.engine import Generator
    from torchpaged.engine.device import DecodeRows, WholeStepRunner

    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    with pytest.raises(
        ArgumentError, match="steps_per_launch: expected 1 with backend 'planning', which plans every step"
    ):
        Generator(model, backend=planning, steps_per_launch=2)
    rows = DecodeRows(2, WIDTH, BLOCK, VOCAB, "cpu", BACKEND_OPS["default"], 2)
    with pytest.raises(ArgumentError, match="rows: expected steps_per_launch=1"):
        WholeStepRunner(GPT(session), rows, session=session)


def test_a_huggingface_cache(planning: str, make_llama: Any) -> None:
    """`generate()` plans by itself, once per forward and from the host's lengths, which the session compares
    with the device's; a forward that is compiled by hand has no place for a plan, and says so."""
    from torchpaged.hf import PagedCache

    torch._dynamo.reset()
    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    inputs = {
        "input_ids": torch.tensor([[0, 0, 5, 9, 11], [3, 4, 5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5]),
    }
    options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    want = model.generate(**inputs, **options)
    model.set_attn_implementation("torchpaged")
    cache: Any = PagedCache(model.config, 2, 32, block_size=4, backend=planning)
    assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), want)
    assert cache.session.plans_made == cache.session.plans_from_host == 8, "one for each forward"
    with torch.no_grad():
        for removed, more in ((-2, 1), (-9, 3)):  # the second one takes back padding too
            cache.crop(removed)
            cache.reorder_cache(torch.tensor([1, 0]))
            model(want[:, -more:], past_key_values=cache)
    assert cache.session.plans_made == cache.session.plans_from_host == 10
    step = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="plans every step outside compiled code"):
        step(want[:, -1:], position_ids=torch.tensor([[10], [12]]), past_key_values=cache)


def test_a_paged_model_whose_session_is_too_small(make_llama: Any, planning: str) -> None:
    from torchpaged.engine import Generator
    from torchpaged.hf import PagedModel

    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    paged = PagedModel(model, num_blocks=64, limits=Limits(max_num_reqs=2))
    with pytest.raises(
        ArgumentError, match="max_batch_size: expected at most 2, the limit of the model's session"
    ):
        Generator(paged, max_batch_size=3)
    narrow = PagedModel(model, num_blocks=6, block_size=4, backend=planning)
    with pytest.raises(
        ArgumentError,
        match=(
            "max_seq_len: expected at most 5 blocks, as the model's session plans for, got 64 tokens, 16 "
            "blocks"
        ),
    ):
        Generator(narrow, max_batch_size=2, max_seq_len=64)
    few = PagedModel(model, num_blocks=64, limits=Limits(max_num_tokens=8))
    with pytest.raises(
        ArgumentError, match="prefill_chunk_size: expected at most 8, the limit of the model's session"
    ):
        Generator(few, max_batch_size=2, prefill_chunk_size=16)
    with pytest.raises(
        ArgumentError, match="max_batch_size: expected at most 8, the limit of the model's session"
    ):
        Generator(few, max_batch_size=9, prefill_chunk_size=8)
    with pytest.raises(ArgumentError, match="metadata: expected at most 8 tokens"):
        few(torch.arange(9), AttentionMetadata.from_lists([9], [9], [[1]], block_size=16))
    with pytest.raises(ArgumentError, match="metadata: expected at most 2 requests"):
        paged(
            torch.tensor([1, 2, 3]),
            AttentionMetadata.from_lists([1] * 3, [1] * 3, [[1], [2], [3]], block_size=16),
        )


# -------------------------------------------------------------------------------------- sessions and backends
def test_a_backend_serves_what_it_declares_and_the_default_the_rest() -> None:
    assert PLANNING.serves == ("paged_attention",)
    assert PLANNING.ops.write_kv is BACKEND_OPS["default"].write_kv
    assert get_backend("cpu").serves == BACKEND_OPS["cpu"]._fields
    with pytest.raises(ArgumentError, match="ops: expected names of write_kv, .*, got attend"):
        Backend("bad", PLANNING.capabilities, {"attend": print}, lambda: None)


def test_a_limit_that_is_needed_and_was_not_said(planning: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"limits\.max_num_reqs: expected a number: this backend makes room for it"
    ):
        PagedAttention(HEADS, DIM, KV_HEADS, backend=planning)
    with pytest.raises(
        ArgumentError, match=r"limits\.num_blocks: expected an int of at least 1, or None, got 0"
    ):
        Limits(num_blocks=0)


@pytest.mark.parametrize(
    "limits", [{"max_num_reqs": 2.5}, {"max_num_tokens": "8"}, {"block_size": True}, {"graphs": True}]
)
def test_a_limit_of_another_type(limits: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"limits.{next(iter(limits))}: expected"):
        Limits(**limits)


@pytest.mark.parametrize(
    ("limits", "message", "compile"),
    [
        (Limits(max_num_tokens=2), "at most 2 tokens", False),
        (Limits(max_num_reqs=1), "at most 1 requests", False),
        (Limits(num_blocks=BLOCKS - 1), f"num_blocks={BLOCKS - 1}", False),
        (Limits(num_blocks=BLOCKS - 1), f"num_blocks={BLOCKS - 1}", True),
        (Limits(block_size=2 * BLOCK), f"block_size={2 * BLOCK}", False),
        (Limits(block_size=2 * BLOCK), f"block_size={2 * BLOCK}", True),
    ],
)
def test_a_batch_over_the_limits_is_refused_before_anything_is_written(
    limits: Limits, message: str, compile: bool
) -> None:
    """A backend may have made room for no more. Compiled code looks at the pools; numbers of requests and
    tokens may be symbols there."""
    layer = PagedAttention(HEADS, DIM, KV_HEADS, backend="reference", limits=limits, dtype=torch.float32)
    pools = torch.zeros(2, BLOCKS, BLOCK, KV_HEADS, DIM).unbind()
    metadata, k = batch([2, 1], [2, 1]), torch.randn(3, KV_HEADS, DIM)
    torch._dynamo.reset()
    call: Any = torch.compile(layer, fullgraph=True, backend="eager") if compile else layer
    with pytest.raises(Exception if compile else ArgumentError, match=message):
        call(torch.randn(3, HEADS, DIM), k, k.clone(), pools, metadata)
    assert not any(pool.any() for pool in pools)


def test_a_plan_of_a_wider_block_table_is_refused(session: PlanningSession) -> None:
    metadata = AttentionMetadata.from_lists([1], [1], [[1]], block_size=BLOCK, max_blocks_per_req=WIDTH + 1)
    with pytest.raises(
        ArgumentError,
        match=(
            f"metadata: expected at most {WIDTH} blocks per request, as the session's limits say, got "
            f"{WIDTH + 1}"
        ),
    ):
        session.plan(metadata)
    assert session.planned is None


def test_sessions_and_limits_of_another_type() -> None:
    for argument, options in (("limits", {"limits": {"max_num_reqs": 3}}), ("session", {"session": "cpu"})):
        with pytest.raises(ArgumentError, match=f"{argument}: expected"):
            PagedAttention(HEADS, DIM, KV_HEADS, **options)
    with pytest.raises(ArgumentError, match="limits: expected Limits"):
        get_backend("reference").open([], None, "cpu")  # type: ignore[arg-type]
    for choose in (torchpaged.select_backend, lambda spec: torchpaged.open_session(spec, Limits())):
        with pytest.raises(ArgumentError, match="spec: expected at least one"):
            choose([])


def test_graph_support_is_asked_for_when_a_session_is_opened() -> None:
    for support, wanted in itertools.product(GraphSupport, GraphSupport):
        reference = get_backend("reference")
        capabilities = copy.copy(reference.capabilities)
        object.__setattr__(capabilities, "graph_support", support)
        backend = Backend("some", capabilities, reference.ops, lambda: None)
        if wanted > support:
            with pytest.raises(
                BackendUnavailableError, match=f"graph support {support.name} is less than {wanted.name}"
            ):
                backend.open([], Limits(graphs=wanted), "cpu")
        else:
            backend.open([], Limits(graphs=wanted), "cpu")


def test_a_session_on_another_device() -> None:
    session = get_backend("reference").open([], Limits(), "cuda")
    with pytest.raises(
        BackendUnavailableError, match="the session was opened on cuda, the attention is on cpu"
    ):
        PagedAttention(HEADS, DIM, KV_HEADS, session=session)


def test_a_kind_of_layer_that_comes_in_the_middle_of_a_step_is_planned(session: PlanningSession) -> None:
    session.plan(batch([1], [5]))
    PagedAttention(HEADS, DIM, KV_HEADS, session=session)
    assert session.plans_made == 2
    PagedAttention(HEADS, DIM, KV_HEADS, session=session)
    assert session.plans_made == 2, "another layer of the same kind"


def test_planning_that_is_not_needed_costs_nothing() -> None:
    """A plan of a backend that plans nothing is not even looked at."""
    session = get_backend("reference").open([], Limits(max_num_reqs=1), "cpu")
    assert session.capabilities.planning == Planning.NEVER
    assert not session.plans
    session.plan(None)  # type: ignore[arg-type]
    assert session.planned is None


def test_streams_of_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA without a GPU, as far as it is asked for streams: each has a semaphore of its own, a capture takes
    the session's."""
    from types import SimpleNamespace

    stream, capturing = SimpleNamespace(cuda_stream=7), [False]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    session = KEPT.open([], Limits(max_num_reqs=3), "cpu")
    session.device = torch.device("cuda")
    session._home = 7  # type: ignore[attr-defined]
    monkeypatch.setattr(
        semaphore_module, "make_semaphore", lambda count, device: torch.zeros(count, dtype=torch.int32)
    )
    kept = {"semaphore": torch.zeros(6, dtype=torch.int32)}
    assert session.workspace_for(kept, 3) is kept
    assert session.workspace_for(kept, 4) == {}
    stream.cuda_stream = 8
    other = session.workspace_for(kept, 3)
    assert other is not kept
    assert other["semaphore"].shape == (6,)
    assert session.workspace_for(kept, 3) is other
    other["semaphore"][2] = 1
    session.reset()
    assert not other["semaphore"].any()
    capturing[0] = True
    assert session.workspace_for(kept, 3) is kept


def test_copies_open_sessions_of_their_own(planning: str) -> None:
    layer = PagedAttention(HEADS, DIM, KV_HEADS, backend=planning, limits=LIMITS)
    again = copy.deepcopy(layer)
    assert again.session is not layer.session
    assert again.session.limits == LIMITS
    assert again.session.name == planning
    shared = PagedAttention(HEADS, DIM, KV_HEADS, session=layer.session)
    assert copy.deepcopy(shared).session.limits == LIMITS
    assert shared.to(torch.bfloat16).session is layer.session


def test_the_example_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert [tuple(x.shape) for x in names["outputs"]] == [(4, 4, 16)] * 2


def test_a_session_that_is_opened_in_inference_mode_is_planned_outside_of_it(planning: str) -> None:
    """What it holds are no inference tensors, which nothing could be written into later: a cache opens it
    within the first forward."""
    with torch.inference_mode():
        session = PLANNING.open([], LIMITS, "cpu")
        layer = PagedAttention(HEADS, DIM, KV_HEADS, block_size=BLOCK, session=session)
    assert not any(tensor.is_inference() for tensor in session.tensors().values())
    metadata, pools = batch([1], [3]), [torch.zeros(BLOCKS, BLOCK, KV_HEADS, DIM) for _ in range(2)]
    with torch.no_grad():
        session.plan(metadata)
        out = layer(torch.randn(1, HEADS, DIM), *torch.randn(2, 1, KV_HEADS, DIM), tuple(pools), metadata)
    assert out.shape == (1, HEADS, DIM)
