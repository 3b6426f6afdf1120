"""Facts about a model: whether it can run through the attention interface (and the refusal of those that
can't), and whether it is fused."""

from __future__ import annotations

import functools
import inspect
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
    PreTrainedModel,
)

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.attached import was_given_functions
from torchpaged.hf.families import family_of

#: The name under which attention and mask functions are registered.
NAME = "torchpaged"
_MAPPINGS: tuple[Any, ...] = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
)
_REASON = (
    "its attention layers do not call transformers' attention interface (ALL_ATTENTION_FUNCTIONS), so that "
    "no attention implementation can be plugged in; use a model that does, or torchpaged.PagedAttention in a "
    "model of your own"
)


def uses_attention_interface(model_class: type[PreTrainedModel]) -> bool:
    """Whether a model class calls the attention interface.

    transformers tells it only through the private ``_can_set_attn_implementation``;
    ``set_attn_implementation`` asks the same method but merely warns. ``tests/hf/test_refusals.py`` notices
    if it changes.
    """
    return bool(model_class._can_set_attn_implementation())


def require_causal_lm(model: Any) -> None:
    """Refuse what is no causal LM of transformers.

    Raises:
        ArgumentError: no model of transformers.
        UnsupportedModelError: one with an encoder besides the decoder, without a head for tokens, or that
            needs more than tokens.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(
            "model",
            "a causal LM of transformers",
            reprlib.repr(model) if isinstance(model, (str, type)) or model is None else type(model).__name__,
            "load one with transformers.AutoModelForCausalLM.from_pretrained(...)",
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the engine runs causal LMs; use PagedCache.for_inputs with generate()"
        )
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{type(model).__name__} has no head that gives logits of tokens; load it with "
            "transformers.AutoModelForCausalLM"
        )
    takes = inspect.signature(model.forward).parameters.values()
    needs = [it.name for it in takes if it.default is it.empty and it.kind is it.POSITIONAL_OR_KEYWORD]
    if set(needs) - {"input_ids"}:
        raise UnsupportedModelError(
            f"{type(model).__name__} can't run without {', '.join(needs)}, and the engine runs tokens; use "
            "generate() with torchpaged.hf.PagedCache"
        )


def require_supported(model: PreTrainedModel) -> None:
    """Refuse a model that would ignore the attention implementation.

    Raises:
        UnsupportedModelError: with the model's class and the reason.
    """
    if family_of(model.config.model_type).own_attention:
        raise UnsupportedModelError(
            f"{type(model).__name__} ignores transformers' attention interface: it runs with a PagedCache "
            "behind torchpaged.hf.attach(model), and not as packed tokens"
        )
    # Of a model of several parts the decoder attends through a cache; others may attend by themselves.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    part = type(decoder) if isinstance(decoder, PreTrainedModel) else type(model)
    if not (uses_attention_interface(type(model)) or uses_attention_interface(part)):
        raise UnsupportedModelError(f"{type(model).__name__} cannot run through torchpaged: {_REASON}")


def rotated_alike(model: PreTrainedModel) -> tuple[int | None, str]:
    """Tokens of a text up to which its keys are rotated alike whatever else is in the batch, and the kind of
    rotation that is other beyond: there the longest text of a forward decides for all of its rows and
    chunks. None: at any length."""
    found: list[tuple[int, str]] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", "default")
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            limit = _same_rotation(module, layer_type, str(kind))
            found += [] if limit is None else [(limit, str(kind))]
    return min(found, default=(None, ""))


def _same_rotation(module: Any, layer_type: str | None, kind: str) -> int | None:
    """Positions that a rotary module of this ``rope_type`` rotates alike whatever else it gets; None: all."""
    if "dynamic" in kind:
        return int(module.original_max_seq_len)
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    parameters = parameters if layer_type is None else parameters[layer_type]
    by_length = kind == "longrope" or (kind != "default" and "short_mscale" in parameters)
    return int(parameters["original_max_position_embeddings"]) if by_length else None


def lacks_causal_mask(model: Any) -> bool:
    """Whether a decoder's modelling file makes no causal mask: of transformers 5.17, its prompts see tokens
    behind their own, in a prefill and not in the steps after it. Versions before and after make one."""
    if not family_of(model.config.model_type).may_lack_causal_mask or not model.config.is_decoder:
        return False
    return not hasattr(sys.modules[type(model).__module__], "create_causal_mask")


def require_implementation(config: Any, holder: str) -> None:
    """Refuse a step of a model whose attention implementation is not ours, or is no longer: it would take the
    pools for keys and values.

    Raises:
        ArgumentError: what ``config``, of the text, names, and what to call.
    """
    implementation = config._attn_implementation
    if implementation == NAME:
        return
    if family_of(config.model_type).own_attention:
        todo = "call torchpaged.hf.attach(model)"
    else:
        todo = "call model.set_attn_implementation('torchpaged')"
    if implementation is None:  # models set one in their own config
        todo += ", and make the cache with that model's own config: model.config"
    raise ArgumentError(
        "attn_implementation", f"'torchpaged' for a model {holder}", repr(implementation), todo
    )


def records_layers(config: Any, options: Mapping[str, Any]) -> bool:
    """Whether transformers' decorators are to collect what the layers give, which forwards of ours do not."""
    names = ("output_attentions", "output_hidden_states")
    return any(options.get(name) or getattr(config, name, False) for name in names)


