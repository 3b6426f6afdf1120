"""`Route`: which backend runs the decodes of a batch, and which one the rest.

    PagedAttention(32, 128, 8, backend=Route(decode="cuda", prefill="flash_attn"))
    PagedAttention(32, 128, 8, backend="decode=cuda,prefill=flash_attn")    # wherever a name is taken

A batch of single query tokens goes to the decode backend as it is, and nothing else happens. Any other batch
is cut on the device, in whatever order its requests stand: both backends see every request, and each finds
those that are the other's without keys, which the contract turns into zeros. Shapes follow from the batch's
shapes, so that one trace and one graph serve all lengths, and no length is read on the host.

What the cut costs is some fifteen small kernels over the requests, their queries' and outputs' copies among
them. Backends that run mixed batches by themselves do so without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, Planning
from torchpaged.backends.session import PlannedBatch, Session
from torchpaged.backends.spec import AttentionSpec, GraphSupport
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.metadata import HostLengths
from torchpaged.metadata.fields import FIELDS

_DECODE, _PREFILL = "decode_", "prefill_"  # before the names of each part's workspace


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


# ------------------------------------------------------------------------------------------- a batch, cut
class Part(NamedTuple):
    """A batch as one of the two backends sees it, and as its session plans it."""

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int


def cut(
    block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, max_query_len: int
) -> tuple[Part, Part]:
    """The batch's decodes, one query token per request, and the rest, whose tokens stay where they are.

    A request that is the other part's has no keys.
    """
    is_decode = query_start_loc.diff() == 1
    none = torch.zeros_like(seq_lens)
    rows = torch.arange(block_table.shape[0] + 1, dtype=torch.int32, device=seq_lens.device)
    decodes = Part(block_table, torch.where(is_decode, seq_lens, none), rows, 1)
    rest = Part(block_table, torch.where(is_decode, none, seq_lens), query_start_loc, max_query_len)
    return decodes, rest


def _attention(decode: Callable[..., None], prefill: Callable[..., None]) -> Callable[..., None]:
    """``paged_attention`` of the contract, by the ops of two backends."""

    def paged_attention(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        max_query_len: int,
        **options: Any,
    ) -> None:
        for_decode, for_prefill = _of_part(_DECODE, options), _of_part(_PREFILL, options)
        shared = {name: x for name, x in options.items() if not name.startswith((_DECODE, _PREFILL))}
        pools, batch = (k_cache, v_cache), (block_table, seq_lens, query_start_loc)
        if max_query_len == 1:
            decode(q, *pools, *batch, out, lse, max_query_len=1, **shared, **for_decode)
            return
        if not torch.compiler.is_compiling() and not (q.shape[0] and block_table.numel()):
            prefill(q, *pools, *batch, out, lse, max_query_len=max_query_len, **shared, **for_prefill)
            return
        decodes, rest = cut(*batch, max_query_len)
        num_reqs, num_tokens = block_table.shape[0], q.shape[0]
        token = query_start_loc[:-1].clamp(max=num_tokens - 1)  # an empty request behind the last has none
        one = q.index_select(0, token)
        one_out = out.new_empty(num_reqs, out.shape[1], out.shape[2])
        one_lse = None if lse is None else lse.new_empty(num_reqs, lse.shape[1])
        # of each token, and nothing to a request's only one
        of_all = {name: value for name, value in shared.items() if name not in FIELDS}
        decode(one, *pools, *decodes[:3], one_out, one_lse, max_query_len=1, **of_all, **for_decode)
        prefill(q, *pools, *rest[:3], out, lse, max_query_len=max_query_len, **shared, **for_prefill)
        # An empty request stands at its neighbour's token: what is put there is the token's in either case.
        row = torch.searchsorted(query_start_loc[1:], token, right=True)  # num_reqs: padding
        owner = row.clamp(max=num_reqs - 1)
        is_decode = (row < num_reqs) & (query_start_loc.diff() == 1).index_select(0, owner)
        _put(out, token, is_decode, one_out.index_select(0, owner))
        if lse is not None and one_lse is not None:
            _put(lse, token, is_decode, one_lse.index_select(0, owner))

    return paged_attention


def _put(whole: Tensor, token: Tensor, chosen: Tensor, rows: Tensor) -> None:
    """``whole[token] = rows`` where ``chosen``, in place; a pass over the requests, not over all tokens.

    ``token`` ``[B]``; ``chosen`` ``[B]`` bool; ``rows`` ``[B, ...]``. Equal tokens come with equal rows.
    """
    kept = whole.index_select(0, token)
    mask = chosen.view(-1, *[1] * (kept.dim() - 1))
    whole.index_copy_(0, token.long(), torch.where(mask, rows, kept))


def _of_part(part: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a part, by the ops' own names."""
    return {name.removeprefix(part): x for name, x in options.items() if name.startswith(part)}


