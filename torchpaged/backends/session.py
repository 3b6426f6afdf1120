"""Sessions: what a backend keeps open between calls for one user of it, and its plan of each batch.

    session = backend.open([spec], Limits(max_num_reqs=8, block_size=16), device)
    workspace = session.workspace(spec)  # once per layer, at construction
    session.plan(metadata)  # outside the trace and the graph; most backends do nothing
    session.ops.paged_attention(..., **options, **workspace)  # traced and captured: tensors are all it gets

What a session holds reaches its op through these tensors alone. One session serves calls that follow one
another: steps that may overlap, on different streams, need one each.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchpaged.backends.capabilities import Capabilities, Planning, unable
from torchpaged.backends.spec import AttentionSpec, GraphSupport, Limits
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.checks import checks_device_values
from torchpaged.custom_ops.errors import ArgumentError, NotCopied, PlanError
from torchpaged.custom_ops.words import counted, one_line
from torchpaged.metadata import HostLengths


class PlannedBatch(Protocol):
    """What `Session.plan` is given: `torchpaged.AttentionMetadata`, or less of it."""

    @property
    def block_table(self) -> Tensor:
        """``[num_reqs, max_blocks_per_req]`` int32."""

    @property
    def seq_lens(self) -> Tensor:
        """``[num_reqs]`` int32, this step's tokens included."""

    @property
    def query_start_loc(self) -> Tensor:
        """``[num_reqs + 1]`` int32."""

    @property
    def max_query_len(self) -> int:
        """Upper bound of the query lengths."""


