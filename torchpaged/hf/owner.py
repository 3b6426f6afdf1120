"""PagedOwner: the transformers cache that paged layers belong to, as they see it.

It has two forms: `torchpaged.hf.PagedCache` owns its rows and moves them on itself, `StepCache` runs steps
whose blocks and lengths another object owns, such as the engine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from torchpaged.backends import Choice, Session
from torchpaged.custom_ops.errors import ArgumentError, NotCopyableError
from torchpaged.hf.chosen_backend import ChosenBackend
from torchpaged.hf.families import family_of
from torchpaged.hf.kv_scales import KVQuantization
from torchpaged.metadata import AttentionMetadata


class PagedOwner(Cache):
    """What a `PagedLayer` is given as its ``owner``.

    Args:
        config: of the text.
        max_seq_len: tokens per row at most.
        make_layers: `torchpaged.hf.template.paged_layers`.
        dense: keys and values are gathered for attention.

    Attributes:
        name, family: the model's type, for messages, and what is known of it.
        backend: which one was chosen, and its session.
        masks: what transformers' masks told: `CacheMasks` or `PackedMasks`.
        kv: dtype and scales of the pools.
        paged: the paged ones of its ``layers``.
        num_blocks, block_size: of the pools.
        rows: the `CacheRows`; None where another object owns them.
        ready: whether the batch that comes has its blocks.
        keys_of_queries: written tokens are the queries of the attention behind; not in cross attention.
        late_copies: takes a reordering's copies of blocks (`torchpaged.hf.row_changes.LateCopies`); None:
            they are made at once.
        num_states: slots of the layers that keep states (`PackedState`), that of padding included.
        state_slots: ``[num_reqs]`` int32, those of the requests; None before there are any.
    """

    backend: ChosenBackend
    masks: Any
    kv: KVQuantization
    num_blocks: int
    block_size: int
    rows: Any = None
    ready: bool
    keys_of_queries = True
    late_copies: Any = None
    num_states = 2
    state_slots: Tensor | None = None

    def __init__(
        self,
        config: Any,
        max_seq_len: int,
        make_layers: "Callable[[Any, int, PagedOwner], list[Any]]",
        dense: bool = False,
    ) -> None:
        self.name = str(config.model_type)
        self.family = family_of(self.name)
        self.max_seq_len, self.dense = max_seq_len, dense
        super().__init__(layers=make_layers(config, max_seq_len, self))
        self.paged = [layer for layer in self.layers if hasattr(layer, "owner")]
        # An offset of 0 that carries the cache to the mask function, see `cache_of`.
        self._mask_token = torch.zeros((), dtype=torch.int64, device="cpu")
        self._mask_token._torchpaged_cache = self  # type: ignore[attr-defined]

    @property
    def keeping(self) -> list[Any]:
        """What has pools, of keys and values, latents or states: layers, and states of layers with keys."""
        parts = (part for layer in self.layers for part in (getattr(layer, "state", None), layer))
        return [part for part in parts if hasattr(part, "has_written")]

    @property
    def states(self) -> list[Any]:
        """Those of `keeping` that are a `torchpaged.hf.packed_state.PackedState`."""
        return [part for part in self.keeping if not hasattr(part, "owner")]

    @property
    def kv_scales(self) -> list[tuple[Tensor, Tensor]]:
        """``(k_scale, v_scale)`` of each paged layer of keys and values, float32 ``[1]`` or
        ``[num_kv_heads]``: for a file, and for the next cache's argument of this name. Empty where there are
        none, or none yet."""
        found = [layer.scales for layer in self.paged if not layer.latent]
        return [tuple(scales.values()) for scales in found] if all(found) else []

    @property
    def choice(self) -> Choice:
        """Which backend runs and why; set with the first keys. An automatic choice may change while the
        layers make their first calls, which say what a config does not (soft cap, sinks, causality)."""
        return self.backend.choice

    @property
    def session(self) -> Session:
        """What that backend keeps open for the layers."""
        return self.backend.session

    def __copy__(self) -> Any:
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
        if self.ready or any(layer.is_initialized for layer in self.keeping):
            raise NotCopyableError(
                "a PagedCache that was used can't be copied or pickled: its pools are places in this "
                "process's memory, known to compiled code; make a new PagedCache, and run the prompt "
                "through it"
            )
        return self.__dict__

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
        pools: tuple[Tensor, Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        return pools

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back: yes, unless a layer of HuggingFace's own says no."""
        return all(getattr(layer, "is_croppable", True) for layer in self.layers)

    @property
    def is_linear(self) -> list[bool]:
        """As transformers' caches; of one without attention none, since its states have rows with lengths, by
        which generate() goes on behind them."""
        attends = bool(self.paged)
        return [attends and not isinstance(layer, CacheLayerMixin) for layer in self.layers]

    # ------------------------------------------------------------------------ each kind of cache has its own
    def prepare(self, layer: Any, key_states: Tensor, head_dim_v: int | None = None) -> None:
        """Before ``layer`` gets its pools, and before a batch's first tokens: set up everything that depends
        on the device and the batch, once; ``head_dim_v`` if it is not the keys'."""
        raise NotImplementedError

    def prepare_states(self, layer: Any, x: Tensor) -> None:
        """`prepare` for a layer that keeps states, before its first tokens ``x [batch, query_len, *]``."""

    def advance(self, layer: Any, batch: int, query_len: int) -> AttentionMetadata:
        """Before ``layer`` writes: the first layer of a forward moves the lengths on by ``query_len`` tokens
        per row. Gives the forward as `metadata_of`, with the slot of every new token."""
        raise NotImplementedError

    def metadata_of(self, layer: Any, batch: int, query_len: int) -> AttentionMetadata:
        """The forward that runs, as a batch for ``layer``'s attention; moves nothing on."""
        raise NotImplementedError

    def see_queries(self, batch: int, query_len: int) -> None:
        """Before attention over another layer's keys, whose queries may be the forward's last ones alone."""

    def written(self, layer: Any) -> None:
        """``layer`` has written this forward's tokens."""

    def num_blocks_of(self, layer: Any) -> int:
        """Blocks of the layer's pools, the null block included."""
        return self.num_blocks

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """As transformers' caches; of a cache without attention by a layer of states, which has rows, too."""
        return super().get_seq_length(layer_idx) if self.paged else self.length(self.layers[layer_idx])

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> Any:
        """As `get_seq_length`."""
        if self.paged:
            return super().get_mask_sizes(query_length, layer_idx)
        return self.mask_sizes(self.layers[layer_idx], query_length)

    def see_mask(self, mask: Tensor, x: Tensor) -> None:
        """The 2-D mask over all tokens of a forward over ``x [batch, query_len, *]``, of a model without
        attention, which asks for no masks."""

    def mask_sizes(self, layer: Any, query_length: int) -> tuple[int, Any]:
        """As many keys as fit, and the offset that carries the cache to the mask function."""
        return self.max_seq_len, self._mask_token

    def length(self, layer: Any) -> Tensor | int:
        """Tokens per row that ``layer`` has written, padding included."""
        raise NotImplementedError


def cache_of(kv_offset: Any) -> Any:
    """The paged cache whose mask sizes had this offset, or None. The offset itself says it: transformers
    tells a mask function no cache; ``tests/hf/test_call_mask.py`` notices if it does."""
    return getattr(kv_offset, "_torchpaged_cache", None)
