"""Models that select the keys of each query by an indexer of their own (DeepSeek sparse attention).

transformers' modules score every cached indexer key against a query, and hand the positions of the best ones
to the attention function, which masks all others: nothing is saved but what the model itself saves. Caches of
models that are not attached gather, and keep the indexer's keys in blocks besides keys and values.

Attached ones keep latents and their indexer's keys, and attend to the rows that the indexer selects, alone.
Ours puts its key into a pool, scores the pool's, and gives positions in the cache, without padding:
``write_index_keys``, ``index_logits`` and ``top_k_indices``. The attention module hands them to its attention
function, which reads those rows. What is projected, rotated and weighted is the module's own, in its own
order of columns.

In transformers 5.17 an attention module expands its tokens' latents before it caches them, in 5.23 behind the
cache; with a paged cache neither is done, see `torchpaged.hf.models.latent`. The modules' fields are not
public; ``tests/hf/test_indexed.py`` runs every family under each supported transformers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import StaticIndexedLayer

from torchpaged.cache.latent import IndexedLatentLayerSpec, LayerIndexedLatentCache
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.attached import PASSES, plain_of, was_given_functions
from torchpaged.hf.cache_argument import cache_of
from torchpaged.hf.call import in_autocast
from torchpaged.hf.compile_layers import LayerCache
from torchpaged.hf.families import Family, Function, Functions, register_family
from torchpaged.hf.layer import PagedLayer, layer_of
from torchpaged.hf.layer_pools import SET_UP
from torchpaged.hf.models.latent import LatentLayer, is_not_plain
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.template import window_and_chunk

#: How an indexer turns its columns: transformers' function by its name in the modelling file, and whether the
#: columns that turn come last.
_ROTATIONS = {
    "axk2": ("apply_rotary_pos_emb", False),
    "deepseek_v32": ("apply_rotary_pos_emb", False),
    "glm_moe_dsa": ("apply_rotary_pos_emb_interleave", False),
    "hy_v4": ("apply_rotary_pos_emb", True),
    "hy_v4_vl_text": ("apply_rotary_pos_emb", True),
}
TYPES = tuple(_ROTATIONS)


class SparseLatentLayer(LatentLayer):
    """A layer of latents with the keys of its indexer."""

    stored: IndexedLatentLayerSpec
    index_pool: Tensor  # [num_blocks, block_size, 1, index_head_dim]
    index_scale: Tensor | None  # [num_blocks, block_size], with fp8 pools

    def __init__(self, owner: PagedOwner, index: int, config: Any) -> None:
        super().__init__(owner, index, config)
        sizes = config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim
        self.stored = IndexedLatentLayerSpec(*sizes)
        self._slots: Tensor | None = None  # of this forward's tokens, until their index keys are written

    def keys_and_values(self, pools: LayerIndexedLatentCache) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The pool of latents, twice."""
        self.index_pool, self.index_scale = pools.index_cache, pools.index_scale
        for pool in pools[1:]:
            if pool is not None:
                torch._dynamo.mark_static_address(pool, guard=False)
        return pools.kv_cache, pools.kv_cache

    def store(self, key_states: Tensor, value_states: Tensor, slots: Tensor, are_query_tokens: bool) -> None:
        """See `PagedLayer`."""
        super().store(key_states, value_states, slots, are_query_tokens)
        self._slots = slots

    def select(self, q: Tensor, k: Tensor, weights: Tensor, top_k: int) -> Tensor:
        """Write the indexer's keys of the tokens that `store` has written, and give the best positions.

        Args:
            q: ``[batch, query_len, index_heads, index_head_dim]``, rotated.
            k: ``[batch, query_len, index_head_dim]``, likewise.
            weights: ``[batch, query_len, index_heads]`` float32.
            top_k: positions per token.

        Returns:
            ``[batch, query_len, top_k]`` int32, as ``mla_attention`` takes them.
        """
        batch, query_len, _ = k.shape
        q, k = in_autocast(q, k)
        step, ops = self.owner.metadata_of(self, batch, query_len), self.owner.backend.ops
        slots, self._slots = self._slots, None
        assert slots is not None
        ops.write_index_keys(k.flatten(0, 1), self.index_pool, slots, self.index_scale)
        columns = step.block_table.shape[1] * self.index_pool.shape[1]
        logits = weights.new_empty(batch * query_len, columns)
        ops.index_logits(
            q.flatten(0, 1),
            weights.flatten(0, 1),
            self.index_pool,
            step.block_table,
            step.seq_lens,
            step.query_start_loc,
            logits,
            max_query_len=step.max_query_len,
            k_scale=self.index_scale,
        )
        indices = logits.new_empty(batch * query_len, min(top_k, columns), dtype=torch.int32)
        ops.top_k_indices(logits, indices)
        return indices.view(batch, query_len, -1)


