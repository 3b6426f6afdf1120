"""ChunkBudget: how many prompt tokens may run beside decodes, so that these wait no longer than a bound; and
StepTimes: how long requests wait for tokens, counted once for all of a batch.

budget = ChunkBudget(seconds=0.05, most=2048)
budget.tokens                           # of the next step's chunks at most
budget.note(512, seconds=0.02)          # so many took so long, decodes included"""

from torchpaged.engine.outputs import GeneratorStats

#: Prompt tokens that a step may always have, so that prompts come to their ends whatever the bound.
LEAST = 64


class ChunkBudget:
    """A bound on a step's seconds as a bound on the prompt tokens in it, by the steps that were seen.

    A step takes about ``a + b * tokens``, with ``a`` for weights, launches and decodes. What takes the bound
    in proportion to a step below it stays below: ``a`` is counted as if it grew, too. So the budget grows
    step by step and comes to the bound from below; a step above it, with longer texts or more decodes than
    those before, or with kernels to compile, cuts it in proportion.

    Args:
        seconds: the bound.
        most: tokens at most, however fast they are.

    Attributes:
        tokens: of the next step's chunks at most; `LEAST` at the start, and never fewer.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self.tokens = min(LEAST, most)

    def note(self, tokens: int, seconds: float) -> None:
        """A step with decodes and ``tokens`` of prompts, at least 1, took ``seconds``."""
        in_time = int(tokens * self._seconds / max(seconds, 1e-9))
        wanted = max(self.tokens, in_time) if seconds <= self._seconds else min(self.tokens, in_time)
        self.tokens = min(max(wanted, LEAST), self._most)


class StepTimes:
    """Seconds between tokens, and what chunks of prompts cost the decodes beside them.

    Args:
        stats: gets the former.
        budget: gets the latter; None: nobody asks.
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
