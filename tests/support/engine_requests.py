"""Requests of a tiny model, and ways to run them, of tests of the engine."""

from __future__ import annotations

from typing import Any

from torchpaged.engine import SamplingParams

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
#: Sizes of a Llama that takes these.
TINY = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