def _layer_in(cache: Any, index: int) -> Any:
    """The layer ``index`` of ``cache`` if that keeps latents; None else."""
    if isinstance(cache, LayerCache):
        layer: Any = cache.layer
    else:
        layer = cache.layers[index] if isinstance(cache, PagedOwner) else None
    return layer if isinstance(layer, LatentLayer) else None


def _attention(module: Any) -> Functions:
    """`forward` and `expand_kv` of an attention module: with such a layer latents pass as they are."""
    forward, expand = plain_of(module, "forward"), plain_of(module, "expand_kv")

    def note(self: Any, *args: Any, **options: Any) -> Any:
        setattr(self, PASSES, _layer_in(cache_of(options), self.layer_idx) is not None)
        return forward(self, *args, **options)

    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> Any:
        if getattr(self, PASSES, False) or isinstance(layer_of(kv_nope), LatentLayer):
            return kv_nope, k_rot
        return expand(self, kv_nope, k_rot)

    return ("forward", note), ("expand_kv", expand_kv)


def _indexer(module: Any, model_type: str) -> Functions:
    """`forward` of an indexer: with such a layer the pool's keys are scored."""
    name, rotates_last = _ROTATIONS[model_type]
    plain, rotate = plain_of(module, "forward"), getattr(sys.modules[type(module).__module__], name)

    def split(x: Tensor, rope: int) -> tuple[Tensor, Tensor]:
        """Columns that turn, and those that don't."""
        rest = x.shape[-1] - rope
        first, last = x.split([rest, rope] if rotates_last else [rope, rest], dim=-1)
        return (last, first) if rotates_last else (first, last)

    def join(rotated: Tensor, passed: Tensor) -> Tensor:
        return torch.cat((passed, rotated) if rotates_last else (rotated, passed), dim=-1)

    def forward(
        self: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *args: Any,
        **options: Any,
    ) -> Tensor:
        layer = _layer_in(cache_of(options), self.layer_idx)
        if layer is None:
            given = hidden_states, q_resid, position_embeddings, *args
            unchanged: Tensor = plain(self, *given, **options)
            return unchanged
        batch, query_len, _ = hidden_states.shape
        q = self.wq_b(q_resid).view(batch, query_len, self.n_heads, self.head_dim)
        k = self.k_norm(self.wk(hidden_states).to(self.k_norm.weight.dtype)).to(hidden_states.dtype)
        q_rot, q_pass = split(q, self.qk_rope_head_dim)
        k_rot, k_pass = split(k[:, :, None], self.qk_rope_head_dim)
        q_rot, k_rot = rotate(q_rot, k_rot, *position_embeddings, unsqueeze_dim=2)
        q, k = join(q_rot, q_pass), join(k_rot, k_pass)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
        weights = weights * (self.n_heads**-0.5 * self.softmax_scale)
        chosen: Tensor = layer.select(q, k[:, :, 0], weights, self.index_topk)
        return chosen

    return (("forward", forward),)


