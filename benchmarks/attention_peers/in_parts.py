"""A mixed batch as two calls, one after the other: what an own backend's single call for it has to beat.

    contender = in_parts("triton")      # "triton-in-parts", for cases whose decodes come before their chunks

The sum of both parts measured alone is a stricter figure, which no program reaches: a kernel among equal ones
begins while the one before it ends. Here decodes and chunks take turns, as they do in a model that gives
each a call of its own.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from attention_peers.cases import AttentionCase
from attention_peers.contender import Contender, Prepared, own_backend
from attention_peers.inputs import Inputs
from attention_peers.summary import SUFFIX
from torchpaged.backends import get_backend


def in_parts_of(backends: Sequence[Contender], cases: Sequence[AttentionCase]) -> list[Contender]:
    """`in_parts` of the own ones among ``backends``; none if no case is a mixed batch."""
    return (
        [in_parts(contender.name) for contender in backends if contender.own]
        if any(map(num_decodes, cases))
        else []
    )


def num_decodes(case: AttentionCase) -> int:
    """Requests of one query token that come first, if only longer queries follow them; else, and if none
    follow, 0."""
    queries = case.query_lens
    count = sum(query == 1 for query in queries)
    return count if 0 < count < len(queries) and max(queries[:count]) == 1 else 0


def in_parts(name: str) -> Contender:
    """The own backend ``name``, called for the decodes of a mixed batch and then for its other requests."""
    whole, backend = own_backend(name), get_backend(name)

    def why_not(case: AttentionCase, device: torch.device) -> str | None:
        return (
            whole.why_not(case, device)
            if num_decodes(case)
            else "no batch of decodes and, after them, longer queries"
        )

    def prepare(case: AttentionCase, inputs: Inputs) -> Prepared:
        count, num_reqs = num_decodes(case), len(case.seq_lens)
        out, starts = inputs.poisoned_out(), inputs.query_start_loc
        semaphores = torch.zeros(
            inputs.num_layers, num_reqs * case.num_kv_heads, dtype=torch.int32, device=inputs.q.device
        )
        parts = []  # a decode has one token row: up to there request and row have one number
        for requests, rows in (
            (slice(0, count), slice(0, count)),
            (slice(count, num_reqs), slice(count, case.num_tokens)),
        ):
            # as wide as it would be for this part alone
            columns = -(-max(case.seq_lens[requests]) // case.block_size)
            arguments = (
                inputs.block_table[requests, :columns].contiguous(),
                inputs.seq_lens[requests].clone(),
                starts[requests.start : requests.stop + 1] - starts[requests.start],
                out[rows],
            )
            pairs = slice(requests.start * case.num_kv_heads, requests.stop * case.num_kv_heads)
            parts.append((inputs.q[rows], arguments, max(case.query_lens[requests]), pairs))

        def call(layer: int) -> Tensor:
            for q, arguments, longest, pairs in parts:
                backend.ops.paged_attention(
                    q,
                    inputs.k_caches[layer],
                    inputs.v_caches[layer],
                    *arguments,
                    None,
                    max_query_len=longest,
                    scale=inputs.scale,
                    **inputs.scales.by_name,
                    semaphore=semaphores[layer, pairs],
                )
            return out

        return Prepared([partial(call, layer) for layer in range(inputs.num_layers)])

    return Contender(name + SUFFIX, True, whole.unavailable, why_not, prepare)
