"""What a call of transformers' ``generate()`` asks of the engine's loop, and what of it the engine can't do.

transformers turns its options into logits processors and stopping criteria. Those the engine knows are read
back exactly; a call with any other runs in transformers' own loop, or is refused by name: none is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.sampling import SamplingParams

_LEAVE = "call torchpaged.hf.unaccelerate(model) first, or leave it out"
# Arguments of generate() that go to loops of transformers' own, by which they never reach a caller's loop.
_OTHER_LOOPS = ("assistant_model", "assistant_tokenizer", "synced_gpus")
# What generate() itself adds to a call.
_CACHES = ("past_key_values", "cache_params", "cache")
_KNOWN_INPUTS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", *_CACHES)
_OUTPUTS = ("output_scores", "output_logits", "output_hidden_states")
_OWN_MODES = ("beam_search", "beam_sample", "assisted_generation")  # the last by prompt lookup


class PlainSteps(Exception):
    """Not an error: the call is one for transformers' own loop. Says what the engine's can't do.

    Attributes:
        rows, tokens: what a cache for it must hold: rows, beams included, and tokens of each.
        has_beams: its rows are beams, whose steps transformers never compiles.
    """

    rows = tokens = 0
    has_beams = False


@dataclass(frozen=True)
class CallSampling:
    """How each row's tokens are chosen and when it ends; and the token behind its end, None without one."""

    sampling: SamplingParams
    padding_token: int | None


def _refuse(name: str, expected: str, got: Any) -> ArgumentError:
    return ArgumentError(name, expected, str(got), _LEAVE)


def require_plain_call(call: Mapping[str, Any]) -> None:
    """Refuse arguments of generate() which it gives to loops of its own.

    Raises:
        ArgumentError: there is one.
    """
    for name in _OTHER_LOOPS:
        if call.get(name) not in (None, False):
            raise _refuse(name, "None on an accelerated model", type(call[name]).__name__)
    for name in (*_CACHES, "cache_implementation"):
        if call.get(name) is not None:
            shown = call[name] if isinstance(call[name], str) else type(call[name]).__name__
            raise _refuse(name, "None on an accelerated model, whose engine keeps its own cache", repr(shown))
    if call.get("inputs_embeds") is not None:
        raise _refuse("inputs_embeds", "None on an accelerated model, which takes input_ids", "a tensor")


def call_sampling(
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    model_kwargs: Mapping[str, Any],
    input_ids: Tensor,
    model_type: str,
) -> CallSampling:
    """The call in the engine's terms.

    Args:
        logits_processor, stopping_criteria: lists as generate() prepared them.
        config: the call's ``GenerationConfig``.
        model_kwargs: the model's inputs, as generate() prepared them.
        input_ids: ``[rows, length]`` int64, left-padded.
        model_type: of the model's config.

    Raises:
        ArgumentError: something that neither loop can do with a paged cache; names it.
        PlainSteps: something that transformers' own loop can do.
    """
    if getattr(config, "output_attentions", None):
        raise _refuse("output_attentions", "False: paged attention keeps no weights", True)
    _require_known_inputs(model_kwargs, input_ids, model_type)
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample", *_OWN_MODES):
        raise _refuse("generation_config", "greedy decoding, sampling or beams on an accelerated model", mode)
    if config.assistant_early_exit is not None:  # its first layers draft by a generate() of their own
        raise _refuse("assistant_early_exit", "None on an accelerated model", config.assistant_early_exit)
    if config.use_cache is False:
        raise _refuse("use_cache", "True on an accelerated model", False)
    if config.cache_implementation is not None:
        raise _refuse("cache_implementation", "None on an accelerated model", config.cache_implementation)
    for name in _OUTPUTS:
        if getattr(config, name, None):
            raise PlainSteps(f"{name}=True")
    if mode in _OWN_MODES:
        plain = PlainSteps(mode.replace("_", " "))
        plain.has_beams = mode.startswith("beam")
        raise plain
    max_length, stops = _ends(stopping_criteria)
    new = max_length - input_ids.shape[1]
    if new < 1:
        raise ArgumentError(
            "max_length", f"more than the prompt's {input_ids.shape[1]} tokens", str(max_length)
        )
    padding = config.pad_token_id if config.pad_token_id is not None else (stops[0] if stops else None)
    drawn = drawing(logits_processor, model_kwargs.get("attention_mask"))
    if config.do_sample:
        drawn.setdefault("temperature", 1.0)
    elif extra := [name for name in drawn if name != "repetition_penalty"]:
        raise PlainSteps(f"{extra[0]} without do_sample")
    # The call's own ends are all there are.
    sampling = SamplingParams(max_new_tokens=new, stop_token_ids=stops, ignore_eos=True, **drawn)
    return CallSampling(sampling, padding)


def _is_of_text(name: str, value: Any, model_type: str) -> bool:
    """Whether an input about pictures says that there are none: the outputs of a model's towers, which
    generate() adds, and the kinds of tokens, which processors give along. Gemma 3 has another name for these;
    under that name GPT-2 embeds zeros, and PaliGemma means pictures by them."""
    kinds = "token_type_ids" if model_type == "gemma3" else "mm_token_type_ids"
    return (name == "mm_encoder_outputs" and not value) or (name == kinds and not value.any())


