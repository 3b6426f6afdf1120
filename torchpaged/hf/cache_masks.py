"""What a paged cache learns from HuggingFace's masks: the left padding, causality, and which windows and
chunks there are.

transformers calls the mask function once per kind of layer: in the forward, or ahead of it under generate(),
whose forward is then given what the calls returned. An all-ones mask and None mean the same to transformers:
neither says anything about padding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.call_mask import CallMask, MaskRequest
from torchpaged.hf.expected_padding import ExpectedPadding, left_padding
from torchpaged.hf.families import family_of
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.mask_functions import is_causal, kinds_of, sees_next, whole_spans
from torchpaged.hf.mask_kinds import MaskKind, Prompt, Rows, Spans
from torchpaged.hf.row_refusals import assert_padding
from torchpaged.hf.row_table import ANOTHER_PROMPT, other_rows


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
        expected: the padding of a forward that has no rows yet.
    """

    def __init__(
        self, name: str, rows: CacheRows, layers: Sequence[PagedLayer], marks_tokens: bool = False
    ) -> None:
        self._name, self._rows, self._layers, self._marks = name, rows, layers, marks_tokens
        # Bloom widens its mask to a fixed cache's length with zeros, unless it is attached.
        family = family_of(name)
        self._todo = "call torchpaged.hf.attach(model) first" if family.own_attention else ""
        self.expected = ExpectedPadding(name)
        self._marks_padding = not family.asks_again
        self.forget()

    def forget(self) -> None:
        """Before another conversation."""
        self.causal: bool | None = None
        self._kinds: set[MaskKind] = set()  # that the model asked for, as far as they were looked at
        self._cut: int | None = None  # where a prompt ended inside or behind a span, and may go on
        self._prompts_are_whole = False  # see `expect_candidates`
        self._longest_mask = 0  # in tokens
        self._mask_seen = False  # a mask came, so that decode steps on a device need not look at theirs
        self.expected.forget()

    def require_next(self, asked: MaskRequest) -> None:
        """Refuse a forward that does not go on behind what the cache holds, as far as it shows; host facts,
        but for a mask that looks like another prompt's.

        generate() takes the first tokens of a prompt for the cached ones, and so those of another prompt; a
        mask that is not all ones gives it away. transformers hides what lies behind the mask's end, the new
        tokens too.

        Raises:
            ArgumentError: rows of a broken forward, other rows than the cache's, no tokens, or a mask that
                ends before they do.
        """
        rows, mask, query_length = self._rows, asked.padding, asked.query_len
        if not rows.ready or torch.compiler.is_compiling():
            return
        rows.require_complete()
        if asked.batch != len(rows.blocks.rows):
            raise other_rows(len(rows.blocks.rows), asked.batch)
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

    def observe(self, asked: MaskRequest) -> Tensor | None:
        """Learn the left padding from the first mask, check later ones; refuse masks that paging can't
        express.

        Returns:
            The mask: None, or a placeholder that carries a `CallMask`, where rows are padded or tokens see
            each other in both directions.

        Raises:
            ArgumentError: padding that rows can't have, or can't have any more.
            UnsupportedModelError: a mask that paged attention would not apply.
        """
        if torch.compiler.is_compiling():
            self._observe_traced(asked)
            return None
        holds = self._learn(asked)
        return None if holds is None else holds.placeholder()

    def _observe_traced(self, asked: MaskRequest) -> None:
        """In a trace nothing can be read: what a mask says is asserted on the device."""
        mask, function = asked.padding, asked.mask_function
        if mask is not None and (asked.query_len > 1 or not self._rows.ready):
            raise UnsupportedModelError(
                "PagedCache: a prefill with an attention mask was compiled, where its padding can't be "
                "read; run the prefill eagerly, as generate() does"
            )
        if mask is not None:
            assert_padding(self._rows, mask)
        if asked.query_len > 1:
            self.causal = is_causal(function)
        if asked.query_len > 1 and self._marks and self.causal and function is not causal_mask_function:
            count = self._rows.max_seq_len - 1
            torch._assert_async(
                ~sees_next(function, asked.batch, 0, count, asked.device).any(),
                "PagedCache: a compiled prompt whose image tokens see each other in both directions; run the "
                "prompt uncompiled, as generate() does",
            )

    def _learn(self, asked: MaskRequest) -> CallMask | None:
        self.require_next(asked)
        mask, rows, query_length = asked.padding, self._rows, asked.query_len
        on_device = mask is None or mask.device.type != "cpu"
        if rows.ready and self._mask_seen and query_length == 1 and on_device and not rows.cut_padding:
            if mask is not None:
                assert_padding(rows, mask)  # reading it would synchronise
            return None
        self._mask_seen = self._mask_seen or mask is not None
        padding = [] if mask is None else left_padding(mask, self._todo)
        holds = None
        if not rows.ready:
            self.expected.forget_another_forward(asked)
        if query_length > 1 or not rows.ready:
            # A row may have more padding than a mask says that came behind another one.
            known = padding or rows.padding or self.expected.padding or ()
            prompt = Prompt(asked.batch, int(asked.q_offset), query_length, known, asked.device)
            found = self._find_kinds(asked, prompt) if query_length > 1 else {}
            padded = self._marks_padding and any(padding) and not rows.ready
            if padded or any(spans.rows for spans in found.values()):
                holds = CallMask(self._name, found, prompt, rows=rows)
        if not rows.ready:
            self.expected.learn(padding, asked)
        elif mask is not None:
            if any(padding):
                self._learn_padding(padding, query_length)
            # A row of nothing but padding: the next mask may say more.
            rows.cut_padding &= max(padding) >= mask.shape[1]
        return holds

    def note_padding(self, asked: MaskRequest) -> None:
        """Learn the left padding of gathered keys: places of tokens are behind by it."""
        mask = asked.padding
        if asked.query_len > 1 and mask is not None and mask.dim() == 2 and not torch.compiler.is_compiling():
            self._rows.gathered_padding = (mask.cumsum(1) == 0).sum(1).tolist()

    def require_whole_spans(self, asked: MaskRequest) -> None:
        """Refuse of gathered keys, whose masks transformers makes, what `observe` refuses of spans.

        Raises:
            UnsupportedModelError: a chunk of a prompt that cuts one, or one behind others in the cache.
        """
        function, compiles = asked.mask_function, torch.compiler.is_compiling()
        if not self._marks or compiles or asked.query_len == 1 or not is_causal(function):
            return
        prompt = Prompt(asked.batch, int(asked.q_offset), asked.query_len, (), asked.device)
        self._require_uncut(asked, prompt)
        if function not in (None, causal_mask_function):
            self._note_cut(prompt, whole_spans(function, prompt))

    def _find_kinds(self, asked: MaskRequest, prompt: Prompt) -> dict[MaskKind, Spans]:
        self._require_uncut(asked, prompt)
        sizes = [(layer.window, layer.chunk) for layer in self._layers]
        found = kinds_of(asked.mask_function, asked.local_size, prompt, sizes, self._marks)
        self._learn_kinds(set(found))
        for spans in found.values():
            self._note_cut(prompt, spans.rows)
        return found

    def _require_uncut(self, asked: MaskRequest, prompt: Prompt) -> None:
        # A chunk of a prompt has the types of its own tokens alone, which don't tell that an image goes on
        # with a single one. Text without types asks for a plain mask, of its layers without a window.
        plain = asked.mask_function in (None, causal_mask_function) or asked.local_size is not None
        if self._marks and prompt.first == self._cut and not plain:
            raise UnsupportedModelError(
                f"{self._name}: a chunk of the prompt ends inside or right behind an image whose tokens see "
                "each other in both directions, and may not know of its rest; leave prefill_chunk_size out"
            )

    def _note_cut(self, prompt: Prompt, rows: Rows) -> None:
        if any(row and row[-1][1] == prompt.end for row in rows) and not self._prompts_are_whole:
            self._cut = prompt.end

    def expect_candidates(self) -> None:
        """What comes behind a prompt are candidates for its next tokens (assisted generation), no chunks of
        it."""
        self._cut, self._prompts_are_whole = None, True

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
        """Refuse a layer whose window or chunk is in none of the masks that the model asked for."""
        if self._kinds and MaskKind(bool(self.causal), window, layer.chunk) not in self._kinds:
            raise UnsupportedModelError(
                f"{self._name}: layer {layer.index} attends with window {window} and chunk {layer.chunk}, "
                f"and the model's masks are {sorted(map(str, self._kinds))}: a mask that paged attention "
                "would drop; use PagedCache(..., dense=True)"
            )
