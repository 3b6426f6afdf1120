"""Proof of a backend's declared graph support: capture once at the largest batch, replay with other
lengths, compare.

    for case in conformance_cases(backend.capabilities.graph_support):
        # or CudaCapture("cuda"), device="cuda"
        check_replays(backend, case, TapeCapture(), device="cpu", dtype=torch.bfloat16)
        check_forgotten_plan(backend, case, TapeCapture(), device="cpu")              # if it plans every step

Sessions are driven as the runners drive them: `plan` outside the graph, before the capture and before each
replay, as far as the backend declares `Planning`. A backend that decides anything else from the live lengths
on the host fails here.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from torchpaged.backends import Backend, GraphSupport
from torchpaged.custom_ops.errors import BackendUnavailableError, PlanError
from torchpaged.graphs import CaptureBackend
from torchpaged.graphs.capture import Captured
from torchpaged.testing.batches import Batch, BatchSpec, make_batch
from torchpaged.testing.conformance import Attempt, spec_of_call
from torchpaged.testing.oracle import assert_attention_close


class Case(NamedTuple):
    """Batches of one static shape: the first is captured, all are replayed."""

    name: str
    batches: tuple[BatchSpec, ...]
    options: dict[str, Any]


_ONE = (1, 1, 1, 1)
_DECODE = (
    BatchSpec("full", (96, 96, 96, 96), _ONE),
    BatchSpec("short", (1, 2, 3, 4), _ONE),
    BatchSpec("skewed", (96, 1, 33, 16), _ONE),
    BatchSpec("padded", (50, 17, 0, 0), (1, 1, 0, 0), padded_tokens=2),
    BatchSpec("empty_row", (0, 96, 0, 5), _ONE),
    BatchSpec("block_edges", (15, 16, 17, 64), _ONE),
    BatchSpec("empty", (0, 0, 0, 0), (0, 0, 0, 0), padded_tokens=4),
)
_UNIFORM = (
    BatchSpec("full", (96, 96, 96), (4, 4, 4)),
    BatchSpec("short", (4, 5, 6), (4, 4, 4)),
    BatchSpec("skewed", (96, 4, 31), (4, 4, 4)),
    BatchSpec("padded", (40, 0, 0), (4, 0, 0), padded_tokens=8),
    BatchSpec("block_edges", (15, 16, 17), (4, 4, 4)),
    BatchSpec("left_padded", (2, 16, 90), (4, 4, 4)),
    BatchSpec("empty", (0, 0, 0), (0, 0, 0), padded_tokens=12),
)
_MIXED = (
    BatchSpec("full", (96, 96, 96), (1, 20, 11)),
    BatchSpec("prefill", (30, 1, 1), (30, 1, 1)),
    BatchSpec("decodes", (50, 96, 3), _ONE[:3], padded_tokens=29),
    BatchSpec("padded", (40, 12, 0), (9, 12, 0), padded_tokens=11),
    BatchSpec("even", (16, 17, 32), (10, 11, 11)),
    BatchSpec("contexts", (96, 33, 60), (2, 25, 5)),
    BatchSpec("empty", (0, 0, 0), (0, 0, 0), padded_tokens=32),
)


def conformance_cases(support: GraphSupport) -> list[Case]:
    """What a backend of this level must pass."""
    cases = []
    if support >= GraphSupport.SINGLE_TOKEN_DECODE:
        cases += [Case("decode", _DECODE, {}), Case("decode_window", _DECODE, {"window_left": 20})]
    if support >= GraphSupport.UNIFORM_BATCH:
        cases += [Case("uniform", _UNIFORM, {})]
    if support >= GraphSupport.ALWAYS:
        cases += [Case("mixed", _MIXED, {}), Case("mixed_window", _MIXED, {"window_left": 20})]
    return cases


class _Static(Attempt):
    """An attempt at a case: static tensors with room for each of its batches, in a pool of twice their size.
    Without log-sum-exps where the backend has none."""

    def __init__(
        self, backend: Backend, case: Case, device: torch.device | str, shape: dict[str, Any]
    ) -> None:
        self.batches = [
            make_batch(spec, seed=i, device=device, **shape) for i, spec in enumerate(case.batches)
        ]
        first, self.case = self.batches[0], case
        self.window = max(batch.k_cache.shape[0] for batch in self.batches)
        self.finite = backend.capabilities.finite_pools
        with torch.inference_mode(False):
            static = replace(
                first,
                q=torch.zeros_like(first.q),
                k_cache=first.k_cache.new_zeros(2 * self.window, *first.k_cache.shape[1:]),
                v_cache=first.v_cache.new_zeros(2 * self.window, *first.v_cache.shape[1:]),
                block_table=first.block_table.new_zeros(
                    len(first.seq_lens), max(batch.block_table.shape[1] for batch in self.batches)
                ),
                seq_lens=torch.zeros_like(first.seq_lens),
                query_start_loc=torch.zeros_like(first.query_start_loc),
                max_query_len=max(batch.max_query_len for batch in self.batches),
            )
            spec = spec_of_call(static, True, case.options)
            alone = replace(spec, uses=spec.uses - {"lse"})
            if backend.capabilities.reject(spec) and not backend.capabilities.reject(alone):
                spec = alone
            super().__init__(backend, static, spec, case.options)

    def load(self, batch: Batch, window: int = 0, poison: bool = True) -> None:
        """``batch`` in the first (0) or second (1) half of the pools; what is not its own is NaN, or large
        where pools must be finite. Without ``poison`` the rest stays as it was."""
        static, offset, blocks = self.batch, window * self.window, batch.k_cache.shape[0]
        pools = ((static.k_cache, batch.k_cache), (static.v_cache, batch.v_cache))
        for pool, source in pools:
            if poison:
                pool.fill_(1000.0 if self.finite else float("nan"))
            pool[offset : offset + blocks].copy_(source.nan_to_num(1000.0) if self.finite else source)
        static.block_table.zero_()
        table = torch.where(batch.block_table < blocks, batch.block_table + offset, batch.block_table)
        static.block_table[:, : table.shape[1]].copy_(table)
        for name in ("q", "seq_lens", "query_start_loc"):
            getattr(static, name).copy_(getattr(batch, name))
        self.out.fill_(float("nan"))
        if self.lse is not None:
            self.lse.fill_(float("nan"))

    def captured(self, capture: CaptureBackend) -> Captured:
        """The step over the first batch, planned."""
        self.load(self.batches[0])
        self.session.plan(self.batch)
        capture.warmup(self.step, 2)
        return capture.capture(self.step, capture.new_pool())


def check_replays(
    backend: Backend, case: Case, capture: CaptureBackend, device: torch.device | str, **shape: Any
) -> int:
    """Capture the case's first batch, replay all of them by changing tensors only, every other one in another
    window of the pool, where the capture's is NaN; returns how many replays were compared.

    Args:
        backend: a session of it is opened.
        case: from `conformance_cases`.
        capture: how the step becomes a graph.
        device: where the tensors are.
        shape: further arguments of `torchpaged.testing.make_batch`: ``dtype``, ``num_heads``,
            ``num_kv_heads``, ``head_dim`` ...

    Raises:
        AssertionError: a replay differs from the oracle beyond its error budget, or from its own repetition
            at all.
        SemaphoreError: the session's semaphore is not zero after a replay.
    """
    static = _Static(backend, case, device, shape)
    graph, session = static.captured(capture), static.session
    for i, batch in enumerate((*static.batches, static.batches[0])):
        static.load(batch, window=i % 2)
        if session.plans_every_step:
            session.plan(static.batch)
        graph.replay()
        once = static.out.clone()
        assert_attention_close(static.out, static.lse, batch, **case.options)
        graph.replay()
        assert torch.equal(static.out, once), (
            f"{case.name}[{batch.spec.name}]: a second replay gave other bits"
        )
        session.check(f"{case.name}[{batch.spec.name}]")
    return len(static.batches) + 1


def check_eager(backend: Backend, case: Case, device: torch.device | str, **shape: Any) -> int:
    """Run the case's batches one after the other, without a graph; returns how many were compared. Those that
    the backend refuses are not.

    Args:
        backend, case, device, shape: as in `check_replays`.

    Raises:
        AssertionError: a result differs from the oracle beyond its error budget; or a session was opened for
            more graph support than is declared.
    """
    try:
        static, compared = _Static(backend, case, device, shape), 0
    except BackendUnavailableError:  # such as queries of more tokens than it takes
        return 0
    for level in GraphSupport:
        if level > backend.capabilities.graph_support:
            try:
                backend.open([static.spec], replace(static.limits, graphs=level), static.batch.q.device)
            except BackendUnavailableError:
                continue
            raise AssertionError(f"a session was opened for graphs of level {level.name}")
    for i, batch in enumerate(static.batches):
        static.load(batch, window=i % 2)
        try:
            static.session.plan(static.batch)
        except PlanError:
            continue
        static.step()
        assert_attention_close(static.out, static.lse, batch, **case.options)
        compared += 1
    return compared


def check_forgotten_plan(
    backend: Backend, case: Case, capture: CaptureBackend, device: torch.device | str, **shape: Any
) -> None:
    """A backend that plans every step raises where a replay was not planned, or gives nothing but NaN; never
    something that looks right and is not.

    On a GPU an assertion of the device ends the process's use of it: call this in a process of its own.

    Args:
        backend, case, capture, device, shape: as in `check_replays`.

    Raises:
        AssertionError: a replay without a plan went unnoticed.
    """
    static = _Static(backend, case, device, shape)
    assert static.session.plans_every_step, (
        f"backend {backend.name!r} declares Planning.{backend.capabilities.planning.name}"
    )
    graph = static.captured(capture)
    for batch in static.batches[1:]:
        static.load(batch, poison=False)  # old blocks must look right
        try:
            graph.replay()
            noticed = bool(static.out.isnan().all())  # waits: a device-side assertion is raised here
        except RuntimeError:
            noticed = True
        if not noticed:  # a batch that needed none, such as one whose part of a route plans nothing
            _require_right(static, batch, case)


def _require_right(static: _Static, batch: Batch, case: Case) -> None:
    try:
        assert_attention_close(static.out, static.lse, batch, **case.options)
    except AssertionError as error:
        raise AssertionError(
            f"{case.name}[{batch.spec.name}]: a replay without a plan gave results that are wrong: {error}"
        ) from error
