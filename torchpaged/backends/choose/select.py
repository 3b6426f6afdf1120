"""Which backend runs, and why.

The one that was asked for (names.py), used or refused with every reason and never swapped for another; else
the first usable one in the order of the device: what `torchpaged tune` measured there, else the table of
order.py, then `AUTOMATIC`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Planning
from torchpaged.backends.choose import names
from torchpaged.backends.choose.names import get_backend, requested
from torchpaged.backends.choose.order import Ranking, ranking_of
from torchpaged.backends.choose.route import Route, route_of
from torchpaged.backends.session import Limits, Session
from torchpaged.backends.spec import AttentionSpec
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError

_LOG = logging.getLogger("torchpaged.backends")
#: Devices on which a backend is chosen without being named, where these are not all of its own, and why.
_AUTOMATIC_ON = {
    "torch_sdpa": ("cuda", "it gathers as many blocks as the block table is wide"),
}


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


def ranking(device: torch.device) -> Ranking:
    """The order of the automatic choice on ``device``: registered backends, those that a measurement or the
    table names for it, the rest of `AUTOMATIC`.

    Warns:
        TunedFileWarning: a measurement that can't be used.
    """
    return ranking_of(device, tuple(names.AUTOMATIC), tuple(names.MODULES), tuple(names.REGISTERED))


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
        _logged(choice.name, choice.reason, specs)
        return choice
    found = get_backend(name)
    reasons = _reject(found, specs)
    if reasons:
        raise BackendUnavailableError(
            f"backend {name!r} ({asker}) cannot run this attention: {'; '.join(reasons)}"
        )
    choice = Choice(name, route_of(found), asker + _routes(found, specs))
    _logged(choice.name, choice.reason, specs)
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
    return ["it plans each batch, and this caller does not: open_session with limits, or name it"]


def _reject(backend: Backend, specs: Sequence[AttentionSpec]) -> list[str]:
    """Every reason of every spec, each once."""
    return list(dict.fromkeys(reason for spec in specs for reason in backend.reject(spec)))


def _logged(name: str, reason: str, specs: Sequence[AttentionSpec]) -> None:
    """Say a choice at level INFO, once for all layers of a model: equal lines are said once in a process."""
    kinds = dict.fromkeys(
        f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim} in "
        + str(spec.dtype).removeprefix("torch.")
        for spec in specs
    )
    _once(f"backend {name} for {', '.join(kinds)} on {specs[0].device}: {reason}")


@functools.lru_cache(maxsize=256)
def _once(text: str) -> None:
    _LOG.info(text)
