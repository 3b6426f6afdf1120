"""How a step becomes a graph: on CUDA for real, on a CPU by running it again, or on a tape that behaves as
CUDA graphs do.

A captured step keeps reading and writing the same storages. Python is not run again at replay (except by
`EagerCapture`), so that host values are frozen; ops that read a device value on the host cannot be captured.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from torchpaged.custom_ops.checks import capturing
from torchpaged.custom_ops.errors import CaptureError

Launch = Callable[[], Tensor]


class Captured(Protocol):
    """One captured step."""

    output: Tensor

    def replay(self) -> None:
        """Run it again; ``output`` holds the result."""


@runtime_checkable
class CaptureBackend(Protocol):
    """Makes `Captured` steps that share one memory pool."""

    def new_pool(self) -> Any:
        """A memory pool for several captures."""

    def warmup(self, step: Launch, iterations: int) -> None:
        """Run the step a few times, so that compilation and lazy initialisation are over before
        the capture."""

    def capture(self, step: Launch, pool: Any) -> Captured:
        """Capture one run."""


class _CudaCaptured:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph, self.output = graph, output
        self.replay = graph.replay


class CudaCapture:
    """CUDA graphs, captured on one side stream into one pool.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device)

    def new_pool(self) -> Any:
        """See `CaptureBackend`."""
        return torch.cuda.graph_pool_handle()

    def warmup(self, step: Launch, iterations: int) -> None:
        """See `CaptureBackend`."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(iterations):
                    step()
        finally:  # whatever ended it, kernels may still run there, and the caller puts back what they write
            current.wait_stream(self._stream)

    def capture(self, step: Launch, pool: Any) -> Captured:
        """See `CaptureBackend`."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        cause: BaseException | None = None
        try:
            with (
                # The next one leaves its stream current where it ends in an error.
                torch.cuda.stream(current),
                # "thread_local" lets other threads allocate meanwhile.
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    output = step()
                except BaseException as error:
                    cause = error
                    raise
        except BaseException as error:
            self._after_failure(pool)
            if cause is not None and not isinstance(cause, Exception) and error is not cause:
                # ending the capture failed as well: that must not turn Ctrl-C into an error of the capture
                raise cause from error
            raise
        return _CudaCaptured(graph, output)

    def _after_failure(self, pool: Any) -> None:
        """Repair the state that torch leaves behind a capture that ended in an error."""
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        # The default generator's state says that it is captured; a clone of its state does not.
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        # Up to torch 2.12 (pytorch#180395) so does the allocator's: memory that another stream used,
        # and empty_cache(), would free nothing any more. There is no public call; this one raises where
        # nothing is left to end.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, pool)


class _EagerCaptured:
    def __init__(self, step: Launch) -> None:
        self._step, self.output = step, step()

    def replay(self) -> None:
        with torch.inference_mode():
            self.output = self._step()


class HostCapture:
    """What needs no memory pool and no side stream."""

    def new_pool(self) -> Any:
        """See `CaptureBackend`."""
        return None

    def warmup(self, step: Launch, iterations: int) -> None:
        """See `CaptureBackend`."""
        for _ in range(iterations):
            step()


class EagerCapture(HostCapture):
    """No graph: replay calls the step again. Buckets, padding and buffers are exercised as on a GPU."""

    def capture(self, step: Launch, pool: Any) -> Captured:
        """See `CaptureBackend`."""
        return _EagerCaptured(step)


# Ops that hand a device value, or a size that depends on one, to the host: illegal while a CUDA graph is
# captured. Under inference mode composite ops arrive whole, hence the likes of `item` next to what they
# decompose into.
_SYNCHRONISING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::equal",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::_unique",
    "aten::_unique2",
    "aten::argwhere",
    "aten::bincount",
}


def synchronises(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op hands a device value to the host."""
    name = func._schema.name
    if name in _SYNCHRONISING or (name == "aten::repeat_interleave" and "Tensor" in func._overloadname):
        return True
    # A boolean index counts its true values.
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        return any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1] or ()
        )
    return False


class _Tape(TorchDispatchMode):
    """Records every op that runs below it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if synchronises(func, args):
            raise CaptureError(f"{func} reads a device value on the host: illegal while a graph is captured")
        out = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, out))
        return out


class _TapeCaptured:
    def __init__(self, tape: _Tape, output: Tensor) -> None:
        self._ops, self.output = tape.ops, output

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, out in self._ops:
                new = func(*args, **kwargs)  # views too: ops such as `to` count as views and yet may copy
                for old, fresh in zip(tree_flatten(out)[0], tree_flatten(new)[0], strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != fresh.data_ptr():
                        old.copy_(fresh)


class TapeCapture(HostCapture):
    """CUDA-graph semantics on a CPU, for tests: Python does not run at replay, scalars are frozen,
    storages stay.

    For uncompiled steps only: kernels that Inductor generates bypass the dispatcher and would be missed (the
    runner refuses the pair). ``.tolist()``, ``.numpy()`` and ``.cpu()`` of a CPU tensor never reach the
    dispatcher and are not noticed.
    """

    def capture(self, step: Launch, pool: Any) -> Captured:
        """See `CaptureBackend`."""
        with capturing(), _Tape() as tape:
            output = step()
        return _TapeCaptured(tape, output)
