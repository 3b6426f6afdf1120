"""What a paged cache learns from HuggingFace's masks: the left padding, causality, and which windows and
chunks there are.

transformers calls the mask function once per kind of layer, and under generate() twice in a prefill: before
the forward, with the user's mask, and inside it, with None or, in models that make a mask of their own where
none came, with ones. An all-ones mask and None mean the same to transformers: neither says anything about
padding. `PendingPadding` keeps what was read until it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.cache_rows import ANOTHER_PROMPT, CacheRows, other_rows
from torchpaged.hf.families import family_of
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.mask_kinds import MaskKind, is_causal, kinds_of, left_padding
from torchpaged.hf.pending_padding import PendingPadding, preparing_caller
from torchpaged.hf.span_mask import SpanMask
from torchpaged.hf.spans import Prompt, sees_next


class CacheMasks:
    """The masks of a `PagedCache`.

    Args:
        name: the model's type, for messages.
        rows: the cache's rows, whose padding the masks tell.
        layers: its paged layers.
        marks_tokens: the model marks tokens of other kinds than text, so that its masks are looked at
            everywhere.

    Attributes:
        causal: whether the masks that the model asked for are causal; None if it asked for none (cross
            attention does not).
        pending: the padding of the first forward, until it writes.
    """

    def __init__(
        self, name: str, rows: CacheRows, layers: Sequence[PagedLayer], marks_tokens: bool = False
    ) -> None:
        self._name, self._rows, self._layers, self._marks = name, rows, layers, marks_tokens
        self.pending = PendingPadding(name)
        # Bloom widens its mask to a fixed cache's length with zeros, unless it is attached.
        self._todo = "call torchpaged.hf.attach(model) first" if family_of(name).own_attention else ""
        self.forget()

    def forget(self) -> None:
        """Before another conversation."""
        self.causal: bool | None = None
        self._kinds: set[MaskKind] = set()  # that the model asked for, as far as they were looked at
        self._cut: FrameType | None = None  # who prepared a forward that ended inside or behind a span
        self._longest_mask = 0  # in tokens
        self._mask_seen = False  # a mask came, so that decode steps on a device need not look at theirs
        self.pending.forget()

    def require_next(self, mask: Tensor | None, batch: int, query_length: int) -> None:
        """Refuse a forward that does not go on behind what the cache holds, as far as it shows; host facts,
        but for a mask that looks like another prompt's.

        generate() takes the first tokens of a prompt for the cached ones, and so those of another prompt; a
        mask that is not all ones gives it away. transformers hides what lies behind the mask's end, the new
        tokens too.

        Args:
            mask: 2-D ``[batch, length]``, or None.
            batch, query_length: rows, and new tokens per row.

        Raises:
            ArgumentError: rows of a broken forward, other rows than the cache's, no tokens, or a mask that
                ends before they do.
        """
        rows = self._rows
        if not rows.ready or torch.compiler.is_compiling():
            return
        rows.require_complete()
        if batch != len(rows.blocks.rows):
            raise other_rows(len(rows.blocks.rows), batch)
        if not query_length:
            raise ArgumentError(
                "input_ids", f"tokens behind the {int(rows.total)} in the cache", "none", ANOTHER_PROMPT
            )
        if mask is None or mask.dim() != 2:
            return
        length, longest = mask.shape[1], self._longest_mask
        self._longest_mask = max(length, longest)
        # The masks of decode steps on a device grow: to look at the lengths there would synchronise.
        if query_length == 1 and length >= longest and mask.device.type != "cpu":
            return
        total = int(rows.total)
        if length < total + query_length:
            self._longest_mask = longest
            raise ArgumentError(
                "attention_mask",
                f"a mask over all {total + query_length} tokens: {total} in the cache, {query_length} new",
                f"one over {length}",
                ANOTHER_PROMPT,
            )

    def observe(
        self,
        mask: Tensor | None,
        batch: int,
        query_length: int,
        mask_function: Any,
        local_size: int | None,
        device: Any = "cpu",
        q_offset: Any = 0,
    ) -> Tensor | None:
        """Learn the left padding from the first mask, check later ones; refuse masks that paging can't
        express.

        Args:
            mask: 2-D ``[batch, length]``, or None.
            batch, query_length: rows, and new tokens per row.
            mask_function, local_size, device, q_offset: as transformers gives them to a mask function.

        Returns:
            The mask: None, or a placeholder (`SpanMask`) where tokens see each other in both directions.

        Raises:
            ArgumentError: padding that rows can't have, or can't have any more.
            UnsupportedModelError: a mask that paged attention would not apply.
        """
        if torch.compiler.is_compiling():
            if mask is not None and (query_length > 1 or not self._rows.ready):
                raise RuntimeError(
                    "PagedCache: a prefill with an attention mask was compiled, where its padding can't be "
                    "read; run the prefill eagerly, as generate() does"
                )
            if mask is not None:
                self._rows.assert_padding(mask)
            if query_length > 1:
                self.causal = is_causal(mask_function)
                self._assert_no_spans(mask_function, batch, device)
            return None
        self.require_next(mask, batch, query_length)
        ready, on_device = self._rows.ready, mask is None or mask.device.type != "cpu"
        if ready and self._mask_seen and query_length == 1 and on_device and not self._rows.cut_padding:
            if mask is not None:
                self._rows.assert_padding(mask)  # reading it would synchronise
            return None
        self._mask_seen = self._mask_seen or mask is not None
        padding = [] if mask is None else left_padding(mask, self._todo)
        spans: SpanMask | None = None
        if query_length > 1:
            sizes = [(layer.window, layer.chunk) for layer in self._layers]
            # A row may have more padding than a mask says that came behind another one.
            known = padding or self._rows.padding or self.pending.padding or ()
            prompt = Prompt(batch, int(q_offset), query_length, known, device)
            if self._marks:
                self._require_whole_spans(prompt)
            found = kinds_of(mask_function, local_size, prompt, sizes, self._marks)
            self._learn_kinds(set(found))
            if any(of_kind.rows for of_kind in found.values()):
                spans = SpanMask(self._name, found, prompt, self._rows)
                ends = {row[-1][1] for of_kind in found.values() for row in of_kind.rows if row}
                caller = preparing_caller() if prompt.end in ends else None
                # Behind a whole prompt candidates come from there, too; were it renamed, they'd be refused.
                whole = caller is not None and caller.f_code.co_name == "_assisted_decoding"
                self._cut = None if whole else caller
        if not ready:
            self.pending.learn(padding, batch, query_length, local_size)
        elif mask is not None:
            if any(padding):
                self._learn_padding(padding, query_length)
            # A row of nothing but padding: the next mask may say more.
            self._rows.cut_padding &= max(padding) >= mask.shape[1]
        return None if spans is None else spans.placeholder()

    def _require_whole_spans(self, prompt: Prompt) -> None:
        """Refuse the next chunk of a prompt behind one that ends with a span: generate() gives a chunk the
        types of its own tokens, which don't tell whether the span goes on."""
        if self._cut is not None and prompt.first > 0 and preparing_caller() is self._cut:
            raise UnsupportedModelError(
                f"{self._name}: a chunk of the prompt ends inside or right behind an image whose tokens see "
                "each other in both directions, and may not know of its rest; leave prefill_chunk_size out"
            )

    def _assert_no_spans(self, mask_function: Any, batch: int, device: Any) -> None:
        """In a trace spans can't be read: they are asserted away on the device."""
        if not self._marks or mask_function is causal_mask_function or not self.causal:
            return
        count = self._rows.max_seq_len - 1
        torch._assert_async(
            ~sees_next(mask_function, batch, 0, count, device).any(),
            "PagedCache: a compiled prompt whose image tokens see each other in both directions; run the "
            "prompt uncompiled, as generate() does",
        )

    def _learn_padding(self, padding: list[int], query_length: int) -> None:
        rows = self._rows
        before = rows.padding or [0] * len(rows.blocks)
        if padding == before:
            return
        if (query_length > 1 or rows.cut_padding) and self._may_grow(before, padding):
            rows.add_padding([new - old for old, new in zip(before, padding, strict=True)])
            rows.padding = padding
            return
        raise ArgumentError(
            "attention_mask",
            f"the left padding of this cache's first batch ({before})",
            str(padding),
            "rows can't be padded again later: generate them apart, or call cache.reset()",
        )

    def _may_grow(self, before: list[int], padding: list[int]) -> bool:
        """Chunked prefill: a row of which only padding was seen so far may turn out to have more."""
        seen = int(self._rows.total)
        return len(padding) == len(before) and all(
            new == old or (new > old and old >= seen) for old, new in zip(before, padding, strict=True)
        )

    def _learn_kinds(self, kinds: set[MaskKind]) -> None:
        """Remember what the model asked for; one cache is causal or it is not."""
        causal = {kind.causal for kind in kinds}
        if self.causal is not None:
            causal &= {self.causal}
        if not causal:
            raise UnsupportedModelError(
                f"{self._name} asks for causal and for bidirectional masks over one cache, which paged "
                "attention does not tell apart; use PagedCache(..., dense=True)"
            )
        self.causal = True in causal
        self._kinds |= {kind for kind in kinds if kind.causal == self.causal}

    def require_kind(self, layer: PagedLayer, window: int | None) -> None:
        """Refuse a layer whose window or chunk is in none of the masks that the model asked for.

        Raises:
            UnsupportedModelError: the model's masks and its layers do not agree, so that one of them would be
                dropped.
        """
        if self._kinds and MaskKind(bool(self.causal), window, layer.chunk) not in self._kinds:
            raise UnsupportedModelError(
                f"{self._name}: layer {layer.index} attends with window {window} and chunk {layer.chunk}, "
                f"and the model's masks are {sorted(map(str, self._kinds))}: a mask that paged attention "
                "would drop; use PagedCache(..., dense=True)"
            )
