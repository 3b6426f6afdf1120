"""Inbox: the requests that one call owns, and those of them with events that it has not taken.

A request's own `Sequence.log` holds its events; the inbox only says where to look. So nothing is lost when a
step breaks off, and no call takes events of another one's requests.
"""

from __future__ import annotations

from torchpaged.engine.sequence import Owner, TokenEvent


class Inbox(Owner):
    """Where events of some requests wait for whoever owns these."""

    def hand_out(self) -> HandOut:
        """All events that were not taken, each request's in order; taken only by `HandOut.take`."""
        return HandOut(self)

    def take(self) -> list[TokenEvent]:
        """All events since the last call, each request's in order."""
        handed = self.hand_out()
        handed.take()
        return handed.events


class HandOut:
    """Events on their way to the caller, which an interrupt before they are there puts back.

    Attributes:
        events: each request's in order.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._places = {sequence: (sequence.taken, len(sequence.log)) for sequence in inbox.ready}
        self.events = [
            event for sequence, (first, end) in self._places.items() for event in sequence.log[first:end]
        ]

    def take(self) -> None:
        """Nobody else gets them."""
        for sequence, (_, end) in self._places.items():
            sequence.taken = end
            sequence.inbox.ready.pop(sequence, None)

    def give_back(self) -> None:
        """The next call of the requests' owner gets them, unless another thread has taken later ones of a
        request meanwhile."""
        for sequence, (first, end) in self._places.items():
            if sequence.taken in (first, end):
                sequence.inbox.ready[sequence] = None
                sequence.taken = first
