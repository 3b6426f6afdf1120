"""`check_batch_invariance`: whether a request gets the same bits in every batch.

    report = check_batch_invariance(get_backend("reference"))    # raises where company changes a bit
    print(report)                                                # reference: 48 calls gave the same bits

Company is all that a scheduler may put beside a request: other requests before and behind it, prompts and
long ones among them, padding, a wider block table, a larger bound of the query lengths, other blocks of the
pool. The request's own tokens are one call's: cutting a prompt into other chunks may change bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import AttentionSpec, Backend, HostLengths, Limits
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.testing.batches import Batch, BatchSpec, make_batch
from torchpaged.testing.conformance import spec_of_call
from torchpaged.testing.graph_conformance import PlannedTensors
from torchpaged.testing.oracle import assert_attention_close

#: ``(query tokens, keys)`` of the requests that are watched.
REQUESTS = ((1, 1), (1, 37), (1, 700), (4, 40), (33, 33), (20, 150))


@dataclass(frozen=True)
class Company:
    """What is in the batch beside the request: ``(query tokens, keys)`` before and behind it."""

    name: str
    before: tuple[tuple[int, int], ...] = ()
    behind: tuple[tuple[int, int], ...] = ()
    padded_reqs: int = 0
    padded_tokens: int = 0
    extra_columns: int = 2
    max_query_len: int = 0  # at least


#: What the request is put beside; the first one is nobody.
COMPANIES = (
    Company("nobody"),
    Company("a short one", behind=((1, 3),)),
    Company("decodes", before=((1, 513), (1, 2), (1, 64)), behind=((1, 33),) * 9),
    Company("a long one", before=((1, 2500),)),
    Company("prompts", before=((150, 150),), behind=((70, 90), (1, 40))),
    Company("padding", padded_reqs=5, padded_tokens=9),
    Company("a wide table", extra_columns=60),
    Company("a graph's bound", padded_reqs=2, max_query_len=64),
)


@dataclass
class BatchInvarianceReport:
    """What was proved.

    Attributes:
        backend: its name.
        calls: how many gave the bits of the request alone.
    """

    backend: str
    calls: int = 0

    def __str__(self) -> str:
        return f"{self.backend}: {self.calls} calls gave the same bits"


def check_batch_invariance(
    backend: Backend,
    *,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    requests: Sequence[tuple[int, int]] = REQUESTS,
    companies: Sequence[Company] = COMPANIES,
    options: Sequence[dict[str, Any]] = ({}, {"window_left": 20}),
    declared: bool = True,
    **shape: Any,
) -> BatchInvarianceReport:
    """Run each request alone and in company; compare every bit of its outputs, and its log-sum-exps where the
    backend has them.

    Args:
        backend: sessions of it are opened.
        device: where; None = a GPU if there is one and the backend runs on it, else the CPU.
        dtypes: of queries and pools; those that the backend does not take are left out.
        requests: ``(query tokens, keys)`` to watch.
        companies: what each is put beside; the first is what the others are compared with.
        options: of the op, each of them for all requests; those that the backend does not take are left out.
        declared: whether the spec asks for batch invariance, which a backend that does not declare it
            refuses; False: try whether it might be declared.
        shape: further arguments of `torchpaged.testing.make_batch`: ``num_heads``, ``head_dim`` ...

    Raises:
        AssertionError: company changed a bit; with the request, the company and the largest difference. Or
            the request alone differs from the float64 oracle.
        BackendUnavailableError: it does not declare batch invariance, or can't run here at all; with all
            reasons.
    """
    if device is None:
        on_gpu = torch.cuda.is_available() and "cuda" in backend.capabilities.device_types
        device = "cuda" if on_gpu else "cpu"
    report, reasons = BatchInvarianceReport(backend.name), []
    for dtype in dtypes:
        for given in options:
            for query_len, length in requests:
                bits: tuple[Tensor, Tensor | None] | None = None
                for company in companies:
                    batch, rows = _batch(
                        query_len, length, company, dtype, backend.capabilities.finite_pools, device, shape
                    )
                    spec = _spec(batch, backend, given, declared)
                    reasons = backend.reject(spec)
                    if reasons:
                        break
                    out, lse = _attend(backend, spec, batch, given)
                    got = out[rows].clone(), None if lse is None else lse[rows].clone()
                    if bits is None:
                        assert_attention_close(out, lse, batch, **given)
                        bits = got
                        continue
                    for what, new, old in zip(("out", "lse"), got, bits, strict=True):
                        _same_bits(f"{backend.name}: {what}", new, old, query_len, length, company, given)
                    report.calls += 1
    if not report.calls:
        raise BackendUnavailableError(
            f"backend {backend.name!r} cannot run this attention: {'; '.join(reasons)}"
        )
    return report


def _same_bits(
    what: str,
    new: Tensor | None,
    old: Tensor | None,
    query_len: int,
    length: int,
    company: Company,
    options: dict[str, Any],
) -> None:
    if new is None or old is None or torch.equal(new, old):
        return
    raise AssertionError(
        f"{what} of a request of {query_len} tokens and {length} keys differs by up to "
        f"{float((new.double() - old.double()).abs().max()):.1e} beside {company.name!r} from what it is "
        f"alone{f', with {options}' if options else ''}; do not declare batch_invariant"
    )


def _batch(
    query_len: int,
    length: int,
    company: Company,
    dtype: torch.dtype,
    finite: bool,
    device: torch.device | str,
    shape: dict[str, Any],
) -> tuple[Batch, slice]:
    """The request in its company, and the rows of its tokens. Its numbers are the same in all companies, its
    blocks are not."""
    all_requests = (*company.before, (query_len, length), *company.behind)
    longest = max(company.max_query_len, *(query for query, _ in all_requests), 1)
    alone = make_batch(BatchSpec("alone", (length,), (query_len,)), seed=7, dtype=dtype, **shape)
    spec = BatchSpec(
        company.name,
        tuple(keys for _, keys in all_requests),
        tuple(query for query, _ in all_requests),
        company.padded_tokens,
        company.padded_reqs,
    )
    seed = 100 + sum(map(ord, company.name))
    batch = make_batch(
        spec,
        seed=seed,
        dtype=dtype,
        extra_columns=company.extra_columns,
        max_query_len=longest,
        num_blocks=sum(-(-keys // alone.k_cache.shape[1]) for _, keys in all_requests) + 12,
        **shape,
    )
    row, first = len(company.before), sum(query for query, _ in company.before)
    rows = slice(first, first + query_len)
    batch.q[rows] = alone.q
    blocks = -(-length // alone.k_cache.shape[1])
    for pool, source in ((batch.k_cache, alone.k_cache), (batch.v_cache, alone.v_cache)):
        pool[batch.block_table[row, :blocks].long()] = source[alone.block_table[0, :blocks].long()]
        if finite:
            pool.nan_to_num_(0.0)
    return replace(batch, extras=alone.extras).to(device), rows


def _spec(batch: Batch, backend: Backend, options: dict[str, Any], declared: bool) -> AttentionSpec:
    return replace(
        spec_of_call(batch, "lse" in backend.capabilities.features, options), batch_invariant=declared
    )


def _attend(
    backend: Backend, spec: AttentionSpec, batch: Batch, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """One eager call of a session of its own."""
    rows, width = batch.block_table.shape
    limits = Limits(rows, max(len(batch.q), 1), width, *batch.k_cache.shape[:2])
    session = backend.open([spec], limits, batch.q.device)
    workspace = session.workspace(spec)
    if session.plans:
        step = PlannedTensors(batch.block_table, batch.seq_lens, batch.query_start_loc, batch.max_query_len)
        host = HostLengths(batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist())
        session.plan(step, host)
    out = torch.full(
        (*batch.q.shape[:2], batch.v_cache.shape[-1]),
        float("nan"),
        dtype=batch.q.dtype,
        device=batch.q.device,
    )
    lse = torch.full(out.shape[:2], float("nan"), device=out.device) if "lse" in spec.uses else None
    session.ops.paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        out,
        lse,
        max_query_len=batch.max_query_len,
        scale=batch.scale,
        **{**batch.extras, **options},
        **workspace,
    )
    return out, lse
