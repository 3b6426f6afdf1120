"""What is asked of an engine under load: requests by lengths, arrivals by a rate, and how waiting times are
summed up.

``uniform``: prompts and outputs of 100 to 1,024 tokens. ``sharegpt``: log-normal lengths with the means of
the conversations that serving benchmarks draw from ShareGPT, 215 and 198 tokens, at most 1,024.
"""

import random
import statistics
from dataclasses import dataclass

SHORTEST, LONGEST = 100, 1024
#: Medians and deviations of the logarithm of lengths whose means, cut at `LONGEST`, are 215 and 198.
LOG_NORMAL = {"prompt": (114.5, 1.25), "output": (124.5, 1.0)}
TEMPERATURE = 0.6


@dataclass(frozen=True)
class Request:
    """A prompt's token ids, the tokens to generate, and the seed of its draws."""

    prompt: list[int]
    new_tokens: int
    seed: int


def length_of(rng: random.Random, lengths: str, part: str, longest: int = LONGEST) -> int:
    """Tokens of a "prompt" or an "output"."""
    if lengths == "uniform":
        return rng.randint(min(SHORTEST, longest), longest)
    median, deviation = LOG_NORMAL[part]
    return min(longest, max(4, round(median * 2.718281828 ** (deviation * rng.gauss(0, 1)))))


def load_of(lengths: str, count: int, vocab: int, seed: int, longest: int = LONGEST) -> list[Request]:
    """``count`` requests, the same ones for the same ``seed``."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        prompt = [rng.randrange(1, vocab) for _ in range(length_of(rng, lengths, "prompt", longest))]
        made.append(Request(prompt, length_of(rng, lengths, "output", longest), index))
    return made


def prompts_of(count: int, tokens: int, vocab: int, seed: int) -> list[Request]:
    """``count`` requests of ``tokens`` and one token of output."""
    rng = random.Random(seed)
    return [Request([rng.randrange(1, vocab) for _ in range(tokens)], 1, index) for index in range(count)]


def arrivals_of(count: int, rate: float | None) -> list[float]:
    """Seconds at which ``count`` requests come by a Poisson process; ``rate`` None: all at once."""
    rng = random.Random(count)
    arrivals = [0.0] * count
    for index in range(1, count if rate else 0):
        arrivals[index] = arrivals[index - 1] + rng.expovariate(rate)
    return arrivals


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def spread(values: list[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile and maximum; nothing of no values."""
    if not values:
        return {}
    return {
        "p50": statistics.median(values),
        "p90": percentile(values, 0.9),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }
