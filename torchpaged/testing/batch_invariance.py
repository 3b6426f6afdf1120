"""`check_batch_invariance`: whether a request gets the same bits in every batch.

    report = check_batch_invariance(get_backend("reference"))    # raises where the batch changes a bit
    print(report)                                                # reference: 48 calls gave the same bits

Surroundings are all that a scheduler may put into a request's batch: other requests before and after it,
prompts and long ones among them, padding, a wider block table, a larger bound of the query lengths, other
blocks of the pool. The request's own tokens are one call's: cutting a prompt into other chunks may change
bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import Backend
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.testing.batches import Batch, BatchSpec, make_batch
from torchpaged.testing.conformance import Attempt, device_of, spec_of_call
from torchpaged.testing.oracle import assert_attention_close

#: ``(query tokens, keys)`` of the requests that are watched.
REQUESTS = ((1, 1), (1, 37), (1, 700), (4, 40), (33, 33), (20, 150))


@dataclass(frozen=True)
class Surroundings:
    """The rest of a request's batch: ``(query tokens, keys)`` of the requests before and after it."""

    name: str
    before: tuple[tuple[int, int], ...] = ()
    behind: tuple[tuple[int, int], ...] = ()
    padded_reqs: int = 0
    padded_tokens: int = 0
    extra_columns: int = 2
    max_query_len: int = 0  # at least


#: What the request is run next to; first nothing.
SURROUNDINGS = (
    Surroundings("nothing"),
    Surroundings("a short one", behind=((1, 3),)),
    Surroundings("decodes", before=((1, 513), (1, 2), (1, 64)), behind=((1, 33),) * 9),
    Surroundings("a long one", before=((1, 2500),)),
    Surroundings("prompts", before=((150, 150),), behind=((70, 90), (1, 40))),
    Surroundings("padding", padded_reqs=5, padded_tokens=9),
    Surroundings("a wide table", extra_columns=60),
    Surroundings("a graph's bound", padded_reqs=2, max_query_len=64),
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
    surroundings: Sequence[Surroundings] = SURROUNDINGS,
    options: Sequence[dict[str, Any]] = ({}, {"window_left": 20}),
    declared: bool = True,
    **shape: Any,
) -> BatchInvarianceReport:
    """Run each request alone and next to others; compare every bit of its outputs, and its log-sum-exps where
    the backend has them.

    Args:
        backend: sessions of it are opened.
        device: where; None = a GPU if there is one and the backend runs on it, else the CPU.
        dtypes: of queries and pools; those that the backend does not take are left out.
        requests: ``(query tokens, keys)`` to watch.
        surroundings: what each is run next to; results are compared with those of the first.
        options: of the op, each of them for all requests; those that the backend does not take are left out.
        declared: whether the spec asks for batch invariance, which a backend that does not declare it
            refuses; False: try whether it might be declared.
        shape: further arguments of `torchpaged.testing.make_batch`: ``num_heads``, ``head_dim`` ...

    Raises:
        AssertionError: the rest of the batch changed a bit; with the request, that rest and the largest
            difference. Or the request alone differs from the float64 oracle.
        BackendUnavailableError: it does not declare batch invariance, or can't run here at all; with all
            reasons.
    """
    device = device_of(backend, device)
    report, reasons = BatchInvarianceReport(backend.name), []
    for dtype, given, (query_len, length) in product(dtypes, options, requests):
        alone: dict[str, Tensor] = {}
        for rest in surroundings:
            batch, rows = _batch(
                query_len, length, rest, dtype, backend.capabilities.finite_pools, device, shape
            )
            spec = spec_of_call(batch, "lse" in backend.capabilities.features, given)
            spec = replace(spec, batch_invariant=declared)
            reasons = backend.reject(spec)
            if reasons:
                break
            attempt = Attempt(backend, batch, spec, given)
            attempt.plan()
            attempt.step()
            bits = {"out": attempt.out[rows].clone()}
            if attempt.lse is not None:
                bits["lse"] = attempt.lse[rows].clone()
            if not alone:
                assert_attention_close(attempt.out, attempt.lse, batch, **given)
                alone = bits
                continue
            which = f"of a request of {query_len} tokens and {length} keys", f"next to {rest.name!r}"
            _require_same(backend, bits, alone, which, given)
            report.calls += 1
    if not report.calls:
        raise BackendUnavailableError(
            f"backend {backend.name!r} cannot run this attention: {'; '.join(reasons)}"
        )
    return report


def _require_same(
    backend: Backend,
    bits: dict[str, Tensor],
    alone: dict[str, Tensor],
    which: tuple[str, str],
    given: dict[str, Any],
) -> None:
    """``which``: request, and what it is next to, for the message."""
    for what, got in bits.items():
        if not torch.equal(got, alone[what]):
            difference = float((got.double() - alone[what].double()).abs().max())
            raise AssertionError(
                f"{backend.name}: {what} {which[0]} differs by up to {difference:.1e} {which[1]} from what "
                f"it is alone{f', with {given}' if given else ''}; do not declare batch_invariant"
            )


def _batch(
    query_len: int,
    length: int,
    rest: Surroundings,
    dtype: torch.dtype,
    finite: bool,
    device: torch.device | str,
    shape: dict[str, Any],
) -> tuple[Batch, slice]:
    """The request in its surroundings, and the rows of its tokens. Its numbers are the same in all of them,
    its blocks are not."""
    all_requests = (*rest.before, (query_len, length), *rest.behind)
    longest = max(rest.max_query_len, *(query for query, _ in all_requests), 1)
    alone = make_batch(BatchSpec("alone", (length,), (query_len,)), seed=7, dtype=dtype, **shape)
    spec = BatchSpec(
        rest.name,
        tuple(keys for _, keys in all_requests),
        tuple(query for query, _ in all_requests),
        rest.padded_tokens,
        rest.padded_reqs,
    )
    seed = 100 + sum(map(ord, rest.name))
    batch = make_batch(
        spec,
        seed=seed,
        dtype=dtype,
        extra_columns=rest.extra_columns,
        max_query_len=longest,
        num_blocks=sum(-(-keys // alone.k_cache.shape[1]) for _, keys in all_requests) + 12,
        **shape,
    )
    row, first = len(rest.before), sum(query for query, _ in rest.before)
    rows = slice(first, first + query_len)
    batch.q[rows] = alone.q
    blocks = -(-length // alone.k_cache.shape[1])
    for pool, source in ((batch.k_cache, alone.k_cache), (batch.v_cache, alone.v_cache)):
        pool[batch.block_table[row, :blocks].long()] = source[alone.block_table[0, :blocks].long()]
        if finite:
            pool.nan_to_num_(0.0)
    return replace(batch, extras=alone.extras).to(device), rows
