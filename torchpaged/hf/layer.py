"""PagedLayer: one attention layer of a paged HuggingFace cache.

``update()`` writes the new keys and values and returns *the pools themselves*; they carry the layer they
belong to, so that the attention function knows a paged call by its key and value alone: no global state, no
layer index, no wrapper around generate().
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from torchpaged.backends import AttentionSpec
from torchpaged.cache import KVLayerSpec, LayerSpec
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError, UnsupportedModelError
from torchpaged.hf.cache_rows import incomplete
from torchpaged.hf.chosen_backend import ChosenBackend, LayerCall, config_spec
from torchpaged.hf.families import Family
from torchpaged.hf.kv_scales import KVScales
from torchpaged.hf.watched_pool import WatchedPool, watch
from torchpaged.metadata import AttentionMetadata
from torchpaged.prefixes.attention import attend_with_prefixes
from torchpaged.profiling.ranges import is_on as is_profiling
from torchpaged.profiling.ranges import ranged_attention

#: Why set-up is not traced, and what to do: the reason of a graph break, or of dynamo's error
#: with ``fullgraph=True``.
SET_UP = (
    "PagedCache: the pools can't be made inside compiled code; run the first forward eagerly (generate() "
    "does), or call cache.early_initialization(batch_size, num_kv_heads, head_dim, dtype, device) before"
)


class Masks(Protocol):
    """What a cache learns from transformers' masks."""

    causal: bool | None  # whether the masks that the model asked for are causal; None if it asked for none

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
        """transformers wants a mask: the arguments of its mask function; gives the mask."""

    def require_kind(self, layer: PagedLayer, window: int | None) -> None:
        """Refuse a layer whose window or chunk is in none of the masks that the model asked for."""


class PagedOwner(Protocol):
    """The cache a layer belongs to: it owns the blocks and knows the step."""

    backend: ChosenBackend
    masks: Masks
    kv: KVScales
    rows: Any  # a `torchpaged.hf.cache_rows.CacheRows`; None where the engine makes the steps
    name: str  # the model's type, for messages
    family: Family
    block_size: int
    max_seq_len: int
    dense: bool
    ready: bool
    keys_of_queries: bool  # written tokens are the queries of the attention behind; not in cross attention

    @property
    def has_prefixes(self) -> bool:
        """Whether the forward that runs may read shared prefixes once."""

    def prepare(self, layer: PagedLayer, key_states: Tensor, head_dim_v: int | None = None) -> None:
        """Before ``layer`` gets its pools, and before a batch's first tokens: set up everything that depends
        on the device and the batch, once; ``head_dim_v`` if it is not the keys'."""

    def advance(self, layer: PagedLayer, batch: int, query_len: int) -> Tensor:
        """Before ``layer`` writes: the first layer of a forward moves the lengths on by ``query_len`` tokens
        per row. Gives the slot of every new token, ``[batch * query_len]`` int64."""

    def written(self, layer: PagedLayer) -> None:
        """``layer`` has written this forward's tokens."""

    def metadata_of(self, layer: PagedLayer, batch: int, query_len: int) -> AttentionMetadata:
        """The forward that runs, as a batch for ``layer``'s attention; changes nothing."""

    def num_blocks_of(self, layer: PagedLayer) -> int:
        """Blocks of the layer's pools, the null block included."""

    def mask_sizes(self, layer: PagedLayer, query_length: int) -> tuple[int, Any]:
        """kv length, and an offset that carries the cache to the mask function."""

    def length(self, layer: PagedLayer) -> Tensor | int:
        """Tokens per row that ``layer`` has written, padding included."""


def layer_of(tensor: Any) -> PagedLayer | None:
    """The layer whose pool ``tensor`` is, or None."""
    return getattr(tensor, "_torchpaged_layer", None)


def mask_token(cache: Any) -> Tensor:
    """The ``kv_offset`` of a paged cache, a scalar int64 0: it carries the cache to the mask function."""
    token = torch.zeros((), dtype=torch.int64, device="cpu")
    token._torchpaged_cache = cache  # type: ignore[attr-defined]
    return token


