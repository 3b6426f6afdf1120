"""`check_conformance`: one suite for all backends, over named batches, features, and ways to run a step.

    report = check_conformance(get_backend("torch_sdpa"), device="cpu")
    print(report)                                # torch_sdpa: 412 right, 24 refused
    for check in conformance_checks(MY_BACKEND): # one by one, by name
        print(check.name, check.run())

Each check is one batch of `BATCH_SPECS`, one variant of `ATTENTION_VARIANTS`, with sinks, ALiBi or neither,
with a log-sum-exp or without; run eagerly, in a compiled call as one op, or replayed from a graph. What the
backend declares not to run must be refused with its reasons, and all else must be right. That replays with
other lengths are right is `check_graph_support`'s.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends import AttentionSpec, Backend, GraphSupport, HostLengths, Limits
from torchpaged.backends.choose.kind import Kind
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.errors import BackendUnavailableError, PlanError
from torchpaged.graphs import CaptureBackend, CudaCapture, TapeCapture
from torchpaged.testing.batches import BATCH_SPECS, Batch, make_batch
from torchpaged.testing.oracle import ATTENTION_VARIANTS, assert_attention_close


def device_of(backend: Backend, device: torch.device | str | None) -> torch.device:
    """``device``; None: a GPU if there is one and the backend runs on it, else the CPU."""
    on_gpu = torch.cuda.is_available() and "cuda" in backend.capabilities.device_types
    return torch.device(device or ("cuda" if on_gpu else "cpu"))


def capture_of(device: torch.device, capture: CaptureBackend | None) -> CaptureBackend:
    """``capture``; None: CUDA graphs on a GPU, on a CPU the recorded tape of a step's ops."""
    return capture or (CudaCapture(device) if device.type == "cuda" else TapeCapture())


def spec_of_call(batch: Batch, lse: bool, options: Mapping[str, Any]) -> AttentionSpec:
    """What a layer that attends to ``batch`` with these options of the op asks for."""
    tensors, named = batch.arguments(*batch.outputs(lse), **options)
    spec = Kind.of(AttentionCall.of(*tensors, **named)).spec()
    return replace(spec, max_query_len=batch.max_query_len)


class Attempt:
    """A session for one batch, its workspace, and outputs.

    Args:
        backend: whose session; it may refuse to open it.
        batch: what is attended to; its tensors may change between steps.
        spec: of the session, as `spec_of_call` makes it.
        options: of the op.
    """

    def __init__(
        self, backend: Backend, batch: Batch, spec: AttentionSpec, options: Mapping[str, Any]
    ) -> None:
        rows, width = batch.block_table.shape
        self.batch, self.spec, self.options = batch, spec, options
        self.limits = Limits(rows, max(len(batch.q), 1), width, *batch.k_cache.shape[:2])
        self.session = backend.open([spec], self.limits, batch.q.device)
        self.attend, self.workspace = self.session.ops.paged_attention, self.session.workspace(spec)
        self.out, self.lse = batch.outputs("lse" in spec.uses)

    def plan(self) -> None:
        """Plan the batch with its lengths on the host, if the session plans at all."""
        if self.session.plans:
            batch = self.batch
            host = HostLengths(batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist())
            self.session.plan(batch, host)

    def step(self) -> Tensor:
        """The call; returns ``out``."""
        tensors, named = self.batch.arguments(self.out, self.lse, **self.options)
        self.attend(*tensors, **named, **self.workspace)
        return self.out


def graph_support_for(query_lens: tuple[int, ...]) -> GraphSupport:
    """The graph support that a batch of these queries needs."""
    if max(query_lens) == 1:
        return GraphSupport.SINGLE_TOKEN_DECODE
    return GraphSupport.UNIFORM_BATCH if len(set(query_lens)) == 1 else GraphSupport.ALWAYS


MODES = ("eager", "compiled", "captured")
#: Further arguments of `make_batch`, by name.
EXTRAS: dict[str, dict[str, Any]] = {"plain": {}, "sinks": {"sinks": True}, "alibi": {"alibi": True}}


class Check(NamedTuple):
    """One check: its name, and what it found: "" where the result was right, or why it was refused. It raises
    AssertionError where a result is wrong."""

    name: str
    run: Callable[[], str]


@dataclass
class ConformanceReport:
    """What was seen.

    Attributes:
        backend: its name.
        right: names of the checks whose results were right.
        refused: reasons by check.
    """

    backend: str
    right: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.backend}: {len(self.right)} right, {len(self.refused)} refused"


