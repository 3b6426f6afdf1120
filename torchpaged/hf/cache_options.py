"""What the options of a `PagedCache` must be, what its config decides about them, and what a cache says of
itself. It imports these functions, so that its type has no name here."""

from collections.abc import Iterable
from typing import Any

import torch

from torchpaged.custom_ops.checks import is_int, switch
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE
from torchpaged.custom_ops.words import counted, of_bytes, one_line
from torchpaged.hf.attached import was_given_functions
from torchpaged.hf.families import family_of
from torchpaged.hf.kv_scales import Scales
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.state_pools import describe_states
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
    """Refuse a text config by whose default generate() runs its model without a cache."""
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
    """The memory arithmetic in one line; pools count once they exist."""
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
