"""Requests of a tiny model, and ways to run them, of tests of the engine."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from torchpaged.engine import Generator, SamplingParams

PROMPTS = [[5, 6, 7], list(range(11, 40)), [50, 51, 52, 53, 54], [9]]
EACH = [
    SamplingParams(max_new_tokens=n, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
    for i, n in enumerate((9, 6, 12, 7))
]
LONG = SamplingParams(max_new_tokens=50, ignore_eos=True)
ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {"steps_per_launch": 1},
    "launches of 3": {"steps_per_launch": 3},
    "no graphs": {"graphs": False},
}
#: Of an engine whose requests are of several chunks and share steps.
SIZES = {"block_size": 4, "max_batch_size": 4, "max_seq_len": 96, "prefill_chunk_size": 16, "compile": False}
#: Sizes of a Llama that takes these.
TINY = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}


def drawn(
    count: int, lengths: Sequence[int], seed: int = 0, most: int = 21
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts of these lengths, and for each up to ``most`` tokens: greedy and seeded ones by turns,
    with a penalty, ids that stop, ends within a launch."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(8, 99) for _ in range(rng.choice(lengths))] for _ in range(count)]
    params = [
        SamplingParams(
            max_new_tokens=rng.randint(1, most),
            temperature=0.9 * (i % 2),
            seed=i,
            top_k=30 if i % 4 == 1 else 0,
            repetition_penalty=1.3 if i > 6 else 1.0,
            ignore_eos=i % 3 == 0,
            stop_token_ids=(9, 61, 2),
        )
        for i in range(count)
    ]
    return prompts, params


def sized(model: Any, **options: Any) -> Generator:
    """An engine of `SIZES`, and of these options."""
    return Generator(model, **{**SIZES, **options})


def faulty_model(model: Any, num_blocks: int = 70) -> Any:
    """A `PagedModel` of blocks of 4, which asks its ``fault``."""
    from torchpaged.hf import PagedModel

    class Faulty(PagedModel):
        """``fault(call)`` before a forward over ``tokens``; where it gives a number, that row's logits become
        NaN."""

        fault: Callable[[int], int | None] = staticmethod(lambda call: None)
        calls = 0
        tokens: list[int]

        def __call__(self, input_ids: Any, metadata: Any, logits_indices: Any = None) -> Any:
            self.calls += 1
            self.tokens = input_ids.tolist()
            row = self.fault(self.calls)
            logits = super().__call__(input_ids, metadata, logits_indices)
            if row is not None and len(logits):
                logits[row % len(logits), 3] = float("nan")
            return logits

    return Faulty(model, num_blocks=num_blocks, block_size=4)


def engine(model: Any, **options: Any) -> Generator:
    """Of a `faulty_model`, whose calls are counted from now on."""
    model.fault = lambda call: None
    defaults = {
        "max_batch_size": 3,
        "max_seq_len": 64,
        "prefill_chunk_size": 16,
        "compile": False,
        "capture_ahead": options.get("graphs", True),  # without graphs there is nothing to capture
    }
    generator = Generator(model, **{**defaults, **options})
    model.calls = 0
    return generator


def tokens_of(outputs: Any) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def submit_all(generator: Generator) -> list[int]:
    """`PROMPTS`; their ids."""
    return [generator.submit(prompt, params) for prompt, params in zip(PROMPTS, EACH, strict=True)]


def assert_unharmed(generator: Generator, want: list[list[int]]) -> None:
    generator.model.fault = lambda call: None  # type: ignore[attr-defined]
    outputs = generator.generate(PROMPTS, EACH)
    assert tokens_of(outputs) == want
    assert {output.finish_reason for output in outputs} == {"length"}
    assert generator.pool.num_free == generator.pool.num_usable
    assert not generator.has_unfinished


def interrupt_a_read(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when tokens of launches are read for the third time."""
    assert generator.loop is not None
    launches, calls = generator.loop.launches, itertools.count(1)
    collect = launches.collect

    def interrupted(keep: int = 0) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return collect(keep)

    monkeypatch.setattr(launches, "collect", interrupted)


class Letters:
    """A tokenizer of one token per letter, which can't decode token ``broken``."""

    broken = -1

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 90 + 8 for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if self.broken in ids:
            raise KeyError(self.broken)
        return "".join(chr(i + 30) for i in ids)
