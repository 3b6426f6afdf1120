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
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from torchpaged.backends import Limits, Route
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.custom_ops.words import counted
from torchpaged.hf.cache_masks import CacheMasks
from torchpaged.hf.cache_options import (
    check_options,
    described,
    in_one_line,
    keeps_kv,
    not_of_fp8,
    require_use_cache,
    why_dense,
)
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.call_mask import MaskRequest
from torchpaged.hf.call_sizes import sizes_of_call
from torchpaged.hf.chosen_backend import ChosenBackend
from torchpaged.hf.families import family_of
from torchpaged.hf.forward_order import TWO_CACHES, ForwardOrder
from torchpaged.hf.kv_scales import KVQuantization, Scales, require_paged
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.layer_pools import SET_UP, scaled
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.packed_state import PackedState
from torchpaged.hf.row_changes import crop, reindex
from torchpaged.hf.row_states import keys_like, slots_of_rows
from torchpaged.hf.row_table import too_many_rows
from torchpaged.hf.several_calls import DEFAULT_STEP, choose_rolling
from torchpaged.hf.support import (
    NAME,
    require_implementation,
    require_kept_layers,
    require_made_by_user,
    require_supported_config,
)
from torchpaged.hf.template import paged_layers
from torchpaged.metadata import AttentionMetadata
from torchpaged.prefixes import CascadeCosts
from torchpaged.prefixes.automatic import RowPrefixes

#: A layer that writes in a forward.
Writer = PagedLayer | PackedState


