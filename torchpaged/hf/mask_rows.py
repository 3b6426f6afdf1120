"""What a mask of transformers says in words that a kernel takes: one span of keys per row, causality, a
window.

The mask function hangs a `MaskRows` on the mask that it makes. The tensor stays what it would have been, so
that a model may do with it as it likes; attention that is given the very same tensor need not look into it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from torchpaged.custom_ops.attention.mask import visible_keys
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.hf.pinned_batch import pin_batch
from torchpaged.hf.spans import sees_next

_QUERIES = 64  # positions at which an unknown mask function is asked for its keys, at most


class MaskKind(NamedTuple):
    """``window``: ``(left, right)`` keys visible besides the own one; -1 = open."""

    causal: bool
    window: tuple[int, int]


class MaskRows:
    """The rows of a mask.

    Args:
        kind: causality and window.
        model_type: of the config that the mask was made for.
        sizes: ``(query_len, kv_len)``.
        present: ``[batch, kv_len]`` bool, the keys that are no padding; None = all of them.

    Attributes:
        causal, window, model_type, sizes: as given.
        batches: what was made of the rows for attention without a cache, by what it depends on: one mask
            serves all layers.
        starts, lens: ``[batch]`` int32, the first key of each row and how many there are, once `are_spans`
            was asked; None where no row has padding.
        all_at_zero: likewise, whether every row's keys start at 0; None where it can't be read, as in a
            trace.
        some_empty: likewise, whether a row has no keys; False where it can't be read.
    """

    def __init__(
        self, kind: MaskKind, model_type: str, sizes: tuple[Any, Any], present: Tensor | None
    ) -> None:
        self.causal, self.window = kind
        self.model_type, self.sizes, self._present = model_type, sizes, present
        self.batches: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}
        self.starts: Tensor | None = None
        self.lens: Tensor | None = None
        self.all_at_zero: bool | None = True
        self.some_empty = False
        self._pinned: Tensor | None = None
        self._are_spans: bool | None = True if present is None else None

    @property
    def is_padded(self) -> bool:
        """Whether some row may have padding."""
        return self._present is not None

    def are_spans(self) -> bool:
        """Whether each row's keys stand side by side; looks at the mask once, and in a trace asserts it on
        the device."""
        if self._are_spans is None and self._present is not None:
            present = self._present
            spans = ((present[:, 1:] & ~present[:, :-1]).sum(-1) + present[:, 0].int() <= 1).all()
            self.starts = present.int().argmax(-1).int()
            self.lens = present.sum(-1, dtype=torch.int32)
            if _is_traced(present):
                self._are_spans, self.all_at_zero = True, None
                torch._assert_async(
                    spans,
                    "attention_mask: expected rows whose tokens stand side by side, got a hole between two; "
                    "run the model uncompiled, where such masks go another way",
                )
            else:
                self._are_spans, self.some_empty = bool(spans), not bool(self.lens.all())
                self.all_at_zero = not bool(self.starts.any())
        return bool(self._are_spans)

    def pinned_lens(self) -> Tensor:
        """``lens`` for a kernel that may read them early, of rows that `are_spans` was asked of."""
        if self._pinned is None:
            assert self.lens is not None and self.starts is not None
            self._pinned = pin_batch(self.starts, self.lens, self.starts)[1]
        return self._pinned


def rows_of(mask: Tensor | None) -> MaskRows | None:
    """What `describe` hung on ``mask``; None for another tensor, or none."""
    return getattr(mask, "_torchpaged_rows", None)


def describe(
    mask: Tensor,
    padding: Tensor | None,
    mask_function: Any,
    local_size: int | None,
    offsets: tuple[Any, Any],
    model_type: str,
) -> None:
    """Hang the rows on a mask that transformers made, if they say the same; else leave it as it is.

    Args:
        mask: ``[batch, 1, query_len, kv_len]``, bool or to add.
        padding: ``[batch, kv_len]``, nonzero = token; None = no padding.
        mask_function, local_size: as transformers gives them to a mask function.
        offsets: ``(q_offset, kv_offset)``; only masks without offsets are described.
        model_type: of the config.
    """
    if mask.dim() != 4 or any(not isinstance(x, int) or x for x in offsets):
        return
    query_len, kv_len = mask.shape[-2:]
    kind = _kind(mask_function, local_size, (mask.shape[0], query_len, kv_len))
    if kind is None or (padding is not None and tuple(padding.shape) != (mask.shape[0], kv_len)):
        return
    present = None if padding is None else padding.bool()
    mask._torchpaged_rows = MaskRows(kind, model_type, (query_len, kv_len), present)  # type: ignore[attr-defined]


def _is_traced(tensor: Tensor) -> bool:
    """Whether values can't be looked at: in a trace, or in a capture."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _kind(mask_function: Any, local_size: int | None, sizes: tuple[int, int, int]) -> MaskKind | None:
    """Which mask ``mask_function`` makes; None for one that is neither causal nor bidirectional within a
    window. ``sizes``: rows, queries and keys."""
    batch, query_len, kv_len = sizes
    if mask_function is bidirectional_mask_function:
        return MaskKind(False, (-1, -1))
    if mask_function is causal_mask_function:
        return MaskKind(True, (-1, -1)) if query_len == kv_len else None
    # Other functions are asked, which a trace can't.
    if local_size is None or query_len != kv_len or torch.compiler.is_compiling():
        return None
    wanted = {
        MaskKind(True, (local_size - 1, -1)),
        MaskKind(False, (local_size, local_size)),
        MaskKind(False, (local_size - 1, local_size - 1)),
    }
    count = min(query_len, _QUERIES)
    spread = sorted({(query_len - 1) * i // max(count - 1, 1) for i in range(count)})
    queries, zero = torch.tensor(spread, device="cpu"), torch.tensor(0, device="cpu")
    keys, rows = torch.arange(kv_len, device="cpu"), torch.arange(batch, device="cpu")[:, None, None]
    places = rows, zero, queries[None, :, None], keys[None, None]
    try:
        got = torch.as_tensor(mask_function(*places), device="cpu")
        # Between the positions that are looked at, tokens may see each other in both directions.
        after = sees_next(mask_function, batch, 0, kv_len - 1, "cpu").cpu()
    except Exception:  # it looks into tensors elsewhere, or takes single positions
        return None
    shape = (batch, len(queries), kv_len)
    for kind in wanted:
        want = visible_keys(queries, kv_len, kind.causal, *kind.window, 0).expand(shape)
        sees = not kind.causal and kind.window[1] > 0
        if torch.equal(got.expand(shape).bool(), want) and bool((after == sees).all()):
            return kind
    return None


def encoder_rows(mask: Tensor | None, batch: int, num_keys: int | None = None) -> MaskRows | None:
    """The rows of a mask of cross attention; None where there is no padding.

    Args:
        mask: as transformers makes it; None = no padding.
        batch: rows.
        num_keys: keys per row that there are, padding included; None: not known.

    Raises:
        ArgumentError: the mask is of another kind, of another number of keys, or its rows have padding before
            their keys.
    """
    if mask is None:
        return None
    rows = rows_of(mask)
    expected = "the mask of an encoder whose rows are padded on the right, as transformers makes it"
    otherwise = "pass EncoderDecoderCache(PagedCache(...), DynamicCache(config=model.config))"
    if (
        rows is None
        or rows.causal
        or rows.window != (-1, -1)
        or mask.shape[0] != batch
        or not rows.are_spans()
    ):
        raise ArgumentError(
            "attention_mask", expected, f"another one of shape {list(mask.shape)}", f"or {otherwise}"
        )
    if num_keys not in (None, rows.sizes[1]):
        raise ArgumentError(
            "attention_mask",
            f"a mask over the {num_keys} tokens of the encoder in the cache",
            f"one over {rows.sizes[1]}",
            "call cache.reset() before another source",
        )
    if rows.starts is None:
        return None
    if rows.some_empty:
        raise ArgumentError(
            "attention_mask",
            "an encoder's input of at least one token in every row",
            "a row that is all padding, for which attention has nothing to average",
            "leave such rows out",
        )
    if rows.all_at_zero is False:
        raise ArgumentError(
            "attention_mask",
            expected,
            "one with padding on the left",
            f"pad the encoder's input on the right, or {otherwise}",
        )
    if rows.all_at_zero is None:
        assert rows.lens is not None
        torch._assert_async(
            ((rows.starts == 0) & (rows.lens > 0)).all(),
            "attention_mask: expected an encoder's input that is padded on the right, of at least one token "
            "in every row",
        )
        rows.all_at_zero = True  # asserted once for all layers
    return rows
