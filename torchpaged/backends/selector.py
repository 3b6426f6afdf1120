"""Which backend runs, and why.

Order of choice: an explicit argument, then ``with torchpaged.use_backend(name)``, then
``TORCHPAGED_BACKEND``, then the first usable one in the order of the device: what `torchpaged tune` measured
there, else the table of platforms.py, then `AUTOMATIC`. A backend that was named is used or refused with
every reason; it is never swapped for another. A `Route` names one for each part of a batch.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Planning
from torchpaged.backends.choice_log import logged
from torchpaged.backends.ranking import Ranking, ranking_of
from torchpaged.backends.route import Route, is_route, parse_route
from torchpaged.backends.routed import route_backend, route_of
from torchpaged.backends.session import Limits, Session
from torchpaged.backends.spec import AttentionSpec
from torchpaged.custom_ops import BackendOps, variables
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError

#: Preference of the automatic choice behind the order of the device; registered ones go before that.
AUTOMATIC = ["cuda", "triton", "cpu", "torch_sdpa", "flex", "reference"]
#: Backend name -> module with a ``BACKEND``; `register_backend` adds to it.
_MODULES = {
    name: f"torchpaged.backends.{name}"
    for name in (*AUTOMATIC, "flash_attn", "flash_attn_4", "flashinfer", "flashinfer_xqa", "torch_varlen")
}
_REGISTERED: dict[str, Backend] = {}
# Of _MODULES and of routes, those that were asked for: for a trace, which imports nothing.
_LOADED: dict[str, Backend] = {}
_PARTS: dict[str, tuple[Backend, Backend]] = {}  # of routes: what they were made of
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
    """The outcome of a selection.

    Attributes:
        name: of the backend.
        route: which backend runs which part of a batch; both are ``name`` unless that is a route.
        reason: in words.
        rejected: of every backend that stood before it in the automatic choice, all reasons.
    """

    name: str
    route: Route
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
    if set(backend.name) & set("=, "):
        raise ValueError(f"backend.name: expected a name without '=', ',' and spaces, got {backend.name!r}")
    _REGISTERED[backend.name] = backend
    if automatic and backend.name not in AUTOMATIC:
        AUTOMATIC.insert(0, backend.name)


def list_backends() -> list[str]:
    """Names of all backends, in the order of the automatic choice, then the others."""
    return [*AUTOMATIC, *(name for name in (*_MODULES, *_REGISTERED) if name not in AUTOMATIC)]


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
        return _routed(_own_route(name))
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


def _routed(route: Route) -> Backend:
    """One backend per route, as long as its parts are the same."""
    if route.decode == route.prefill:
        return get_backend(route.decode)
    parts, name = (get_backend(route.decode), get_backend(route.prefill)), str(route)
    known = _PARTS.get(name)
    if known is None or any(a is not b for a, b in zip(known, parts, strict=True)):
        _PARTS[name], _LOADED[name] = parts, route_backend(*parts)
    return _LOADED[name]


@contextlib.contextmanager
def use_backend(name: str | Route) -> Iterator[None]:
    """Within the block, whatever is built without an explicit backend uses ``name`` ("auto" lifts an outer
    choice).

    It holds for this thread, or this task of asyncio, alone: a thread that is started inside chooses anew.
    """
    if name != "auto":
        get_backend(name)
    token = _forced.set(str(name))
    try:
        yield
    finally:
        _forced.reset(token)


def requested(backend: str | Route | None) -> tuple[str, str]:
    """The name asked for and who asked."""
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
    return name if name in _REGISTERED else ALIASES.get(name, name)


def _own_route(route: str | Route) -> Route:
    asked = parse_route(route) if isinstance(route, str) else route
    return Route(_own_name(asked.decode), _own_name(asked.prefill))


def ranking(device: torch.device) -> Ranking:
    """The order of the automatic choice on ``device``: registered backends, those that a measurement or the
    table names for it, the rest of `AUTOMATIC`.

    Warns:
        TunedFileWarning: a measurement that can't be used.
    """
    return ranking_of(device, tuple(AUTOMATIC), tuple(_MODULES), tuple(_REGISTERED))


def select_backend(
    spec: AttentionSpec | Sequence[AttentionSpec], backend: str | Route | None = None, *, plans: bool = False
) -> Choice:
    """Choose the backend for ``spec``. Call it at construction, never inside a traced call.

    Args:
        spec: the attention to run; several, such as those of a model's layers: one backend that can run
            them all.
        backend: a name, a route or its text, or None / "auto".
        plans: whether the caller opens a session with limits and plans each batch. If not, the automatic
            choice leaves out backends that need that.

    Raises:
        ArgumentError: an empty list, or a route that is none.
        BackendUnavailableError: the named backend can't run ``spec``, or none can; with all reasons.
    """
    specs = [spec] if isinstance(spec, AttentionSpec) else list(spec)
    if not specs:
        raise ArgumentError("spec", "at least one AttentionSpec", "none")
    name, asker = requested(backend)
    if name == "auto":
        choice = _automatic(specs, plans)
        logged(choice.name, choice.reason, specs)
        return choice
    found = get_backend(name)
    reasons = _reject(found, specs)
    if reasons:
        raise BackendUnavailableError(
            f"backend {name!r} ({asker}) cannot run this attention: {'; '.join(reasons)}"
        )
    choice = Choice(name, route_of(found), asker + _routes(found, specs))
    logged(choice.name, choice.reason, specs)
    return choice


def _automatic(specs: Sequence[AttentionSpec], plans: bool) -> Choice:
    order = ranking(specs[0].device)
    rejected: dict[str, list[str]] = {}

    def first(candidates: tuple[str, ...], part: Sequence[AttentionSpec]) -> str | None:
        for name in candidates:
            why = [] if name in order.preferred else _by_name_alone(name, specs)
            why += _not_planned(name, plans) + _reject(get_backend(name), part)
            if not why:
                return name
            rejected[name] = why
        return None

    prefill = first(order.prefill, specs)
    only_decodes = all(spec.max_query_len == 1 for spec in specs)
    if only_decodes or order.decode != order.prefill:
        decode = first(order.decode, [replace(spec, max_query_len=1) for spec in specs])
    else:
        decode = prefill
    if only_decodes:
        prefill = decode
    if decode is None or prefill is None:
        lines = "\n".join(f"  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items())
        raise BackendUnavailableError(f"no backend can run this attention:\n{lines}")
    chosen = get_backend(Route(decode, prefill))
    if _reject(chosen, specs):  # such as graphs of more than the decode part
        chosen = get_backend(prefill)
    rejected = {name: why for name, why in rejected.items() if name not in (decode, prefill)}
    place = "first choice" if not rejected else f"after {', '.join(rejected)}"
    reason = f"automatic for {specs[0].device.type} ({place}; {order.evidence})"
    return Choice(chosen.name, route_of(chosen), reason + _routes(chosen, specs), rejected)


def open_session(
    spec: AttentionSpec | Sequence[AttentionSpec], limits: Limits, backend: str | Route | None = None
) -> Session:
    """Choose the backend for ``spec`` and open a session of it: for several layers that share one. Call its
    `Session.plan` before each step.

    Args:
        spec, backend: as in `select_backend`.
        limits: the largest batches to come.

    Raises:
        BackendUnavailableError, ArgumentError: from `select_backend` or `Backend.open`.
    """
    specs = [spec] if isinstance(spec, AttentionSpec) else list(spec)
    if not isinstance(limits, Limits):
        raise ArgumentError("limits", "Limits", repr(limits))
    said = limits.max_num_reqs, limits.max_num_tokens, limits.max_blocks_per_req, limits.block_size
    plans = None not in said
    return select_backend(specs, backend, plans=plans).backend.open(specs, limits, specs[0].device)


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
    reasons = [f"on device {other} it runs where it is named alone: {why}" for other in others]
    if name == "flex" and not any(spec.mods or spec.batch_invariant for spec in specs):
        reasons.append("it runs where it is named, or where score_mod, mask_mod or batch_invariant need it")
    return reasons


def _not_planned(name: str, plans: bool) -> list[str]:
    if plans or get_backend(name).capabilities.planning == Planning.NEVER:
        return []
    return ["it plans each batch, and nobody does so here: open_session with limits, or name it"]


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
    routes = [backend for name, backend in list(_LOADED.items()) if is_route(name)]
    return [*_REGISTERED.values(), *(get_backend(name) for name in _MODULES), *routes]