def _functions(model: PreTrainedModel) -> dict[nn.Module, Function | Functions]:
    """Those of each attention module and of its indexer; none where a projection is not plain, so that the
    model's caches gather."""
    model_type = model.config.get_text_config(decoder=True).model_type
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    if any("expand_kv" in vars(module) or is_not_plain(module.kv_b_proj) for module in modules):
        return {}
    made: dict[nn.Module, Function | Functions] = {module: _attention(module) for module in modules}
    indexers = (module.indexer for module in modules if module.indexer is not None)
    return made | {indexer: _indexer(indexer, model_type) for indexer in indexers}


def _sparse_layer(owner: Any, index: int, config: Any) -> LatentLayer:
    """Of a cache that keeps latents; one without an indexer has the selection of a layer before it."""
    shares = (getattr(config, "indexer_types", None) or {index: ""})[index] == "shared"
    return LatentLayer(owner, index, config) if shares else SparseLatentLayer(owner, index, config)


class IndexedLayer(PagedLayer):
    """A layer whose indexer caches one key per token, in blocks of its own in the rows' slots."""

    def __init__(self, owner: PagedOwner, index: int, window: int | None = None) -> None:
        super().__init__(owner, index, window)
        self.index_pool: Tensor | None = None  # [num_blocks, block_size, 1, index_head_dim]

    @torch.compiler.disable(reason=SET_UP)
    def _make_index_pool(self, states: Tensor) -> None:
        assert self.keys is not None
        shape = (*self.keys.shape[:2], 1, states.shape[-1])
        with torch.inference_mode(False):
            self.index_pool = torch.zeros(shape, dtype=states.dtype, device=states.device)
        torch._dynamo.mark_static_address(self.index_pool, guard=False)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the indexer's keys of this forward's tokens, ``[batch, query_len, index_head_dim]``, and give
        those of all, ``[batch, max_seq_len, index_head_dim]``; `update` has moved the lengths on."""
        if self.index_pool is None:
            self._make_index_pool(indexer_key_states)
        pool = self.index_pool
        assert pool is not None
        batch, query_len, width = indexer_key_states.shape
        rows: Any = self.owner.rows
        # Padding has slot -1: it goes into the null block, which nothing reads.
        slots = rows.step(batch, query_len, writes=True).slot_mapping.clamp_min(0)
        pool.view(-1, width).index_put_((slots,), indexer_key_states.reshape(-1, width))
        gathered: Tensor = rows.gather(pool, batch)[:, 0]
        return gathered

    def copy_blocks(self, block_mapping: Tensor) -> None:
        """See `PagedLayer`; the indexer's keys too."""
        super().copy_blocks(block_mapping)
        if self.index_pool is not None:
            source, destination = block_mapping.to(self.index_pool.device).unbind(1)
            self.index_pool[destination] = self.index_pool[source]

    def count_bytes(self) -> int:
        """See `PagedLayer`; the indexer's keys too."""
        return super().count_bytes() + (0 if self.index_pool is None else self.index_pool.nbytes)


def _layer(owner: Any, index: int, config: Any, template: Any) -> Any:
    """The layers with an indexer: of a cache that gathers, or, for an attached model, of latents."""
    if not isinstance(template, StaticIndexedLayer):
        return None
    if owner.dense:
        return IndexedLayer(owner, index, window_and_chunk(config, index, template)[0])
    if config.model_type in TYPES and was_given_functions(config):
        return _sparse_layer(owner, index, config)
    attach = "call torchpaged.hf.attach(model), or " if config.model_type in TYPES else ""
    raise UnsupportedModelError(
        f"{config.model_type}: layer {index} caches an indexer (sparse attention), which is not paged; "
        f"{attach}use PagedCache(..., dense=True)"
    )


_SELECTS = "selects the keys of each query by an indexer"
register_family(Family(("dots3_note_text",), needs_dense=_SELECTS, layer=_layer))
register_family(
    Family(
        TYPES,
        needs_dense=f"{_SELECTS}; torchpaged.hf.attach(model) makes it attend over latents that are selected",
        takes_no_none=True,
        functions=_functions,
        layer=_layer,
    )
)
