"""Prompts and parameters as callers give them, checked before anything is queued."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.numbers import as_integer, shown
from torchpaged.engine.sampling import SamplingParams


def list_prompts(prompts: Any) -> list[Any]:
    """``prompts`` of `Generator.generate` as a list; one string is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    expected = "a string, or a list of strings or of lists of token ids"
    if isinstance(prompts, (bytes, dict)) or not isinstance(prompts, Iterable):
        raise ArgumentError("prompts", expected, shown(prompts))
    listed = list(prompts)
    if any(as_integer(prompt) is not None for prompt in listed):
        raise ArgumentError("prompts", expected, shown(prompts), "put one prompt's ids in a list: [ids]")
    return listed


def list_sampling(sampling: Any, count: int) -> list[SamplingParams]:
    """``sampling`` for each of ``count`` prompts."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [SamplingParams() if sampling is None else sampling] * count
    each = list(sampling) if isinstance(sampling, (list, tuple)) else [sampling]
    wrong = [params for params in each if not isinstance(params, SamplingParams | None)]
    if wrong:
        raise ArgumentError("sampling", "SamplingParams, or a list of them", shown(wrong[0]))
    if len(each) != count:
        raise ArgumentError("sampling", f"one SamplingParams per prompt ({count})", str(len(each)))
    return [SamplingParams() if params is None else params for params in each]


def token_ids(prompt: Any, vocab_size: int) -> list[int]:
    """A prompt's ids as plain integers within the vocabulary; at least one.

    Raises:
        ArgumentError: what came instead.
    """
    values = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise ArgumentError("prompt", "a string or token ids", shown(prompt))
    ids = []
    for value in values:
        token = as_integer(value)
        if token is None:
            raise ArgumentError(
                "prompt", "token ids, integers of one dimension", f"{shown(value)} ({type(value).__name__})"
            )
        if not 0 <= token < vocab_size:
            raise ArgumentError("prompt", f"token ids in [0, {vocab_size})", shown(token))
        ids.append(token)
    if not ids:
        raise ArgumentError("prompt", "at least one token", "an empty prompt")
    return ids