# ------------------------------------------------------------------------------------------------ the session
class RouteSession(Session):
    """A session of each of the two backends. What they give goes to layers under a prefix of the part."""

    def __init__(self, decode: Backend, prefill: Backend, *arguments: Any) -> None:
        self._backends = decode, prefill
        super().__init__(*arguments)

    def _open(self, specs: Sequence[AttentionSpec]) -> None:
        limits, never = self.limits, GraphSupport.NEVER  # `RouteCapabilities` has judged graphs for both
        tokens = max(limits.max_num_tokens or 0, limits.max_num_reqs or 0)  # padding requests, too, have one
        both = (
            replace(limits, graphs=never, max_num_tokens=tokens if limits.max_num_tokens else None),
            replace(limits, graphs=never),
        )
        self._decode, self._prefill = (
            backend.open([of_part(spec) for spec in specs], each, self.device)
            for backend, of_part, each in zip(self._backends, _OF_PARTS, both, strict=True)
        )
        self._parts = {_DECODE: self._decode, _PREFILL: self._prefill}

    def _of_both(self, give: Callable[[str, Session], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What both give, under their prefixes."""
        return {part + name: x for part, own in self._parts.items() for name, x in give(part, own).items()}

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        asked = dict(zip(self._parts, (of_part(spec) for of_part in _OF_PARTS), strict=True))
        return self._of_both(lambda part, own: own.workspace(asked[part]))

    def workspace_for(self, workspace: dict[str, Tensor], num_reqs: int) -> dict[str, Tensor]:
        """What each part's session passes."""
        return self._of_both(lambda part, own: own.workspace_for(_of_part(part, workspace), num_reqs))

    def planning_of(self, max_query_len: int) -> Planning:
        """Single query tokens are the decode backend's alone."""
        return self._decode.capabilities.planning if max_query_len == 1 else self.capabilities.planning

    def _plan(self, batch: PlannedBatch, host: HostLengths | None) -> None:
        if batch.max_query_len == 1:
            self._decode.plan(batch, host)
            return
        with torch.inference_mode():
            table, starts = batch.block_table, batch.query_start_loc
            decodes, rest = cut(table, batch.seq_lens, starts, batch.max_query_len)
        of_decodes, of_rest = (None, None) if host is None else _cut_host(host)
        self._decode.plan(decodes, of_decodes)
        self._prefill.plan(rest, of_rest)

    def tensors(self) -> dict[str, Tensor]:
        """Those of both parts."""
        return self._of_both(lambda part, own: own.tensors())

    def reset(self) -> None:
        """Both."""
        for own in self._parts.values():
            own.reset()

    def check(self, launch: str) -> None:
        """Both."""
        for own in self._parts.values():
            own.check(launch)

    def close(self) -> None:
        """Both."""
        super().close()
        for own in self._parts.values():
            own.close()


def _without_graphs(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, graphs=GraphSupport.NEVER)


def _decodes_alone(spec: AttentionSpec) -> AttentionSpec:
    """For backends that take no longer queries."""
    return replace(_without_graphs(spec), max_query_len=1)


#: What each part's session is asked for, in the order of `RouteSession._parts`.
_OF_PARTS = (_decodes_alone, _without_graphs)


def _cut_host(host: HostLengths) -> tuple[HostLengths, HostLengths]:
    """`cut`, of lengths on the host."""
    lens = list(zip(host.query_lens, host.seq_lens, strict=True))
    decodes = HostLengths([1] * len(lens), [seq if query == 1 else 0 for query, seq in lens])
    return decodes, HostLengths(host.query_lens, [0 if query == 1 else seq for query, seq in lens])


# --------------------------------------------------------------------------------------------- what it can do
@dataclass(frozen=True)
class RouteCapabilities(Capabilities):
    """What both can do. As data it is the narrower of the two, as sentences each backend speaks for itself.

    Graphs: the decode backend sees single query tokens alone, so that its support of these is enough, and the
    prefill backend's decides about everything else.
    """

    parts: tuple[tuple[str, Capabilities], ...] = ()

    def reject(self, spec: AttentionSpec) -> list[str]:
        """Every reason of each backend why ``spec`` can't run, with its name; empty if it can."""
        asked = _without_graphs(spec)
        of_parts = ("decode", replace(asked, max_query_len=1)), ("prefill", asked)
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

    attention = _attention(decode.ops.paged_attention, prefill.ops.paged_attention)
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