def require_weights(model: PreTrainedModel) -> None:
    """Refuse a model whose weights are not all there between forwards, on one device.

    Raises:
        UnsupportedModelError: some are offloaded, or on another device (``device_map``).
    """
    first: torch.device | None = None
    for name, weight in model.named_parameters():
        first = weight.device if first is None else first
        if weight.is_meta or weight.device != first:
            where = "offloaded" if weight.is_meta else f"on {weight.device}, others on {first}"
            raise UnsupportedModelError(
                f"{type(model).__name__}: {name} is {where} (device_map); the engine runs models on one "
                "device: use generate() with a PagedCache where the layers are on one, or DynamicCache"
            )


def _class_of(config_class: type) -> type[PreTrainedModel] | None:
    """A model class that transformers knows for a config; None for a config from elsewhere. One modelling
    file holds them all."""
    for mapping in _MAPPINGS:
        found = mapping.get(config_class, None)
        found = found[0] if isinstance(found, (tuple, list)) else found
        if isinstance(found, type):
            return found
    return None


@functools.cache
def _told_by_class(model_type: str) -> tuple[bool, bool]:
    """`has_own_attention` and `needs_eager_mask`."""
    found = _class_of(CONFIG_MAPPING[model_type]) if model_type in CONFIG_MAPPING else None
    own = found is not None and not uses_attention_interface(found)
    without_sdpa = found is not None and not getattr(found, "_supports_sdpa", False)
    return own, own or without_sdpa or family_of(model_type).adds_bias


@torch.compiler.assume_constant_result
def has_own_attention(model_type: str) -> bool:
    """Whether the models of a type ignore the attention interface, so that they add the mask to scores of
    their own."""
    return _told_by_class(model_type)[0]


@torch.compiler.assume_constant_result
def needs_eager_mask(model_type: str) -> bool:
    """Whether the models of a type are right only with the mask that eager attention adds to scores: one for
    every forward, in floating point.

    Those that ignore the attention interface, and those that do not claim SDPA: BigBird-Pegasus' decoder
    calls itself not causal and leaves causality to a mask that SDPA's mask function would leave out, and its
    encoder adds the mask to scores of its own. And those with a bias by positions, a mask in floating point
    anyway: UMT5's decoder calls itself not causal in transformers 5.17. ``_supports_sdpa`` is private;
    ``tests/hf/test_encoder_decoder.py`` notices if it changes.
    """
    return _told_by_class(model_type)[1]


