"""PagedCache: a HuggingFace ``Cache`` whose layers are block pools and whose metadata lives on the device.

    cache = PagedCache(model.config, max_batch_size=4, max_seq_len=512)
    model.generate(**inputs, past_key_values=cache)

A decode step needs nothing from the host: the first layer's ``update()`` advances lengths and slots in place,
inside the compiled graph. A forward is complete with the last layer; behind one that raised in between, rows
hold more tokens in some layers than in others, and the cache refuses to go on until ``reset()``. The layers
share one session of the backend, so forwards on one cache must not overlap on two streams.
"""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from torchpaged.backends import Limits, Route
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.hf.cache_masks import CacheMasks
from torchpaged.hf.cache_options import check_options, described, in_one_line, not_of_fp8, why_dense
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.call_sizes import sizes_of_call
from torchpaged.hf.chosen_backend import ChosenBackend
from torchpaged.hf.families import family_of
from torchpaged.hf.forward_order import ForwardOrder
from torchpaged.hf.kv_scales import KVQuantization, Scales, require_paged
from torchpaged.hf.layer_pools import scaled
from torchpaged.hf.row_forwards import RowForwards
from torchpaged.hf.several_calls import DEFAULT_STEP
from torchpaged.hf.support import require_kept_layers, require_made_by_user, require_supported_config
from torchpaged.hf.template import paged_layers
from torchpaged.prefixes import CascadeCosts
from torchpaged.prefixes.automatic import RowPrefixes


