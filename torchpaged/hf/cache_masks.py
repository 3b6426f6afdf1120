"""What a paged cache learns from HuggingFace's masks: the left padding, causality, and which windows and
chunks there are.

transformers calls the mask function once per kind of layer, and under generate() twice in a prefill: before
the forward, with the user's mask, and inside it, with None or, in models that make a mask of their own where
none came, with ones. An all-ones mask and None mean the same to transformers: neither says anything about
padding. `PendingPadding` keeps what was read until it is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.masks import MaskKind, is_causal, kinds_of, left_padding
from torchpaged.hf.pending_padding import PendingPadding


class CacheMasks(CacheRows):
    """The masks of a `PagedCache`.

    Attributes:
        dense: keys and values are gathered, and transformers' own masks apply.
    """

    dense: bool
    _kinds: set[MaskKind]  # that the model asked for, as far as they were looked at
    _causal: bool | None
    _mask_seen: bool  # a mask came, so that decode steps on a device need not look at theirs
    _pending: PendingPadding  # of the first forward, until it writes

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may make the masks outside the forward, and compile a decode step.

        Not in dense mode where a layer has both a recurrent state and a window: there transformers makes a
        mask without the window. Not with chunked attention: transformers 5.17 cannot make that mask outside
        the forward, and never compiles those models.
        """
        hybrid = any(
            layer.window is not None and isinstance(layer, LinearAttentionCacheLayerMixin)
            for layer in self.paged
        )
        chunked = any(layer.chunk is not None for layer in self.paged)
        return bool(super().is_compileable) and not chunked and not (self.dense and hybrid)

    def _forget_masks(self) -> None:
        self._kinds, self._causal, self._mask_seen = set(), None, False
        self._pending = PendingPadding(self.name)

    def observe_mask(
        self,
        mask: Tensor | None,
        batch: int,
        query_length: int,
        mask_function: Any,
        local_size: int | None,
        device: Any = "cpu",
    ) -> None:
        """Learn the left padding from the first mask, check later ones; refuse masks that paging
        can't express.

        Args:
            mask: 2-D ``[batch, length]``, or None.
            batch, query_length: rows, and new tokens per row.
            mask_function, local_size, device: as transformers gives them to a mask function.
        """
        if torch.compiler.is_compiling():
            if mask is not None and query_length > 1:
                raise RuntimeError(
                    "PagedCache: a prefill with an attention mask was compiled, where its padding can't be "
                    "read; "
                    "run the prefill eagerly, as generate() does"
                )
            if query_length > 1:
                self._causal = is_causal(mask_function)
            return
        if (
            self.ready
            and self._mask_seen
            and query_length == 1
            and (mask is None or mask.device.type != "cpu")
            and not self._cut_padding
        ):
            return  # a decode step of generate() appends ones; checking would synchronise
        self._mask_seen = self._mask_seen or mask is not None
        padding = [] if mask is None else left_padding(mask)
        if query_length > 1:
            self._learn_kinds(
                kinds_of(
                    mask_function,
                    local_size,
                    query_length,
                    padding,
                    [(x.window, x.chunk) for x in self.paged],
                    device,
                )
            )
        if not self.ready:
            self._pending.learn(padding, batch, query_length, local_size)
        elif mask is not None:
            if any(padding):
                self._learn_padding(padding, query_length)
            self._cut_padding &= (
                max(padding) >= mask.shape[1]
            )  # a row of nothing but padding: the next mask may say more

    def _learn_padding(self, padding: list[int], query_length: int) -> None:
        before = self._padding or [0] * len(self.blocks)
        if padding == before or (
            (query_length > 1 or self._cut_padding) and self._grow_padding(before, padding)
        ):
            return
        raise ArgumentError(
            "attention_mask",
            f"the left padding of this cache's first batch ({before})",
            str(padding),
            "rows can't be padded again later: generate them apart, or call cache.reset()",
        )

    def _grow_padding(self, before: list[int], padding: list[int]) -> bool:
        """Chunked prefill: a row of which only padding was seen so far may turn out to have more."""
        seen = int(self.total)
        if len(padding) != len(before):
            return False
        more = [new - old for old, new in zip(before, padding, strict=True)]
        if any(extra and not (extra > 0 and old >= seen) for extra, old in zip(more, before, strict=True)):
            return False
        self.seq_lens[: len(more)] -= torch.tensor(more, dtype=torch.int32).to(self.seq_lens.device)
        self._padding = padding
        return True

    def _learn_kinds(self, kinds: set[MaskKind]) -> None:
        """Remember what the model asked for; one cache is causal or it is not."""
        causal = {kind.causal for kind in kinds}
        if self._causal is not None:
            causal &= {self._causal}
        if not causal:
            raise UnsupportedModelError(
                f"{self.name} asks for causal and for bidirectional masks over one cache, which paged "
                "attention does not tell apart; "
                "use PagedCache(..., dense=True)"
            )
        self._causal = True in causal
        self._kinds |= {kind for kind in kinds if kind.causal == self._causal}

    def causality(self) -> bool | None:
        """Whether the masks that the model asked for are causal; None if it asked for none (cross attention
        does not)."""
        return self._causal

    def require_kind(self, layer: PagedLayer, window: int | None) -> None:
        """Refuse a layer whose window or chunk is in none of the masks that the model asked for.

        Raises:
            UnsupportedModelError: the model's masks and its layers do not agree, so that one of them would
                be dropped.
        """
        if self._kinds and MaskKind(bool(self._causal), window, layer.chunk) not in self._kinds:
            raise UnsupportedModelError(
                f"{self.name}: layer {layer.index} attends with window {window} and chunk {layer.chunk}, "
                "and the model's masks are "
                f"{sorted(map(str, self._kinds))}: a mask that paged attention would drop; use "
                "PagedCache(..., dense=True)"
            )

    def require_mask_of_own(self) -> None:
        """Dense keys reach to ``max_seq_len``; without a mask made to that length, what lies behind the last
        token would be seen.

        Raises:
            UnsupportedModelError: the model attends without asking this cache for its sizes, as cross
                attention does.
        """
        if not self.order.masks_asked:
            raise UnsupportedModelError(
                f"{self.name} builds no mask from the sizes of this dense cache, as in cross attention: "
                "the keys behind the last token would "
                "be seen; for cross attention pass EncoderDecoderCache(PagedCache(...), "
                "DynamicCache(config=model.config))"
            )
