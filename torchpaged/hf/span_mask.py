"""The mask of a forward with spans of tokens that see each other in both directions, and attention over them.

On the paged path a mask is None otherwise. Here it is a placeholder that carries the spans: transformers
hands a ready mask of four dimensions on as it is, so that each layer gets the one that was made for it, or
the end of it, where a model needs no more than its last queries. A query of a span sees the keys up to the
span's end, every other one those up to itself. So a prompt takes two calls of the op: all queries, causal,
and then those of the spans, as requests that end where their span ends, not causal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.chosen_backend import LayerCall
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.mask_kinds import MaskKind
from torchpaged.hf.pinned_batch import pin_batch
from torchpaged.hf.rolling_attention import require_kept
from torchpaged.hf.spans import Prompt, Spans


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


class SpanMask:
    """What a placeholder carries.

    Args:
        name: the model's type, for messages.
        found: the kinds of mask that it may be, each with its spans.
        prompt: the forward that it was made for.
        rows: the cache's rows.
    """

    def __init__(self, name: str, found: Mapping[MaskKind, Spans], prompt: Prompt, rows: CacheRows) -> None:
        self._name, self._found, self._prompt, self._rows = name, found, prompt, rows
        self._batches: dict[tuple[Spans, int], SpanBatch | None] = {}

    def placeholder(self) -> Tensor:
        """A mask ``[1, 1, query_len, 1]`` that carries this and says nothing by itself."""
        shape = (1, 1, self._prompt.length, 1)
        mask = torch.zeros(shape, dtype=torch.bool, device=self._prompt.device).as_subclass(_Placeholder)
        mask._torchpaged_spans = self
        return mask

    def batch_for(self, kind: MaskKind, batch: int, query_len: int) -> SpanBatch | None:
        """The spans among the last ``query_len`` queries of the forward that runs, for a layer of a kind;
        made once. None where there are none.

        Raises:
            UnsupportedModelError: the mask was made for another forward, or for layers of other kinds.
        """
        of = self._prompt
        first = self._rows.first_position(of.length)
        if batch != of.rows or query_len > of.length or first not in (None, of.first):
            raise UnsupportedModelError(
                f"{self._name} runs {batch} rows of {query_len} tokens from position {first} on with a mask "
                f"that was made for {of.rows} rows of {of.length} from position {of.first} on"
            )
        spans = self._found.get(kind)
        if spans is None:
            raise UnsupportedModelError(
                f"{self._name}: a layer attends with window {kind.window} and chunk {kind.chunk}, and its "
                f"mask is {sorted(map(str, self._found))}; use PagedCache(..., dense=True)"
            )
        if (spans, query_len) not in self._batches:
            self._batches[spans, query_len] = self._make(spans, query_len)
        return self._batches[spans, query_len]

    def _make(self, spans: Spans, query_len: int) -> SpanBatch | None:
        first = self._prompt.end - query_len
        padding = self._rows.padding or [0] * self._prompt.rows
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
        device = self._rows.block_table.device
        index, where = (torch.tensor(x, dtype=torch.int64, device=device) for x in (of_row, tokens))
        lengths, begins = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lens, starts))
        longest = max(after - before for before, after in pairwise(starts))
        requests = pin_batch(self._rows.block_table[index], lengths, begins)
        return SpanBatch(where, requests, longest, spans.windowed)


class _Placeholder(Tensor):
    """A mask that carries a `SpanMask`, and gives it to its own last queries and to copies; not to anything
    else that is made of it, which attention then refuses."""

    _torchpaged_spans: SpanMask

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on plain tensors; mark what is still a mask of the same forward."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result is args[0]:
            return result
        kept = func in (Tensor.to, Tensor.contiguous, Tensor.clone, Tensor.detach)
        if kept or (func is Tensor.__getitem__ and _is_end(args[1])):
            result = result.as_subclass(_Placeholder)
            result._torchpaged_spans = args[0]._torchpaged_spans
            return result
        return result.as_subclass(Tensor)


def _is_end(index: Any) -> bool:
    """Whether ``index`` takes the last queries of a mask, ``[:, :, -n:, :]``."""
    if not isinstance(index, tuple) or len(index) != 4 or not all(isinstance(x, slice) for x in index):
        return False
    queries = index[2]
    full = all(x == slice(None) for x in (*index[:2], index[3]))
    return full and queries.stop is None and queries.step is None and (queries.start or -1) < 0


def spans_of(mask: Tensor | None) -> SpanMask | None:
    """What a placeholder carries; None for another mask, or none."""
    return getattr(mask, "_torchpaged_spans", None)


def both_directions(module: nn.Module, beside: str) -> UnsupportedModelError:
    """The error of image tokens in attention that can't take them."""
    return UnsupportedModelError(
        f"{type(module).__name__} has image tokens that see each other in both directions, which attention "
        f"with {beside} does not express; use PagedCache(..., dense=True)"
    )


def attend_with_spans(layer: PagedLayer, call: LayerCall, marked: SpanMask) -> Tensor:
    """Attention of a forward whose mask is a placeholder: of all queries, causal, and then of the spans'
    queries, whose results take the place of what they were given.

    The gather of the queries, an ordinary kernel, stands between the two attentions: the second one reads
    keys as its context that the layer has just written (custom_ops/stream_order.py).

    Returns:
        ``[batch, query_len, num_heads, head_dim_v]``.

    Raises:
        UnsupportedModelError: the layer, or the call, does not take spans.
        BackendUnavailableError: the cache's backend declares not to run it.
    """
    if layer.latent:
        raise both_directions(call.module, "latents")
    if call.alibi_slopes is not None or not call.causal:
        raise both_directions(call.module, "linear biases, or without causality,")
    if layer.rolls:
        require_kept(layer, call._replace(causal=False))
    batch, _, query_len, _ = call.query.shape
    backend, metadata = layer.owner.backend, layer.owner.metadata_of(layer, batch, query_len)
    layer.hold(call)
    spans = marked.batch_for(MaskKind(True, call.window, layer.chunk), batch, query_len)
    requests = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
    every = layer.op_call(call, requests, metadata.max_query_len)
    if spans is None:
        layer.run(every)
    else:
        second = call._replace(causal=False, window=call.window if spans.windowed else None)
        workspace = backend.hold_spans(layer, second)
        layer.run(every)
        inside = every.q.index_select(0, spans.tokens)
        second = second._replace(query=inside.transpose(0, 1)[None])
        made = layer.op_call(second, spans.requests, spans.longest)._replace(chunk_size=0)
        layer.run(made, workspace)
        every.out.index_copy_(0, spans.tokens, made.out)
    return every.out.view(batch, query_len, *every.out.shape[1:])
