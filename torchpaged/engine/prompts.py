"""Prompts and parameters as callers give them, checked before anything is queued."""

import contextlib
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.device import LogitsStage
from torchpaged.engine.numbers import as_integer, shown
from torchpaged.engine.sampling import SamplingParams

#: More tokens than any request has.
_ALWAYS = 2**31 - 1


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


def as_sampling(sampling: Any) -> SamplingParams:
    """``sampling`` of one request, checked; None: the default."""
    params = SamplingParams() if sampling is None else sampling
    if not isinstance(params, SamplingParams):
        raise ArgumentError("sampling", "SamplingParams", shown(params))
    return params


def require_text(name: str, text: str) -> None:
    """Refuse halves of surrogate pairs, which are no text: bytes of a shell, or of JSON, that are no UTF-8.

    Raises:
        ArgumentError: of the argument ``name``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(name, "text in UTF-8", shown(text)) from error


def encoded(prompt: Any, tokenizer: Any, needs_tokenizer: bool = False) -> Any:
    """Token ids of a text, by ``tokenizer``; anything else as it is.

    Raises:
        ArgumentError: as `require_text`, or there is no tokenizer for a text, or for what
            ``needs_tokenizer``.
    """
    if (isinstance(prompt, str) or needs_tokenizer) and tokenizer is None:
        raise ArgumentError(
            "tokenizer",
            "a tokenizer for string prompts and stop strings",
            "None",
            "make Generator(model, tokenizer), or give token ids",
        )
    if not isinstance(prompt, str):
        return prompt
    require_text("prompt", prompt)
    return tokenizer(prompt)["input_ids"]


def token_ids(prompt: Any, vocab_size: int) -> "array[int]":
    """A prompt's ids as integers of 64 bits within the vocabulary; at least one.

    Raises:
        ArgumentError: what came instead.
    """
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # of tensors and arrays
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise ArgumentError("prompt", "a string or token ids", shown(prompt))
    ids = array("q")
    # Most prompts, looked at as a whole; `struct` takes half the time of an array for the same.
    if type(values) is list and values and type(values[0]) is int:
        with contextlib.suppress(struct.error, TypeError):  # what is no integer, or beyond 64 bits
            ids.frombytes(struct.pack(f"{len(values)}q", *values))
            numbers = torch.frombuffer(ids, dtype=torch.int64)
            least, most = map(int, torch.aminmax(numbers))
            if least >= 0 and most < vocab_size and (least > 1 or _are_plain(values, numbers < 2)):
                return ids
        ids = array("q")
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


def _are_plain(values: list[Any], marks: Tensor) -> bool:
    """Whether these of ``values`` are integers: `struct` takes True for 1."""
    return all(type(values[place]) is int for (place,) in marks.nonzero().tolist())


def logits_words(
    stage: LogitsStage, sampling: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int
) -> tuple[int, ...]:
    """What a request brings into its row for ``stage``: ``num_words`` signed integers of 32 bits.

    Args:
        stage: of the engine.
        sampling: of the request.
        eos_token_ids: the model's own ends.
        vocab_size: tokens that have logits.

    Raises:
        ArgumentError: it asks for more than the engine was made for.
    """
    args, most = sampling.extra_args, stage.max_extra_args
    if len(args) > most:
        raise _too_much("extra_args", f"at most {most} numbers", len(args), "max_extra_args")
    likeliest = -1 if stage.max_logprobs is None else stage.max_logprobs
    if sampling.logprobs is not None and sampling.logprobs > likeliest:
        expected = "None" if likeliest < 0 else f"None, or at most {likeliest}"
        raise _too_much("logprobs", expected, sampling.logprobs, "max_logprobs")
    biases = [(token, _ALWAYS, bias) for token, bias in sampling.logit_bias.items()]
    if sampling.min_new_tokens:
        ends = {token for token in sampling.end_token_ids(eos_token_ids) if 0 <= token < vocab_size}
        biases += [(token, min(sampling.min_new_tokens, _ALWAYS), -math.inf) for token in sorted(ends)]
    if len(biases) > stage.max_logit_bias:
        asked = ("logit_bias", sampling.logit_bias), ("min_new_tokens", sampling.min_new_tokens)
        raise _too_much(
            " and ".join(name for name, given in asked if given),
            f"at most {stage.max_logit_bias} tokens with a bias, end tokens under min_new_tokens included",
            len(biases),
            "max_logit_bias",
        )
    # A bias of 0 changes nothing, whatever token it is for.
    biases += [(0, 0, 0.0)] * (stage.max_logit_bias - len(biases))
    tokens, until, added = zip(*biases, strict=True) if biases else ((), (), ())
    packed = struct.pack(
        f"={2 * len(biases)}i{len(biases)}f{most}f",
        *(*tokens, *until, *added),
        *(*args, *[0.0] * (most - len(args))),
    )
    return struct.unpack(f"={stage.num_words}i", packed)


def _too_much(name: str, expected: str, got: int, option: str) -> ArgumentError:
    return ArgumentError(name, expected, str(got), f"make the Generator with a larger {option}")