def check_conformance(backend: Backend, **options: Any) -> ConformanceReport:
    """Run every check of `conformance_checks`, whose arguments these are.

    Raises:
        AssertionError: a result is wrong, or what the backend declares not to run was run; with the check.
        BackendUnavailableError: it refused everything; with its reasons.
    """
    report = ConformanceReport(backend.name)
    for check in conformance_checks(backend, **options):
        try:
            refused = check.run()
        except Exception as error:
            raise AssertionError(f"{backend.name}: {check.name}: {error}") from error
        if refused:
            report.refused[check.name] = refused
        else:
            report.right.append(check.name)
    if not report.right:
        raise BackendUnavailableError(
            f"backend {backend.name!r} ran nothing: {'; '.join(dict.fromkeys(report.refused.values()))}"
        )
    return report


def conformance_checks(
    backend: Backend,
    *,
    device: torch.device | str | None = None,
    modes: Sequence[str] = MODES,
    batches: Sequence[str] = tuple(BATCH_SPECS),
    variants: Mapping[str, dict[str, Any]] = ATTENTION_VARIANTS,
    extras: Mapping[str, dict[str, Any]] = EXTRAS,
    lse: Sequence[bool] = (True, False),
    capture: CaptureBackend | None = None,
    compiler: str = "inductor",
    **shape: Any,
) -> Iterator[Check]:
    """The checks of a backend, by name.

    Args:
        backend: sessions of it are opened.
        device: where; None = a GPU if there is one and the backend runs on it, else the CPU.
        modes: of `MODES`. Batches beyond the declared graph support are not captured.
        batches: names of `BATCH_SPECS`.
        variants: options of the op, by name.
        extras: further arguments of `torchpaged.testing.make_batch`, by name.
        lse: whether the log-sum-exp is asked for.
        capture: how a step becomes a graph; None = CUDA graphs on a GPU, on a CPU the recorded tape.
        compiler: of `torch.compile`.
        shape: further arguments of `make_batch` for all batches: ``num_heads``, ``head_dim``, ``dtype`` ...
    """
    where = device_of(backend, device)
    graphs = capture_of(where, capture)

    def run(mode: str, name: str, options: dict[str, Any], given: dict[str, Any], with_lse: bool) -> str:
        batch = make_batch(BATCH_SPECS[name], device=where, **shape | given)
        if backend.capabilities.finite_pools:
            batch.k_cache.nan_to_num_(0.0), batch.v_cache.nan_to_num_(0.0)
        return _run(backend, batch, options, with_lse, mode, graphs, compiler)

    kinds = product(modes, batches, variants.items(), extras.items(), lse)
    for mode, name, (variant, options), (extra, given), with_lse in kinds:
        needed = graph_support_for(BATCH_SPECS[name].query_lens)
        if mode != "captured" or needed <= backend.capabilities.graph_support:
            also = "" if with_lse else " without lse"
            check = partial(run, mode, name, options, given, with_lse)
            yield Check(f"{mode} {name} {variant} {extra}{also}", check)


def _run(
    backend: Backend,
    batch: Batch,
    options: dict[str, Any],
    lse: bool,
    mode: str,
    capture: CaptureBackend,
    compiler: str,
) -> str:
    spec = spec_of_call(batch, lse, options)
    reasons = "; ".join(backend.reject(spec))
    if reasons:
        try:
            Attempt(backend, batch, spec, options)
        except BackendUnavailableError as error:
            assert reasons in str(error), f"expected a refusal with {reasons!r}, got {error}"
            return reasons
        raise AssertionError(f"expected a refusal with {reasons!r}, got a session")
    attempt = Attempt(backend, batch, spec, options)
    try:
        attempt.plan()
    except PlanError as error:
        return str(error)
    step: Callable[[], Tensor] = attempt.step
    if mode == "compiled":
        torch._dynamo.reset()  # each check is a function of its own, and dynamo counts them
        step = torch.compile(step, fullgraph=True, backend=compiler)
    if mode == "captured":
        capture.warmup(step, 1)
        graph = capture.capture(step, capture.new_pool())
        attempt.out.fill_(float("nan"))
        if attempt.session.plans_every_step:
            attempt.plan()
        graph.replay()
    else:
        step()
    assert_attention_close(attempt.out, attempt.lse, batch, **options)
    return ""
