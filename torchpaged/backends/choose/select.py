"""Which backend runs, and why.

The one that was asked for (names.py), used or refused with every reason and never swapped for another; else
the first usable one in the order of the device, of which `PLATFORMS` is the table.
"""

import functools
import logging
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Planning
from torchpaged.backends.choose import names
from torchpaged.backends.choose.names import asked_backend, backends_with, get_backend, requested
from torchpaged.backends.choose.route import Route, route_of
from torchpaged.backends.session import Session
from torchpaged.backends.spec import AttentionSpec, Limits
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.custom_ops.words import one_line

#: What a row that no machine of this project has run says of itself.
UNVERIFIED = "not verified here"


class Platform(NamedTuple):
    """One kind of device.

    Attributes:
        name: as people call it.
        device_type: torch's.
        capabilities: least and largest compute capability of an NVIDIA GPU; None = any.
        order: backends that come first there; whatever else is chosen automatically follows.
        evidence: where the order comes from: a file of measurements, or `UNVERIFIED` and whose habit it is.
        hip: whether it is an AMD GPU.
    """

    name: str
    device_type: str
    capabilities: tuple[tuple[int, int], tuple[int, int]] | None
    order: tuple[str, ...]
    evidence: str
    hip: bool = False


_OWN, _AS_ENGINES = ("cuda", "triton"), f"{UNVERIFIED}: as serving engines do"
_MEASURED = "measured on an H200: benchmarks/results/h200_routing.json"

#: The first row that fits a device counts.
PLATFORMS = (
    Platform("CPU", "cpu", None, ("cpu",), "the only native kernels there; held to the reference by tests"),
    Platform("ROCm", "cuda", None, ("triton",), f"{UNVERIFIED}: the only own kernels for it", hip=True),
    Platform(
        "Volta, Turing",
        "cuda",
        ((7, 0), (7, 5)),
        ("flex", "torch_sdpa"),
        f"{UNVERIFIED}: own kernels need 8.0",
    ),
    Platform("Ampere", "cuda", ((8, 0), (8, 8)), _OWN, f"{UNVERIFIED}: as on Hopper"),
    Platform("Ada", "cuda", ((8, 9), (8, 9)), ("flashinfer", *_OWN), _AS_ENGINES),
    Platform("Hopper", "cuda", ((9, 0), (9, 0)), _OWN, _MEASURED),
    Platform("Blackwell", "cuda", ((10, 0), (12, 9)), ("flashinfer", *_OWN), _AS_ENGINES),
)
_UNKNOWN = Platform("unknown", "", None, (), f"{UNVERIFIED}: no row of the table")


