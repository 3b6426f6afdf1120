"""What the options of a `PagedCache` must be, what its config decides about them, which sizes a call of
generate() needs, and what a cache says of itself. It imports these functions, so that its type has no name
here."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from torchpaged.custom_ops.checks import is_int, switch
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE
from torchpaged.custom_ops.words import counted, of_bytes, one_line
from torchpaged.hf.attached import was_given_functions
from torchpaged.hf.families import family_of
from torchpaged.hf.kv_scales import Scales
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.row_states import describe_states
from torchpaged.hf.template import HybridPagedLayer, PackedHybridLayer


def check_options(
    num_blocks: int | None,
    dense: bool | None,
    batch_invariant: bool,
    kv_dtype: str | torch.dtype | None,
    kv_scales: str | Scales,
) -> None:
    """Refuse options that can't be, or not together; raises `ArgumentError`."""
    if num_blocks is not None and (not is_int(num_blocks) or num_blocks < 2):
        raise ArgumentError(
            "num_blocks", "None or an int of at least 2 (block 0 is the null block)", repr(num_blocks)
        )
    switch("dense", dense, None)
    switch("batch_invariant", batch_invariant)
    if batch_invariant and kv_dtype is not None and isinstance(kv_scales, str):
        raise ArgumentError(
            "kv_scales",
            "scales, with batch_invariant=True and fp8 pools: those found are of the first batch",
            repr(kv_scales),
            "give those that another cache of this model found: its kv_scales",
        )


def why_dense(config: Any, dense: bool | None, batch_invariant: bool) -> str:
    """Why keys of a model of this text config are gathered that were not asked to be; empty: they are not,
    or were.

    Raises:
        UnsupportedModelError: they can't be for this model, or not with ``batch_invariant``.
    """
    name = str(config.model_type)
    family = family_of(name)
    reason = family.needs_dense if dense is None and not was_given_functions(config) else ""
    if (dense or reason) and batch_invariant:
        raise UnsupportedModelError(
            f"{name}: batch_invariant is not held where keys are gathered "
            f"({reason or 'dense=True'}): SDPA promises nothing of the kind"
        )
    if (dense or reason) and family.own_attention:
        raise UnsupportedModelError(
            f"{name} masks by the lengths of its own keys, which dense=True makes max_seq_len; "
            "leave dense out, and call torchpaged.hf.attach(model)"
        )
    return reason


def keeps_kv(layer: PagedLayer) -> bool:
    """Whether a layer keeps keys and values, and nothing else per token."""
    return type(layer) in (PagedLayer, HybridPagedLayer, PackedHybridLayer)


def not_of_fp8(
    layers: Iterable[PagedLayer], kv_dtype: torch.dtype, dense: bool, dense_reason: str
) -> set[str]:
    """Why a cache can't have pools of this fp8 dtype; empty: it can."""
    layers = list(layers)
    others = (layer for layer in layers if not keeps_kv(layer) and not layer.latent)
    own = {f"layer {layer.index} is a {type(layer).__name__}" for layer in others}
    return (
        own
        | latents_not_of(layers, kv_dtype)
        | (set() if layers else {"no layer keeps keys and values"})
        | ({f"its keys are gathered ({dense_reason or 'dense=True'})"} if dense else set())
    )


def latents_not_of(layers: Iterable[PagedLayer], kv_dtype: torch.dtype) -> set[str]:
    """Why layers of latents can't have pools of this fp8 dtype; empty: they can."""
    if kv_dtype == ROW_DTYPE:
        return set()
    return {
        f"layer {layer.index} keeps latents, which {kv_dtype} has no rows of"
        for layer in layers
        if layer.latent
    }


def require_use_cache(config: Any) -> None:
    """Refuse a text config by whose default generate() runs its model without a cache.

    Raises:
        ArgumentError: it has ``use_cache=False``.
    """
    if config.use_cache is False:
        raise ArgumentError(
            "use_cache",
            f"True for {config.model_type} with a PagedCache",
            "False, its config's default, with which generate() runs all tokens again in every step",
            "set model.config.use_cache = model.generation_config.use_cache = True, or give use_cache="
            "True to PagedCache.for_inputs(model, **call) and to generate() alike",
        )


