"""How a `torchpaged.backends.Route` runs a batch: cut in two on the device, each part by its backend.

A batch of single query tokens goes to the decode backend as it is, and nothing else happens. Any other batch
is cut on the device, in whatever order its requests stand: both backends see every request, and each finds
those that are the other's without keys, which the contract turns into zeros. Shapes follow from the batch's
shapes, so that one trace and one graph serve all lengths, and no length is read on the host.

What the cut costs is some fifteen small kernels over the requests, their queries' and outputs' copies among
them. Backends that run mixed batches by themselves do so without.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Planning
from torchpaged.backends.session import PlannedBatch, Session
from torchpaged.backends.spec import AttentionSpec, GraphSupport
from torchpaged.metadata import HostLengths
from torchpaged.metadata.fields import FIELDS

_DECODE, _PREFILL = "decode_", "prefill_"  # before the names of each part's workspace


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


def attention_of(decode: Callable[..., None], prefill: Callable[..., None]) -> Callable[..., None]:
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


def without_graphs(spec: AttentionSpec) -> AttentionSpec:
    """What a backend is asked for in eager calls alone."""
    return replace(spec, graphs=GraphSupport.NEVER)


def decodes_alone(spec: AttentionSpec) -> AttentionSpec:
    """For backends that take no longer queries."""
    return replace(without_graphs(spec), max_query_len=1)


#: What each part's session is asked for, in the order of `RouteSession._parts`.
_OF_PARTS = (decodes_alone, without_graphs)


def _cut_host(host: HostLengths) -> tuple[HostLengths, HostLengths]:
    """`cut`, of lengths on the host."""
    lens = list(zip(host.query_lens, host.seq_lens, strict=True))
    decodes = HostLengths([1] * len(lens), [seq if query == 1 else 0 for query, seq in lens])
    return decodes, HostLengths(host.query_lens, [0 if query == 1 else seq for query, seq in lens])
