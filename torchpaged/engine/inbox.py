"""Inbox: the requests that one call owns, and those of them with events that it has not taken.

A request's own `Sequence.log` holds its events; the inbox only says where to look. So nothing is lost when a step breaks off, and
no call takes events of another one's requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchpaged.engine.sequence import Sequence, TokenEvent


class Inbox:
    """Where events of some requests wait for whoever owns these.

    Attributes:
        live: its requests that have not ended, as a set in order.
        ready: those with events to take, likewise; some may have none.
    """

    def __init__(self) -> None:
        self.live: dict[Sequence, None] = {}
        self.ready: dict[Sequence, None] = {}

    def take(self) -> list[TokenEvent]:
        """All events since the last call, each request's in order."""
        events: list[TokenEvent] = []
        for sequence in self.ready:
            events += sequence.log[sequence.taken :]
            sequence.taken = len(sequence.log)
        self.ready.clear()
        return events
