"""LayerPools: what one attention layer of a paged HuggingFace cache keeps, and how it is made and filled."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from torchpaged.backends import AttentionSpec, attention_spec
from torchpaged.cache import KVLayerSpec, LayerSpec
from torchpaged.hf.call import by_token
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.row_table import other_layout

#: Why set-up is not traced, and what to do: the reason of a graph break, or of dynamo's error
#: with ``fullgraph=True``.
SET_UP = (
    "PagedCache: the pools can't be made inside compiled code; run the first forward eagerly (generate() "
    "does), or call cache.early_initialization(batch_size, num_kv_heads, head_dim, dtype, device) before"
)


def scaled(layers: "Iterable[LayerPools]") -> "list[LayerPools]":
    """Those whose fp8 pools have scales apart from them."""
    return [layer for layer in layers if not layer.latent]


class LayerPools(CacheLayerMixin):
    """Pools of one layer.

    Args:
        owner: the cache.
        index: position among the cache's layers.
        window: sliding window in tokens, the own one included; None = full.
        chunk: chunked attention's chunk in tokens; None = off.

    Attributes:
        stored, pools: what they hold and they themselves, once there are any.
        states_dtype: of keys and values as they come.
        latent: whether it keeps latents, and attention is ``mla_attention``.
        scales: `KVScales` of fp8 pools, by name, once they are known.
        rolls: whether its blocks are rings, see `torchpaged.hf.several_calls`.
        asked, spec: the kind of call that the backend was held to, see `PagedLayer.hold`, and what it asks;
            before it, of the config.
    """

    latent = False
    stored: LayerSpec
    pools: Any
    states_dtype: torch.dtype

    def __init__(
        self, owner: PagedOwner, index: int, window: int | None = None, chunk: int | None = None
    ) -> None:
        super().__init__()
        self.owner, self.index, self.window, self.chunk = owner, index, window, chunk
        self.scales: dict[str, Tensor] = {}
        self.rolls = False
        self.asked: tuple[Any, ...] | None = None
        self.spec: AttentionSpec | None = None

    @torch.compiler.disable(reason=SET_UP)
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the pools; shapes ``[batch, num_kv_heads, *, head_dim(_v)]``."""
        self.owner.prepare(self, key_states, value_states.shape[3])
        stored = self.stored_by(key_states, value_states)
        sizes = (self.owner.num_blocks_of(self), self.owner.block_size)
        with torch.inference_mode(False):  # an inference tensor could not be written under no_grad later
            pools = stored.make_pools(*sizes, self.owner.kv.dtype or key_states.dtype, key_states.device)
        self.adopt(stored, pools, key_states.dtype)
        self._find_scales(key_states, value_states)

    def _find_scales(self, key_states: Tensor, value_states: Tensor) -> None:
        """Of fp8 pools; from tokens, if they are not given, and so not from none. Rows of latents have scales
        of their own."""
        if self.owner.kv.dtype is not None and not self.latent:
            with torch.inference_mode(False):
                position = scaled(self.owner.paged).index(self)
                self.scales = self.owner.kv.of(position, key_states, value_states).by_name

    def adopt(self, stored: LayerSpec, pools: Any, states_dtype: torch.dtype | None = None) -> None:
        """Take existing pools of ``stored``, and mark what attention reads as this layer's; ``states_dtype``:
        of keys and values as they come, None: the pools'."""
        self.stored, self.pools = stored, pools
        self.keys, self.values = self.keys_and_values(pools)
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.states_dtype = self.dtype if states_dtype is None else states_dtype
        self._takes = [(*sizes, self.states_dtype, self.device) for sizes in self.widths()]
        for pool in (self.keys, self.values):
            pool._torchpaged_layer = self  # type: ignore[attr-defined]
            # guard=False: a new cache must not recompile the model.
            torch._dynamo.mark_static_address(pool, guard=False)
        self.is_initialized = True

    def adopt_as(self, probed: "LayerPools", pools: Any) -> None:
        """Take pools in the place of another cache's layer, with what is known of that."""
        self.adopt(probed.stored, pools, probed.states_dtype)
        self.rolls, self.asked, self.spec = probed.rolls, probed.asked, probed.spec

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

    def store(self, key_states: Tensor, value_states: Tensor, slots: Tensor, are_query_tokens: bool) -> None:
        """Put ``[batch, num_kv_heads, query_len, head_dim(_v)]`` into ``slots [batch * query_len]``;
        ``are_query_tokens`` as the op has it."""
        k, v = by_token(key_states), by_token(value_states)
        self.owner.backend.ops.write_kv(
            k, v, self.keys, self.values, slots, are_query_tokens=are_query_tokens, **self.scales
        )

    def attention_spec(self, config: Any, key_states: Tensor, head_dim_v: int | None) -> AttentionSpec:
        """What the layer will ask of a backend, as far as the config and the first keys say."""
        num_kv_heads = key_states.shape[1]
        return attention_spec(
            device=key_states.device,
            dtype=key_states.dtype,
            num_heads=getattr(config, "num_attention_heads", num_kv_heads),
            num_kv_heads=num_kv_heads,
            head_dim=key_states.shape[3],
            head_dim_v=head_dim_v,
            block_size=self.owner.block_size,
            kv_dtype=self.owner.kv.dtype,
            window_size=(-1 if self.window is None else self.window - 1, -1),
            chunk_size=self.chunk,
            logits_soft_cap=getattr(config, "attn_logit_softcapping", None),
        )

    @property
    def lacks_scales(self) -> bool:
        """Whether it has fp8 pools whose scales are not known yet."""
        return self.owner.kv.dtype is not None and not self.latent and not self.scales

    @property
    def num_bytes(self) -> int:
        """Bytes that the pools take; 0 before there are any."""
        return self.count_bytes()

    def count_bytes(self) -> int:
        """Work out `num_bytes`. A method, for layers with further pools: a trace reads no property by way of
        ``super()`` under torch 2.11."""
        if not self.is_initialized:
            return 0
        assert self.keys is not None
        return self.keys.shape[0] * self.stored.bytes_per_block(self.keys.shape[1], self.dtype)

    def copy_blocks(self, block_mapping: Tensor) -> None:
        """Copy whole blocks, ``[n, 2]`` int64 of source and destination."""
        if self.is_initialized:
            self.stored.copy_blocks(self.pools, block_mapping, self.owner.backend.ops)

    def _require_own(self, name: str, states: Tensor, takes: tuple[Any, ...]) -> None:
        """Refuse what the pools were not made for, before the step moves on."""
        got = states.shape[1], states.shape[3], states.dtype, states.device
        if got != takes:
            words = ("{} heads of {}, {} on {}".format(*each) for each in (takes, got))
            raise other_layout(name, self.index, *words)