def require_supported_config(config: Any) -> None:
    """The same from a config alone, where transformers knows the model that goes with it; also refuses those
    with caches of their own.

    `_supports_default_dynamic_cache` is private too; ``tests/hf/test_typed_refusals.py`` notices if it
    changes.
    """
    require_keys_of_tokens(config)
    model_class = _class_of(type(config))
    if model_class is None:
        return
    if not uses_attention_interface(model_class):  # of a model of several parts the text part counts
        model_class = _class_of(type(config.get_text_config(decoder=True))) or model_class
    family = family_of(config.model_type)
    if family.own_attention:
        family.require_expressible(config)
    elif not uses_attention_interface(model_class):
        raise UnsupportedModelError(f"{model_class.__name__} cannot run through torchpaged: {_REASON}")
    own_cache = not getattr(model_class, "_supports_default_dynamic_cache", lambda: True)()
    if own_cache and not was_given_functions(config.get_text_config(decoder=True)):
        todo = "call torchpaged.hf.attach(model) before, or " if family.packed else "call "
        raise UnsupportedModelError(
            f"{model_class.__name__} cannot run with a PagedCache: it keeps a cache of its own kind; {todo}"
            "generate() without past_key_values"
        )


def require_keys_of_tokens(config: Any) -> None:
    """Refuse a model that caches more than keys of its tokens, one per layer, see `Family.caches_others`.

    Raises:
        UnsupportedModelError: with what else it caches.
    """
    text = str(config.get_text_config(decoder=True).model_type)
    others = family_of(text).caches_others
    if others:
        raise UnsupportedModelError(
            f"{text} cannot run with a PagedCache: it {others}; call generate() without past_key_values"
        )


def has_paged_cache(config: Any) -> bool:
    """Whether a `PagedCache` of a supported model keeps anything: not of one without attention that is not
    attached."""
    config = config.get_text_config(decoder=True)
    return not family_of(config.model_type).states_alone or was_given_functions(config)


def require_kept_layers(config: Any, layers: Sequence[Any]) -> None:
    """Refuse a model of which no layer would keep anything in a paged cache.

    Args:
        config: of the text.
        layers: those with pools: of keys and values, latents or states.

    Raises:
        UnsupportedModelError: there is none.
    """
    if layers:
        return
    if family_of(config.model_type).packed:
        raise UnsupportedModelError(
            f"{config.model_type} keeps states alone, as an attached model's mixers compute them, and no "
            "keys to gather; call torchpaged.hf.attach(model) before PagedCache(model.config, ...), and "
            "leave dense out"
        )
    raise UnsupportedModelError(
        f"{config.model_type} keeps no keys and values in any layer, so that there is nothing to page; "
        "call generate() without past_key_values"
    )


def require_made_by_user(arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse ``options`` that transformers gives to a cache: T5Gemma makes its cross cache itself, of the
    class that it finds. And a model in the place of its config.

    Raises:
        UnsupportedModelError: there is one that only transformers gives.
        ArgumentError: the first of ``arguments`` is a model.
    """
    config = arguments[0] if arguments else options.get("config")
    if isinstance(config, torch.nn.Module):
        raise ArgumentError(
            "config",
            "the config of a model",
            f"a {type(config).__name__}",
            "pass model.config and sizes, or call for_inputs(model, **call), which takes them from a call",
        )
    if "offloading" in options:
        raise UnsupportedModelError(
            f"{getattr(options.get('config'), 'model_type', 'the model')} makes a cache in the place of "
            "this one, without the sizes that a PagedCache needs; for cross attention pass "
            "EncoderDecoderCache(PagedCache(...), DynamicCache(config=model.config))"
        )


def fusion_of(model: PreTrainedModel) -> Any:
    """The `FusionReport` of the `fuse` that ``model`` is under; None if it is not fused."""
    fusion: Any = getattr(model.get_decoder(), "_torchpaged_fusion", None)
    return None if fusion is None else fusion.report