class PagedCache(PagedOwner):
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

    rows: CacheRows
    masks: CacheMasks
    paged: list[PagedLayer]

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
        self._rolling_chosen = False
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

    @property
    def ready(self) -> bool:  # type: ignore[override]
        """Whether the current batch has its blocks: from its first keys on, until `reset`."""
        return self.rows.ready

    @torch.compiler.disable(reason=SET_UP)
    def prepare(self, layer: Writer, key_states: Tensor, head_dim_v: int | None = None) -> None:
        """Choose the backend, give each row its blocks, fill the rows' tensors; once per batch, never
        traced."""
        if not layer.is_initialized:
            self.order.use(layer, self.rows.num_forwards)
        if self.ready:
            self.rows.require_device(self.name, key_states.device)
            return
        batch = key_states.shape[0]
        padding = self.masks.expected.take(batch, key_states.shape[2])  # a refusal below forgets it
        if batch > self.rows.max_rows:
            expected = f"at least the batch ({counted(batch, 'row')}, beams included)"
            raise too_many_rows(expected, self.rows.max_rows)
        self._require_implementation()
        if not self._caches:
            require_use_cache(self._text_config)
        self.backend.choose_for(self._text_config, key_states, head_dim_v)
        self._choose_rolling()
        self.rows.begin(batch, key_states.device, padding, key_states.shape[2])
        self.session.reset()  # a forward that was cut short may have left it in any state

    def prepare_states(self, layer: PackedState, x: Tensor) -> None:
        """See `PagedOwner`; by keys as the config has them, of which there are none yet."""
        self.prepare(layer, keys_like(self._text_config, x))
        if self.state_slots is None or self.state_slots.device != x.device:
            self.state_slots = slots_of_rows(self.rows.max_rows, x.device)

    def _choose_rolling(self) -> None:
        """Before the first pools are made: which layers need only the blocks of their window. Not where keys
        are gathered or attended in both directions, as images in models of several parts may be, and not for
        plans on the host, which read one table."""
        both_ways = self.masks.causal is False or self._config is not self._text_config
        chosen, self._rolling_chosen = self._rolling_chosen, True
        if chosen or not self.keys_of_queries or both_ways or self.session.plans:
            return
        layers = [layer for layer in self.paged if keeps_kv(layer)]
        rings = choose_rolling(self._text_config, layers, self.sliding_step, self.backend.limits)
        if rings is not None:
            self.rows.roll(rings)
            for layer in layers:
                layer.step = rings.step if layer.rolls else None

    def num_blocks_of(self, layer: PagedLayer) -> int:
        """Blocks of the layer's pools, the null block included."""
        rolling = self.rows.rolling
        return rolling.blocks.num_blocks if rolling is not None and layer.rolls else self.num_blocks

    def _require_implementation(self) -> None:
        if not self.dense and self._text_config._attn_implementation != NAME:
            require_implementation(self._text_config, "with a PagedCache")

    # ------------------------------------------------------------------------------------------- one forward
    def advance(self, layer: Writer, batch: int, query_len: int) -> AttentionMetadata:
        """See `PagedOwner`; lengths move on in place, in the graph."""
        if self.dense:
            self.order.require_masks_asked()
        if isinstance(layer, PagedLayer) and layer.lacks_scales:
            raise UnsupportedModelError(
                f"{self.name}: the first keys of a cache with fp8 pools come in compiled or fused code, "
                "where no scales can be found; run a forward eagerly and unfused before, or give kv_scales"
            )
        if layer.is_first:
            self._require_implementation()
        traced = torch.compiler.is_compiling()
        self.order.enter(layer, query_len, traced)
        if not traced and not layer.has_written:
            self.order.use(layer, self.rows.num_forwards)
        if layer.is_first:
            self.rows.advance(batch, query_len)
            if self.prefixes.active:
                self.prefixes.advance(query_len)
            if self.backend.plans:
                step = self.rows.step(batch, query_len)
                self.backend.plan(step, None if traced else self.rows.host_lengths(batch, query_len))
        self.order.leave(layer, query_len, traced)
        return self._step(layer, batch, query_len, writes=True)

    def see_queries(self, batch: int, query_len: int) -> None:
        """See `PagedOwner`: their starts, what they share, and a plan of them."""
        if query_len == self.order.query_len:
            return
        if self.prefixes.active:
            self.prefixes.advance(query_len)
        self.rows.query_starts.fill(query_len, short=True)
        if self.backend.plans:
            self.backend.plan(self.rows.step(batch, query_len), self.rows.host_lengths(batch, query_len))

    def written(self, layer: Writer) -> None:
        """The last layer's word completes the forward."""
        if layer.is_last:
            self.rows.complete()

    def metadata_of(self, layer: Writer, batch: int, query_len: int) -> AttentionMetadata:
        """See `PagedOwner`."""
        if not self.keys_of_queries:  # cross attention: the tokens that `advance` got are the encoder's
            self.rows.query_starts.fill(query_len)
        return self._step(layer, batch, query_len)

    def _step(self, layer: Any, batch: int, query_len: int, writes: bool = False) -> AttentionMetadata:
        """With the prefixes that rows share, and none of rings."""
        step = self.rows.step(batch, query_len, layer.rolls, writes)
        return self.prefixes.prepare(step) if self.prefixes.active and not layer.rolls else step

    # --------------------------------------------------------------------------------- what transformers asks
    def see_mask(self, mask: Tensor, x: Tensor) -> None:
        """See `PagedOwner`."""
        first = int(self.rows.total) if self.ready and not torch.compiler.is_compiling() else 0
        self.masks.observe(MaskRequest(x.shape[0], x.shape[1], 0, mask, q_offset=first, device=x.device))

    def mask_sizes(self, layer: PagedLayer, query_length: int) -> tuple[int, Any]:
        """Runs right before the mask function; outside compiled code it is also where overlong rows are
        refused."""
        self.order.announce(query_length)
        if not torch.compiler.is_compiling() and layer is (self.paged or self.layers)[0]:
            self._require_implementation()  # before the model reads a mask that it can't
            self.rows.require_room(query_length)
        return super().mask_sizes(layer, query_length)

    def length(self, layer: PagedLayer) -> Tensor | int:
        """Tokens per row that ``layer`` has written, padding included: 0, or a 0-d tensor once there is one;
        never ``rows.total`` itself, which moves on."""
        if not self.ready:
            return 0
        total = self.rows.total
        return total - self.order.query_len if self.order.is_behind(layer) else total.clone()

    @property
    def batch_size(self) -> int:
        """Rows of the current batch; -1 before the first."""
        return len(self.rows.blocks) or -1

    @property
    def is_updated(self) -> Any:
        """What decoders ask an EncoderDecoderCache for.

        Raises:
            UnsupportedModelError: always: its keys are those of one kind of attention.
        """
        raise UnsupportedModelError(
            f"{self.name} is an encoder-decoder model and asks its cache for `is_updated`; {TWO_CACHES}"
        )

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may make the masks outside the forward, and compile a decode step.

        Not in dense mode where a layer has both a recurrent state and a window: there transformers makes a
        mask without the window. Not with chunked attention, whose mask transformers 5.17 cannot make there.
        Not where such masks are wrong, see `Family.loses_masks_made_ahead`.
        """
        # Cache's own rule first, written out: torch 2.11 cannot trace a property through super(), and the
        # decode step that generate() compiles asks for it; tests/hf compares the two
        if not self.layers or not all(layer.is_compileable for layer in self.layers) or self._loses_masks:
            return False
        kinds = {isinstance(x, LinearAttentionCacheLayerMixin) for x in self.paged if x.window is not None}
        return all(layer.chunk is None for layer in self.paged) and not (self.dense and True in kinds)

    # ------------------------------------------------------------------------------------- between forwards
    def reset(self) -> None:
        """Forget everything; the pools' memory stays. The next forward may have another batch size."""
        for layer in self.layers:
            layer.reset()  # a paged one has nothing to do, unless it keeps a recurrent state too
        for layer in self.paged:
            layer.take_waiting()
        self.rows.forget()
        self.prefixes.forget()
        self.order.reset()
        self.masks.forget()

    def forget_recorded(self) -> None:
        """As `CacheRows.forget_recorded`, for all layers."""
        for layer in self.paged:
            layer.take_waiting()
        self.rows.forget_recorded()
        self.session.reset()
        self.order.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens of every row, all at most (assisted generation).

        The rule of transformers since 5.18. In 5.17 a positive number is the length to keep, deprecated; here
        it is refused in either.

        Args:
            tokens_to_remove: 0 or negative.

        Raises:
            ArgumentError: a positive number, no integer, or a forward before that did not complete; nothing
                is taken back then.
        """
        crop(self, self.prefixes, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` continues row ``beam_idx[i]``: full blocks are shared, only the last partial one is
        copied, where two rows continue the same. Raises as `torchpaged.hf.row_changes.reindex`."""
        reindex(self, self.prefixes, beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, neighbours; raises as `reorder_cache`."""
        reindex(self, self.prefixes, [row for row in range(len(self.rows.blocks)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, by their numbers; raises as `reorder_cache`."""
        reindex(self, self.prefixes, indices.tolist())

    def activate_past_recording(self) -> None:
        """generate() asks for it before it adds candidates that it may take back."""
        super().activate_past_recording()
        self.masks.expect_candidates()
        self.rows.expects_candidates = self.ready and self.rows.first_position(0) != 0

    def __repr__(self) -> str:
        return in_one_line(self)

    def describe(self) -> str:
        """The memory arithmetic in one line; pools count once they exist."""
        return described(self)
