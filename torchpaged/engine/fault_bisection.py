"""Which requests make a step raise: its requests are retried, in halves where that raises again, until one
raises alone.

    bisection = FaultBisection(candidates, requests, more_tokens=3, error=error)
    while bisection.group is not None:
        error = step(bisection.group)       # without the others; what it raised, or None
        bisection.stepped(error)
    bisection.faulty, bisection.is_of_engine, bisection.limit

A group begins again from the tokens that its requests were given, so that these are as they would have been.
It passes when each has a few more.

- **Faulty** is a request that raises alone and, after another one passed, alone `RETRIES` times in a row
  without a token: an error that comes for a while and goes ends no request, and one that comes at times only
  if it came in each of these. Where no request is left that passed, it raises `PROBES`
  times.
- **Of the engine** is an error where none passes. `PROBES` consecutive requests that raise alone are enough
  to say so.
- **Too large** is a group that raises and whose halves pass: steps take at most half as many from then on.

A group that raises is split, and one of a single request is not retried until all are through: of ``n``
candidates there are at most ``2 n - 1`` such groups, then `PROBES` probes of other requests, then the
retries, which begin anew with a token only. A bisection whose error is not the engine's has a group that
passed, which gave a request a token: there are at most as many of them as tokens to come.
"""

import logging
import traceback
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TypeAlias

from torchpaged.custom_ops.words import counted
from torchpaged.engine.sequence import Sequence

#: So many requests that raise alone, and none that passes, show an error of the engine.
PROBES = 8
#: So often in a row a faulty request raises alone, and gets no token.
RETRIES = 3
_LOG = logging.getLogger("torchpaged.engine")
#: Gives groups to be retried, takes what they raised: None if they passed.
_Groups: TypeAlias = "Generator[list[Sequence], Exception | None, None]"


class FaultBisection:
    """Retries after a step that raised.

    Args:
        candidates: the requests of that step.
        requests: all that wait or run, by id, now and later.
        more_tokens: how many a request is given in a retry at most: as many as a step may be ahead of what
            was read, so that it comes to where the first one was.
        error: of that step.

    Attributes:
        group: requests that the next steps compute, no others; None: it is over. Some may have ended.
        error: as given.
        candidates: as given.
        faulty: requests that make steps raise, and what each raised.
        is_of_engine: no request passed.
        limit: requests of a step at most from now on; None: as many as before.
    """

    def __init__(
        self, candidates: Seq[Sequence], requests: Mapping[int, Sequence], more_tokens: int, error: Exception
    ) -> None:
        self._requests, self._more, self.error = requests, more_tokens, error
        self.candidates, self.faulty = list(candidates), list[tuple[Sequence, Exception]]()
        self.is_of_engine = False
        self.limit: int | None = None
        self.group: list[Sequence] | None = None
        self._goals: dict[Sequence, int] = {}  # events that each of the group is to have
        self._had, self._steps_left = 0, 0
        said = f"{type(error).__name__}: {error}"
        what = counted(len(candidates), "request")
        _LOG.warning("a step raised %s; computed again: its %s", said, what, exc_info=error)
        free_locals(error)
        self._groups = self._all_groups()
        self._next(None)

    def stepped(self, error: Exception | None) -> bool:
        """A step of `group` is over, which raised ``error``; whether another group is to be computed now, or
        none."""
        group, self._steps_left = self.group or [], self._steps_left - 1
        if error is not None:
            free_locals(error)
        elif self._steps_left and any(not s.finish_reason and len(s.log) < self._goals[s] for s in group):
            return False
        self._next(error)
        return True

    def _next(self, error: Exception | None) -> None:
        try:
            self.group = self._groups.send(error)
        except StopIteration:  # at its end, or broken off there
            self.group = None
            return
        self._goals = {sequence: len(sequence.log) + self._more for sequence in self.group}
        self._had = sum(len(sequence.tokens) for sequence in self.group)
        # A step computes a token at least, and reads those of the step before it.
        self._steps_left = sum(2 + self._more + len(sequence.tokens) for sequence in self.group)

    # -------------------------------------------------------------------------------------------- the retries
    def _all_groups(self) -> _Groups:
        passed, failed, too_large = list[Sequence](), list[Sequence](), list[list[Sequence]]()
        engine_works = False  # a request passed after the last of `failed` raised
        groups = [self.candidates]
        while groups:
            group = _live(groups.pop())
            if not group:
                continue
            error = yield group
            if error is None:
                engine_works = engine_works or self._has_moved(group)
                passed += group if self._has_moved(group) else []
                continue
            left = _live(group)
            if len(group) == 1:
                failed += left
                engine_works = engine_works and not left
                if not passed and len(failed) == PROBES:
                    break
            elif len(left) < len(group):
                groups.append(left)
            else:
                half = (len(group) + 1) // 2
                too_large.append(group)
                groups += [group[half:], group[:half]]
        retries = RETRIES
        if failed and not engine_works:
            probed, most = list[Sequence](), PROBES if passed else PROBES - len(failed)
            while not engine_works and len(probed) < most:
                # Those that came meanwhile, too: an error of the engine would end them untried.
                others = _live([*passed, *self._requests.values()])
                probe = next((s for s in others if s not in failed and s not in probed), None)
                if probe is None:
                    break
                probed.append(probe)
                if (yield [probe]) is None and self._has_moved([probe]):
                    engine_works = True
                    passed.append(probe)
            if not probed:  # the requests that passed have ended
                engine_works, retries = bool(passed), PROBES
        if not passed or (failed and not engine_works):
            self.is_of_engine = bool(_live(self.candidates))
            return
        for sequence in failed:
            again, count = None, 0
            while count < retries and sequence.finish_reason is None:
                again = yield [sequence]
                if again is None:
                    break
                count = 0 if self._has_moved([sequence]) else count + 1
            if again is not None and sequence.finish_reason is None:
                self.faulty.append((sequence, again))
        ended = {sequence for sequence, _ in self.faulty}
        sizes = [len(group) for group in too_large if ended.isdisjoint(group)]
        self.limit = (min(sizes) + 1) // 2 if sizes else None

    def _has_moved(self, group: Iterable[Sequence]) -> bool:
        return sum(len(sequence.tokens) for sequence in group) > self._had


def _live(group: Iterable[Sequence]) -> list[Sequence]:
    return [sequence for sequence in group if sequence.finish_reason is None]


def free_locals(error: BaseException) -> None:
    """Let go of what the frames that ``error`` came through hold: a batch that did not fit into memory would
    take it from the next try."""
    seen = set[int]()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