def platform_of(device: torch.device) -> Platform:
    """The row of a device; one without an order where there is none, or no such device here to ask."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return _UNKNOWN
    hip = device.type == "cuda" and torch.version.hip is not None
    have = torch.cuda.get_device_capability(device) if device.type == "cuda" and not hip else None
    for row in PLATFORMS:
        if row.device_type != device.type or row.hip != hip:
            continue
        if row.capabilities is None or (have and row.capabilities[0] <= have <= row.capabilities[1]):
            return row
    return _UNKNOWN


def order_of(device: torch.device) -> tuple[str, ...]:
    """The names that the automatic choice tries on ``device``: registered ones, those of its row, the rest of
    `AUTOMATIC`."""
    first = (name for name in names.AUTOMATIC if name not in names.MODULES)
    return tuple(dict.fromkeys((*first, *platform_of(device).order, *names.AUTOMATIC)))


_LOG = logging.getLogger("torchpaged.backends")


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

    def __repr__(self) -> str:
        return one_line(self, repr(self.name), textwrap.shorten(self.reason, 80, placeholder=" ..."))

    @property
    def backend(self) -> Backend:
        """The chosen backend."""
        return get_backend(self.name)


def select_backend(
    spec: AttentionSpec | Sequence[AttentionSpec], backend: str | Route | None = None, *, plans: bool = False
) -> Choice:
    """Choose the backend for ``spec``. Call it at construction, never inside a traced call.

    >>> sizes = {"head_dim": 64, "num_heads": 8, "num_kv_heads": 2, "block_size": 16}
    >>> choice = select_backend(attention_spec(device="cpu", dtype=torch.float32, **sizes), "reference")
    >>> choice.name, choice.reason
    ('reference', "backend='reference' was given")

    Args:
        spec: the attention to run; several, such as those of a model's layers: one backend that can run
            them all.
        backend: a name, a route or its text, or None / "auto".
        plans: whether the caller opens a session with limits and plans each batch. If not, the automatic
            choice leaves out backends that need that.

    Raises:
        ArgumentError: an empty list, what is no spec, or a route that is none.
        BackendUnavailableError: the named backend can't run ``spec``, or none can; with all reasons.
    """
    specs = _specs(spec)
    name, reason = requested(backend)
    rejected: dict[str, list[str]] = {}
    if name == "auto":
        name, reason, rejected = _automatic(specs, plans)
    elif reasons := _reject(asked_backend(name, reason), specs):
        raise BackendUnavailableError(
            f"backend {name!r} ({reason}) cannot run this attention: {'; '.join(reasons)}"
        )
    found = get_backend(name)
    if found.route:  # which kernels of its own serve these, each said once
        reason = "; ".join([reason, *dict.fromkeys(map(found.route, specs))])
    choice = Choice(found.name, route_of(found), reason, rejected)
    _log(choice, specs)
    return choice


def _specs(spec: AttentionSpec | Sequence[AttentionSpec]) -> list[AttentionSpec]:
    specs = list(spec) if isinstance(spec, Sequence) else [spec]
    if not specs or not all(isinstance(one, AttentionSpec) for one in specs):
        words = "at least one AttentionSpec, as attention_spec() makes them"
        raise ArgumentError("spec", words, repr(spec) if specs else "none")
    return specs


def _automatic(specs: Sequence[AttentionSpec], plans: bool) -> tuple[str, str, dict[str, list[str]]]:
    """The name of the first that can run them, the reason, and those of all before it."""
    device, rejected = specs[0].device, dict[str, list[str]]()
    row = platform_of(device)
    for name in order_of(device):
        backend = get_backend(name)
        why = [] if name in row.order else _by_name_alone(name, specs)
        if backend.capabilities.planning > Planning.NEVER and not plans:
            why.append("it plans each batch, and this caller does not: open_session with limits, or name it")
        why += _reject(backend, specs)
        if not why:
            place = "first choice" if not rejected else f"after {', '.join(rejected)}"
            reason = f"automatic for {device.type} ({place}; {row.name}: {row.evidence})"
            return name, reason, rejected
        rejected[name] = why
    lines = "\n".join(f"  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items())
    raise BackendUnavailableError(f"no backend can run this attention:\n{lines}")


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
    specs = _specs(spec)
    if not isinstance(limits, Limits):
        raise ArgumentError("limits", "Limits", repr(limits))
    said = limits.max_num_reqs, limits.max_num_tokens, limits.max_blocks_per_req, limits.block_size
    plans = None not in said
    return select_backend(specs, backend, plans=plans).backend.open(specs, limits, specs[0].device)


def backend_of(ops: BackendOps, spec: AttentionSpec) -> Backend | None:
    """The backend whose handles ``ops`` are and that can run ``spec``; None for those of no backend.

    Raises:
        BackendUnavailableError: every backend that has them declares not to run it; with the reasons of each.
    """
    backends = backends_with(ops)
    reasons = [backend.capabilities.reject(spec) for backend in backends]
    able = [backend for backend, why in zip(backends, reasons, strict=True) if not why]
    if backends and not able:
        name = " or ".join(repr(backend.name) for backend in backends)
        why = "; ".join(reason for each in reasons for reason in each)
        raise BackendUnavailableError(f"backend {name} (its ops were given) cannot run this attention: {why}")
    return able[0] if able else None


def _by_name_alone(name: str, specs: Sequence[AttentionSpec]) -> list[str]:
    """Why the automatic choice passes a backend over on these devices, though it may be able to run there."""
    if name == "flex" and not any(spec.mods or spec.batch_invariant for spec in specs):
        return ["it runs where it is named, or where score_mod, mask_mod or batch_invariant need it"]
    if name != "torch_sdpa":
        return []
    others = dict.fromkeys(spec.device.type for spec in specs if spec.device.type != "cuda")
    why = "it gathers as many blocks as the block table is wide"
    return [f"on device {other} it runs where it is named alone: {why}" for other in others]


def _reject(backend: Backend, specs: Sequence[AttentionSpec]) -> list[str]:
    """Every reason of every spec, each once."""
    return list(dict.fromkeys(reason for spec in specs for reason in backend.reject(spec)))


def _log(choice: Choice, specs: Sequence[AttentionSpec]) -> None:
    """Say a choice at level INFO, once for all layers of a model: equal lines are said once in a process."""
    kinds = dict.fromkeys(
        f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim} in "
        + str(spec.dtype).removeprefix("torch.")
        for spec in specs
    )
    _once(f"backend {choice.name} for {', '.join(kinds)} on {specs[0].device}: {choice.reason}")


@functools.lru_cache(maxsize=256)
def _once(text: str) -> None:
    _LOG.info(text)