class PagedCache(RowForwards):
    """A paged KV cache for ``generate()`` and direct forwards. Left padding is read once from the 2-D
    attention mask, any other hole is refused; call `reset` before another, unrelated conversation.

    Args:
        config: the model's config (``model.config``).
        max_batch_size: rows at most; with beams or several return sequences, all of them.
        max_seq_len: tokens per row at most, prompt and new ones, padding included.
        block_size: tokens per block.
        num_blocks: blocks per layer, the null block included; default: enough for ``max_batch_size`` full
            rows, each of which takes its ``ceil(max_seq_len / block_size)`` blocks when its batch arrives. Of
            fewer, rows take blocks as they grow, all equally many (beams share theirs); steps that are
            compiled by hand, where nothing runs on the host, can't, and fail. Layers with a sliding window
            or chunks have fewer, see ``sliding_step``.
        backend: a name, a route, or None / "auto"; chosen when the first keys arrive (device and dtype are
            known then).
        dense: gather keys and values and let SDPA attend: slower, for models that change cached values before
            attention. None: for those that are known to (`torchpaged.hf.families`), and for no others.
            Models of multi-head latent attention are not among them once they are attached
            (`torchpaged.hf.attach`): their layers keep latents.
        kv_dtype: of the pools: "fp8_e4m3" or "fp8_e5m2", or torch's dtype of that name; None: the keys'.
        kv_scales: of fp8 pools: "head" or "tensor", found in the first forward's keys and values, one per kv
            head or one per layer, and kept until the cache is gone; or for each paged layer
            ``(k_scale, v_scale)``, numbers or float32 ``[1]`` or ``[num_kv_heads]``, as the attribute of this
            name holds them. Latents are stored as "fp8_e4m3" alone, in rows with scales of their own.
        cascade: decode steps read blocks that several rows share once, where that pays
            (`torchpaged.prefixes`): rows share them after beams were reordered or rows repeated. True: by the
            device's own costs; `torchpaged.prefixes.CascadeCosts`: by these; False: never. Not in decoders
            with cross attention.
        batch_invariant: attention gives a row the same bits in every batch: by a backend that declares it,
            else the cache is refused. Of the model's own linear layers torch promises nothing of the kind.
        sliding_step: in layers with a sliding window or attention chunks, a row's blocks are used over and
            over: they hold the window and this many tokens more, however long the row is. Longer
            forwards are attended in steps of so many tokens, and so many can be taken back at least
            (`crop`). ``max_seq_len`` keeps every token, and so do backends that plan on the host, and models
            whose config has parts besides the text's (images).

    Attributes:
        dense: whether keys and values are gathered.
        dense_reason: why, if it was not asked for; else empty.
        rows, masks, backend, order, prefixes: what it is made of.
        paged: the paged ones of its ``layers``.

    Raises:
        ArgumentError, BackendUnavailableError: a size below 1, a ``backend`` of no such name, or another
            ``kv_dtype`` or form of ``kv_scales``.
        UnsupportedModelError: the config's model ignores the attention interface.
    """

    def __new__(cls, *args: Any, **options: Any) -> "PagedCache":
        """Refuse to be made by transformers, or of a model, see `require_made_by_user`."""
        require_made_by_user(args, options)
        return super().__new__(cls)

    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_seq_len: int,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        backend: str | Route | None = "auto",
        dense: bool | None = None,
        kv_dtype: str | torch.dtype | None = None,
        kv_scales: str | Scales = "head",
        cascade: bool | CascadeCosts = True,
        batch_invariant: bool = False,
        sliding_step: int = DEFAULT_STEP,
    ) -> None:
        sizes = {"block_size": block_size, "sliding_step": sliding_step}
        check_sizes(max_batch_size=max_batch_size, max_seq_len=max_seq_len, **sizes)
        check_options(num_blocks, dense, batch_invariant, kv_dtype, kv_scales)
        require_supported_config(config)
        self._config, self._text_config = config, config.get_text_config(decoder=True)
        self.dense_reason = why_dense(self._text_config, dense, batch_invariant)
        dense = bool(self.dense_reason) if dense is None else dense
        super().__init__(self._text_config, max_seq_len, paged_layers, dense)
        require_kept_layers(self._text_config, self.keeping)
        if not self.paged and num_blocks is not None:
            expected = f"None for {self.name}, which keeps states and no blocks"
            raise ArgumentError("num_blocks", expected, str(num_blocks))
        # An encoder's keys, in a cache for cross attention, are context of the first query and must be
        # complete before attention begins.
        flags = ("is_encoder_decoder", "add_cross_attention")
        crosses = any(getattr(c, flag, False) for c in (config, self._text_config) for flag in flags)
        self.keys_of_queries = not self.dense and not crosses
        self._loses_masks = family_of(config.model_type).loses_masks_made_ahead(config)
        self.block_size, self.sliding_step = block_size, sliding_step
        blocks_per_row = -(-max_seq_len // block_size)
        self.num_blocks = max_batch_size * blocks_per_row + 1 if num_blocks is None else num_blocks
        self.kv = KVQuantization(kv_dtype, kv_scales, len(scaled(self.paged)))
        if self.kv.dtype is not None:
            require_paged(self.name, not_of_fp8(self.paged, self.kv.dtype, self.dense, self.dense_reason))
        most = max_batch_size, max_batch_size * max_seq_len
        limits = Limits(*most, blocks_per_row, self.num_blocks, block_size)
        self.rows = CacheRows(limits, max_seq_len)
        self.pool = self.rows.pool
        # A model of several parts: tokens may stand for images, and see each other.
        self.masks = CacheMasks(self.name, self.rows, self.paged, config is not self._text_config)
        self.backend = ChosenBackend(backend, limits, self.paged, batch_invariant)
        self.num_states = max_batch_size + 1
        self.order = ForwardOrder(self.name, self.keeping, crosses)
        self.prefixes = RowPrefixes(self.rows, self.paged, cascade if self.keys_of_queries else False)
        # generate() runs the models of some configs without a cache, even if it is given one
        self._caches = getattr(type(self._text_config), "use_cache", True) is not False

    @classmethod
    def for_inputs(cls, model: PreTrainedModel, **call: Any) -> "PagedCache":
        """A cache as large as one call of generate() needs.

            call = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
            call = {**call, "max_new_tokens": 64, "num_beams": 4}
            out = model.generate(**call, past_key_values=PagedCache.for_inputs(model, **call))

        Args:
            model: the model.
            call: options of `PagedCache`, such as ``block_size`` or ``kv_dtype``; and generate()'s arguments:
                what they leave out is taken from ``generation_config`` and from the model's. Of an
                encoder-decoder model, the decoder's prompt must be among them.

        Raises:
            ArgumentError: the prompt is missing, nothing says how many tokens may come, or the call has
                ``use_cache=False``.
            UnsupportedModelError: as `PagedCache`.
        """
        known = inspect.getfullargspec(PagedCache.__init__).kwonlyargs
        options = {name: call.pop(name) for name in known if name in call}
        rows, tokens = sizes_of_call(model, call)
        cache = cls(model.config, rows, tokens, **options)
        cache._caches = True
        return cache

    def activate_past_recording(self) -> None:
        """generate() asks for it before it adds candidates that it may take back."""
        super().activate_past_recording()
        self.masks.expect_candidates()
        self.rows.expects_candidates = self.ready and self.rows.first_position(0) != 0

    __repr__ = in_one_line
    describe = described
