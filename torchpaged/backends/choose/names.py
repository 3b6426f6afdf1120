"""The backends by name, and which name was asked for.

Order of asking: an explicit argument, then ``with torchpaged.use_backend(name)``, then
``TORCHPAGED_BACKEND``, then "auto". A name may be a `Route`, one for each part of a batch.
"""

import contextlib
import contextvars
import importlib
from collections.abc import Iterator
from types import NoneType

from torchpaged.backends.base import Backend
from torchpaged.backends.choose.route import Route, is_route, parse_route, route_backend
from torchpaged.custom_ops import BackendOps, variables
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError

#: Preference of the automatic choice behind the order of the device; registered ones go before that.
AUTOMATIC = ["cuda", "triton", "cpu", "torch_sdpa", "flex", "reference"]
_NAMED = ("flash_attn", "flash_attn_4", "flashinfer", "flashinfer_gdn", "flashinfer_xqa", "torch_varlen")
#: Backend name -> module with a ``BACKEND``; `register_backend` adds to it.
MODULES = {name: f"torchpaged.backends.{name}" for name in (*AUTOMATIC, *_NAMED)}
REGISTERED: dict[str, Backend] = {}
# Of MODULES and of routes, those that were asked for: for a trace, which imports nothing.
LOADED: dict[str, Backend] = {}
#: What others call what a backend here is made of.
ALIASES = {
    "FLASHINFER": "flashinfer",
    "FLASH_ATTN": "flash_attn",
    "FLEX_ATTENTION": "flex",
    "TORCH_SDPA": "torch_sdpa",
    "TRITON_ATTN": "triton",
}
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("torchpaged_backend", default=None)


def register_backend(backend: Backend, *, automatic: bool = False) -> None:
    """Make ``backend`` selectable by its name, in this process; one of the same name is replaced.

    Args:
        backend: with a name that no built-in one has, without "=", "," and spaces.
        automatic: put it before the built-in ones in the automatic choice.

    Raises:
        ArgumentError: such a name.
    """
    if backend.name in (*MODULES, *ALIASES, "auto", "default", "meta"):
        raise ArgumentError("backend.name", "a new name", f"{backend.name!r}, which is built in")
    if set(backend.name) & set("=, "):
        raise ArgumentError("backend.name", "a name without '=', ',' and spaces", repr(backend.name))
    REGISTERED[backend.name] = backend
    if automatic and backend.name not in AUTOMATIC:
        AUTOMATIC.insert(0, backend.name)


def list_backends() -> list[str]:
    """Names of all backends, in the order of the automatic choice, then the others."""
    return [*AUTOMATIC, *(name for name in (*MODULES, *REGISTERED) if name not in AUTOMATIC)]


def get_backend(name: str | Route) -> Backend:
    """The backend of that name, one of `list_backends` or of `ALIASES`, whether or not it can run here; or
    the one of a route.

    Raises:
        BackendUnavailableError: no backend has that name.
        ArgumentError: what is written as a route is none.
    """
    if not isinstance(name, (str, Route)):
        raise ArgumentError("backend", 'a name, a Route or "auto"', repr(name))
    if isinstance(name, Route) or is_route(name):
        route = _own_route(name)
        if route.decode == route.prefill:
            return get_backend(route.decode)
        made = LOADED[str(route)] = route_backend(get_backend(route.decode), get_backend(route.prefill))
        return made
    if name in REGISTERED:
        return REGISTERED[name]
    name = _own_name(name)
    if name not in MODULES:
        raise BackendUnavailableError(
            f"backend: expected one of auto, {', '.join(list_backends())}, got {name!r}"
        )
    if name not in LOADED:
        LOADED[name] = importlib.import_module(MODULES[name]).BACKEND
    return LOADED[name]


@contextlib.contextmanager
def use_backend(name: str | Route | None) -> Iterator[None]:
    """Within the block, whatever is built without an explicit backend uses ``name`` (None
    or "auto" lifts an outer choice).

    >>> with use_backend("reference"):
    ...     PagedAttention(8, 64).choice.name
    'reference'

    It holds for this thread, or this task of asyncio, alone: a thread that is started inside chooses anew.
    """
    named = "auto" if name is None else name
    if named != "auto":
        get_backend(named)
    token = _forced.set(str(named))
    try:
        yield
    finally:
        _forced.reset(token)


def requested(backend: str | Route | None) -> tuple[str, str]:
    """The name asked for, and where it was said."""
    if not isinstance(backend, (str, Route, NoneType)):
        raise ArgumentError("backend", 'a name, a Route or "auto"', repr(backend))
    if backend is not None and backend != "auto":
        return _own_name(str(backend)), f"backend={str(backend)!r} was given"
    forced = _forced.get()
    if forced is not None:
        return _own_name(forced), f"torchpaged.use_backend({forced!r}) is active"
    variable = variables.get("TORCHPAGED_BACKEND")
    return _own_name(variable), f"TORCHPAGED_BACKEND={variable} is set"


def _own_name(name: str) -> str:
    """Of a backend that was asked for by the name that others have for it; a registered one keeps its own."""
    if is_route(name):
        return str(_own_route(name))
    return name if name in REGISTERED else ALIASES.get(name, name)


def _own_route(route: str | Route) -> Route:
    asked = parse_route(route) if isinstance(route, str) else route
    return Route(_own_name(asked.decode), _own_name(asked.prefill))


def asked_backend(name: str, asker: str) -> Backend:
    """`get_backend` of what `requested` gives; the message of an unknown name says who asked."""
    try:
        return get_backend(name)
    except BackendUnavailableError as error:
        raise BackendUnavailableError(f"{error}; {asker}") from None


def check_backend(backend: str | Route | None) -> None:
    """Refuse what was asked for if no backend has that name; whether it can run is asked with the
    attention."""
    name, asker = requested(backend)
    if name != "auto":
        asked_backend(name, asker)


def requested_name(device_type: str, backend: str | Route | None = None) -> str:
    """The backend that was asked for by name, or "default".

    Raises:
        BackendUnavailableError: it is not usable here, or doesn't know the device; with all reasons.
    """
    name, asker = requested(backend)
    if name == "auto" or device_type == "meta":
        return "default"
    found = asked_backend(name, asker)
    missing, known = found.unavailable(), found.capabilities.device_types
    reasons = [missing] if missing else []
    if device_type not in known:
        reasons.append(f"device {device_type} is not one of {', '.join(known)}")
    if reasons:
        raise BackendUnavailableError(f"backend {name!r} ({asker}) cannot run this: {'; '.join(reasons)}")
    return name


def backends_with(ops: BackendOps) -> list[Backend]:
    """Every backend whose handles are ``ops``; where they are no backend's own object, such as in a trace:
    every one with equal handles."""
    routes = [backend for name, backend in list(LOADED.items()) if is_route(name)]
    known = [*REGISTERED.values(), *map(get_backend, MODULES), *routes]
    same = [backend for backend in known if backend.ops is ops]
    return same or [backend for backend in known if backend.ops == ops]
