"""Multi-head latent attention in a `PagedCache`: its layers keep the latents themselves.

transformers' modules hand ``update()`` the normalised latent and the rotated key of each token, and expand
what comes back to keys and values of all heads (`expand_kv`) before they attend. With pools there is nothing
to expand: the key's half of ``kv_b_proj`` is multiplied into the query, attention runs over the pool's rows,
and the value's half is applied to what comes out. So a token costs ``kv_lora_rank + qk_rope_head_dim``
numbers per layer.

`torchpaged.hf.attach` gives each module an `expand_kv` that lets pools pass and expands anything else as
before; the config of an attached model is remembered, and tells a `PagedCache` that it may keep latents.

The modules' fields are not public; ``tests/hf/test_latent.py`` runs every family under each supported
transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchpaged.backends import AttentionSpec, attention_spec
from torchpaged.cache import LatentLayerSpec, LayerLatentCache
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.known_models import CACHES_LATENTS
from torchpaged.hf.layer import PagedLayer, PagedOwner, by_token, layer_of
from torchpaged.metadata import AttentionMetadata
from torchpaged.profiling import is_on as is_profiling
from torchpaged.profiling import ranged_attention

# Configs of attached models by their id. Configs compare by their contents and have no hash.
_ATTACHED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class LatentLayer(PagedLayer):
    """The pool of one layer of latents, ``[num_blocks, block_size, 1, rank + rope]``; it is both ``keys`` and
    ``values``."""

    stored: LatentLayerSpec
    latent = True

    def __init__(self, owner: PagedOwner, index: int, config: Any) -> None:
        """``config``: the model's, which has the widths: pools made ahead are made from no tokens."""
        super().__init__(owner, index)
        self.stored = LatentLayerSpec(config.kv_lora_rank, config.qk_rope_head_dim)

    def stored_by(self, key_states: Tensor, value_states: Tensor) -> LatentLayerSpec:
        """See `PagedLayer`; latents and rotated keys come as keys and values of one head."""
        return self.stored

    def keys_and_values(self, pools: LayerLatentCache) -> tuple[Tensor, Tensor]:
        """The pool, twice."""
        return pools.kv_cache, pools.kv_cache

    def widths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """See `PagedLayer`."""
        return (1, self.stored.kv_lora_rank), (1, self.stored.qk_rope_head_dim)

    def attention_spec(self, config: Any, key_states: Tensor, head_dim_v: int | None) -> AttentionSpec:
        """See `PagedLayer`."""
        rank = self.stored.kv_lora_rank
        return attention_spec(
            device=key_states.device,
            dtype=key_states.dtype,
            num_heads=config.num_attention_heads,
            num_kv_heads=1,
            head_dim=rank + self.stored.qk_rope_head_dim,
            head_dim_v=rank,
            block_size=self.owner.block_size,
            latent=True,
        )

    def store(
        self, key_states: Tensor, value_states: Tensor, slots: Tensor, are_query_tokens: bool | None = None
    ) -> None:
        """See `PagedLayer`; by the op ``write_latent``."""
        assert self.keys is not None
        self.owner.backend.ops.write_latent(
            by_token(key_states)[:, 0],
            by_token(value_states)[:, 0],
            self.keys,
            slots,
        )

    def _require_attended(self) -> None:
        """Nothing to require: a module that expands what it is given meets rows of ``rank + rope`` numbers,
        which its projection refuses by their width."""


