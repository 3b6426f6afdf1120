"""StepTimes: how long requests wait for tokens, counted once for all of a batch."""

from torchpaged.engine.chunk_budget import ChunkBudget
from torchpaged.engine.outputs import GeneratorStats


class StepTimes:
    """Seconds between tokens, and what chunks of prompts cost the decodes beside them.

    Args:
        stats: gets the former.
        budget: gets the latter; None: it is not kept.
        waits_later: a step's call waits for the step before it, not for its own.
    """

    def __init__(self, stats: GeneratorStats, budget: ChunkBudget | None, waits_later: bool) -> None:
        self._stats, self._budget, self._waits_later = stats, budget, waits_later
        self._last_tokens_at = 0.0
        self._chunk_tokens = 0  # beside decodes, in the step whose end is waited for next

    def begin(self, now: float) -> None:
        """The first request comes; ``now`` by `time.perf_counter`."""
        self._last_tokens_at = now

    def note_tokens(self, now: float, tokens: int, first_tokens: int, num_steps: int) -> None:
        """A call has given ``tokens`` of ``num_steps`` steps, ``first_tokens`` of them requests' first. Each
        other request has had its token before from the last call that gave any, or was put back since."""
        if tokens > first_tokens:
            seconds = (now - self._last_tokens_at) / num_steps
            self._stats.between_tokens.add(seconds, tokens - first_tokens)
        if tokens:
            self._last_tokens_at = now

    def note_wait(self, seconds: float, chunk_tokens: int) -> None:
        """What decodes waited in a call, beside so many tokens of prompts."""
        waited, self._chunk_tokens = self._chunk_tokens, chunk_tokens
        if not self._waits_later:
            waited = chunk_tokens
        if waited and self._budget is not None:
            self._budget.note(waited, seconds)
