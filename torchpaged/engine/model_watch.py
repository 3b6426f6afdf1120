"""ModelWatch: whether a model is still the one that an engine's graphs were made with and its kept blocks
were computed by.

    watch = ModelWatch(model, captured=True, shares=True)
    forget = watch.look()                   # raises, or says whether kept blocks are of other weights

A look costs O(modules and weights), 0.1 to 0.25 ms at 16 layers, 0.4 where all linear layers have adapters.
So there are two between two steps, however many requests come there: at the first of them, which is refused
at once, and ahead of the step, in front of which nothing of them was computed. Where a step runs the model's
Python, every step looks: once a number or a hook is changed back, nothing shows that blocks were computed
with it. What a replay reads are weights, and what `torchpaged.fuse` made of them, at addresses: unless that
was called, only these are looked at in front of a replay. That the modules are the same and hold the same
tensors, which the watch keeps alive, is looked at while the device replays, ahead of all that Python runs of
the model and of the tokens.
"""

from collections.abc import Callable
from typing import Any

from torchpaged.model_state import MOVES, ModelState


class ModelWatch:
    """A model as it is now.

    Args:
        model: whose modules, weights and adapters are looked at; what is no module has none that are known.
        captured: graphs replay kernels at addresses of its weights: a change is refused.
        shares: requests find blocks of earlier ones, which are of no use behind a change.

    Attributes:
        is_due: the next step looks.
        each_step: every step does.
    """

    def __init__(self, model: Any, captured: bool, shares: bool) -> None:
        self._model, self._captured, self._shares = model, captured, shares
        self._state, self._moves = ModelState.of(model), MOVES[0]
        self._num_writes, self._adapts = self._state.num_writes(), self._state.has_adapters
        self._looked = self.is_due = self._is_half = self.each_step = False

    def at_request(self) -> bool:
        """A request comes: `look`, if it is the first since a step, and have the next step look.

        Raises:
            ArgumentError: as `require_unchanged`.
        """
        forget = not self._looked and self.look()
        self._looked = self.is_due = True
        return forget

    def at_stream(self) -> None:
        """A stream begins: `require_unchanged`, unless a request has had the look since the last step, and
        the next step has its own.

        Raises:
            ArgumentError: as `require_unchanged`.
        """
        if not self._looked:
            self.require_unchanged()

    def at_call(self) -> bool:
        """All requests of a call come, whose steps it makes itself: `look` at addresses, and the next step at
        the rest (`in_step`); at all of it where `torchpaged.fuse` freed what graphs may read.

        Raises:
            ArgumentError: as `require_unchanged`.
        """
        half = self._moves == MOVES[0]
        forget = self.look(half)
        self._is_half = self._captured and half
        return forget

    def at_step(self) -> bool:
        """A step comes: as `at_call`, if `each_step`, a request came since the last one, `torchpaged.fuse`
        moved weights, or the model has adapters: once they are switched back, nothing shows under which of
        them the blocks of the requests in between were computed.

        Raises:
            ArgumentError: as `require_unchanged`; the next step looks again.
        """
        self._looked = False
        due = self.is_due or self.each_step or self._moves != MOVES[0] or self._adapts
        forget = due and self.at_call()
        self.is_due = False
        return forget

    def in_step(self, in_python: bool = False) -> None:
        """Look at what is left, if anything: behind the launch of a replay, ahead of all else.

        Args:
            in_python: the model's Python is about to run, under this watch's graphs: look in any case.

        Raises:
            ArgumentError: as `require_unchanged`; `is_due`.
        """
        if self._is_half or in_python:
            self.is_due = True
            self.require_unchanged(ModelState.changed_but_moved)
            self.is_due = self._is_half = False

    def look(self, half: bool = False) -> bool:
        """Look at all of it; whether what was computed before is of other weights.

        Args:
            half: of graphs' models at their weights' addresses alone.

        Raises:
            ArgumentError: as `require_unchanged`.
        """
        self.require_unchanged(ModelState.moved if half else ModelState.changed)
        forget = False
        if self._shares:
            if not self._captured and self._state.changed() is not None:
                self._state, forget = ModelState.of(self._model), True
                self._adapts = self._state.has_adapters
            num_writes = self._state.num_writes()
            forget = forget or num_writes != self._num_writes
            self._num_writes = num_writes
        self._moves = MOVES[0]
        return forget

    def require_unchanged(self, changed: Callable[[ModelState], str | None] = ModelState.changed) -> None:
        """Refuse to replay graphs over a model that changed.

        Raises:
            ArgumentError: with the first thing that is not as it was.
        """
        if self._captured:
            self._state.require_unchanged(
                "its graphs were made with",
                "make a new Generator (unaccelerate and accelerate again), or give graphs=False, which looks "
                "at them at every step",
                changed,
            )
