"""Launches in flight: started, and their tokens not read by the host yet."""

from collections.abc import Iterator
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
        decoded: tokens of decode steps read so far, those of prefills left out.
        steps_read: steps read so far, packed batches among them.
    """

    def __init__(self, rows: DecodeRows) -> None:
        self._rows = rows
        self._in_flight: list[Launch] = []
        self.decoded = self.steps_read = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    def add(self, launch: Launch) -> None:
        """One that was started just now."""
        self._in_flight.append(launch)

    def forget(self) -> None:
        """Drop them; their tokens are lost."""
        self._rows.ring.forget()
        self._in_flight = []

    def collect(self, keep: int = 0) -> Iterator[tuple[Sequence, list[int], list[dict[int, float]] | None]]:
        """Tokens of all launches but the newest ``keep``, in order, per request, and the log probabilities
        of those of a request that wants them. They are waited for and read in this call; the iterator makes
        lists of them."""
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
            for column, sequence in enumerate(launch.columns):
                if sequence is not None and sequence.finish_reason is None:
                    sequence.steps_read += launch.num_steps
                    if column < launch.decodes:
                        for step in steps:
                            self.decoded += step[column] != IDLE_TOKEN
            read.append((launch, steps, records))
        return _per_request(read)

    def _logprobs(self, launch: Launch) -> TokenLogprobs | None:
        """Log probabilities of a launch's tokens, which were not read yet; None: no request wants them."""
        if not self._rows.stage.record_words or all(
            s is None or s.sampling.logprobs is None or s.finish_reason is not None for s in launch.columns
        ):
            return None
        if launch.records is not None:
            return TokenLogprobs(launch.records.wait())
        return TokenLogprobs(self._rows.ring.read_records(launch.number, len(launch.columns)))


def _per_request(
    read: list[tuple[Launch, list[list[int]], TokenLogprobs | None]],
) -> Iterator[tuple[Sequence, list[int], list[dict[int, float]] | None]]:
    for launch, steps, records in read:
        only = steps[0] if len(steps) == 1 else None
        for column, sequence in enumerate(launch.columns):
            if sequence is None or sequence.finish_reason is not None:
                continue
            # NO_TOKEN is the caller's. A step alone, as most are, needs no loop.
            if only is not None:
                tokens = [only[column]] if only[column] != IDLE_TOKEN else []
            else:
                tokens = [step[column] for step in steps if step[column] != IDLE_TOKEN]
            logprobs = None
            if records is not None and (count := sequence.sampling.logprobs) is not None:
                places = [n for n, step in enumerate(steps) if step[column] != IDLE_TOKEN]
                logprobs = [records.of(n * len(steps[0]) + column, count) for n in places]
            yield sequence, tokens, logprobs