def _require_known_inputs(model_kwargs: Mapping[str, Any], input_ids: Tensor, model_type: str) -> None:
    for name, value in model_kwargs.items():
        if value is None or name in (*_KNOWN_INPUTS, *_OUTPUTS) or _is_of_text(name, value, model_type):
            continue
        raise _refuse(
            name,
            "None on an accelerated model, whose engine takes tokens alone (images go through generate() "
            "with a PagedCache)",
            type(value).__name__,
        )
    # in transformers 5.24 "cache" is the name of them all
    name = "cache" if "cache" in model_kwargs else "past_key_values"
    cache = model_kwargs.get(name)
    # one of states alone, which generate() made, has no length
    if cache is not None and not all(cache.is_linear) and cache.get_seq_length() != 0:
        raise _refuse(name, "None on an accelerated model", type(cache).__name__)
    given, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if given is not None:
        ones = torch.ones_like(input_ids) if mask is None else mask.to(torch.int64)
        real = ones != 0
        # Of models with several axes of positions all must say the same, as they do for text.
        if given.dim() == 3 and bool((given == given[:1]).all()):
            given = given[0]
        if given.shape != input_ids.shape or bool(((given != ones.cumsum(-1) - 1) & real).any()):
            raise _refuse("position_ids", "the places of the tokens in their prompts", "others")


def _ends(criteria: Any) -> tuple[int, tuple[int, ...]]:
    """Tokens at most, padded prompt included, and the tokens that end a row."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    lengths, stops = [], []
    for one in criteria:
        if type(one) is MaxLengthCriteria:
            lengths.append(int(one.max_length))
        elif type(one) is EosTokenCriteria:
            # -1 stands for no end: transformers warns of it, and no token is one
            stops += [token for token in one.eos_token_id.flatten().tolist() if token >= 0]
        else:
            raise PlainSteps(type(one).__name__)
    if not lengths:
        raise ArgumentError("max_new_tokens", "the number of tokens that generate() may add", "None")
    return min(lengths), tuple(dict.fromkeys(stops))


def drawing(
    processors: Any, attention_mask: Tensor | None, stand_for: Mapping[type, type] | None = None
) -> dict[str, Any]:
    """Fields of `SamplingParams` that the processors stand for.

    The engine applies them in transformers' own order: penalty, temperature, top-k, top-p, min-p.

    Args:
        processors: transformers' list.
        attention_mask: of the prompts; None: they are whole.
        stand_for: other classes of it, which have the fields of those that they stand for.

    Raises:
        PlainSteps: a processor, or a field of one, that the engine has not.
    """
    from transformers.generation import logits_process as known

    names = {
        known.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
        known.TemperatureLogitsWarper: ("temperature", "temperature"),
        known.TopKLogitsWarper: ("top_k", "top_k"),
        known.TopPLogitsWarper: ("top_p", "top_p"),
        known.MinPLogitsWarper: ("min_p", "min_p"),
    }
    order, found, last = list(names), {}, -1
    for one in processors:
        kind = (stand_for or {}).get(type(one), type(one))
        entry = names.get(kind)
        if entry is None or entry[0] in found or order.index(kind) < last:
            raise PlainSteps(f"{kind.__name__}, or its place among the logits processors")
        last = order.index(kind)
        found[entry[0]] = getattr(one, entry[1])
        if getattr(one, "filter_value", -float("inf")) != -float("inf"):
            raise PlainSteps(f"filter_value={one.filter_value}")
        if getattr(one, "min_tokens_to_keep", 1) != 1:
            raise PlainSteps(f"min_tokens_to_keep={one.min_tokens_to_keep}")
        if entry[0] == "repetition_penalty":
            _require_whole_prompts(one, attention_mask)
    return found


def _require_whole_prompts(processor: Any, attention_mask: Tensor | None) -> None:
    """Leave to transformers a repetition penalty for other tokens than those of the prompt and the output:
    for padding, as 5.17 has it, or for a part of the prompt."""
    device = torch.device("cpu") if attention_mask is None else attention_mask.device
    padding = 0 if attention_mask is None else (attention_mask == 0).sum(-1)
    ignored = 0 if processor.prompt_ignore_length is None else processor.prompt_ignore_length
    if bool((torch.as_tensor(ignored, device=device) != torch.as_tensor(padding, device=device)).any()):
        raise PlainSteps(f"a repetition penalty that leaves {ignored} tokens out, {padding} being padding")


def without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The prompts of left-padded rows."""
    rows: list[list[int]] = input_ids.tolist()
    if attention_mask is None:
        return rows
    if attention_mask.shape != input_ids.shape:
        raise ArgumentError(
            "attention_mask", f"a tensor of shape {list(input_ids.shape)}", str(list(attention_mask.shape))
        )
    masks: list[list[int]] = attention_mask.to(torch.int64).tolist()
    prompts = []
    for ids, mask in zip(rows, masks, strict=True):
        start = mask.index(1) if 1 in mask else len(mask)
        if start == len(mask) or mask != [0] * start + [1] * (len(mask) - start):
            raise ArgumentError(
                "attention_mask",
                "0 on padding at the left of a row and 1 on its prompt, of one token at least",
                "a row of another kind",
                "give the tokenizer padding_side='left'",
            )
        prompts.append(ids[start:])
    return prompts
