"""Where the seconds of a load went: its steps by what they did, next to the least that each can take.

The least: weights read once at `READ` bytes per second or multiplied at `PRODUCTS` per second, whichever
takes longer, keys and values of the decoding requests read once, and products of the prompts behind them.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from decode_step.cases import ModelShape

from serving.loads import Request

#: Of an H200: bytes and floating-point operations of 16 bits per second.
READ, PRODUCTS = 4.35e12, 700e12
#: Rows of the decode steps that are counted together.
ROWS = 64


@dataclass
class Steps:
    """Steps as they come.

    Attributes:
        lens: tokens of each request so far, by its name in the engine.
        launched: tokens of prompts that the last step launched: the next one waits for them.
        seen: of each step its seconds, its decoding requests, their tokens, and tokens of prompts.
    """

    lens: dict[Hashable, int] = field(default_factory=dict)
    launched: int = 0
    seen: list[tuple[float, int, int, int]] = field(default_factory=list)

    def add(self, seconds: float, names: Iterable[Hashable], load: dict[Any, Request], prompts: int) -> None:
        """A step that gave ``names`` a token each, and launched ``prompts`` tokens."""
        rows = context = 0
        for name in names:
            if name in self.lens:
                rows, context = rows + 1, context + self.lens[name]
            else:
                self.lens[name] = len(load[name].prompt)
            self.lens[name] += 1
        self.seen.append((seconds, rows, context, self.launched))
        self.launched = prompts

    def table(self, shape: ModelShape) -> list[dict[str, Any]]:
        """Of each kind of step: count, seconds, the least of them, the longest one, and their sizes."""
        kinds: dict[str, dict[str, Any]] = {}
        sizes = ("rows", "context", "prompt_tokens")
        for seconds, *counts in self.seen:
            zeros = {"steps": 0, "s": 0.0, "least_s": 0.0, "max_s": 0.0}
            kind = kinds.setdefault(kind_of(counts[0], counts[2]), zeros)
            kind["steps"] += 1
            kind["s"] += seconds
            kind["least_s"] += least_seconds(shape, *counts)
            kind["max_s"] = max(kind["max_s"], seconds)
            for name, count in zip(sizes, counts, strict=True):
                kind[name] = kind.get(name, 0) + count
        return [{"kind": name, **kind} for name, kind in sorted(kinds.items())]


def kind_of(rows: int, prompts: int) -> str:
    if prompts:
        return "mixed" if rows else "prompts"
    return f"decodes, {(rows - 1) // ROWS * ROWS + 1:4d} to {-(-rows // ROWS) * ROWS}" if rows else "none"


def least_seconds(shape: ModelShape, rows: int, context: int, prompts: int) -> float:
    """Of a step of ``rows`` decodes over ``context`` tokens in all, and ``prompts`` tokens of prompts."""
    weights = shape.weights_read()
    layers = weights - shape.hidden_size * shape.vocab_size
    decodes = max(2 * weights / READ, 2 * weights * rows / PRODUCTS) if rows else 0.0
    return decodes + context * shape.kv_bytes_per_token(2) / READ + 2 * layers * prompts / PRODUCTS
