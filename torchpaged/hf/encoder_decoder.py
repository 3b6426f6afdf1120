"""PagedEncoderDecoderCache: both caches of an encoder-decoder model, paged.

    call = {**inputs, "max_new_tokens": 64}
    out = model.generate(**call, past_key_values=PagedEncoderDecoderCache.for_inputs(model, **call))

The decoder's own keys are a `PagedCache`. The encoder's are written once, by the first forward, into pools of
their own, and read by every step after it; rows whose source is padded on the right keep their lengths.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel

from torchpaged.backends import Route
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.custom_ops.words import counted, one_line
from torchpaged.hf.cache import PagedCache
from torchpaged.hf.call_sizes import sizes_of_encoder_decoder_call
from torchpaged.hf.kv_scales import Scales


class CrossPagedCache(PagedCache):
    """The encoder's keys and values, for cross attention.

    Args:
        config: the model's config.
        max_batch_size: rows at most, beams included.
        max_encoder_len: tokens of the encoder per row at most, padding included; None: as many as come first.
        block_size, num_blocks, backend, kv_dtype, kv_scales: as for `PagedCache`.

    Raises:
        ArgumentError, UnsupportedModelError: as `PagedCache`.
    """

    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_encoder_len: int | None = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        backend: str | Route | None = "auto",
        kv_dtype: str | torch.dtype | None = None,
        kv_scales: str | Scales = "head",
    ) -> None:
        options: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks, "backend": backend}
        options |= {"kv_dtype": kv_dtype, "kv_scales": kv_scales}
        self._sized, self._made_of = max_encoder_len is not None, (config, max_batch_size, options)
        self._make(1 if max_encoder_len is None else max_encoder_len)

    def _make(self, max_encoder_len: int) -> None:
        config, max_batch_size, options = self._made_of
        PagedCache.__init__(
            self, config, max_batch_size, max_encoder_len, dense=False, cascade=False, **options
        )
        if self.family.own_attention and not self.family.pages_cross_attention:
            raise UnsupportedModelError(
                f"{self.name} attends to its encoder in modules of its own, which torchpaged does not page; "
                "pass EncoderDecoderCache(PagedCache(...), DynamicCache(config=model.config))"
            )
        self.keys_of_queries = False
        for layer in self.paged:  # those of the decoder's own keys
            layer.window = layer.chunk = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`PagedCache.update`; the first one sizes a cache that was given no size."""
        if not self._sized:
            self._sized = True
            self._make(key_states.shape[2])
        if key_states.shape[2] > self.max_seq_len:
            raise ArgumentError(
                "max_encoder_len",
                f"room for {key_states.shape[2]} tokens of the encoder per row (padding included)",
                str(self.max_seq_len),
                "build the cache with a larger max_encoder_len",
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class PagedEncoderDecoderCache(EncoderDecoderCache):
    """A paged cache for ``generate()`` and direct forwards of an encoder-decoder model.

    Args:
        config: the model's config (``model.config``).
        max_batch_size: rows at most; with beams or several return sequences, all of them.
        max_seq_len: the decoder's tokens per row at most, prompt and new ones.
        max_encoder_len: the encoder's, padding included; None: as many as the first batch has.
        block_size, backend: as for `PagedCache`.
        dense: as for `PagedCache`; of the decoder's own keys. Cross attention is paged in any case.
        kv_dtype, kv_scales: as for `PagedCache`; of both caches.

    Attributes:
        self_attention_cache, cross_attention_cache: a `PagedCache` and a `CrossPagedCache`.

    Raises:
        ArgumentError, UnsupportedModelError: as `PagedCache`.
    """

    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_seq_len: int,
        max_encoder_len: int | None = None,
        *,
        block_size: int = 16,
        backend: str | Route | None = "auto",
        dense: bool | None = None,
        kv_dtype: str | torch.dtype | None = None,
        kv_scales: str | Scales = "head",
    ) -> None:
        both: dict[str, Any] = {"block_size": block_size, "backend": backend}
        both |= {"kv_dtype": kv_dtype, "kv_scales": kv_scales}
        super().__init__(
            PagedCache(config, max_batch_size, max_seq_len, dense=dense, **both),
            CrossPagedCache(config, max_batch_size, max_encoder_len, **both),
        )

    def __repr__(self) -> str:
        """Of the decoder's half; `describe` tells of both."""
        half = self.self_attention_cache
        blocks = f"{counted(half.num_blocks, 'block')} of {counted(half.block_size, 'token')} in the decoder"
        return one_line(self, blocks, counted(len(half.paged), "paged layer"))

    def __copy__(self) -> Any:
        """Refuse, as the two caches do: a shallow copy would write into its original's rows."""
        return copy.copy(self.self_attention_cache)

    @classmethod
    def for_inputs(cls, model: PreTrainedModel, **call: Any) -> "PagedEncoderDecoderCache":
        """A cache as large as one call of generate() needs; the encoder's part takes what comes.

        Args:
            model: the model.
            call: options of the class, such as ``block_size``; and generate()'s arguments: what they leave
                out is taken from ``generation_config`` and from the model's.

        Raises:
            ArgumentError: the encoder's input is missing, or nothing says how many tokens may come.
            UnsupportedModelError: as `PagedCache`.
        """
        known = inspect.getfullargspec(cls.__init__).kwonlyargs
        options = {name: call.pop(name) for name in known if name in call}
        rows, tokens = sizes_of_encoder_decoder_call(model, call)
        return cls(model.config, rows, tokens, **options)

    def check_dynamic_cache(self, method: str) -> None:
        """Nothing is refused: transformers asks before ``crop``, ``batch_repeat_interleave`` and
        ``batch_select_indices``, which both of these have."""

    def describe(self) -> str:
        """The memory arithmetic of both, a line each."""
        halves = {"decoder": self.self_attention_cache, "encoder": self.cross_attention_cache}
        return "\n".join(f"{name}: {half.describe()}" for name, half in halves.items())
