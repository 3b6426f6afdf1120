"""Models whose attention modules ignore transformers' attention interface, and what makes them attend in a
paged cache.

Each module gets a function of ours in the place of one of its own, on the instance: `_attn`, where a module
computes its scores in a method by that name, else `forward`. With a paged cache the function calls
`paged_attention_forward`; with any other cache, without one, and in cross attention it calls what it
replaced. `torchpaged.hf.attach` puts the functions in, `detach` takes them out.

The modules' names and fields are not public; ``tests/hf/test_own_attention.py`` runs every family under each
supported transformers.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_masks_for_generate

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.attention import paged_attention_forward, require_cache
from torchpaged.hf.known_models import MAY_LACK_CAUSAL_MASK
from torchpaged.hf.layer import PagedLayer, layer_of
from torchpaged.hf.replaced import MARK, Replaced, plain_of

_SLOPES = "_torchpaged_slopes"

Heads = tuple[Tensor, Tensor, Tensor]  # query, key, value: [batch, heads, query_len, head_dim]


def alibi_slopes(num_heads: int) -> list[float]:
    """Slopes per head: the powers ``2 ** (-8 * i / n)`` of the largest power of two n within ``num_heads``,
    then every other one of ``2 * n``.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (2021), section 3, and its published code for
    other numbers of heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]


def _slopes(module: Any, num_heads: int, device: torch.device) -> Tensor:
    """The module's slopes ``[num_heads]`` float32 on ``device``; made once."""
    slopes: Tensor | None = getattr(module, _SLOPES, None)
    if slopes is None or slopes.device != device:
        with torch.inference_mode(False):
            slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)
        torch._dynamo.mark_static_address(slopes, guard=False)
        setattr(module, _SLOPES, slopes)
    return slopes


# --------------------------------------------------------------------------------------- modules with `_attn`
def _attn(scaling: Callable[[Any], float], window: Callable[[Any], int | None]) -> Callable[..., Any]:
    """`_attn` of a module: ``(query, key, value, attention_mask) -> (out, weights)``.

    ``out [batch, heads, query_len, head_dim]``.
    """

    def make(module: Any) -> tuple[str, Callable[..., Any]]:
        plain, factor, size = plain_of(module, "_attn"), scaling(module), window(module)

        def attn(
            self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
        ) -> Any:
            if layer_of(key) is None:
                require_cache(self, attention_mask)
                return plain(self, query, key, value, attention_mask)
            out, weights = paged_attention_forward(
                self,
                query,
                key,
                value,
                attention_mask,
                scaling=factor,
                sliding_window=size,
                masks_itself=True,
            )
            return out.transpose(1, 2), weights

        return "_attn", attn

    return make


# ----------------------------------------------------------------------------- modules that inline everything
def _split(states: Tensor, head_dim: int) -> Tensor:
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _bert(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    width = module.attention_head_size
    return tuple(
        _split(project(hidden_states), width) for project in (module.query, module.key, module.value)
    )  # type: ignore[return-value]


def _roformer(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    query, key, value = _bert(module, hidden_states, given)
    positions = given.get("sinusoidal_pos")
    if positions is None:
        return query, key, value
    if module.rotary_value:
        return module.apply_rotary_position_embeddings(positions, query, key, value)
    return (*module.apply_rotary_position_embeddings(positions, query, key), value)


def _require_no_prompt(module: Any, given: dict[str, Any]) -> None:
    if given.get("attn_prompt") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} puts a trained prompt before its cached keys, which the paged pools "
            "don't hold"
        )


