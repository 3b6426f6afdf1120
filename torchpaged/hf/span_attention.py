"""Attention of a forward with spans of tokens that see each other in both directions.

A query of a span sees the keys up to the span's end, every other one those up to itself. So a prompt takes
two calls of the op: all queries, causal, and then those of the spans, as requests that end where their span
ends, not causal.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.call import LayerCall
from torchpaged.hf.call_mask import CallMask
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.mask_kinds import MaskKind, Spans
from torchpaged.hf.pinned_batch import pin_batch
from torchpaged.hf.rolling_attention import require_kept


class SpanBatch(NamedTuple):
    """The spans of a forward as requests whose keys end with the span.

    Attributes:
        tokens: ``[num_tokens]`` int64, where the spans' queries stand among the forward's, row by row.
        requests: block table ``[num_spans, blocks_per_row]``, lengths ``[num_spans]`` and query starts
            ``[num_spans + 1]``, int32.
        longest: tokens of the longest span.
        windowed: whether a layer's window hides keys from these queries.
    """

    tokens: Tensor
    requests: tuple[Tensor, Tensor, Tensor]
    longest: int
    windowed: bool


def _spans_of(mask: CallMask, kind: MaskKind, query_len: int) -> SpanBatch | None:
    """The spans among the last ``query_len`` queries of a forward, for a layer of a kind; made once. None
    where there are none.

    Raises:
        UnsupportedModelError: the mask was made for layers of other kinds.
    """
    spans = mask.kinds.get(kind)
    if spans is None:
        raise UnsupportedModelError(
            f"{mask.model_type}: a layer attends with window {kind.window} and chunk {kind.chunk}, and its "
            f"mask is {sorted(map(str, mask.kinds))}; use PagedCache(..., dense=True)"
        )
    if (spans, query_len) not in mask.made:
        mask.made[spans, query_len] = _make(mask, spans, query_len)
    made: SpanBatch | None = mask.made[spans, query_len]
    return made


def _make(mask: CallMask, spans: Spans, query_len: int) -> SpanBatch | None:
    rows, first = mask.rows, mask.prompt.end - query_len
    assert rows is not None
    padding = rows.padding or [0] * mask.prompt.rows
    tokens: list[int] = []
    of_row, lens, starts = [], [], [0]
    for row, inside in enumerate(spans.rows):
        for begin, end in inside:
            if end > first:
                tokens += range(row * query_len + max(begin - first, 0), row * query_len + end - first)
                of_row.append(row)
                lens.append(end - padding[row])
                starts.append(len(tokens))
    if not tokens:
        return None
    device = rows.block_table.device
    index, where = (torch.tensor(x, dtype=torch.int64, device=device) for x in (of_row, tokens))
    lengths, begins = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lens, starts))
    longest = max(after - before for before, after in pairwise(starts))
    return SpanBatch(where, pin_batch(rows.block_table[index], lengths, begins), longest, spans.windowed)


def _both_directions(module: nn.Module, what: str) -> UnsupportedModelError:
    """The error of image tokens in attention that can't take them."""
    return UnsupportedModelError(
        f"{type(module).__name__} has image tokens that see each other in both directions, which attention "
        f"with {what} does not express; use PagedCache(..., dense=True)"
    )


def attend_with_spans(layer: PagedLayer, call: LayerCall, mask: CallMask) -> Tensor:
    """Attention of a forward whose mask has spans: of all queries, causal, and then of the spans' queries,
    whose results take the place of what they were given.

    The gather of the queries, an ordinary kernel, stands between the two attentions: the second one reads
    keys as its context that the layer has just written (custom_ops/stream_order.py).

    Returns:
        ``[batch, query_len, num_heads, head_dim_v]``.

    Raises:
        UnsupportedModelError: the layer, or the call, does not take spans.
        BackendUnavailableError: the cache's backend declares not to run it.
    """
    if layer.latent:
        raise _both_directions(call.module, "latents")
    if call.alibi_slopes is not None or not call.causal:
        raise _both_directions(call.module, "linear biases, or without causality,")
    if layer.rolls:
        require_kept(layer, call._replace(causal=False))
    batch, _, query_len, _ = call.query.shape
    backend, metadata = layer.owner.backend, layer.owner.metadata_of(layer, batch, query_len)
    every = call.over(metadata, layer.own)
    layer.hold(every)
    spans = _spans_of(mask, MaskKind(True, call.window, layer.chunk), query_len)
    if spans is None:
        layer.run(every)
    else:
        window_left = every.window_left if spans.windowed else -1
        second = every._replace(causal=False, window_left=window_left)
        workspace = backend.hold_spans(layer, second)
        layer.run(every)
        q, (table, lens, starts) = every.q.index_select(0, spans.tokens), spans.requests
        made = second._replace(
            q=q,
            block_table=table,
            seq_lens=lens,
            query_start_loc=starts,
            out=every.out.new_empty(q.shape[0], *every.out.shape[1:]),
            max_query_len=spans.longest,
            chunk_size=0,
        )
        layer.run(made, workspace)
        every.out.index_copy_(0, spans.tokens, made.out)
    return every.out.view(batch, query_len, *every.out.shape[1:])
