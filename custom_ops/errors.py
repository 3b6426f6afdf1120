"""Typed errors of torchpaged. Every message names the argument, what was expected, what came, and what
to do.

An error of several parts keeps them as its ``args`` and makes its message when asked. None has an
``__init__`` of its own, which a trace can't follow: one raised inside ``torch.compile(fullgraph=True)`` is
shown with its parts then. Copies and pickles keep them, too.
"""

from typing import TYPE_CHECKING, Any, NoReturn


class TorchpagedError(Exception):
    """Base class of every error that torchpaged raises on purpose."""


class ArgumentError(TorchpagedError, ValueError):
    """An argument has a wrong shape, dtype, device, layout or value. Raised before anything is written."""

    if TYPE_CHECKING:

        def __init__(self, argument: str, expected: str, got: str, fix: str = "", /) -> None: ...

    @property
    def argument(self) -> str:
        """The argument's name as the caller knows it."""
        return str(self.args[0])

    def __str__(self) -> str:
        argument, expected, got, *fix = self.args
        return "; ".join([f"{argument}: expected {expected}, got {got}", *filter(None, fix)])


class BackendUnavailableError(TorchpagedError, RuntimeError):
    """A backend was named that cannot run here, or cannot run this attention. The message lists
    every reason."""


class BlockPoolExhaustedError(TorchpagedError, RuntimeError):
    """More blocks were asked for than are free. The pool is left exactly as it was."""

    if TYPE_CHECKING:

        def __init__(self, requested: int, available: int, total: int, fix: str = "", /) -> None: ...

    @property
    def requested(self) -> int:
        """Blocks asked for."""
        return int(self.args[0])

    @property
    def available(self) -> int:
        """Blocks free at that moment."""
        return int(self.args[1])

    @property
    def total(self) -> int:
        """Blocks that can be used at all."""
        return int(self.args[2])

    def __str__(self) -> str:
        requested, available, total, *fix = self.args
        need = total - available + requested + 1  # with the null block
        free = f"free finished requests, or build the cache with num_blocks={need} or more"
        return f"num_blocks: {requested} requested, {available} free of {total} usable; " + (
            "".join(fix) or free
        )


class UnsupportedModelError(TorchpagedError, ValueError):
    """A model cannot run through torchpaged. The message names the model and the reason."""


class SemaphoreError(TorchpagedError, RuntimeError):
    """A semaphore was not zero after a launch: what that launch computed is wrong. The message says what
    to do."""


class PlanError(TorchpagedError, RuntimeError):
    """A step was to run on a backend that plans every batch, and this one was not planned. The message says
    what to do."""


class RequestError(TorchpagedError, RuntimeError):
    """One request of an engine ended without what was asked; the others are not concerned. Given with its
    last event, not raised."""

    if TYPE_CHECKING:

        def __init__(self, request_id: int, reason: str, /) -> None: ...

    @property
    def request_id(self) -> int:
        """The request."""
        return int(self.args[0])

    @property
    def reason(self) -> str:
        """What became of it."""
        return str(self.args[1])

    def __str__(self) -> str:
        return f"request {self.request_id}: {self.reason}"


class ClosedError(TorchpagedError, RuntimeError):
    """A call of an object that was closed. The message names the object."""


class NotCopyableError(TorchpagedError, TypeError):
    """An object was to be copied or pickled that can't be: it is bound to memory, graphs or a model. The
    message says what to do."""


class NotCopied:
    """Base class of objects of which neither copies nor pickles can be made."""

    #: What holds it here, and what to do instead.
    _BOUND, _ADVICE = "its graphs and buffers are places in this process's memory", "make a new one"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: for `copy` and `pickle`.

        Raises:
            NotCopyableError: always.
        """
        name = type(self).__name__
        raise NotCopyableError(f"a {name} can't be copied or pickled: {self._BOUND}; {self._ADVICE}")


class CaptureError(TorchpagedError, RuntimeError):
    """A step could not be captured into a graph, or a captured graph was replayed against moved memory."""
