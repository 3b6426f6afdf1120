"""PagedCache: a HuggingFace ``Cache`` whose layers are block pools and whose metadata lives on the device.

    cache = PagedCache(model.config, max_batch_size=4, max_seq_len=512)
    model.generate(**inputs, past_key_values=cache)

A decode step needs nothing from the host: the first layer's ``update()`` advances lengths and slots in place,
inside the compiled graph. Left padding is read once from the 2-D attention mask; any other hole is refused.
For another, unrelated conversation call ``cache.reset()``. The layers share one session of the backend, so
forwards on one cache must not overlap on two streams.

A forward begins with the first layer that writes and is complete with the last one. One that raised in
between leaves rows of which some layers hold more tokens than others: the cache refuses to go on until
``reset()``.

What it is made of: its rows (cache_rows.py, row_changes.py for what generate() does to them between
forwards, and `torchpaged.prefixes` for those that share blocks), what the masks told (cache_masks.py), the
backend (chosen_backend.py) and the order of the layers (forward_order.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from torchpaged.backends import Choice, Limits, Planning, Session
from torchpaged.cache import BlockPool
from torchpaged.custom_ops.checks import is_int, switch
from torchpaged.custom_ops.errors import (
    ArgumentError,
    BackendUnavailableError,
    NotCopyableError,
    UnsupportedModelError,
)
from torchpaged.hf.attached import was_given_functions
from torchpaged.hf.cache_masks import CacheMasks
from torchpaged.hf.cache_rows import CacheRows, incomplete
from torchpaged.hf.call_sizes import sizes_of_call
from torchpaged.hf.chosen_backend import ChosenBackend
from torchpaged.hf.families import family_of
from torchpaged.hf.forward_order import ForwardOrder
from torchpaged.hf.kv_scales import KVScales, Scales, require_paged
from torchpaged.hf.layer import SET_UP, PagedLayer, mask_token
from torchpaged.hf.rolling_attention import DEFAULT_STEP, choose_rolling
from torchpaged.hf.row_changes import RowChanges
from torchpaged.hf.support import (
    NAME,
    require_implementation,
    require_made_by_user,
    require_paged_layers,
    require_supported_config,
)
from torchpaged.hf.template import HybridPagedLayer, paged_layers
from torchpaged.metadata import AttentionMetadata
from torchpaged.prefixes import CascadeCosts
from torchpaged.prefixes.rows import RowPrefixes


def _keeps_kv(layer: PagedLayer) -> bool:
    return type(layer) in (PagedLayer, HybridPagedLayer)


class PagedCache(Cache):
    """A paged KV cache for ``generate()`` and direct forwards.

    Args:
        config: the model's config (``model.config``).
        max_batch_size: rows at most; with beams or several return sequences, all of them.
        max_seq_len: tokens per row at most, prompt and new ones, padding included.
        block_size: tokens per block.
        num_blocks: blocks per layer, the null block included; default: enough for ``max_batch_size`` full
            rows. A row takes its ``ceil(max_seq_len / block_size)`` blocks when its batch arrives. Layers
            with a sliding window or chunks have fewer, see ``sliding_step``.
        backend: a name or "auto"; chosen when the first keys arrive (device and dtype are known then).
        dense: gather keys and values and let SDPA attend: slower, for models that change cached values before
            attention. None: for those that are known to (`torchpaged.hf.families`), and for no others.
            Models of multi-head latent attention are not among them once they are attached
            (`torchpaged.hf.attach`): their layers keep latents.
        kv_dtype: of the pools: "fp8_e4m3" or "fp8_e5m2", or torch's dtype of that name; None: the keys'.
        kv_scales: of fp8 pools: "head" or "tensor", found in the first forward's keys and values, one per kv
            head or one per layer, and kept until the cache is gone; or for each paged layer
            ``(k_scale, v_scale)``, as the attribute of this name holds them.
        cascade: decode steps read blocks that several rows share once, where that pays
            (`torchpaged.prefixes`): rows share them after beams were reordered or rows repeated. True: by the
            device's own costs; `torchpaged.prefixes.CascadeCosts`: by these; False: never. Not in decoders
            with cross attention.
        batch_invariant: attention gives a row the same bits in every batch: by a backend
            that declares it, else the cache is refused. Of the model's own linear layers torch promises
            nothing of the kind.
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
        ArgumentError: a size below 1, or another ``kv_dtype`` or form of ``kv_scales``.
        UnsupportedModelError: the config's model ignores the attention interface.
    """

    def __new__(cls, *args: Any, **options: Any) -> PagedCache:
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
        backend: str = "auto",
        dense: bool | None = None,
        kv_dtype: str | torch.dtype | None = None,
        kv_scales: str | Scales = "head",
        cascade: bool | CascadeCosts = True,
        batch_invariant: bool = False,
        sliding_step: int = DEFAULT_STEP,
    ) -> None:
        sizes = {
            "max_batch_size": max_batch_size,
            "max_seq_len": max_seq_len,
            "block_size": block_size,
            "sliding_step": sliding_step,
        }
        for name, size in sizes.items():
            if not is_int(size) or size < 1:
                raise ArgumentError(name, "an int of at least 1", repr(size))
        if num_blocks is not None and (not is_int(num_blocks) or num_blocks < 2):
            raise ArgumentError(
                "num_blocks", "None or an int of at least 2 (block 0 is the null block)", repr(num_blocks)
            )
        switch("dense", dense, None)
        switch("batch_invariant", batch_invariant)
        if batch_invariant and kv_dtype is not None and isinstance(kv_scales, str):
            raise ArgumentError(
                "kv_scales",
                "scales, with batch_invariant=True and fp8 pools: those found are of the first batch",
                repr(kv_scales),
                "give those that another cache of this model found: its kv_scales",
            )
        require_supported_config(config)
        text_config = config.get_text_config(decoder=True)
        self.name = str(text_config.model_type)
        self.family = family_of(self.name)
        given = was_given_functions(text_config)
        self.dense_reason = self.family.needs_dense if dense is None and not given else ""
        self.dense = bool(self.dense_reason) if dense is None else dense
        if self.dense and batch_invariant:
            raise UnsupportedModelError(
                f"{self.name}: batch_invariant is not held where keys are gathered "
                f"({self.dense_reason or 'dense=True'}): SDPA promises nothing of the kind"
            )
        super().__init__(layers=paged_layers(text_config, max_seq_len, self))
        self.paged = [layer for layer in self.layers if isinstance(layer, PagedLayer)]
        require_paged_layers(text_config, self.paged)
        # An encoder's keys, in a cache for cross attention, are context of the first query and must be
        # complete before attention begins.
        flags = ("is_encoder_decoder", "add_cross_attention")
        crosses = any(getattr(c, flag, False) for c in (config, text_config) for flag in flags)
        self._config, self._text_config = config, text_config
        self._loses_masks = family_of(config.model_type).loses_masks_made_ahead(config)
        if self.dense and self.family.own_attention:
            raise UnsupportedModelError(
                f"{self.name} masks by the lengths of its own keys, which dense=True makes max_seq_len; "
                "leave dense out, and call torchpaged.hf.attach(model)"
            )
        self.keys_of_queries = not self.dense and not crosses
        self.max_seq_len, self.block_size, self.sliding_step = max_seq_len, block_size, sliding_step
        blocks_per_row = -(-max_seq_len // block_size)
        self.num_blocks = max_batch_size * blocks_per_row + 1 if num_blocks is None else num_blocks
        self.kv = KVScales(kv_dtype, kv_scales, len(self.paged))
        if self.kv.dtype is not None:
            require_paged(self.name, self._not_of_fp8())
        limits = Limits(
            max_batch_size, max_batch_size * max_seq_len, blocks_per_row, self.num_blocks, block_size
        )
        self.rows = CacheRows(limits, max_seq_len)
        # A model of several parts: tokens may stand for images, and see each other.
        self.masks = CacheMasks(self.name, self.rows, self.paged, config is not text_config)
        self.backend = ChosenBackend(backend, limits, self.paged, batch_invariant)
        self.order = ForwardOrder(self.name, self.paged, crosses)
        self.prefixes = RowPrefixes(self.rows, self.paged, cascade if self.keys_of_queries else False)
        self._changes = RowChanges(self.rows, self.layers, self.prefixes)
        self._rolling_chosen = False
        # By default generate() runs the models of some configs without a cache, even if it is given one.
        self._caches = getattr(type(text_config), "use_cache", True) is not False
        self._mask_token = mask_token(self)

    @classmethod
    def for_inputs(
        cls,
        model: PreTrainedModel,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        backend: str = "auto",
        dense: bool | None = None,
        kv_dtype: str | torch.dtype | None = None,
        kv_scales: str | Scales = "head",
        cascade: bool | CascadeCosts = True,
        batch_invariant: bool = False,
        sliding_step: int = DEFAULT_STEP,
        **call: Any,
    ) -> PagedCache:
        """A cache as large as one call of generate() needs.

            call = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
            call = {**call, "max_new_tokens": 64, "num_beams": 4}
            out = model.generate(**call, past_key_values=PagedCache.for_inputs(model, **call))

        Args:
            model: the model.
            block_size, num_blocks, backend, dense, kv_dtype, kv_scales, cascade, batch_invariant,
                sliding_step: as for `PagedCache`.
            call: generate()'s arguments; what they leave out is taken from ``generation_config`` and from the
                model's. Of an encoder-decoder model, the decoder's prompt must be among them.

        Raises:
            ArgumentError: the prompt is missing, nothing says how many tokens may come, or the call has
                ``use_cache=False``.
            UnsupportedModelError: as `PagedCache`.
        """
        rows, tokens = sizes_of_call(model, call)
        cache = cls(
            model.config,
            rows,
            tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            backend=backend,
            dense=dense,
            kv_dtype=kv_dtype,
            kv_scales=kv_scales,
            cascade=cascade,
            batch_invariant=batch_invariant,
            sliding_step=sliding_step,
        )
        cache._caches = True
        return cache

    def _not_of_fp8(self) -> set[str]:
        own = {
            f"layer {layer.index} is a {type(layer).__name__}" for layer in self.paged if not _keeps_kv(layer)
        }
        return own | (
            {f"its keys are gathered ({self.dense_reason or 'dense=True'})"} if self.dense else set()
        )

    @property
    def kv_scales(self) -> list[tuple[Tensor, Tensor]]:
        """``(k_scale, v_scale)`` of each paged layer, float32 ``[1]`` or ``[num_kv_heads]``: for a file, and
        for the next cache's argument of this name. Empty where there are none, or none yet."""
        found = [layer.scales for layer in self.paged]
        return [(scales["k_scale"], scales["v_scale"]) for scales in found] if all(found) else []

    @property
    def choice(self) -> Choice:
        """Which backend runs and why; set with the first keys. An automatic choice may change while the
        layers make their first calls, which say what a config does not (soft cap, sinks, causality)."""
        return self.backend.choice

    @property
    def session(self) -> Session:
        """What that backend keeps open for the layers."""
        return self.backend.session

    @property
    def pool(self) -> BlockPool:
        """Which blocks are free."""
        return self.rows.pool

    @property
    def ready(self) -> bool:
        """Whether the current batch has its blocks: from its first keys on, until `reset`."""
        return self.rows.ready

    def __copy__(self) -> PagedCache:
        """Refuse: a shallow copy would write into its original's rows.

        Raises:
            NotCopyableError: always.
        """
        raise NotCopyableError(
            "copy.copy of a PagedCache would share its rows and blocks; make a new PagedCache, or use "
            "copy.deepcopy on an unused one"
        )

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of an unused cache.

        Raises:
            NotCopyableError: it has pools: they are places in this process's memory that layers, masks and
                compiled code know.
        """
        if self.ready or any(layer.is_initialized for layer in self.paged):
            raise NotCopyableError(
                "a PagedCache that was used can't be copied or pickled: its pools are places in this "
                "process's memory, known to compiled code; make a new PagedCache, and run the prompt "
                "through it"
            )
        return self.__dict__

    # ------------------------------------------------------------------------------------------------ set-up
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`PagedLayer.update` of layer ``layer_idx``.

        Raises:
            ArgumentError: the cache was made for fewer layers, or for others than this one.
        """
        if layer_idx >= len(self.layers):
            raise ArgumentError(
                "past_key_values",
                f"a PagedCache of at least {layer_idx + 1} layers",
                f"one of {len(self.layers)}",
                "make a new PagedCache of the model's config",
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable(reason=SET_UP)
    def prepare(self, layer: PagedLayer, key_states: Tensor, head_dim_v: int | None = None) -> None:
        """Choose the backend, give each row its blocks, fill the rows' tensors; once per batch, never
        traced."""
        if not layer.is_initialized:
            self._use(layer)
        if self.ready:
            self.rows.require_device(self.name, key_states.device)
            return
        batch = key_states.shape[0]
        padding = self.masks.pending.take()  # a refusal below forgets it
        if batch > self.rows.max_rows:
            raise ArgumentError(
                "max_batch_size",
                f"at least the batch ({batch} rows, beams included)",
                str(self.rows.max_rows),
                "build a larger PagedCache",
            )
        self._require_implementation()
        if not self._caches and self._text_config.use_cache is False:
            raise ArgumentError(
                "use_cache",
                f"True for {self.name} with a PagedCache",
                "False, its config's default, with which generate() runs all tokens again in every step",
                "set model.config.use_cache = model.generation_config.use_cache = True, or give use_cache="
                "True to PagedCache.for_inputs(model, **call) and to generate() alike",
            )
        specs = [each.attention_spec(self._text_config, key_states, head_dim_v) for each in self.paged]
        like = (key_states.device, key_states.dtype)
        # Asked before a reset.
        known = [spec for spec in self.backend.specs if (spec.device, spec.dtype) == like]
        self.backend.choose([*specs, *known])
        for each, spec in zip(self.paged, specs, strict=True):
            if each.asked is None:
                self.backend.give_workspace(each, spec)
        self._choose_rolling()
        self.rows.begin(batch, key_states.device, padding, key_states.shape[2])
        self.session.reset()  # a forward that was cut short may have left it in any state

    def _choose_rolling(self) -> None:
        """Before the first pools are made: which layers need only the blocks of their window. Not where keys
        are gathered or attended in both directions, as images in models of several parts may be, and not for
        plans on the host, which read one table."""
        if self._rolling_chosen:
            return
        self._rolling_chosen = True
        both_ways = self.masks.causal is False or self._config is not self._text_config
        if self.dense or not self.keys_of_queries or both_ways or self.session.plans:
            return
        rings = choose_rolling(
            self._text_config,
            [layer for layer in self.paged if _keeps_kv(layer)],
            self.sliding_step,
            self.block_size,
            self.rows.max_rows,
            self.rows.blocks_per_row,
            self.num_blocks,
        )
        if rings is not None:
            self.rows.roll(rings)
            for layer in self.paged:
                layer.step = rings.step if layer.rolls else None

    def num_blocks_of(self, layer: PagedLayer) -> int:
        """Blocks of the layer's pools, the null block included."""
        rolling = self.rows.rolling
        return rolling.blocks.num_blocks if rolling is not None and layer.rolls else self.num_blocks

    # ------------------------------------------------------------------------------------------- one forward
    def _require_implementation(self) -> None:
        if not self.dense and self._text_config._attn_implementation != NAME:
            require_implementation(self._text_config, "with a PagedCache")

    def advance(self, layer: PagedLayer, batch: int, query_len: int) -> Tensor:
        """The slots of this forward's tokens; the first layer moves the lengths on (in place, in the
        graph)."""
        if self.dense:
            self.order.require_masks_asked()
        if self.kv.dtype is not None and not layer.scales:
            raise UnsupportedModelError(
                f"{self.name}: the first keys of a cache with fp8 pools come in compiled or fused code, "
                "where no scales can be found; run a forward eagerly and unfused before, or give kv_scales"
            )
        if layer.is_first:
            self._require_implementation()
        self.order.enter(layer, query_len)
        if not torch.compiler.is_compiling() and not layer.has_written:
            self._use(layer)
        if layer.is_first:
            self.rows.advance(batch, query_len)
            if self.prefixes.active:
                self.prefixes.advance(query_len)
            if self.backend.plans and self.session.planning_of(query_len) > Planning.NEVER:
                self._plan(batch, query_len)
        self.order.leave(layer, query_len)
        return self.rows.slots(batch, query_len, layer.rolls)

    def _plan(self, batch: int, query_len: int) -> None:
        """For a backend that plans: compiled code has no place for it."""
        if torch.compiler.is_compiling():
            raise BackendUnavailableError(
                f"backend {self.choice.name!r} plans every step outside compiled code, and a compiled "
                "forward moves the lengths on inside; run the model eagerly, through "
                "torchpaged.engine.Generator, or on another backend"
            )
        self.session.plan(self.rows.metadata(batch, query_len), self.rows.host_lengths(batch, query_len))

    def written(self, layer: PagedLayer) -> None:
        """The last layer's word completes the forward."""
        if layer.is_last:
            self.rows.complete()

    def _use(self, layer: PagedLayer) -> None:
        """A layer gets pools, or writes for the first time. After the first forward it is one that an
        incomplete first forward did not reach."""
        if self.rows.num_forwards > 1:
            raise incomplete()
        self.order.use(layer)

    def metadata_of(self, layer: PagedLayer, batch: int, query_len: int) -> AttentionMetadata:
        """This forward as a batch of ``batch`` requests of ``query_len`` queries each, for ``layer``'s
        attention alone."""
        if not self.keys_of_queries:  # cross attention: what `advance` was told of are the encoder's tokens
            self.rows.fill_query_starts(query_len)
        if layer.rolls:
            return self.rows.metadata(batch, query_len, rolls=True)
        metadata = self.rows.metadata(batch, query_len)
        return self.prefixes.prepare(metadata) if self.prefixes.active else metadata

    @property
    def has_prefixes(self) -> bool:
        """Whether the forward that runs may read shared prefixes once."""
        return self.prefixes.active

    # --------------------------------------------------------------------------------- what transformers asks
    def mask_sizes(self, layer: PagedLayer, query_length: int) -> tuple[int, Any]:
        """Runs right before the mask function; outside compiled code it is also where overlong rows are
        refused."""
        self.order.announce(query_length)
        if not torch.compiler.is_compiling() and layer is self.paged[0]:
            self._require_implementation()
            self.rows.require_room(query_length)
        return self.max_seq_len, self._mask_token

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
            UnsupportedModelError: always; this cache holds the keys of self-attention or of cross-attention,
                not both.
        """
        raise UnsupportedModelError(
            f"{self.name} is an encoder-decoder model and asks its cache for `is_updated`; pass "
            "past_key_values=PagedEncoderDecoderCache.for_inputs(model, **call), or EncoderDecoderCache("
            "PagedCache(...), DynamicCache(config=model.config))"
        )

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back: yes, unless a layer of HuggingFace's own says no."""
        return all(getattr(layer, "is_croppable", True) for layer in self.layers)

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may make the masks outside the forward, and compile a decode step.

        Not in dense mode where a layer has both a recurrent state and a window: there transformers makes a
        mask without the window. Not with chunked attention: transformers 5.17 cannot make that mask outside
        the forward, and never compiles those models. Not where such masks are wrong, see
        `Family.loses_masks_made_ahead`.
        """
        windowed = [layer for layer in self.paged if layer.window is not None]
        hybrid = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in windowed)
        chunked = any(layer.chunk is not None for layer in self.paged)
        # Cache's own rule, written out: torch 2.11 cannot trace a property through super(), and the decode
        # step that generate() compiles asks for it; tests/hf compares the two
        compileable = len(self.layers) > 0 and all(layer.is_compileable for layer in self.layers)
        return compileable and not chunked and not self._loses_masks and not (self.dense and hybrid)

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
        self._changes.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` continues row ``beam_idx[i]``: full blocks are shared, only the last partial one is
        copied. Raises as `RowChanges.reindex` does, before anything is changed."""
        self._changes.reindex(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, neighbours; raises as `reorder_cache`."""
        self._changes.reindex([row for row in range(len(self.rows.blocks)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, by their numbers; raises as `reorder_cache`."""
        self._changes.reindex(indices.tolist())

    def describe(self) -> str:
        """The memory arithmetic in one line; pools count once they exist."""
        num_bytes = sum(layer.num_bytes for layer in self.paged)
        tokens = self.pool.num_usable * self.block_size
        grows = [layer for layer in self.paged if not layer.rolls]
        per_token = sum(layer.num_bytes for layer in grows) // (self.num_blocks * self.block_size)
        rolling = self.rows.rolling
        return (
            f"{self.num_blocks} blocks of {self.block_size} tokens = {tokens} tokens in {len(grows)} "
            f"paged layers, {num_bytes / 2**30:.3f} GiB ({per_token} bytes per token)"
            + (
                f"; {len(self.paged) - len(grows)} layers keep {rolling.blocks.blocks_per_ring} blocks per "
                f"row for a window of {rolling.blocks.window}"
                if rolling is not None
                else ""
            )
            + (f"; gathered: {self.name} {self.dense_reason}" if self.dense_reason else "")
        )
