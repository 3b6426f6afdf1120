"""Every backend's declared graph support, proved in float32 and bf16: on a tape on a CPU, with CUDA graphs on
a GPU (tests/gpu, too)."""

import dataclasses
from typing import Any

import pytest
import torch
from sessions import KEPT, PLANNING, PlanningSession
from wrapper_backend import WRAPPER

from torchpaged.backends import (
    AttentionSpec,
    Backend,
    GraphSupport,
    Limits,
    Planning,
    Session,
    get_backend,
    list_backends,
)
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.graphs import CudaCapture, DecodeGraphRunner, PackedGraphRunner, TapeCapture
from torchpaged.graphs.capture import EagerCapture
from torchpaged.testing import check_graph_support
from torchpaged.testing.graph_conformance import Case, check_forgotten_plan, check_replays, conformance_cases

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SHAPE: dict[str, Any] = {"head_dim": 32, "num_heads": 4, "num_kv_heads": 2}


def backend_of(name: str) -> Backend:
    """The built-in ones, two that plan, and the device's own kernels with a kept semaphore."""
    if name == "kept":
        return Backend(
            "kept",
            dataclasses.replace(KEPT.capabilities, graph_support=GraphSupport.ALWAYS),
            BACKEND_OPS["default"],
            lambda: None,
            KEPT.session,
        )
    return {"planning": PLANNING, "wrapper": WRAPPER}.get(name) or get_backend(name)