class Session(NotCopied):
    """What every backend keeps open: nothing, unless a subclass says otherwise.

    A subclass overrides `_open` and `_make_workspace` to give its op tensors, `_plan` if its backend declares
    `Planning`, and `tensors`, `reset`, `check` and `close` for what it holds. Its op must refuse a batch that
    it was not planned for, see `assert_planned`.

    Args:
        name, capabilities, ops: the backend's.
        specs: what the layers ask for.
        limits: the largest batches to come.
        device: where they run.

    Attributes:
        name, capabilities, ops, limits, device: as given.
        planned: the batch that `plan` was called with last; None before.

    Raises:
        BackendUnavailableError: the backend can't run one of the specs, or can't be captured as
            ``limits.graphs`` asks; with all reasons.
        NotCopyableError: it is copied or pickled; layers that have one open another for their copy.
    """

    _BOUND = "what it keeps for its backend is in this process's memory"
    _ADVICE = "open another with open_session(session.specs, session.limits, session.name)"

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        ops: BackendOps,
        specs: Sequence[AttentionSpec],
        limits: Limits,
        device: torch.device,
    ) -> None:
        self.name, self.capabilities, self.ops = name, capabilities, ops
        self.limits, self.device = limits, device
        self.planned: PlannedBatch | None = None
        self._host: HostLengths | None = None
        # Those that were planned: without `plans_every_step` such a plan lasts.
        self._shapes: set[tuple[int, ...]] = set()
        self._workspaces: dict[AttentionSpec, dict[str, Tensor]] = {}
        with torch.inference_mode(False):  # an inference tensor could not be written under no_grad later
            self._open(specs)
        if limits.graphs > capabilities.graph_support:
            declared = capabilities.graph_support.name
            raise unable(name, f"graph support {declared} is less than {limits.graphs.name}")
        for spec in specs:
            self.workspace(spec)

    def __repr__(self) -> str:
        specs = counted(len(self._workspaces), "layer spec")
        return one_line(self, repr(self.name), specs, f"device={str(self.device)!r}")

    # ---------------------------------------------------------------------------------------- a backend's own
    def _open(self, specs: Sequence[AttentionSpec]) -> None:
        """Make what all layers share; ``specs`` are those known at the start. `Limits.need` gives the limits
        that it takes."""

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        """The tensors that the op takes beyond the batch, by argument name, for layers of ``spec``."""
        return {}

    def _plan(self, batch: PlannedBatch, host: HostLengths | None) -> None:
        """Make the plan of ``batch`` for every spec so far, in the tensors that the ops were given: they
        never move."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a captured step may read or write, by name: a runner checks that it stays where
        it is."""
        return {}

    def reset(self) -> None:
        """Reset the workspace, on the current stream, after calls that may have been interrupted. Does not
        wait for the device."""

    def check(self, launch: str) -> None:
        """In debug mode, after ``launch`` (a name for the error): waits for it.

        Raises:
            TorchpagedError: what the launch left shows that its results are wrong.
        """

    def close(self) -> None:
        """Give back what the session holds; it is not used afterwards."""
        self._workspaces, self.planned = {}, None

    # --------------------------------------------------------------------------------------- the same for all
    @property
    def plans(self) -> bool:
        """Whether eager steps and captures need `plan`."""
        return self.capabilities.planning > Planning.NEVER

    @property
    def plans_every_step(self) -> bool:
        """Whether every replay needs `plan` too."""
        return self.capabilities.planning == Planning.EVERY_STEP

    def require_graphs(self, max_query_len: int) -> None:
        """For a graph runner, at its construction: captured steps of up to so many query tokens per request,
        whose lengths change between replays, are within the declared graph support.

        Raises:
            BackendUnavailableError: they are not.
        """
        needed = GraphSupport.SINGLE_TOKEN_DECODE if max_query_len == 1 else GraphSupport.ALWAYS
        if needed > self.capabilities.graph_support:
            steps = f"steps of up to {max_query_len} tokens per request"
            what = "decode steps" if max_query_len == 1 else steps
            declared = self.capabilities.graph_support.name
            lacking = f"graph support {declared} is less than {needed.name}, which graphs of {what} need"
            raise unable(self.name, lacking)

    def planning_of(self, max_query_len: int) -> Planning:
        """When `plan` must run for batches of queries of at most that many tokens; less than the backend
        declares where such batches need none of what it plans."""
        return self.capabilities.planning

    @property
    def plans_every_decode(self) -> bool:
        """`plans_every_step`, for steps of one query token per request."""
        return self.planning_of(1) == Planning.EVERY_STEP

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """What its layers are known to ask for, each once."""
        return tuple(self._workspaces)

    def workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        """What a layer passes to ``ops.paged_attention`` besides the batch: keyword arguments, tensors that
        stay where they are.

        Call it at construction, or eagerly where a new kind of layer appears; the same for equal specs.

        Raises:
            BackendUnavailableError: the backend can't run ``spec``; with all reasons.
        """
        if spec not in self._workspaces:
            reasons = self.capabilities.reject(spec)
            if spec.device.type != self.device.type:
                reasons.append(f"the session was opened on {self.device}, the attention is on {spec.device}")
            if reasons:
                raise unable(self.name, *reasons)
            with torch.inference_mode(False):
                self._workspaces[spec] = self._make_workspace(spec)
            self._shapes.clear()  # their plans don't know it
            if self.planned is not None:
                self.plan(self.planned, self._host)
        return self._workspaces[spec]

    def workspace_for(self, workspace: dict[str, Tensor], num_reqs: int) -> dict[str, Tensor]:
        """What an eager call of ``num_reqs`` requests passes in ``workspace``'s place; for callers that know
        nothing of streams and limits."""
        return workspace

    def plan(self, batch: PlannedBatch, host: HostLengths | None = None) -> None:
        """Plan the next step. Outside traces and captures, on the stream that the step runs on; nothing to do
        unless `plans`.

        A plan that depends on shapes alone lasts: graphs of several shapes stay right, whichever was
        planned last.

        Args:
            batch: the metadata that the step will be given, with this step's lengths.
            host: its lengths, where the host knows them; with ``TORCHPAGED_CHECK=1`` they are compared with
                the batch's, which waits for the device.

        Raises:
            ArgumentError: the batch is over the limits, or ``host`` was seen to tell other lengths than it
                has.
        """
        if self.plans:
            self.limits.check(batch.seq_lens.shape[0], max_blocks_per_req=batch.block_table.shape[1])
            if host is not None and checks_device_values():
                _require_same(batch, host)
            self.planned = None
            self._plan(batch, host)
            self.planned, self._host = batch, host
            self._shapes.add(_shape(batch))

    def require(self, batch: PlannedBatch, num_tokens: int = 0) -> None:
        """Eagerly, before a step: ``batch`` is within the limits and was planned, if it has to be. Host
        facts only.

        Args:
            batch: the step's metadata.
            num_tokens: its query tokens, padding included; 0 = not said.

        Raises:
            ArgumentError: it is over the limits.
            PlanError: `plan` was not called with it.
        """
        self.limits.check(batch.seq_lens.shape[0], num_tokens)
        planning = self.planning_of(batch.max_query_len)
        lasts = planning < Planning.EVERY_STEP and _shape(batch) in self._shapes
        if planning > Planning.NEVER and self.planned is not batch and not lasts:
            raise PlanError(
                f"metadata: expected a batch that was planned, got one that backend {self.name!r} knows "
                "nothing of; call session.plan(metadata) before the step, outside compiled code and graphs"
            )


def _require_same(batch: PlannedBatch, host: HostLengths) -> None:
    """Refuse lengths of the host that are not the batch's; reads the device."""
    for name, told, lengths in (
        ("seq_lens", host.seq_lens, batch.seq_lens),
        ("query_lens", host.query_lens, batch.query_start_loc.diff()),
    ):
        if list(told) != lengths.tolist():
            raise ArgumentError(f"host.{name}", f"{lengths.tolist()}, as the batch says", str(list(told)))


def _shape(batch: PlannedBatch) -> tuple[int, ...]:
    return (*batch.block_table.shape, batch.max_query_len)


def assert_planned(planned: Sequence[Tensor], live: Sequence[Tensor]) -> None:
    """For the op of a backend that plans: the plan was made for this batch. On the device, so that a replay
    without a plan raises, too.

    Args:
        planned: copies of what the plan was made from, such as lengths and block table: as large as
            the limits.
        live: the same of the call, which may be smaller.

    Raises:
        RuntimeError: they differ; on a GPU a device-side assertion.
    """
    same = [
        (old[tuple(slice(size) for size in new.shape)] == new).all()
        for old, new in zip(planned, live, strict=True)
    ]
    # torch has no public asynchronous assertion; the tests of a forgotten plan notice if this one goes.
    torch._assert_async(
        torch.stack(same).all(),
        (
            "plan: expected one for this batch, got one for another; call session.plan(metadata) before "
            "each step"
        ),
    )
