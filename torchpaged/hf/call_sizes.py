"""Which cache a call of generate() needs: its rows, beams included, and its tokens per row."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from torchpaged.custom_ops.errors import ArgumentError


def option_of(model: PreTrainedModel, call: Mapping[str, Any], name: str) -> Any:
    """An option as generate() takes it: its own argument, then its ``generation_config``, then the
    model's."""
    for holder in (call, vars(call.get("generation_config") or object), vars(model.generation_config)):
        if holder.get(name) is not None:
            return holder[name]
    return None


def _prompt(model: PreTrainedModel, call: Mapping[str, Any]) -> Tensor:
    crosses = model.config.is_encoder_decoder
    names = ("decoder_input_ids",) if crosses else ("input_ids", "inputs", "inputs_embeds")
    found = next((call[name] for name in names if call.get(name) is not None), None)
    if not isinstance(found, Tensor) or found.dim() < 2:
        got = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        todo = "or call PagedEncoderDecoderCache.for_inputs, which pages both halves and needs none"
        expected = "a tensor [batch, length], as generate() takes it"
        raise ArgumentError(names[0], expected, got, todo if crosses else "")
    return found


def _require_model(model: Any) -> None:
    if isinstance(model, PreTrainedConfig):
        raise ArgumentError(
            "model",
            "the model that generate() is called of",
            f"a {type(model).__name__}",
            "pass the model, or give the config and sizes to the class itself",
        )


def sizes_of_call(model: PreTrainedModel, call: Mapping[str, Any]) -> tuple[int, int]:
    """Rows, and tokens per row, that a PagedCache needs for ``model.generate(**call)``.

    Args:
        model: the model.
        call: generate()'s arguments. Of an encoder-decoder model, the decoder's prompt must be among them.

    Returns:
        ``max_batch_size`` and ``max_seq_len``.

    Raises:
        ArgumentError: the prompt is missing, nothing says how many tokens may come, or ``use_cache=False``.
    """
    _require_model(model)
    prompt = _prompt(model, call)
    batch, length = prompt.shape[:2]
    # the decoder's start token, where the prompt lacks it
    return _sizes(model, call, batch, length + int(model.config.is_encoder_decoder))


def _sizes(model: PreTrainedModel, call: Mapping[str, Any], batch: int, length: int) -> tuple[int, int]:
    """Rows and tokens per row behind a prompt of ``length`` tokens."""
    copies = max(
        option_of(model, call, "num_beams") or 1, option_of(model, call, "num_return_sequences") or 1
    )
    if option_of(model, call, "use_cache") is False:
        raise ArgumentError(
            "use_cache",
            "True, for a cache to be of use",
            "False (given, or by the model's generation_config)",
            "give use_cache=True here and to generate() alike",
        )
    new, most = option_of(model, call, "max_new_tokens"), option_of(model, call, "max_length")
    if new is None and most is None:
        raise ArgumentError(
            "max_new_tokens",
            "the number of tokens that generate() may add",
            "neither max_new_tokens nor max_length",
            "give it here and to generate() alike",
        )
    tokens = length + new if new is not None else max(most or 0, length)
    # Prompt lookup proposes that many tokens at the end, too, and takes back what is too much.
    return batch * copies, tokens + (option_of(model, call, "prompt_lookup_num_tokens") or 0)


def sizes_of_encoder_decoder_call(model: PreTrainedModel, call: Mapping[str, Any]) -> tuple[int, int]:
    """As `sizes_of_call`, of a call that may leave the decoder's prompt to generate().

    Raises:
        ArgumentError: there is no input for the encoder, or as `sizes_of_call`.
    """
    _require_model(model)
    if isinstance(call.get("decoder_input_ids"), Tensor):
        return sizes_of_call(model, call)
    names = ("inputs", model.main_input_name, "inputs_embeds", "input_ids", "input_features", "input_values")
    found = next((call[name] for name in names if isinstance(call.get(name), Tensor)), None)
    if found is None and call.get("encoder_outputs") is not None:
        found = call["encoder_outputs"][0]
    if found is None:
        raise ArgumentError(
            model.main_input_name, "the encoder's input, as generate() takes it", f"only {sorted(call)}"
        )
    batch = found.shape[0]
    if model.config.model_type == "whisper":  # it repeats its input for each of them, ahead of the beams
        batch *= option_of(model, call, "num_return_sequences") or 1
        call = {**call, "num_return_sequences": 1}
    rows, tokens = _sizes(model, call, batch, 2)  # a start token, and a forced one
    # Speech models prepend tokens of their own to the prompt, and know how many fit at most.
    most = getattr(model.config, "max_target_positions", None)
    return rows, most if isinstance(most, int) else tokens
