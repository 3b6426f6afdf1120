"""RowForwards: a paged cache that owns its rows, forward by forward: a batch's begin, its layers' writes, its
masks, and its end."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.custom_ops.words import counted
from torchpaged.hf.cache_masks import CacheMasks
from torchpaged.hf.cache_options import keeps_kv, require_use_cache
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.call_mask import MaskRequest
from torchpaged.hf.forward_order import TWO_CACHES, ForwardOrder
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.layer_pools import SET_UP
from torchpaged.hf.packed_state import PackedState
from torchpaged.hf.row_changes import RowChanges
from torchpaged.hf.row_table import too_many_rows
from torchpaged.hf.several_calls import choose_rolling
from torchpaged.hf.state_pools import keys_like, slots_of_rows
from torchpaged.hf.support import NAME, require_implementation
from torchpaged.metadata import AttentionMetadata

#: A layer that writes in a forward.
Writer = PagedLayer | PackedState


class RowForwards(RowChanges):
    """What `torchpaged.hf.PagedCache` has of it; its ``__init__`` makes what is declared here."""

    rows: CacheRows
    masks: CacheMasks
    order: ForwardOrder
    sliding_step: int
    _config: Any
    _text_config: Any
    _caches: bool  # whether generate() runs models of this config with a cache
    _loses_masks: bool  # see `Family.loses_masks_made_ahead`
    _rolling_chosen = False

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
    def is_initialized(self) -> bool:
        """Whether the current batch has keys. By it models tell a prompt's first forward from later ones
        (HRM-Text, Molmo 2, PaliGemma), which `reset` makes one again; the pools stay."""
        return self.ready

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
