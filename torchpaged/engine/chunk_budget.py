"""How many prompt tokens run beside decodes: so many that these wait no longer than a bound (ChunkBudget);
and that little of a captured step is padding (least_padded).

budget = ChunkBudget(seconds=0.05, most=2048)
budget.tokens                           # of the next step's chunks at most
budget.note(512, seconds=0.02)          # so many took so long, decodes included
least_padded([512, 1024], decodes=250, tokens=400)     # 262: with the decodes 512"""

import bisect
from collections.abc import Sequence

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


#: Graphs of fewer tokens are not filled: what reading the weights takes, each of their steps takes again.
LEAST_FILLED = 512


def least_padded(buckets: Sequence[int], decodes: int, tokens: int) -> int:
    """Prompt tokens of a step beside ``decodes``: as many as fill the largest graph that these do fill, if
    that is half of ``tokens`` at least, or all. The next step has the others in front of its own.

    Args:
        buckets: numbers of tokens of the captured steps, ascending.
    """
    index = bisect.bisect_right(buckets, decodes + tokens)
    if not 0 < index < len(buckets) or buckets[index - 1] < LEAST_FILLED:
        return tokens
    filling = buckets[index - 1] - decodes
    return filling if 2 * filling >= tokens else tokens