@pytest.mark.slow_cases("flex-*", but=("flex-decode-bf16", "flex-mixed-bf16"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("case", conformance_cases(GraphSupport.ALWAYS), ids=lambda c: c.name)
@pytest.mark.parametrize("name", [*list_backends(), "planning", "wrapper", "kept"])
def test_declared_support_holds(
    name: str, case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(name)
    spec = AttentionSpec(device=DEVICE, dtype=dtype, **SHAPE)
    reasons = backend.reject(spec)
    if reasons:
        pytest.skip("; ".join(reasons))
    support = backend.capabilities.graph_support
    if case not in conformance_cases(support):
        wanted = dataclasses.replace(spec, graphs=GraphSupport.ALWAYS)
        assert any("graph support" in reason for reason in backend.reject(wanted))
        return
    capture: Any = CudaCapture(DEVICE) if ON_GPU else TapeCapture()
    if name == "flex" and not ON_GPU:  # compiled, it would take minutes; unfused, it can't run below the tape
        monkeypatch.setenv("TORCHPAGED_FLEX_COMPILER", "eager")
        capture = EagerCapture()
    assert check_replays(backend, case, capture, DEVICE, dtype=dtype, **SHAPE) == len(case.batches) + 1


@pytest.mark.parametrize("case", conformance_cases(GraphSupport.ALWAYS), ids=lambda c: c.name)
def test_a_forgotten_plan_raises(case: Case) -> None:
    """On a CPU also where there is a GPU: an assertion of the device would end this process's use of it."""
    check_forgotten_plan(PLANNING, case, TapeCapture(), "cpu", **SHAPE)
    if case in conformance_cases(WRAPPER.capabilities.graph_support):
        check_forgotten_plan(WRAPPER, case, TapeCapture(), "cpu", **SHAPE)


class Unchecked(PlanningSession):
    """Its op takes the plan for granted, of lengths and of blocks."""


def _unchecked(
    q: Any,
    k: Any,
    v: Any,
    table: Any,
    lens: Any,
    starts: Any,
    out: Any,
    lse: Any,
    *,
    planned_table: Any,
    planned_lens: Any,
    **options: Any,
) -> None:
    n = lens.shape[0]
    BACKEND_OPS["default"].paged_attention(
        q, k, v, planned_table[:n], planned_lens[:n], starts, out, lse, **options
    )


UNCHECKED = Backend(
    "unchecked", PLANNING.capabilities, {"paged_attention": _unchecked}, lambda: None, Unchecked
)


def test_the_suite_catches_an_op_that_takes_the_plan_for_granted() -> None:
    """With plans it passes, without one it gives results of another batch."""
    case = conformance_cases(GraphSupport.SINGLE_TOKEN_DECODE)[0]
    check_replays(UNCHECKED, case, TapeCapture(), "cpu", **SHAPE)
    with pytest.raises(AssertionError, match=r"decode\[short\]: a replay without a plan gave results"):
        check_forgotten_plan(UNCHECKED, case, TapeCapture(), "cpu", **SHAPE)


@pytest.mark.parametrize("planning", [Planning.NEVER, Planning.AT_CAPTURE])
def test_the_suite_catches_a_backend_that_declares_less_planning_than_it_needs(planning: Planning) -> None:
    backend = Backend(
        "less",
        dataclasses.replace(PLANNING.capabilities, planning=planning),
        PLANNING.ops,
        lambda: None,
        PlanningSession,
    )
    with pytest.raises(RuntimeError, match="plan: expected one for this batch"):
        check_replays(
            backend, conformance_cases(GraphSupport.SINGLE_TOKEN_DECODE)[0], TapeCapture(), "cpu", **SHAPE
        )


def test_the_suite_catches_a_host_decision() -> None:
    """A kernel that freezes the longest length at capture passes its first batch and must fail the others."""
    reference = get_backend("reference")
    frozen: list[int] = []

    def attend(q, k_cache, v_cache, table, lens, starts, out, lse, **options):  # type: ignore[no-untyped-def]
        if not frozen:
            frozen.append(3)  # "no row is longer than this"
        reference.ops.paged_attention(
            q, k_cache, v_cache, table, lens.clamp_max(frozen[0]), starts, out, lse, **options
        )

    backend = Backend("frozen", reference.capabilities, {"paged_attention": attend}, lambda: None)
    case = conformance_cases(GraphSupport.SINGLE_TOKEN_DECODE)[0]
    with pytest.raises(AssertionError, match="budget"):
        check_replays(backend, case, TapeCapture(), "cpu", head_dim=32)


# ----------------------------------------------------------------------------- all of it, as authors call it
def test_what_was_proved_is_told() -> None:
    report = check_graph_support(PLANNING, device="cpu", dtypes=(torch.float32, torch.float64), **SHAPE)
    assert report.replays.keys() == {
        f"{case.name}[float32]" for case in conformance_cases(GraphSupport.ALWAYS)
    }
    assert report.forgotten_plans
    assert "planning: ALWAYS, proved by 40 replays of decode[float32], " in str(report)
    none = check_graph_support(get_backend("reference"), device="cpu")
    assert str(none) == "reference: NEVER; 70 batches right without a graph"


LEVELS = list(GraphSupport)


def liar(attend: Any, declared: GraphSupport, session: Any = Session) -> Backend:
    """The reference with ``attend`` in its place."""
    capabilities = dataclasses.replace(get_backend("reference").capabilities, graph_support=declared)
    return Backend("liar", capabilities, {"paged_attention": attend}, lambda: None, session)


def freezing(held: GraphSupport) -> Any:
    """Right for what ``held`` says; in all other steps half of the longest length that it saw first is the
    longest for good."""
    longest_query = {
        GraphSupport.NEVER: 0,
        GraphSupport.SINGLE_TOKEN_DECODE: 1,
        GraphSupport.UNIFORM_BATCH: 4,
    }
    reference, frozen = get_backend("reference"), []

    def attend(
        q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any, out: Any, lse: Any, **options: Any
    ) -> None:
        if options["max_query_len"] > longest_query.get(held, 99):
            frozen.append(int(lens.max()))
            lens = lens.clamp_max(frozen[0] // 2)
        reference.ops.paged_attention(q, k, v, table, lens, starts, out, lse, **options)

    return attend


@pytest.mark.parametrize(
    ("held", "declared"), [(held, declared) for held in LEVELS for declared in LEVELS if held < declared]
)
def test_a_liar_is_found_out(held: GraphSupport, declared: GraphSupport) -> None:
    """Of every level, told which one it holds."""
    with pytest.raises(
        AssertionError, match=f"'liar' declares graph support {declared.name} and holds {held.name}: case"
    ):
        check_graph_support(
            liar(freezing(held), declared),
            device="cpu",
            dtypes=(torch.float32,),
            capture=EagerCapture(),
            **SHAPE,
        )


def test_who_declares_no_graphs_is_right_without_them() -> None:
    """And does not open sessions for them."""

    class Willing(Session):
        def __init__(self, name: Any, can: Any, ops: Any, specs: Any, limits: Any, device: Any) -> None:
            super().__init__(
                name, can, ops, specs, dataclasses.replace(limits, graphs=GraphSupport.NEVER), device
            )

    can = {"device": "cpu", "dtypes": (torch.float32,), **SHAPE}
    with pytest.raises(
        AssertionError, match="'liar' declares graph support NEVER, and is wrong without a graph"
    ):
        check_graph_support(liar(freezing(GraphSupport.NEVER), GraphSupport.NEVER), **can)
    right = get_backend("reference").ops.paged_attention
    with pytest.raises(AssertionError, match="a session was opened for graphs of level SINGLE_TOKEN_DECODE"):
        check_graph_support(liar(right, GraphSupport.NEVER, Willing), **can)
    assert check_graph_support(liar(right, GraphSupport.NEVER), **can).eager == 35


@pytest.mark.parametrize("what", ["blocks", "window", "starts"])
def test_what_a_capture_may_have_kept(what: str) -> None:
    """Blocks of the first batch, the part of the pool that it used, its queries' places: kept on the host at
    the first call, as a caller that plans too early."""
    kept: dict[str, Any] = {}

    def attend(
        q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any, out: Any, lse: Any, **options: Any
    ) -> None:
        first = not kept
        if first:
            used = table[table < k.shape[0]]
            kept.update(blocks=table.clone(), starts=starts.clone(), window=slice(0, int(used.max()) + 1))
        if what == "window":
            k, v = k[kept["window"]], v[kept["window"]]
            table = torch.where(table < len(k), table, 0)
        table = kept["blocks"] if what == "blocks" else table
        starts = kept["starts"] if what == "starts" else starts
        get_backend("reference").ops.paged_attention(q, k, v, table, lens, starts, out, lse, **options)

    case = next(case for case in conformance_cases(GraphSupport.ALWAYS) if case.name == "mixed")
    with pytest.raises(AssertionError, match="budget|finite"):
        check_replays(liar(attend, GraphSupport.ALWAYS), case, EagerCapture(), "cpu", **SHAPE)


def test_what_it_does_not_declare_is_not_asked_of_it() -> None:
    """No windows: the others prove its graphs."""
    narrow = dataclasses.replace(
        PLANNING.capabilities, features=PLANNING.capabilities.features - {"window", "lse"}
    )
    backend = Backend("narrow", narrow, PLANNING.ops, lambda: None, PLANNING.session)
    report = check_graph_support(backend, device="cpu", dtypes=(torch.float32,), **SHAPE)
    assert list(report.replays) == ["decode[float32]", "uniform[float32]", "mixed[float32]"]


def test_a_backend_that_can_not_run_here() -> None:
    with pytest.raises(BackendUnavailableError, match="'triton' cannot run this attention: .*device cpu"):
        check_graph_support(get_backend("triton"), device="cpu")


@pytest.mark.parametrize("declared", LEVELS, ids=lambda level: level.name)
def test_a_runner_goes_by_the_declared_level(declared: GraphSupport) -> None:
    """It refuses graphs beyond it when it is made, before a capture; an eager capture and a tape, which run
    ops again, are none."""

    class Frozen:
        """As CUDA graphs are: no part of the others."""

        def new_pool(self, *_: Any) -> None:
            return None

        warmup = capture = new_pool

    session = liar(get_backend("reference").ops.paged_attention, declared).open([], Limits(), "cpu")
    sizes: dict[str, Any] = {"max_blocks_per_req": 2, "block_size": 4, "session": session}

    def decode(capture: Any) -> None:
        DecodeGraphRunner(
            lambda ids, metadata: ids, max_batch_size=2, compile=False, capture=capture, **sizes
        )

    def packed(capture: Any, **more: Any) -> None:
        runner: Any = PackedGraphRunner
        runner(lambda *given: given[0], buckets=[4], max_num_reqs=2, capture=capture, **sizes, **more)

    for make, needed, what in (
        (decode, GraphSupport.SINGLE_TOKEN_DECODE, "decode steps"),
        (packed, GraphSupport.ALWAYS, "steps of up to 4 tokens per request"),
    ):
        make(EagerCapture())
        make(TapeCapture())
        if declared >= needed:
            make(Frozen())
            continue
        why = f"graph support {declared.name} is less than {needed.name}, which graphs of {what} need"
        with pytest.raises(BackendUnavailableError, match=why):
            make(Frozen())
    if declared == GraphSupport.SINGLE_TOKEN_DECODE:
        packed(Frozen(), max_query_len=1)