_NOT_MADE = "made with the first keys"


def in_one_line(cache: Any) -> str:
    """Of its repr."""
    num_bytes = sum(layer.num_bytes for layer in cache.paged)
    size = of_bytes(num_bytes) if num_bytes else _NOT_MADE
    parts = [f"{_blocks(cache)} in {counted(len(cache.paged), 'paged layer')}", size]
    if not cache.paged:
        parts = [_rows(cache), *describe_states(cache.states)]
    choice = getattr(cache.backend, "choice", None)  # made with the first keys
    return one_line(cache, *parts, "backend not chosen yet" if choice is None else f"backend={choice.name!r}")


def described(cache: Any) -> str:
    """See `PagedCache.describe`."""
    parts = [_paged(cache) if cache.paged else _rows(cache)]
    rings, rolling = cache.rows.rolling, sum(layer.rolls for layer in cache.paged)
    if rings is not None:
        parts.append(
            f"a row keeps {counted(rings.blocks.blocks_per_ring, 'block')} in "
            f"{counted(rolling, 'layer')} with a window of {rings.blocks.window}"
        )
    parts += describe_states(cache.states)
    if cache.dense_reason:
        parts.append(f"gathered: {cache.name} {cache.dense_reason}")
    return "; ".join(parts)


def _blocks(cache: Any) -> str:
    return f"{counted(cache.num_blocks, 'block')} of {counted(cache.block_size, 'token')}"


def _rows(cache: Any) -> str:
    return f"{counted(cache.rows.max_rows, 'row')} of {counted(cache.max_seq_len, 'token')}"


def _paged(cache: Any) -> str:
    tokens = cache.pool.num_usable * cache.block_size
    grows = [layer for layer in cache.paged if not layer.rolls]
    per_token = sum(layer.num_bytes for layer in grows) // (cache.num_blocks * cache.block_size)
    num_bytes = sum(layer.num_bytes for layer in cache.paged)
    size = f"{of_bytes(num_bytes)} ({per_token} bytes per token)" if num_bytes else _NOT_MADE
    return f"{_blocks(cache)} = {counted(tokens, 'token')} in {counted(len(grows), 'paged layer')}, {size}"


def _option(model: PreTrainedModel, call: Mapping[str, Any], name: str) -> int | None:
    """An option as generate() takes it: its own argument, then its ``generation_config``, then the
    model's."""
    for holder in (call, vars(call.get("generation_config") or object), vars(model.generation_config)):
        value: int | None = holder.get(name)
        if value is not None:
            return value
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
    copies = max(_option(model, call, "num_beams") or 1, _option(model, call, "num_return_sequences") or 1)
    if _option(model, call, "use_cache") is False:
        raise ArgumentError(
            "use_cache",
            "True, for a cache to be of use",
            "False (given, or by the model's generation_config)",
            "give use_cache=True here and to generate() alike",
        )
    new, most = _option(model, call, "max_new_tokens"), _option(model, call, "max_length")
    if new is None and most is None:
        raise ArgumentError(
            "max_new_tokens",
            "the number of tokens that generate() may add",
            "neither max_new_tokens nor max_length",
            "give it here and to generate() alike",
        )
    tokens = length + new if new is not None else max(most or 0, length)
    # Prompt lookup proposes that many tokens at the end, too, and takes back what is too much.
    return batch * copies, tokens + (_option(model, call, "prompt_lookup_num_tokens") or 0)


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
    rows, tokens = _sizes(model, call, found.shape[0], 2)  # a start token, and a forced one
    # Speech models prepend tokens of their own to the prompt, and know how many fit at most.
    most = getattr(model.config, "max_target_positions", None)
    return rows, most if isinstance(most, int) else tokens
