"""Sampling parameters of a request.

Token ``t`` of a request is drawn from ``(seed, t)`` alone: batch composition, preemption and recomputation
never change it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import repr_of_fields
from torchpaged.engine.numbers import as_float, as_integer, shown

# The device has float32.
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    >>> sampling = SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.95, seed=7)
    >>> sampling.max_new_tokens, SamplingParams().temperature  # greedy by default
    (16, 0.0)

    Attributes:
        max_new_tokens: tokens at most.
        temperature: 0 = greedy; else logits are divided by it.
        top_k: the k likeliest tokens only; 0 = all.
        top_p: the likeliest tokens whose probabilities sum to p; 1 = all (nucleus
            sampling, arXiv:1904.09751).
        min_p: tokens with at least this share of the likeliest one's probability only; 0 =
            all (arXiv:2407.01082).
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that occurred in
            prompt or output; 1 = off (arXiv:1909.05858).
        seed: of this request's draws, 64 bits; None = a fresh one.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end it, besides the model's own end, and stay in ``token_ids``; within
            the model's vocabulary, which is checked at submission.
        ignore_eos: go on past the model's end token.
        cache_salt: with the prefix cache: keys and values are shared with requests of the same salt alone,
            of tenants that must not learn what others asked; None: with all that have none.
        min_new_tokens: tokens at least, 0 = off: before them the tokens that end the request have logits of
            -inf, and stop strings are not looked for. These tokens count against the `Generator`'s
            ``max_logit_bias``.
        logit_bias: numbers that are added to logits, by token id, in front of repetition penalty and
            temperature; -inf rules a token out. At most the `Generator`'s ``max_logit_bias`` of them.
        logprobs: log probabilities that come with each token: of itself, and of so many likeliest tokens;
            None = none. Of the softmax of the model's logits, before anything changes these, temperature
            included. At most the `Generator`'s ``max_logprobs``.
        n: samples of a prompt, each a request of its own: `Generator.generate` gives as many outputs,
            `Generator.submit` takes `samples` one by one. Sample i has the seed ``seed + i``.
        extra_args: numbers for the `Generator`'s ``logits_processor``, at most its ``max_extra_args``; as
            float32.

    Numbers of NumPy become Python's, lists become tuples. Nothing else is converted: True is no number, 2.0
    is no integer.

    Raises:
        ArgumentError: a field of another type, or out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str | None = None
    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    n: int = 1
    extra_args: tuple[float, ...] = ()

    __repr__ = repr_of_fields

    def __post_init__(self) -> None:
        self._integer("max_new_tokens", "an integer of at least 1", 1)
        self._float("temperature", "0 (greedy) or a positive number of float32's range", 0.0, _LARGEST)
        self._integer("top_k", "an integer, 0 (off) or 1 to 2**31 - 1", 0, 2**31 - 1)
        self._float("top_p", "a number in (0, 1]", _SMALLEST, 1.0)
        self._float("min_p", "a number in [0, 1]", 0.0, 1.0)
        self._float(
            "repetition_penalty", "a positive number of float32's range (1 = off)", _SMALLEST, _LARGEST
        )
        if self.seed is not None:
            self._integer("seed", "None or a signed 64-bit integer", -(2**63), 2**63 - 1)
        if not isinstance(self.stop, (tuple, list)) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise ArgumentError("stop", "a tuple or list of non-empty strings", shown(self.stop))
        object.__setattr__(self, "stop", tuple(self.stop))
        stops = (
            [as_integer(token) for token in self.stop_token_ids]
            if isinstance(self.stop_token_ids, (tuple, list))
            else [None]
        )
        if any(token is None or not 0 <= token < 2**63 for token in stops):
            raise ArgumentError("stop_token_ids", "a tuple or list of token ids", shown(self.stop_token_ids))
        object.__setattr__(self, "stop_token_ids", tuple(stops))
        if not isinstance(self.ignore_eos, bool):
            raise ArgumentError("ignore_eos", "True or False", shown(self.ignore_eos))
        if not isinstance(self.cache_salt, str | None):
            raise ArgumentError("cache_salt", "None or a string", shown(self.cache_salt))
        most = f"an integer from 0 to max_new_tokens ({self.max_new_tokens})"
        self._integer("min_new_tokens", most, 0, self.max_new_tokens)
        self._check_bias()
        self._integer("n", "an integer of at least 1", 1)
        if self.n > 1 and not self.temperature:
            raise ArgumentError("n", "1 with temperature 0, whose samples are all alike", str(self.n))
        if self.logprobs is not None:
            self._integer("logprobs", "None or an integer of at least 0", 0)
        args = self.extra_args if isinstance(self.extra_args, (tuple, list)) else [None]
        numbers = tuple(as_float(number) for number in args)
        if any(number is None or not -_LARGEST <= number <= _LARGEST for number in numbers):
            expected = "a tuple or list of numbers of float32's range"
            raise ArgumentError("extra_args", expected, shown(self.extra_args))
        object.__setattr__(self, "extra_args", numbers)

    def _check_bias(self) -> None:
        given = self.logit_bias
        pairs = given.items() if isinstance(given, Mapping) else [(None, None)]
        biases = [(as_integer(token), as_float(bias)) for token, bias in pairs]
        if any(
            token is None or token < 0 or bias is None or not (bias == -math.inf or abs(bias) <= _LARGEST)
            for token, bias in biases
        ):
            expected = "a dict of token ids with numbers of float32's range or -inf"
            raise ArgumentError("logit_bias", expected, shown(given))
        object.__setattr__(self, "logit_bias", dict(biases))

    def _integer(self, name: str, expected: str, low: int, high: int | None = None) -> None:
        value = as_integer(getattr(self, name))
        if value is None or value < low or (high is not None and value > high):
            raise ArgumentError(name, expected, shown(getattr(self, name)))
        object.__setattr__(self, name, value)

    def _float(self, name: str, expected: str, low: float, high: float) -> None:
        value = as_float(getattr(self, name))
        if value is None or not low <= value <= high:
            raise ArgumentError(name, expected, shown(getattr(self, name)))
        object.__setattr__(self, name, value)

    def samples(self) -> "list[SamplingParams]":
        """Those of each of the ``n`` samples: ``n`` is 1 there, and sample i has the seed ``seed + i``, as
        signed 64-bit integers count; None stays None."""
        if self.n == 1:
            return [self]
        first = self.seed
        seeds = [None if first is None else (first + i + 2**63) % 2**64 - 2**63 for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse stop ids and biases of tokens that a vocabulary of ``vocab_size`` does not have; raises
        `ArgumentError`."""
        for name in ("stop_token_ids", "logit_bias"):
            wrong = next((token for token in getattr(self, name) if token >= vocab_size), None)
            if wrong is not None:
                raise ArgumentError(name, f"token ids in [0, {vocab_size})", shown(wrong))

    def end_token_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that end a request of a model with these ends of its own."""
        return *self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)
