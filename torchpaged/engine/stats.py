"""GeneratorStats: what a Generator did since its construction, in tokens, blocks and seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GeneratorStats:
    """Counters since construction. Seconds are of prefill and of decode; a mixed step is split by its
    parts' time. ``shared_tokens``: tokens of prompts that were not prefilled, since another request had
    them."""

    num_blocks: int
    peak_blocks_used: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preemptions: int = 0
    shared_tokens: int = 0
    steps: int = 0

    def add_step(self, seconds: float, decode_seconds: float | None, decoded: int, prefilled: int) -> None:
        """Count one step.

        Args:
            seconds: of the whole step.
            decode_seconds: of its decodes; None where launches return at once, so that a mixed step is shared
                by tokens.
            decoded, prefilled: tokens.
        """
        if not prefilled:
            share = seconds
        elif not decoded:
            share = 0.0
        else:
            share = seconds * decoded / (decoded + prefilled) if decode_seconds is None else decode_seconds
        self.decode_seconds += share
        self.prefill_seconds += seconds - share
        self.decode_tokens += decoded
        self.prefill_tokens += prefilled
        self.steps += 1
