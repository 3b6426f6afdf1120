"""`Route`: which backend runs the decodes of a batch, and which one the rest.

    PagedAttention(32, 128, 8, backend=Route(decode="cuda", prefill="flash_attn"))
    PagedAttention(32, 128, 8, backend="decode=cuda,prefill=flash_attn")    # wherever a name is taken

How a batch is cut: route_session.py.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, Planning
from torchpaged.backends.choose.route_session import RouteSession, attention_of, decodes_alone, without_graphs
from torchpaged.backends.session import Session
from torchpaged.backends.spec import AttentionSpec, GraphSupport
from torchpaged.custom_ops.errors import ArgumentError


@dataclass(frozen=True)
class Route:
    """A backend for each part of a batch. Equal ones are that backend itself, whose own kernels run mixed
    batches in one call.

    Attributes:
        decode: name of the backend for requests of one query token.
        prefill: name of the backend for requests of more.

    Raises:
        ArgumentError: a name that is none, or that is a route itself.
    """

    decode: str
    prefill: str

    def __post_init__(self) -> None:
        for part in ("decode", "prefill"):
            name = getattr(self, part)
            if not isinstance(name, str) or not name or name == "auto" or set(name) & set("=, "):
                raise ArgumentError(f"route.{part}", "the name of one backend, not 'auto'", repr(name))

    def __str__(self) -> str:
        """The name of the backend that runs it; `parse_route` reads it."""
        return self.decode if self.decode == self.prefill else f"decode={self.decode},prefill={self.prefill}"


def is_route(name: str) -> bool:
    """Whether a backend's name is written as a route."""
    return "=" in name


def parse_route(text: str) -> Route:
    """The route that ``"decode=NAME,prefill=NAME"`` says, in any order, with spaces or without.

    Raises:
        ArgumentError: a part is missing, said twice, or unknown.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    names = {part.strip(): name.strip() for part, _, name in pairs}
    if len(pairs) != 2 or names.keys() != {"decode", "prefill"}:
        raise ArgumentError(
            "backend", "decode=NAME,prefill=NAME", repr(text), "name a backend for each of the two parts"
        )
    return Route(names["decode"], names["prefill"])


@dataclass(frozen=True)
class RouteCapabilities(Capabilities):
    """What both can do. As data it is the narrower of the two, as sentences each backend speaks for itself.

    Graphs: the decode backend sees single query tokens alone, so that its support of these is enough, and the
    prefill backend's decides about everything else.
    """

    parts: tuple[tuple[str, Capabilities], ...] = ()

    def reject(self, spec: AttentionSpec) -> list[str]:
        """Every reason of each backend why ``spec`` can't run, with its name; empty if it can."""
        asked = without_graphs(spec)
        of_parts = ("decode", decodes_alone(spec)), ("prefill", asked)
        reasons = [
            f"{part} by {name!r}: {reason}"
            for (part, one), (name, can) in zip(of_parts, self.parts, strict=True)
            for reason in can.reject(one)
        ]
        if spec.graphs > self.graph_support:
            each = ", ".join(f"{name!r} {can.graph_support.name}" for name, can in self.parts)
            reasons.append(
                f"graph support {self.graph_support.name} (of {each}) is less than {spec.graphs.name}"
            )
        return reasons


def _capabilities(decode: Backend, prefill: Backend) -> RouteCapabilities:
    a, b = decode.capabilities, prefill.capabilities
    graphs = GraphSupport.NEVER
    if a.graph_support >= GraphSupport.SINGLE_TOKEN_DECODE:
        graphs = max(b.graph_support, GraphSupport.SINGLE_TOKEN_DECODE)
    values: dict[str, Any] = {
        name: tuple(one for one in getattr(a, name) if one in getattr(b, name))
        for name in ("device_types", "dtypes", "kv_dtypes")
    }
    for name in ("head_dims", "block_sizes"):
        lists = [set(given) for given in (getattr(a, name), getattr(b, name)) if given is not None]
        values[name] = tuple(sorted(set.intersection(*lists))) if lists else None
    for name, narrower in (("max_head_dim", min), ("min_compute_capability", max)):
        said = [given for given in (getattr(a, name), getattr(b, name)) if given is not None]
        values[name] = narrower(said, default=None)
    for name, value in vars(a).items():
        if isinstance(value, bool):
            values[name] = value and getattr(b, name)
    values["finite_pools"] = a.finite_pools or b.finite_pools
    return RouteCapabilities(
        **values,
        features=a.features & b.features,
        graph_support=graphs,
        planning=Planning(max(a.planning, b.planning)),
        parts=((decode.name, a), (prefill.name, b)),
    )


@functools.lru_cache(maxsize=64)
def route_backend(decode: Backend, prefill: Backend) -> Backend:
    """The backend that sends the decodes of a batch to ``decode`` and the rest to ``prefill``. Its other ops
    are those of ``decode``."""

    def unavailable() -> str | None:
        missing = [
            f"{part} by {backend.name!r}: {reason}"
            for part, backend in (("decode", decode), ("prefill", prefill))
            if (reason := backend.unavailable()) is not None
        ]
        return "; ".join(missing) or None

    attention = attention_of(decode.ops.paged_attention, prefill.ops.paged_attention)
    return Backend(
        str(Route(decode.name, prefill.name)),
        _capabilities(decode, prefill),
        decode.ops._replace(paged_attention=attention),
        unavailable,
        functools.partial(RouteSession, decode, prefill),
        prefill.route,  # how prompts run
    )


def route_of(backend: Backend | Session) -> Route:
    """Which backend runs which part of a batch; both are the same unless it is a route's."""
    can = backend.capabilities
    if isinstance(can, RouteCapabilities):
        (decode, _), (prefill, _) = can.parts
        return Route(decode, prefill)
    return Route(backend.name, backend.name)
