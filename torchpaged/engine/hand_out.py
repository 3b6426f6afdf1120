"""HandOut: events of some requests on their way to the call that owns these.

with calls.entered():           # holds the lock of all calls
    handed = HandOut(inbox)
for event in handed: ...        # without the lock, whatever other calls do meanwhile
"""

import threading
from collections.abc import Iterator

from torchpaged.engine.outputs import TokenEvent
from torchpaged.engine.sequence import Inbox, Sequence

#: Held while events are taken or change their owner, which a stream does with no other lock: it must not wait
#: for another thread's step to give what it has. A signal may come in that takes some, too.
TAKING = threading.RLock()


class HandOut:
    """Events on their way to a caller, each request's in order. An event is taken when it is given, not when
    it is found: a stream may be suspended between two, and the other calls give what it has not given.

    Args:
        inbox: whose events; the caller holds the lock of `Calls`.
    """

    def __init__(self, inbox: Inbox) -> None:
        # Numbers and a mark, no tuple per request and no way from a request back to this: that would be work
        # for the garbage collector, see `EventLog`.
        self._inbox, self._mark, self._ends = inbox, object(), inbox.waiting
        self._firsts = [sequence.taken for sequence in self._ends]
        inbox.ready = dict.fromkeys(self._ends)

    def _places(self) -> Iterator[tuple[Sequence, int, int]]:
        return zip(self._ends, self._firsts, self._ends.values(), strict=True)

    def __iter__(self) -> Iterator[TokenEvent]:
        """One by one, those that no other call has taken by then."""
        for sequence, first, end in self._places():
            for index in range(first, end):
                # Nothing is called in here, so that no signal and no garbage collector, which may close a
                # stream and wait for the lock of all calls, comes in.
                with TAKING:
                    mine = sequence.inbox is self._inbox and sequence.taken == index
                    if mine:
                        sequence.taken, sequence.taker = index + 1, self._mark
                if not mine:
                    break
                yield sequence.event(index)

    def take(self) -> list[TokenEvent]:
        """All at once, of each request all or, if another call took some or owns them, none. The caller holds
        the lock of all calls: what closes a stream meanwhile does not wait for it."""
        inbox, mark = self._inbox, self._mark
        with TAKING:
            for sequence, first, end in self._places():
                if sequence.inbox is inbox and sequence.taken == first:
                    sequence.taken, sequence.taker = end, mark
        return [
            sequence.event(index)
            for sequence, first, end in self._places()
            if sequence.taker is mark
            for index in range(first, end)
        ]

    def give_back(self) -> None:
        """After an interrupt in or behind `take`: the next call of the requests' owner gets them, unless
        another thread has taken later ones of a request meanwhile. The caller holds the lock."""
        for sequence, first, end in self._places():
            if sequence.taker is self._mark and sequence.taken == end:
                sequence.inbox.ready[sequence] = None
                sequence.taken = first
