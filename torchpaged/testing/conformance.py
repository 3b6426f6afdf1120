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

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends import (
    AttentionSpec,
    Backend,
    GraphSupport,
    HostLengths,
    Limits,
    Session,
    attention_spec,
)
from torchpaged.custom_ops.errors import BackendUnavailableError, PlanError
from torchpaged.graphs import CaptureBackend, CudaCapture, TapeCapture
from torchpaged.testing.batches import BATCH_SPECS, Batch, make_batch
from torchpaged.testing.graph_conformance import PlannedTensors
from torchpaged.testing.oracle import ATTENTION_VARIANTS, assert_attention_close

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
    if device is None:
        on_gpu = torch.cuda.is_available() and "cuda" in backend.capabilities.device_types
        device = "cuda" if on_gpu else "cpu"
    device = torch.device(device)
    graphs: CaptureBackend = capture or (CudaCapture(device) if device.type == "cuda" else TapeCapture())
    for mode in modes:
        for name in batches:
            if mode == "captured" and _level(name) > backend.capabilities.graph_support:
                continue
            for variant, options in variants.items():
                for extra, given in extras.items():
                    for with_lse in lse:

                        def run(
                            mode: str = mode,
                            name: str = name,
                            options: dict[str, Any] = options,
                            given: dict[str, Any] = given,
                            with_lse: bool = with_lse,
                        ) -> str:
                            batch = make_batch(BATCH_SPECS[name], device=device, **shape | given)
                            if backend.capabilities.finite_pools:
                                batch.k_cache.nan_to_num_(0.0), batch.v_cache.nan_to_num_(0.0)
                            return _run(backend, batch, options, with_lse, mode, graphs, compiler)

                        also = "" if with_lse else " without lse"
                        yield Check(f"{mode} {name} {variant} {extra}{also}", run)


def spec_of_call(batch: Batch, lse: bool, options: Mapping[str, Any]) -> AttentionSpec:
    """What a layer that attends to ``batch`` with these options of the op asks for."""
    spec = attention_spec(
        device=batch.q.device,
        dtype=batch.q.dtype,
        num_heads=batch.q.shape[1],
        num_kv_heads=batch.k_cache.shape[2],
        head_dim=batch.q.shape[2],
        head_dim_v=batch.v_cache.shape[3],
        block_size=batch.k_cache.shape[1],
        kv_dtype=batch.k_cache.dtype,
        causal=options.get("causal", True),
        window_size=(options.get("window_left", -1), options.get("window_right", -1)),
        logits_soft_cap=options.get("logits_soft_cap", 0.0),
        chunk_size=options.get("chunk_size", 0),
        alibi_slopes=batch.extras.get("alibi_slopes"),
        sinks=batch.extras.get("sinks"),
        lse=lse,
        scale=batch.scale,
    )
    return replace(spec, max_query_len=batch.max_query_len)


def _level(name: str) -> GraphSupport:
    """The graph support that a named batch needs."""
    lens = BATCH_SPECS[name].query_lens
    if max(lens) == 1:
        return GraphSupport.SINGLE_TOKEN_DECODE
    return GraphSupport.UNIFORM_BATCH if len(set(lens)) == 1 else GraphSupport.ALWAYS


def _run(
    backend: Backend,
    batch: Batch,
    options: dict[str, Any],
    lse: bool,
    mode: str,
    capture: CaptureBackend,
    compiler: str,
) -> str:
    spec, (rows, width) = spec_of_call(batch, lse, options), batch.block_table.shape
    limits = Limits(rows, max(len(batch.q), 1), width, *batch.k_cache.shape[:2])
    reasons = "; ".join(backend.reject(spec))
    if reasons:
        try:
            backend.open([spec], limits, batch.q.device)
        except BackendUnavailableError as error:
            assert reasons in str(error), f"expected a refusal with {reasons!r}, got {error}"
            return reasons
        raise AssertionError(f"expected a refusal with {reasons!r}, got a session")
    session = backend.open([spec], limits, batch.q.device)
    try:
        _plan(session, batch)
    except PlanError as error:
        return str(error)
    out, total = _outputs(batch, lse)
    step = _step(session, spec, batch, options, out, total)
    if mode == "compiled":
        torch._dynamo.reset()  # each check is a function of its own, and dynamo counts them
        step = torch.compile(step, fullgraph=True, backend=compiler)
    if mode == "captured":
        capture.warmup(step, 1)
        graph = capture.capture(step, capture.new_pool())
        out.fill_(float("nan"))
        if session.plans_every_step:
            _plan(session, batch)
        graph.replay()
    else:
        step()
    assert_attention_close(out, total, batch, **options)
    return ""


def _plan(session: Session, batch: Batch) -> None:
    if session.plans:
        step = PlannedTensors(batch.block_table, batch.seq_lens, batch.query_start_loc, batch.max_query_len)
        session.plan(step, HostLengths(batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist()))


def _outputs(batch: Batch, lse: bool) -> tuple[Tensor, Tensor | None]:
    """NaN, so that what is not written shows."""
    shape = (*batch.q.shape[:2], batch.v_cache.shape[-1])
    out = torch.full(shape, float("nan"), dtype=batch.q.dtype, device=batch.q.device)
    return out, torch.full(shape[:2], float("nan"), device=batch.q.device) if lse else None


def _step(
    session: Session,
    spec: AttentionSpec,
    batch: Batch,
    options: dict[str, Any],
    out: Tensor,
    total: Tensor | None,
) -> Callable[[], Tensor]:
    attend, workspace = session.ops.paged_attention, session.workspace(spec)

    def step() -> Tensor:
        attend(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            out,
            total,
            max_query_len=batch.max_query_len,
            scale=batch.scale,
            **{**batch.extras, **options},
            **workspace,
        )
        return out

    return step
