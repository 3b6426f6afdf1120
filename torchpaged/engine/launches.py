"""Launches in flight: started, and their tokens not read by the host yet."""

from typing import NamedTuple

from torchpaged.engine.device import CopiedTokens, DecodeRows, TokenLogprobs
from torchpaged.engine.sequence import Sequence
from torchpaged.profiling import range as profile_range

#: The token of a row that was idle in a step.
IDLE_TOKEN = -1


class Launch(NamedTuple):
    """A launch of decode steps, or a packed batch. No tuple per column: see `EventLog`.

    Attributes:
        number: of a launch of decode steps, in ``rows.ring``.
        copied: tokens of a packed batch, which has no number.
        columns: the request of each column of tokens; None: an idle row.
        num_steps: tokens of a column.
        decodes: the first so many columns are decodes; prompts ended in the others.
        records: log probabilities of a packed batch; None: no request wants them.
    """

    number: int
    copied: CopiedTokens | None
    columns: list[Sequence | None]
    num_steps: int
    decodes: int
    records: CopiedTokens | None = None


class Launches:
    """Launches over ``rows``, the oldest first; its length is their number.

    Attributes:
        steps_read: steps read so far, packed batches among them.
    """

    def __init__(self, rows: DecodeRows) -> None:
        self._rows = rows
        self._in_flight: list[Launch] = []
        self.steps_read = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    def add(self, launch: Launch) -> None:
        """One that was started just now."""
        self._in_flight.append(launch)

    def forget(self) -> None:
        """Drop them; their tokens are lost."""
        self._rows.ring.forget()
        self._in_flight = []

    def collect(self, keep: int = 0) -> list[tuple[Launch, list[list[int]], TokenLogprobs | None]]:
        """All launches but the newest ``keep``, in order, with their tokens, ``[steps][columns]``, which are
        waited for, and the log probabilities of these, where a request wants them."""
        read: list[tuple[Launch, list[list[int]], TokenLogprobs | None]] = []
        while len(self._in_flight) > keep:
            launch = self._in_flight.pop(0)
            self.steps_read += launch.num_steps
            with profile_range("collect", batch=len(launch.columns)):
                records = self._logprobs(launch)
                if launch.copied is not None:
                    steps = [launch.copied.read()]
                else:
                    steps = self._rows.ring.read(launch.number, len(launch.columns))
            read.append((launch, steps, records))
        return read

    def _logprobs(self, launch: Launch) -> TokenLogprobs | None:
        """Log probabilities of a launch's tokens, which were not read yet; None: no request wants them."""
        if not self._rows.stage.record_words or all(
            s is None or s.sampling.logprobs is None or s.finish_reason is not None for s in launch.columns
        ):
            return None
        if launch.records is not None:
            return TokenLogprobs(launch.records.wait())
        return TokenLogprobs(self._rows.ring.read_records(launch.number, len(launch.columns)))
