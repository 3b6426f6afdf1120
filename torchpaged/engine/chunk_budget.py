"""ChunkBudget: how many prompt tokens may run beside decodes, so that these wait no longer than a bound.

budget = ChunkBudget(seconds=0.05, most=2048)
budget.tokens                           # of the next step's chunks at most
budget.note(512, seconds=0.02)          # so many took so long, decodes included"""

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
