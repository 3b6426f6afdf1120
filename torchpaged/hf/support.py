"""Facts about a model, and refusals of those that can't run through the attention interface."""

import inspect
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from torchpaged.custom_ops.checks import is_int
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.attached import was_given_functions
from torchpaged.hf.families import family_of
from torchpaged.hf.model_classes import class_of, uses_attention_interface

#: The name under which attention and mask functions are registered.
NAME = "torchpaged"
_REASON = (
    "its attention layers do not call transformers' attention interface (ALL_ATTENTION_FUNCTIONS), so that "
    "no attention implementation can be plugged in; use a model that does, or torchpaged.PagedAttention in a "
    "model of your own"
)


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
    """Refuse a model that would ignore the attention implementation."""
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


def require_supported_config(config: Any) -> None:
    """The same from a config alone, where transformers knows the model that goes with it; also refuses those
    with caches of their own.

    `_supports_default_dynamic_cache` is private too; ``tests/hf/test_typed_refusals.py`` notices if it
    changes.
    """
    require_keys_of_tokens(config)
    model_class = class_of(type(config))
    if model_class is None:
        return
    if not uses_attention_interface(model_class):  # of a model of several parts the text part counts
        model_class = class_of(type(config.get_text_config(decoder=True))) or model_class
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
    """Refuse a model that caches more than keys of its tokens, one per layer, see `Family.caches_others`."""
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


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a text, by the model's generation config.

    Raises:
        ArgumentError: they are none.
    """
    eos = getattr(model.generation_config, "eos_token_id", None)
    ends = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    if not all(is_int(token) and -(2**31) <= token < 2**31 for token in ends):
        raise ArgumentError("eos_token_id", "token ids, of generation_config", repr(eos))
    return ends