def latent_attention(
    module: Any,
    layer: LatentLayer,
    query: Tensor,
    metadata: AttentionMetadata,
    causal: bool,
    scale: float,
    further: dict[str, Any],
) -> Tensor:
    """Attention of one layer's queries over its latents.

    Args:
        module: the attention module, attached.
        layer: its layer of the cache; this forward's tokens are written.
        query: ``[batch, num_heads, query_len, qk_nope_head_dim + qk_rope_head_dim]``.
        metadata: the forward as a batch.
        causal, scale: as in ``mla_attention``.
        further: arguments of the attention interface that ``mla_attention`` does not have.

    Returns:
        ``[batch, query_len, num_heads, v_head_dim]``.

    Raises:
        UnsupportedModelError: one of ``further`` is given, or the projection is not a plain one.
        BackendUnavailableError: the cache's backend declares not to run this attention.
    """
    for name, value in further.items():
        if value is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends over latents by {name}, which mla_attention does not take; "
                "use PagedCache(..., dense=True)"
            )
    up_keys, up_values = up_projections(module, query)
    batch, num_heads, query_len, _ = query.shape
    nope, rope = query.split([up_keys.shape[1], layer.stored.qk_rope_head_dim], dim=-1)
    absorbed = torch.cat((nope @ up_keys, rope), dim=-1)  # [batch, num_heads, query_len, rank + rope]
    pool, rank = layer.keys, layer.stored.kv_lora_rank
    assert pool is not None
    backend = layer.owner.backend
    value = pool if torch.compiler.is_compiling() else pool[..., :rank]
    backend.hold(layer, absorbed, pool, value, causal, None, None, None, scale)
    q = absorbed.transpose(1, 2).reshape(batch * query_len, num_heads, -1)
    out = q.new_empty(batch * query_len, num_heads, rank)
    attend = backend.ops.mla_attention
    if not torch.compiler.is_compiling() and is_profiling():
        attend = ranged_attention(attend, layer.index)
    attend(
        q,
        pool,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        out,
        None,
        max_query_len=metadata.max_query_len,
        scale=scale,
        causal=causal,
    )
    values = torch.einsum("thr,hvr->thv", out, up_values)
    return values.view(batch, query_len, num_heads, -1)


def up_projections(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of ``kv_b_proj``: ``[num_heads, qk_nope_head_dim, rank]``, ``[num_heads, v_head_dim,
    rank]``, views of its weight.

    Raises:
        UnsupportedModelError: it is more than a product with that weight (an adapter, a quantised or
            offloaded weight, a bias), so that its halves would not be the whole of it.
    """
    why = _not_plain(module.kv_b_proj)
    weight: Tensor = module.kv_b_proj.weight
    if not why and (weight.dtype != query.dtype or weight.device != query.device):
        why = f"has a weight of {weight.dtype} on {weight.device}, not {query.dtype} on {query.device}"
    if why:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends over latents by the halves of kv_b_proj's weight, and that "
            f"projection {why}; use PagedCache(..., dense=True)"
        )
    halves = weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])
    up_keys, up_values = halves.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    return up_keys, up_values


def _not_plain(projection: Any) -> str:
    """What a projection has beside a weight; empty if nothing."""
    if type(projection) is not nn.Linear:
        return f"is a {type(projection).__name__}"
    if projection._forward_hooks or projection._forward_pre_hooks:
        return "has forward hooks"
    if "forward" in projection.__dict__:
        return "has a forward that another one replaced"
    if projection.bias is not None:
        return "has a bias"
    if type(projection.weight) not in (Tensor, nn.Parameter) or not projection.weight.is_floating_point():
        return f"has a weight that is a {type(projection.weight).__name__} of {projection.weight.dtype}"
    return ""


def _pass_pools(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv` of an attached module."""
    if isinstance(layer_of(kv_nope), LatentLayer):
        return kv_nope, k_rot
    expanded: tuple[Tensor, Tensor] = type(self).expand_kv(self, kv_nope, k_rot)
    return expanded


def latent_functions(model: PreTrainedModel) -> dict[nn.Module, tuple[str, Callable[..., Any]]]:
    """The functions for `torchpaged.hf.own_attention` to put in, by module: none, where ``model`` expands no
    latents, or where one of its projections is not plain, so that its caches gather."""
    if _text_config(model).model_type not in CACHES_LATENTS:
        return {}
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    if any("expand_kv" in vars(module) or _not_plain(module.kv_b_proj) for module in modules):
        return {}
    return dict.fromkeys(modules, ("expand_kv", _pass_pools))


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def remember(model: PreTrainedModel) -> None:
    """``model`` was given its functions."""
    config = _text_config(model)
    _ATTACHED[id(config)] = config


def forget(model: PreTrainedModel) -> None:
    """They were taken out again."""
    _ATTACHED.pop(id(_text_config(model)), None)


def keeps_latents(config: Any) -> bool:
    """Whether a model of this text config, the very object, is attached and lets pools of latents pass."""
    return _ATTACHED.get(id(config)) is config
