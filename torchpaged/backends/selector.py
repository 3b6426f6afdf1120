"""Which backend runs, and why.

Order of choice: an explicit argument, then ``with torchpaged.use_backend(name)``, then
``TORCHPAGED_BACKEND``, then the first usable one of `AUTOMATIC`. A backend that was named is used or refused
with every reason; it is never swapped for another.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchpaged.backends.base import Backend
from torchpaged.backends.session import Limits, Session
from torchpaged.backends.spec import AttentionSpec
from torchpaged.custom_ops import BackendOps, variables
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError

#: Preference of the automatic choice.
AUTOMATIC = ["cuda", "triton", "cpu", "torch_sdpa", "flex", "reference"]
#: Backend name -> module with a ``BACKEND``; `register_backend` adds to it.
_MODULES = {
    name: f"torchpaged.backends.{name}" for name in (*AUTOMATIC, "flash_attn", "flashinfer", "torch_varlen")
}
_REGISTERED: dict[str, Backend] = {}
_LOADED: dict[str, Backend] = {}  # of _MODULES, those that were asked for: for a trace, which imports nothing
#: Devices on which a backend is chosen without being named, where these are not all of its own, and why.
_AUTOMATIC_ON = {
    "torch_sdpa": ("cuda", "it gathers as many blocks as the block table is wide"),
}
#: What others call what a backend here is made of.
ALIASES = {
    "FLASHINFER": "flashinfer",
    "FLASH_ATTN": "flash_attn",
    "FLEX_ATTENTION": "flex",
    "TORCH_SDPA": "torch_sdpa",
    "TRITON_ATTN": "triton",
}
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("torchpaged_backend", default=None)


@dataclass(frozen=True)
class Choice:
    """The outcome of a selection: ``name``, ``reason`` in words, and every other backend's ``rejected``
    reasons."""

    name: str
    reason: str
    rejected: dict[str, list[str]] = field(default_factory=dict)

    @property
    def backend(self) -> Backend:
        """The chosen backend."""
        return get_backend(self.name)


def register_backend(backend: Backend, *, automatic: bool = False) -> None:
    """Make ``backend`` selectable by its name; ``automatic`` puts it before the built-in ones in the
    automatic choice."""
    if backend.name in (*_MODULES, *ALIASES, "auto", "default", "meta"):
        raise ValueError(f"backend.name: expected a new name, got {backend.name!r}, which is built in")
    _REGISTERED[backend.name] = backend
    if automatic and backend.name not in AUTOMATIC:
        AUTOMATIC.insert(0, backend.name)


def list_backends() -> list[str]:
    """Names of all backends, in the order of the automatic choice, then the others."""
    return [*AUTOMATIC, *(name for name in (*_MODULES, *_REGISTERED) if name not in AUTOMATIC)]


def get_backend(name: str) -> Backend:
    """The backend of that name, one of `list_backends` or of `ALIASES`, whether or not it can run here.

    Raises:
        BackendUnavailableError: no backend has that name.
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    name = _own_name(name)
    if name not in _MODULES:
        raise BackendUnavailableError(
            f"backend: expected one of auto, {', '.join(list_backends())}, got {name!r}"
        )
    if name not in _LOADED:
        _LOADED[name] = importlib.import_module(_MODULES[name]).BACKEND
    return _LOADED[name]


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, whatever is built without an explicit backend uses ``name`` ("auto" lifts an outer
    choice).

    It holds for this thread, or this task of asyncio, alone: a thread that is started inside chooses anew.
    """
    if name != "auto":
        get_backend(name)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def requested(backend: str | None) -> tuple[str, str]:
    """The name asked for and who asked."""
    if backend not in (None, "auto"):
        assert backend is not None
        return _own_name(backend), f"backend={backend!r} was given"
    forced = _forced.get()
    if forced is not None:
        return _own_name(forced), f"torchpaged.use_backend({forced!r}) is active"
    variable = variables.get("TORCHPAGED_BACKEND")
    return _own_name(variable), f"TORCHPAGED_BACKEND={variable} is set"


def _own_name(name: str) -> str:
    """Of a backend that was asked for by the name that others have for it; a registered one keeps its own."""
    return name if name in _REGISTERED else ALIASES.get(name, name)


def select_backend(spec: AttentionSpec | Sequence[AttentionSpec], backend: str | None = None) -> Choice:
    """Choose the backend for ``spec``. Call it at construction, never inside a traced call.

    Args:
        spec: the attention to run; several, such as those of a model's layers: one backend that can run
            them all.
        backend: a name, or None / "auto".

    Raises:
        ArgumentError: an empty list.
        BackendUnavailableError: the named backend can't run ``spec``, or none can; with all reasons.
    """
    specs = [spec] if isinstance(spec, AttentionSpec) else list(spec)
    if not specs:
        raise ArgumentError("spec", "at least one AttentionSpec", "none")
    name, asker = requested(backend)
    rejected: dict[str, list[str]] = {}
    if name != "auto":
        reasons = _reject(get_backend(name), specs)
        if reasons:
            raise BackendUnavailableError(
                f"backend {name!r} ({asker}) cannot run this attention: {'; '.join(reasons)}"
            )
        return Choice(name, asker + _routes(get_backend(name), specs))
    for candidate in AUTOMATIC:
        reasons = _by_name_alone(candidate, specs) + _reject(get_backend(candidate), specs)
        if not reasons:
            place = "first choice" if not rejected else f"after {', '.join(rejected)}"
            reason = f"automatic for {specs[0].device.type} ({place})" + _routes(
                get_backend(candidate), specs
            )
            return Choice(candidate, reason, rejected)
        rejected[candidate] = reasons
    lines = "\n".join(f"  {candidate}: {'; '.join(reasons)}" for candidate, reasons in rejected.items())
    raise BackendUnavailableError(f"no backend can run this attention:\n{lines}")


def open_session(
    spec: AttentionSpec | Sequence[AttentionSpec], limits: Limits, backend: str | None = None
) -> Session:
    """Choose the backend for ``spec`` and open a session of it: for several layers that share one.

    Args:
        spec, backend: as in `select_backend`.
        limits: the largest batches to come.

    Raises:
        BackendUnavailableError, ArgumentError: from `select_backend` or `Backend.open`.
    """
    specs = [spec] if isinstance(spec, AttentionSpec) else list(spec)
    return select_backend(specs, backend).backend.open(specs, limits, specs[0].device)


def _routes(backend: Backend, specs: Sequence[AttentionSpec]) -> str:
    """What the backend says of the kernels that serve these, each once, as the end of a `Choice.reason`."""
    return (
        "".join(f"; {text}" for text in dict.fromkeys(backend.route(spec) for spec in specs))
        if backend.route
        else ""
    )


def _by_name_alone(name: str, specs: Sequence[AttentionSpec]) -> list[str]:
    """Why the automatic choice passes a backend over on these devices, though it may be able to run there."""
    device, why = _AUTOMATIC_ON.get(name, ("", ""))
    others = dict.fromkeys(spec.device.type for spec in specs if device and spec.device.type != device)
    if name == "flex" and not any(spec.mods or spec.batch_invariant for spec in specs):
        return ["it runs where it is named, or where score_mod, mask_mod or batch_invariant ask for it"]
    return [f"on device {other} it runs where it is named alone: {why}" for other in others]


def _reject(backend: Backend, specs: Sequence[AttentionSpec]) -> list[str]:
    """Every reason of every spec, each once."""
    return list(dict.fromkeys(reason for spec in specs for reason in backend.reject(spec)))


def backend_of(ops: BackendOps) -> Backend | None:
    """The backend whose handles ``ops`` are; None for the device's own ("default") and for handles that
    nobody registered."""
    return next((backend for backend in _all() if backend.ops is ops), None)


def backends_with(ops: BackendOps) -> list[Backend]:
    """Every backend with handles equal to ``ops``."""
    return [backend for backend in _all() if backend.ops == ops]


def _all() -> list[Backend]:
    return [*_REGISTERED.values(), *(get_backend(name) for name in _MODULES)]