def _bart(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    _require_no_prompt(module, given)
    width = module.head_dim
    return tuple(
        _split(project(hidden_states), width) for project in (module.q_proj, module.k_proj, module.v_proj)
    )  # type: ignore[return-value]


def _bloom(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    return module._reshape(module.query_key_value(hidden_states))


def _mpt(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    return tuple(_split(part, module.head_dim) for part in mixed.chunk(3, dim=-1))  # type: ignore[return-value]


def _falcon(module: Any, hidden_states: Tensor, given: dict[str, Any]) -> Heads:
    query, key, value = (
        x.transpose(1, 2) for x in _falcon_split(module, module.query_key_value(hidden_states))
    )
    cos, sin = (x.unsqueeze(1) for x in given["position_embeddings"])
    return _rotate(query, cos, sin), _rotate(key, cos, sin), value


def _falcon_split(module: Any, fused: Tensor) -> Heads:
    """``[batch, query_len, heads, head_dim]`` each, keys and values once per group, as the pools keep
    them."""
    if not module.new_decoder_architecture:
        return module._split_heads(fused)
    groups = fused.unflatten(-1, (-1, module.num_heads // module.num_kv_heads + 2, module.head_dim))
    return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


class _Family(NamedTuple):
    """How a module of one family projects, attends and ends.

    Attributes:
        heads: ``(module, hidden_states, further arguments) -> Heads``.
        scaling: of the scores.
        end: ``(module, out, further arguments)`` -> what forward returns first; ``out`` is
            ``[batch, query_len, heads * head_dim]``.
        cache: the argument's name.
        crosses: the argument that holds an encoder's states in cross attention.
        alibi: whether the scores have linear biases.
    """

    heads: Callable[[Any, Tensor, dict[str, Any]], Heads]
    scaling: Callable[[Any], float]
    end: Callable[[Any, Tensor, dict[str, Any]], Tensor]
    cache: str = "past_key_values"
    crosses: str = ""
    alibi: bool = False


def _bloom_end(module: Any, out: Tensor, given: dict[str, Any]) -> Tensor:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise UnsupportedModelError(
            "bloom with slow_but_exact sums slices of its output projection, which the paged path does not; "
            "load it with slow_but_exact=False"
        )
    return module.dense(out) + given["residual"]


def _paged_cache(cache: Any, index: int) -> Any:
    """The cache that holds layer ``index`` in pools, behind what a module was given; None if there is
    none."""
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    return cache if isinstance(layer, PagedLayer) and not layer.owner.dense else None


def _forward(family: _Family) -> Callable[..., Any]:
    def make(module: nn.Module) -> tuple[str, Callable[..., Any]]:
        plain, scaling = plain_of(module, "forward"), family.scaling(module)
        names = tuple(inspect.signature(module.forward).parameters)[1:]

        def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **options}
            if family.crosses and given.get(family.crosses) is not None:
                if self.training or not _pages_cross(self, given):
                    return plain(self, hidden_states, *args, **options)
                return _cross_attention(self, hidden_states, given, scaling)
            cache = None if self.training else _paged_cache(given.get(family.cache), self.layer_idx)
            if cache is None:
                require_cache(self, given.get("attention_mask"))
                return plain(self, hidden_states, *args, **options)
            query, key, value = family.heads(self, hidden_states, given)
            key, value = cache.update(key, value, self.layer_idx)
            slopes = _slopes(self, query.shape[1], query.device) if family.alibi else None
            out, weights = paged_attention_forward(
                self, query, key, value, None, scaling=scaling, alibi_slopes=slopes, masks_itself=True
            )
            return family.end(self, out.flatten(2), given), weights

        return "forward", forward

    return make


def _pages_cross(module: Any, given: dict[str, Any]) -> bool:
    """Whether a module of Bart's kind attends to an encoder whose keys are in pools."""
    cross = getattr(given.get("past_key_values"), "cross_attention_cache", None)
    layers = getattr(cross, "layers", ())
    return module.layer_idx < len(layers) and isinstance(layers[module.layer_idx], PagedLayer)


def _cross_attention(module: Any, hidden_states: Tensor, given: dict[str, Any], scaling: float) -> Any:
    """The encoder's keys are written by the first step and read by all."""
    _require_no_prompt(module, given)
    both, index = given["past_key_values"], module.layer_idx
    if both.is_updated.get(index):
        layer = both.cross_attention_cache.layers[index]
        key, value = layer.keys, layer.values
    else:
        states = given["key_value_states"]
        key, value = (_split(project(states), module.head_dim) for project in (module.k_proj, module.v_proj))
        key, value = both.cross_attention_cache.update(key, value, index)
        both.is_updated[index] = True
    query = _split(module.q_proj(hidden_states), module.head_dim)
    mask = given.get("attention_mask")
    out, weights = paged_attention_forward(
        module, query, key, value, mask, scaling=scaling, is_causal=False, masks_itself=True
    )
    return module.out_proj(out.flatten(2)), weights


def _root(head_dim: str) -> Callable[[Any], float]:
    return lambda module: 1 / math.sqrt(getattr(module, head_dim))


def _window_of_gpt_neo(module: Any) -> int | None:
    """Of a local layer: its causal mask has so many keys in the last row."""
    return int(module.bias[0, 0, -1].sum()) if module.attention_type == "local" else None


_BERT = _forward(
    _Family(
        _bert, _root("attention_head_size"), lambda module, out, given: out, crosses="encoder_hidden_states"
    )
)
_BART = _forward(
    _Family(
        _bart,
        lambda module: module.scaling,
        lambda module, out, given: module.out_proj(out),
        crosses="key_value_states",
    )
)


def _led(module: nn.Module) -> tuple[str, Callable[..., Any]]:
    """As Bart's, and gives its cache back as a third."""
    name, attend = _BART(module)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        out = attend(self, hidden_states, *args, **options)
        return out if len(out) == 3 else (*out, options.get("past_key_values"))

    return name, forward


_NONE: Callable[[Any], None] = lambda module: None  # noqa: E731

#: Class of an attention module -> what makes its function.
MAKERS: dict[str, Callable[[nn.Module], tuple[str, Callable[..., Any]]]] = {
    "GPTJAttention": _attn(_root("head_dim"), _NONE),
    "CodeGenAttention": _attn(_root("head_dim"), _NONE),
    "GPTNeoSelfAttention": _attn(lambda module: 1.0, _window_of_gpt_neo),
    "GPTNeoXJapaneseAttention": _attn(_root("head_size"), _NONE),
    "BigBirdSelfAttention": _BERT,
    "MegatronBertSelfAttention": _BERT,
    "RemBertSelfAttention": _BERT,
    "RoFormerSelfAttention": _forward(
        _Family(
            _roformer,
            _root("attention_head_size"),
            lambda module, out, given: out,
            crosses="encoder_hidden_states",
        )
    ),
    "LEDDecoderAttention": _led,
    "MvpAttention": _BART,
    "TrOCRAttention": _BART,
    "XGLMAttention": _BART,
    "BloomAttention": _forward(
        _Family(_bloom, _root("head_dim"), _bloom_end, cache="layer_past", alibi=True)
    ),
    "MptAttention": _forward(
        _Family(
            _mpt,
            lambda module: module.softmax_scale,
            lambda module, out, given: module.out_proj(out),
            alibi=True,
        )
    ),
    "FalconAttention": _forward(
        _Family(_falcon, _root("head_dim"), lambda module, out, given: module.dense(out), cache="layer_past")
    ),
}


def _masks_of_bloom(model: Any) -> tuple[str, Callable[..., Any]]:
    """Bloom gives generate() a 2-D mask as long as its cache, zeros behind the last token, to build biases
    from, which the pools don't need."""
    name = "create_masks_for_generate"
    plain = plain_of(model, name) if hasattr(model, name) else None  # transformers 5.17 has none

    def create_masks(self: Any, *args: Any, **given: Any) -> Any:
        if plain is None or _paged_cache(given.get("past_key_values"), 0) is not None:
            return create_masks_for_generate(*args, **given)
        return plain(self, *args, **given)

    return name, create_masks


def _positions(module: nn.Module) -> tuple[str, Callable[..., Any]]:
    """Position embeddings that count from the cache's length: as a tensor it is no bound of a range in
    compiled code."""
    plain = plain_of(module, "forward")

    def forward(
        self: Any, ids: Any, past_key_values_length: Any = 0, position_ids: Tensor | None = None
    ) -> Any:
        if position_ids is None and isinstance(past_key_values_length, Tensor):
            length = (ids.shape if isinstance(ids, Tensor) else ids)[1]
            position_ids = past_key_values_length + torch.arange(length, device=past_key_values_length.device)
        return plain(self, ids, past_key_values_length, position_ids)

    return "forward", forward


def _places_from(module: Any) -> tuple[str, Callable[..., Any]]:
    """The same, of LED, which takes no positions."""
    plain = plain_of(module, "forward")

    def forward(self: Any, input_ids_shape: Any, past_key_values_length: Any = 0) -> Tensor:
        if not isinstance(past_key_values_length, Tensor):
            return plain(self, input_ids_shape, past_key_values_length)
        places = torch.arange(input_ids_shape[1], device=self.weight.device) + past_key_values_length
        return nn.functional.embedding(places, self.weight)

    return "forward", forward


def lacks_causal_mask(model: Any) -> bool:
    """Whether a decoder's modelling file makes no causal mask: of transformers 5.17, its prompts see tokens
    behind their own, in a prefill and not in the steps after it. Versions before and after make one."""
    if model.config.model_type not in MAY_LACK_CAUSAL_MASK or not model.config.is_decoder:
        return False
    return not hasattr(sys.modules[type(model).__module__], "create_causal_mask")


def _causal(module: Any) -> tuple[str, Callable[..., Any]] | None:
    """The mask that a decoder of such a file needs; with a paged cache, transformers' mask function tells it
    the padding."""
    if not lacks_causal_mask(module):
        return None
    plain = plain_of(module, "forward")

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **given: Any,
    ) -> Any:
        states: Tensor | None = input_ids if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if states is None:
            return plain(self, input_ids, attention_mask, *args, **given)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=torch.empty(*states.shape[:2], 0, dtype=self.dtype, device=states.device),
            attention_mask=attention_mask,
            past_key_values=given.get("past_key_values"),
        )
        if mask is None:  # nothing looks at it, and the module makes one of its own where none comes
            mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=states.device)
        return plain(self, input_ids, mask, *args, **given)

    return "forward", forward


def _sinusoids(module: Any) -> tuple[str, Callable[..., Any]]:
    """Position embeddings whose table grows with the cache's length, which compiled code can't look at: there
    a position past the table raises."""
    plain = plain_of(module, "forward")

    def forward(self: Any, position_ids: Tensor, past_key_values_length: Any = 0) -> Tensor:
        if not (torch.compiler.is_compiling() and isinstance(past_key_values_length, Tensor)):
            return plain(self, position_ids, past_key_values_length)
        rows: Tensor = self.weights.index_select(0, position_ids.flatten() + self.offset)
        return rows.view(*position_ids.shape, -1).detach()

    return "forward", forward


#: Class of a module beside attention -> the same, for models whose attention modules were given theirs; None
#: where this transformers needs nothing.
HELPERS: dict[str, Callable[[nn.Module], tuple[str, Callable[..., Any]] | None]] = {
    "BigBirdModel": _causal,
    "BloomForCausalLM": _masks_of_bloom,
    "LEDLearnedPositionalEmbedding": _places_from,
    "MegatronBertModel": _causal,
    "MvpLearnedPositionalEmbedding": _positions,
    "RemBertModel": _causal,
    "RoFormerModel": _causal,
    "RoFormerSinusoidalPositionalEmbedding": _positions,
    "TrOCRLearnedPositionalEmbedding": _positions,
    "XGLMSinusoidalPositionalEmbedding": _sinusoids,
}


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of ``model`` that `MAKERS` knows and that keep keys and values in a cache."""
    found = (module for module in model.modules() if type(module).__name__ in MAKERS)
    return [
        module
        for module in found
        if getattr(module, "layer_idx", getattr(module, "layer_id", None)) is not None
    ]


def replace_attention(model: PreTrainedModel) -> int:
    """Give every module its function; returns how many."""
    modules = attention_modules(model)
    for module in modules:
        _replace(module, *MAKERS[type(module).__name__](module))
    for module in model.modules() if modules else ():
        helper = HELPERS.get(type(module).__name__)
        function = None if helper is None else helper(module)
        if function is not None:
            _replace(module, *function)
    return len(modules)


def put_in(functions: Mapping[nn.Module, tuple[str, Callable[..., Any]]]) -> None:
    """Give each module its function, by the name it has there."""
    for module, (name, function) in functions.items():
        _replace(module, name, function)


def _replace(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    setattr(module, MARK, Replaced(name, vars(module).get(name)))
    setattr(module, name, types.MethodType(function, module))


def restore_attention(model: PreTrainedModel) -> None:
    """Take the functions out again; what was on the instance before them comes back."""
    for module in model.modules():
        if hasattr(module, MARK):
            replaced: Replaced = getattr(module, MARK)
            for own in (MARK, _SLOPES, replaced.name):
                vars(module).pop(own, None)
            if replaced.before is not None:
                setattr(module, replaced.name, replaced.before)
