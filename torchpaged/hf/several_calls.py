"""Attention of a forward that one call of the op can't give.

Layers with a window, whose blocks are rings: which ones, and forwards of more tokens than a ring takes at
once.

Spans of tokens that see each other in both directions: a query of a span sees the keys up to the span's end,
every other one those up to itself. So a prompt takes two calls of the op: all queries, causal, and then those
of the spans, as requests that end where their span ends, not causal."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpaged.backends import Limits
from torchpaged.cache import RollingBlocks
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.call import LayerCall, Requests
from torchpaged.hf.call_mask import CallMask
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.mask_kinds import MaskKind, Spans
from torchpaged.hf.query_starts import pin_batch

#: New tokens of a row that a rolling layer takes at once, where no number is given.
DEFAULT_STEP = 512


def reach_of(layer: PagedLayer) -> int | None:
    """Tokens that a query of ``layer`` sees at most, its own one included; None: all."""
    return layer.chunk if layer.window is None else layer.window


def choose_rolling(
    config: Any, layers: Sequence[PagedLayer], step: int, limits: Limits
) -> RollingBlocks | None:
    """Say of each layer whether it rolls: where that takes fewer blocks, unless other layers read its keys.

    Args:
        config: the model's text config.
        layers: those that could; ``rolls`` of each is set.
        step: new tokens of a row at once.
        limits: of the cache otherwise.

    Returns:
        The rings that they share, of the widest window among them; None if no layer rolls.
    """
    names = ("max_num_reqs", "max_blocks_per_req", "num_blocks", "block_size")
    max_rows, blocks_per_row, num_blocks, block_size = limits.need(*names)
    candidates = [layer for layer in layers if reach_of(layer) is not None]
    if getattr(config, "num_kv_shared_layers", 0):  # the last one of each kind is read by layers behind it
        last = {(layer.window, layer.chunk): layer for layer in candidates}
        candidates = [layer for layer in candidates if layer not in last.values()]
    rings = {layer: RollingBlocks(reach_of(layer) or 1, step, block_size, max_rows) for layer in candidates}
    for layer, ring in rings.items():
        layer.rolls = ring.blocks_per_ring < blocks_per_row and ring.num_blocks < num_blocks
    chosen = [ring for layer, ring in rings.items() if layer.rolls]
    return max(chosen, key=lambda ring: ring.window, default=None)


def require_kept(layer: PagedLayer, call: LayerCall) -> None:
    """Refuse attention that sees more than a rolling layer keeps.

    Raises:
        UnsupportedModelError: a wider window than the cache knows of, none at all, or keys ahead of a query.
    """
    reach = reach_of(layer)
    seen = layer.chunk if call.window is None else call.window
    if call.causal and reach is not None and seen is not None and seen <= reach:
        return
    sees = "no window" if seen is None else f"a window of {seen}"
    raise UnsupportedModelError(
        f"{type(call.module).__name__}: layer {layer.index} keeps what a window of {reach} tokens needs, and "
        f"attends {f'with {sees}' if call.causal else 'ahead of its tokens'}; build the PagedCache with "
        "sliding_step=max_seq_len"
    )


def attend_rolling(layer: PagedLayer, call: LayerCall) -> Tensor:
    """`PagedLayer.attend` of a rolling layer; a forward of more tokens than its ring takes at once is written
    and attended step by step.

    Raises:
        UnsupportedModelError: as `require_kept`; or another layer attends with this one's keys, step by step.
        BackendUnavailableError: the cache's backend declares not to run it.
    """
    require_kept(layer, call)
    batch, num_heads, query_len, _ = call.query.shape
    if layer.takes_at_once(query_len):
        return layer.attend(call)
    rows = layer.owner.rows
    assert rows is not None and rows.rolling is not None
    table, step, device = rows.rolling, rows.rolling.blocks.step, call.query.device
    parts = []
    for start in range(0, query_len, step):
        count = min(step, query_len - start)
        # In front of the write, which holds the attention back: it may not read them early.
        seq_lens = (rows.seq_lens[:batch] - (query_len - start - count)).clamp_min(0)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * count
        first = rows.seq_lens[:batch, None].long() - query_len + start
        slots = table.slots_of(first + torch.arange(count, device=device)[None])
        new = slice(start, start + count)
        requests = Requests(table.table[:batch], seq_lens, starts, count)
        made = call._replace(query=call.query[:, :, new]).over(requests, layer.own)
        layer.hold(made)
        if start == 0:  # nothing refuses any more: until here they stay, and with them the forward is open
            key, value = _taken(layer, query_len)
        layer.store(key[:, :, new], value[:, :, new], slots, are_query_tokens=False)
        layer.run(made)
        parts.append(made.out.view(batch, count, num_heads, made.out.shape[-1]))
    return torch.cat(parts, 1)


def _taken(layer: PagedLayer, query_len: int) -> tuple[Tensor, Tensor]:
    """The keys and values that a layer left to its attention."""
    states = layer.take_waiting()
    if states is None or states[0].shape[2] != query_len:
        raise UnsupportedModelError(
            f"{layer.owner.name}: two layers attend with the keys of layer {layer.index}, which keeps only "
            "what its window needs; build the PagedCache with sliding_step=max_seq_len"
        )
    return states


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
    keys as its context that the layer has just written (docs/stream_order.md).

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