def cache_of(kv_offset: Any) -> Any:
    """The paged cache whose `mask_token` this is, or None."""
    return getattr(kv_offset, "_torchpaged_cache", None)


def scale_of(call: LayerCall) -> float:
    """The factor of a call's scores."""
    return call.query.shape[3] ** -0.5 if call.scaling is None else float(call.scaling)


def by_token(states: Tensor) -> Tensor:
    """``[batch, heads, query_len, head_dim]`` as ``[batch * query_len, heads, head_dim]``, the last dimension
    side by side as ops want it: a convolution's output of one row is strided there, and stays so."""
    batch, heads, query_len, head_dim = states.shape
    flat = states.transpose(1, 2).reshape(batch * query_len, heads, head_dim)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


#: Devices that have autocast: asked here, since torch 2.11 can't trace the question.
_AUTOCAST = tuple(kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind))


def in_autocast(*states: Tensor) -> tuple[Tensor, ...]:
    """``states`` in the dtype of ``torch.autocast`` where it is on, as SDPA takes them: rotated keys come in
    float32, beside values that do not."""
    kind = states[0].device.type
    if kind not in _AUTOCAST or not torch.is_autocast_enabled(kind):
        return states
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in states)


class PagedLayer(CacheLayerMixin):
    """Pools of one layer.

    Args:
        owner: the cache.
        index: position among the cache's layers.
        window: sliding window in tokens, the own one included; None = full.
        chunk: chunked attention's chunk in tokens; None = off.
    """

    position = 0  # among the cache's paged layers
    latent = False  # whether it keeps latents, and attention is ``mla_attention``
    stored: LayerSpec  # with the pools of that spec, once there are any
    pools: Any
    is_compileable = True
    is_croppable = True
    is_sliding = False  # no mask is ever built from it: every layer reports the full length

    def __init__(
        self, owner: PagedOwner, index: int, window: int | None = None, chunk: int | None = None
    ) -> None:
        super().__init__()
        self.owner, self.index, self.window, self.chunk = owner, index, window, chunk
        # Of the layers that write, in a forward: the owner's `ForwardOrder` says which.
        self.is_first = self.is_last = False
        self.has_written = False  # outside of compiled code
        # The kind of call that the backend was held to, see `hold`.
        self.asked: tuple[Any, ...] | None = None
        self.spec: AttentionSpec | None = None  # of that call, or before it of the config
        # What the backend's session keeps for such calls: arguments of `paged_attention`.
        self.workspace: dict[str, Tensor] = {}
        self.reads_once = False  # whether that kind of call may read shared prefixes once
        self.scales: dict[str, Tensor] = {}  # ``k_scale`` and ``v_scale`` of fp8 pools, once they are known
        self.states_dtype: torch.dtype | None = None  # of keys and values as they come
        self.rolls = False  # whether its blocks are rings, see `torchpaged.hf.rolling_attention`
        self.step: int | None = None  # tokens of a row that such a ring takes at once; None: any number
        # Keys and values of a forward of more tokens than a ring takes at once, until attention takes them.
        self._waiting: tuple[Tensor, Tensor] | None = None
        self._watched = False  # whether attention was seen to take the pools as they are
        self._computes = owner.family.computes_with_keys

    @torch.compiler.disable(reason=SET_UP)
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the pools; shapes ``[batch, num_kv_heads, *, head_dim(_v)]``."""
        self.owner.prepare(self, key_states, value_states.shape[3])
        stored = self.stored_by(key_states, value_states)
        sizes = (self.owner.num_blocks_of(self), self.owner.block_size)
        with torch.inference_mode(False):  # an inference tensor could not be written under no_grad later
            pools = stored.make_pools(*sizes, self.owner.kv.dtype or key_states.dtype, key_states.device)
        self.adopt(stored, pools)
        self.states_dtype = key_states.dtype
        self._find_scales(key_states, value_states)

    def _find_scales(self, key_states: Tensor, value_states: Tensor) -> None:
        """Of fp8 pools; from tokens, if they are not given, and so not from none."""
        if self.owner.kv.dtype is not None:
            with torch.inference_mode(False):
                self.scales = self.owner.kv.of(self.position, key_states, value_states)

    # What a layer of another kind has of its own, see `torchpaged.cache.kinds`; with `attention_spec`, and
    # `widths` and `store` if the op ``write_kv`` is not its.
    def stored_by(self, key_states: Tensor, value_states: Tensor) -> LayerSpec:
        """What the layer's pools must hold for keys and values of these shapes."""
        return KVLayerSpec(key_states.shape[1], key_states.shape[3], value_states.shape[3])

    def keys_and_values(self, pools: Any) -> tuple[Tensor, Tensor]:
        """What attention reads and `write` fills: ``[num_blocks, block_size, num_kv_heads, head_dim(_v)]`` of
        ``pools``, or views into them."""
        return pools.k_cache, pools.v_cache

    def widths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and width of the keys and of the values that it stores."""
        assert self.keys is not None and self.values is not None
        return (self.keys.shape[2], self.keys.shape[3]), (self.values.shape[2], self.values.shape[3])

    def store(
        self, key_states: Tensor, value_states: Tensor, slots: Tensor, are_query_tokens: bool | None = None
    ) -> None:
        """Put ``[batch, num_kv_heads, query_len, head_dim(_v)]`` into ``slots [batch * query_len]``;
        ``are_query_tokens`` as the op has it, None: `writes_query_tokens`."""
        k, v = by_token(key_states), by_token(value_states)
        early = self.writes_query_tokens if are_query_tokens is None else are_query_tokens
        self.owner.backend.ops.write_kv(
            k, v, self.keys, self.values, slots, are_query_tokens=early, **self.scales
        )

    def attention_spec(self, config: Any, key_states: Tensor, head_dim_v: int | None) -> AttentionSpec:
        """What the layer will ask of a backend, as far as the config and the first keys say."""
        kv_dtype = self.owner.kv.dtype
        return config_spec(config, self, key_states, head_dim_v, self.owner.block_size, kv_dtype)

    def adopt(self, stored: LayerSpec, pools: Any) -> None:
        """Take existing pools of ``stored``, and mark what attention reads as this layer's."""
        self.stored, self.pools = stored, pools
        self.keys, self.values = self.keys_and_values(pools)
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.states_dtype = self.dtype
        for pool in (self.keys, self.values):
            pool._torchpaged_layer = self  # type: ignore[attr-defined]
            # guard=False: a new cache must not recompile the model.
            torch._dynamo.mark_static_address(pool, guard=False)
        self.is_initialized = True

    # ------------------------------------------------------------------------------------------- attention
    def attend(self, call: LayerCall) -> Tensor:
        """Attention of a forward whose tokens are written, ``[batch, query_len, num_heads, head_dim_v]``.

        Raises:
            BackendUnavailableError: the cache's backend declares not to run it.
            UnsupportedModelError: this kind of layer does not.
        """
        backend = self.owner.backend
        batch, _, query_len, _ = call.query.shape
        metadata = self.owner.metadata_of(self, batch, query_len)
        self.hold(call)
        if metadata.tree_mask is not None and "tree_mask" not in backend.capabilities.features:
            raise BackendUnavailableError(
                f"backend {backend.choice.name!r} cannot run this attention: tree_mask is not supported"
            )
        requests = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
        made = self.op_call(call, requests, metadata.max_query_len, metadata.tree_mask)
        alike = call.causal and call.window is None and call.alibi_slopes is None
        if metadata.prefixes is not None and self.reads_once and alike and metadata.tree_mask is None:
            made = made._replace(semaphore=self.workspace.get("semaphore"))
            attend_with_prefixes(backend.ops, made, metadata.prefixes)
        else:
            self.run(made)
        return made.out.view(batch, query_len, *made.out.shape[1:])

    def hold(self, call: LayerCall) -> None:
        """Hold a call to what the backend declares; host facts only, and once per kind of call.

        Raises:
            BackendUnavailableError: with all reasons.
        """
        if torch.compiler.is_compiling():
            if self.asked is None:  # no eager forward has held it yet: the pools were made ahead
                self.owner.backend.hold_traced(self, call)
            return
        _, query, _, _, causal, window, softcap, sinks, alibi_slopes, scaling = call
        sizes = query.dtype, query.shape[1], query.shape[3]
        kind = (*sizes, causal, window, softcap, sinks is None, scaling, alibi_slopes is None)
        if kind != self.asked:
            self.owner.backend.hold(self, call)
            self.asked = kind

    def op_call(
        self,
        call: LayerCall,
        requests: tuple[Tensor, Tensor, Tensor],
        max_query_len: int,
        tree_mask: Tensor | None = None,
    ) -> AttentionCall:
        """``call`` as the op takes it, with an ``out`` of its own.

        Args:
            call: as its kind was held to the backend.
            requests: block table, lengths and query starts.
            max_query_len, tree_mask: of them.
        """
        q = by_token(call.query)
        out = q.new_empty(*q.shape[:2], call.value.shape[-1])
        table, lens, starts = requests
        return AttentionCall(
            q,
            call.key,
            call.value,
            table,
            lens,
            starts,
            out,
            None,
            max_query_len,
            scale_of(call),
            causal=call.causal,
            window_left=-1 if call.window is None else call.window - 1,
            logits_soft_cap=0.0 if call.softcap is None else float(call.softcap),
            alibi_slopes=call.alibi_slopes,
            sinks=call.sinks,
            chunk_size=self.chunk or 0,
            tree_mask=tree_mask,
            k_scale=self.scales.get("k_scale"),
            v_scale=self.scales.get("v_scale"),
        )

    def run(self, call: AttentionCall, workspace: dict[str, Tensor] | None = None) -> None:
        """The backend's ``paged_attention``, in a range of its own while a profile is taken; with the layer's
        ``workspace``, unless another one is given."""
        attend = self.owner.backend.ops.paged_attention
        if not torch.compiler.is_compiling() and is_profiling():
            attend = ranged_attention(attend, self.index)
        arguments, options = call.flat()
        attend(*arguments, **options, **(self.workspace if workspace is None else workspace))

    @property
    def num_bytes(self) -> int:
        """Bytes that the pools take; 0 before there are any."""
        return self.count_bytes()

    def count_bytes(self) -> int:
        """Work out `num_bytes`. A method, for layers with further pools: a trace reads no property by way of
        ``super()`` under torch 2.11."""
        return (
            self.owner.num_blocks_of(self) * self.stored.bytes_per_block(self.owner.block_size, self.dtype)
            if self.is_initialized
            else 0
        )

    def copy_blocks(self, block_mapping: Tensor) -> None:
        """Copy whole blocks, ``[n, 2]`` int64 of source and destination."""
        if self.is_initialized:
            self.stored.copy_blocks(self.pools, block_mapping, self.owner.backend.ops)

    @property
    def writes_query_tokens(self) -> bool:
        """``are_query_tokens`` of this layer's writes. The first layer moves the step on right in front of
        its write, by ordinary kernels that the attention must not overtake: its write holds the
        attention back. So does the write of a layer that reads prefixes once, whose attention is several
        launches."""
        once = self.reads_once and self.owner.has_prefixes
        return self.owner.keys_of_queries and not self.is_first and not once

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[batch, num_kv_heads, query_len, head_dim]`` and return the pools (or dense copies, in
        dense mode)."""
        pools = self.write(key_states, value_states)
        self.complete()
        return pools

    def complete(self) -> None:
        """Say that this forward's tokens are written; the last layer's word completes the forward.

        Behind `write` in `update`. A compiled layer leaves it to the caller: being the last one would make it
        a kind of its own.
        """
        self.owner.written(self)

    def write(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """`update` without `complete`."""
        refuse_grad(key_states=key_states, value_states=value_states)
        key_states, value_states = in_autocast(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self.owner.ready:
            self.owner.prepare(self, key_states, value_states.shape[3])
        batch, _, query_len, _ = key_states.shape
        assert self.keys is not None and self.values is not None
        traced = torch.compiler.is_compiling()
        if not traced:  # a trace has the op's own check
            self._require_own(key_states, value_states)
        if not traced and self.owner.kv.dtype is not None and not self.scales:
            self._find_scales(key_states, value_states)
        if self._waiting is not None:
            raise incomplete()
        slots = self.owner.advance(self, batch, query_len)
        if self.takes_at_once(query_len):
            self.store(key_states, value_states, slots)
        else:
            self._waiting = key_states, value_states
        if self.owner.dense:
            rows = self.owner.rows
            return rows.gather(self.keys, batch), rows.gather(self.values, batch)
        # Other models of such a type may not be attached.
        if not traced and (not self._watched or self._computes):
            return watch(self.keys, self), watch(self.values, self)
        if not self._watched:
            self._require_attended()
        return self.keys, self.values

    def takes_at_once(self, query_len: int) -> bool:
        """Whether it can write ``query_len`` tokens per row before the first of them attends."""
        return self.step is None or query_len <= self.step

    def take_waiting(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values that `write` left to attention, once."""
        waiting, self._waiting = self._waiting, None
        return waiting

    def _require_own(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse what the pools were not made for, before the step moves on."""
        of_keys, of_values = self.widths()
        for name, states, (heads, width) in (
            ("key_states", key_states, of_keys),
            ("value_states", value_states, of_values),
        ):
            if (
                states.shape[1] != heads
                or states.shape[3] != width
                or states.dtype != self.states_dtype
                or states.device != self.device
            ):
                raise ArgumentError(
                    name,
                    (
                        f"{heads} heads of {width}, {self.states_dtype} on {self.device}, as this cache's "
                        f"layer {self.index} was made for"
                    ),
                    f"{states.shape[1]} heads of {states.shape[3]}, {states.dtype} on {states.device}",
                    (
                        "a cache keeps the layout of the model that used it first: make a new PagedCache "
                        "of the model's config"
                    ),
                )

    def _require_attended(self) -> None:
        """In a trace nothing is watched: a model that is known to compute with its keys must have
        attended."""
        if self._computes:
            raise UnsupportedModelError(
                f"{self.owner.name}: the first forward of its cache was compiled, where torchpaged can't see "
                "that attention takes the pools as they are; run it eagerly, as generate() does"
            )

    def watch_again(self) -> None:
        """The model computed with the pools: another try is refused, too."""
        self._watched = False

    def pools_of(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The pools behind what `update` returned.

        Raises:
            UnsupportedModelError: keys were passed for values, or the other way round.
        """
        if (
            not torch.compiler.is_compiling()
            and isinstance(key, WatchedPool)
            and isinstance(value, WatchedPool)
        ):
            if key.pool is not self.keys or value.pool is not self.values:
                raise UnsupportedModelError(
                    f"{self.owner.name}: layer {self.index} attends with other than its cached keys and "
                    "values in their places; use PagedCache(..., dense=True)"
                )
            self._watched = True
            return key.pool, value.pool
        return key, value

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Called right before the mask function: the offset returned carries the cache to it."""
        return self.owner.mask_sizes(self, query_length)

    def get_seq_length(self) -> int:
        """Tokens that this layer has seen; a 0-d tensor once initialised, so that no guard ever sees a
        changing int."""
        return self.owner.length(self)  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """Tokens a row can hold."""
        return self.owner.max_seq_len

    # Lengths and rows belong to the cache, not to a layer: PagedCache does these for all layers at once.
    def reset(self) -> None:
        """Nothing to do for one layer; see `PagedCache.reset`."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to do for one layer; see `PagedCache.crop`."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Nothing to do for one layer; see `PagedCache.reorder_cache`."""


class LayerCache:
    """A cache as one decoder layer sees it: the layer's own pools, whatever index it names.

    A compiled layer that is given this instead of the whole cache does not depend on its index, so that all
    layers share the code.
    """

    def __init__(self, layer: PagedLayer) -> None:
        self.layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`PagedLayer.write`; ``layer_idx`` is not looked at. `compile_layers` completes the layer outside
        the compiled region."""
        return self.layer.write(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """`PagedLayer.get_seq_length`; ``layer_idx`` is not looked at."""
        return self.layer.get_seq_length()
