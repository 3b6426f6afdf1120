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

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, StaticIndexedLayer, StaticLayer

from torchpaged.backends import AttentionSpec, attention_spec
from torchpaged.cache import LatentLayerSpec
from torchpaged.cache.latent import LayerLatentCache
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.few_tokens import own_forward
from torchpaged.hf.attached import was_given_functions
from torchpaged.hf.call import LayerCall, by_token, in_autocast
from torchpaged.hf.families import Family, Function, register_family
from torchpaged.hf.layer import PagedLayer, layer_of
from torchpaged.hf.owner import PagedOwner
from torchpaged.profiling.ranges import is_on as is_profiling
from torchpaged.profiling.ranges import ranged_attention


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
            kv_dtype=self.owner.kv.dtype,
            latent=True,
        )

    def store(self, key_states: Tensor, value_states: Tensor, slots: Tensor, are_query_tokens: bool) -> None:
        """See `PagedLayer`; by the op ``write_latent``."""
        assert self.keys is not None
        self.owner.backend.ops.write_latent(
            by_token(key_states)[:, 0], by_token(value_states)[:, 0], self.keys, slots
        )

    def attend(self, call: LayerCall) -> Tensor:
        """See `PagedLayer`; by the op ``mla_attention``.

        Raises:
            UnsupportedModelError: an argument that the op does not have, or a projection that is not plain.
            BackendUnavailableError: the cache's backend declares not to run this attention.
        """
        batch, num_heads, query_len, _ = call.query.shape
        metadata = self.owner.metadata_of(self, batch, query_len)
        options = {"sliding_window": call.window, "softcap": call.softcap, "alibi_slopes": call.alibi_slopes}
        given = [name for name, value in options.items() if value is not None]
        if given := [*given, *metadata.features]:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} attends over latents by {given[0]}, which mla_attention does "
                "not take; use PagedCache(..., dense=True)"
            )
        up_keys, up_values = up_projections(call.module, call.query)
        refuse_grad(**{"kv_b_proj.weight": up_keys})
        absorbed = call.query  # [batch, num_heads, query_len, rank + rope]
        if not call.absorbed:
            nope, rope = call.query.split([up_keys.shape[1], self.stored.qk_rope_head_dim], dim=-1)
            absorbed = torch.cat((nope @ up_keys, rope), dim=-1)
        q = by_token(absorbed)
        step = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
        out = q.new_empty(*q.shape[:2], self.stored.kv_lora_rank)
        lse = None if call.sinks is None else q.new_empty(q.shape[:2], dtype=torch.float32)
        indices = None if call.indices is None else call.indices.flatten(0, 1)
        named: dict[str, Any] = {"max_query_len": metadata.max_query_len, "scale": call.scale}
        named |= {"causal": call.causal, "indices": indices}
        tensors = q, call.key, *step, out, lse
        traced = torch.compiler.is_compiling()
        if not traced or self.asked is None:  # else a trace would have a view of the pool
            self.hold(LatentCall(*tensors, **named).as_attention())
        attend = self.owner.backend.ops.mla_attention
        if not traced and is_profiling():
            attend = ranged_attention(attend, self.index)
        attend(*tensors, **named)
        values = out.new_empty(*out.shape[:2], up_values.shape[1])
        self.owner.backend.ops.up_project_values(out, up_values, values)
        if call.sinks is not None and lse is not None:  # a logit more in the sum, and no value
            values = values * torch.sigmoid(lse - call.sinks.float())[..., None].to(values.dtype)
        return values.view(batch, query_len, num_heads, -1)

    def _require_attended(self) -> None:
        """Nothing to require: a module that expands what it is given meets rows of ``rank + rope`` numbers,
        which its projection refuses by their width."""


def up_projections(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of ``kv_b_proj``: ``[num_heads, qk_nope_head_dim, rank]``, ``[num_heads, v_head_dim,
    rank]``, views of its weight.

    Raises:
        UnsupportedModelError: it is more than a product with that weight (an adapter, a quantised or
            offloaded weight, a bias), so that its halves would not be the whole of it.
    """
    why = is_not_plain(module.kv_b_proj)
    (weight,) = in_autocast(module.kv_b_proj.weight)
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


def is_not_plain(projection: Any) -> str:
    """What a projection has besides a weight; empty if nothing."""
    if type(projection) is not nn.Linear:
        return f"is a {type(projection).__name__}"
    if projection._forward_hooks or projection._forward_pre_hooks:
        return "has forward hooks"
    if own_forward(projection) is not None:
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


def _functions(model: PreTrainedModel) -> dict[nn.Module, Function]:
    """What lets pools pass, for each module that expands latents; none where one of the projections is not
    plain, so that the model's caches gather."""
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    if any("expand_kv" in vars(module) or is_not_plain(module.kv_b_proj) for module in modules):
        return {}
    return dict.fromkeys(modules, ("expand_kv", _pass_pools))


def _layer(owner: Any, index: int, config: Any, template: Any) -> LatentLayer | None:
    """For an attached model, unless its keys are gathered: its modules let pools of latents pass."""
    others = (LinearAttentionCacheLayerMixin, StaticIndexedLayer)
    keeps = isinstance(template, StaticLayer) and not isinstance(template, others)
    keeps = keeps and not owner.dense and was_given_functions(config)
    return LatentLayer(owner, index, config) if keeps else None


_TYPES = "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite longcat_flash minicpm3 mistral4 sarvam_mla youtu"
register_family(
    Family(
        tuple(_TYPES.split()),
        needs_dense=(
            "expands its cached latents to keys and values before it attends; torchpaged.hf.attach(model) "
            "makes it attend over the latents"
        ),
        caches_latents=True,
        functions=_functions,
        layer=_layer,
    )
)
