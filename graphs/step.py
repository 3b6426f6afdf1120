"""What runners are given: a decode step, one copy of it per bucket for the compiler, what its backend keeps,
the ranges around it, how it is captured, and the addresses that its graphs rely on.

steps = decode_steps(step, [1, 2, 4], compile=True, capture=capture)
logits = steps(4)(input_ids, metadata)"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from torchpaged.compile.compile_cache import with_own_code
from torchpaged.custom_ops.checks import check_callable, switch
from torchpaged.custom_ops.errors import ArgumentError, CaptureError
from torchpaged.graphs.capture import CaptureBackend, CudaCapture, EagerCapture, TapeCapture
from torchpaged.metadata import AttentionMetadata, HostLengths

Watch = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]


class CapturedAddresses:
    """Addresses per bucket, as captured.

    Args:
        static: gives the tensors of the runner's own buffers or rows, by name.
        watch: further ones, by name; or a function that gives them, so that a replaced attribute is
            noticed too.
    """

    def __init__(self, static: Callable[[], Mapping[str, Tensor]], watch: Watch | None) -> None:
        self._static = static
        self._watch = watch if callable(watch) else dict(watch or {})
        self._captured: dict[int, dict[str, int]] = {}

    def note(self, bucket: int) -> None:
        """Remember where everything is now."""
        self._captured[bucket] = {name: tensor.data_ptr() for name, tensor in self._fixed().items()}

    def check(self, bucket: int) -> None:
        """Compare with `note`.

        Raises:
            CaptureError: a tensor moved; by name.
        """
        now = self._fixed()
        for name, address in self._captured[bucket].items():
            if name not in now or now[name].data_ptr() != address:
                found = f"{now[name].data_ptr():#x}" if name in now else "nothing of that name"
                raise CaptureError(
                    f"{name}: expected at {address:#x}, where it was captured, got {found}; "
                    "captured tensors must be updated in place, never replaced"
                )

    def _fixed(self) -> dict[str, Tensor]:
        return {**self._static(), **(self._watch() if callable(self._watch) else self._watch)}


Step = Callable[[Tensor, AttentionMetadata], Tensor]
Ranges = Callable[..., AbstractContextManager[None]]

_NO_RANGE: AbstractContextManager[None] = nullcontext()


class StepSession(Protocol):
    """What a runner drives of the session that its step's layers share: a `torchpaged.Session`, or anything
    like it. The bodies here are those of `NoSession`."""

    @property
    def plans(self) -> bool:
        """Whether a capture needs `plan`."""
        return False

    @property
    def plans_every_step(self) -> bool:
        """Whether every replay needs `plan`."""
        return False

    @property
    def plans_every_decode(self) -> bool:
        """Whether a replay of one query token per request does."""
        return False

    def require_graphs(self, max_query_len: int) -> None:
        """Raise if graphs of steps with up to so many query tokens per request are beyond its backend."""
        return None

    def plan(self, batch: AttentionMetadata, host: HostLengths | None = None) -> None:
        """Plan the next step."""
        return None

    def tensors(self) -> Mapping[str, Tensor]:
        """What a captured step reads or writes, by name."""
        return {}

    def reset(self) -> None:
        """Forget what an interrupted step left behind."""
        return None

    def check(self, launch: str) -> None:
        """In debug mode, behind ``launch``: raise if its results are wrong."""
        return None


class NoSession(StepSession):
    """The session of steps that keep nothing, or whose layers have sessions of their own that need
    no plan."""


def no_range(name: str, **payload: object) -> AbstractContextManager[None]:
    """Ranges that are off: one object, which does nothing."""
    return _NO_RANGE


def decode_steps(
    step: Step, buckets: Sequence[int], compile: bool, capture: str | CaptureBackend
) -> Callable[[int], Step]:
    """``step`` for each bucket.

    Args:
        step: ``step(input_ids, metadata)``.
        buckets: batch sizes.
        compile: run it through ``torch.compile(fullgraph=True)``. Shapes are static per bucket: one compile a
            bucket, none per length, and kernels tuned to the size. (One dynamic compile for all would fail on
            models that branch on sizes.)
        capture: what it will be captured with.

    Raises:
        ArgumentError: compiled steps on a tape.
    """
    switch("compile", compile)
    if not compile:
        return lambda bucket: step
    if isinstance(capture, TapeCapture):
        raise ArgumentError(
            "compile",
            "False with a TapeCapture",
            "True",
            "the tape can't see the kernels that Inductor generates",
        )

    def call(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        return step(input_ids, metadata)

    # Code of its own for each bucket, so that buckets don't share the compiler's recompile limit.
    compiled: dict[int, Step] = {
        n: torch.compile(with_own_code(call, f"decode_{n}"), fullgraph=True, dynamic=False) for n in buckets
    }
    return compiled.__getitem__


Progress = Callable[[int, int, str], None]


class CaptureOptions(TypedDict, total=False):
    """What runners hand on to `BucketedGraphs`, which says what it means."""

    capture: str | CaptureBackend
    warmup_iters: int
    warms_each: bool
    progress: Progress | None
    watch: Watch | None
    debug: bool | None
    ranges: Ranges | None
    session: StepSession | None


def capture_backend_for(capture: str | CaptureBackend, device: torch.device) -> CaptureBackend:
    """``capture``, or for "auto" CUDA graphs on a GPU and an eager capture elsewhere;
    raises `ArgumentError`."""
    check_capture(capture)
    if not isinstance(capture, str):
        return capture
    return CudaCapture(device) if device.type == "cuda" else EagerCapture()


def check_capture(capture: str | CaptureBackend) -> None:
    """Refuse what is neither "auto" nor a `CaptureBackend`."""
    if capture != "auto" and (isinstance(capture, type) or not isinstance(capture, CaptureBackend)):
        raise ArgumentError("capture", "'auto' or a CaptureBackend", repr(capture))


def check_progress(progress: Progress | None) -> None:
    """Refuse what can't be called."""
    check_callable("progress", progress, "progress(done, total, text)")


class StaticInputs(Protocol):
    """Tensors that never move, of up to as many rows as the largest bucket."""

    def tensors(self) -> Mapping[str, Tensor]:
        """All of them by name."""

    def view(self, bucket: int, /) -> tuple[Any, ...]:
        """The arguments of a step over ``bucket`` rows: slices, no copies. The second one is the batch, which
        a session plans."""

    def padding(self, bucket: int, /) -> AbstractContextManager[None]:
        """The first ``bucket`` rows are padding inside the block: a step over them writes nothing into
        a cache."""

    def reset(self) -> None:
        """Wait for the device, and make host and device agree, after a capture or replay that failed or
        was interrupted."""
