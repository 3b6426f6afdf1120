"""BlockDemand: how many blocks requests lack for the step that comes, and those that they get ahead of need.

Sequences with a row in the decode loop may be further than the host has read: their blocks are counted from
the tokens they may have.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torchpaged.engine.request_blocks import RequestBlocks
from torchpaged.engine.sequence import Sequence, StepCount


class Asked(NamedTuple):
    """The running requests before a step, the oldest first: ``ready``, whose blocks hold it, most of a large
    batch; ``lacking``, the others, with the blocks that each lacks for it, or for the rest of its prompt; and
    ``prompts``, those of the latter that do not decode."""

    ready: list[Sequence]
    lacking: dict[Sequence, int]
    prompts: list[Sequence]


class BlockDemand:
    """What requests lack of ``blocks``; the other arguments as of `torchpaged.engine.scheduler.Scheduler`."""

    def __init__(self, blocks: RequestBlocks, steps: StepCount, ahead: int, lookahead: int) -> None:
        self.blocks, self.pool, self.block_size = blocks, blocks.pool, blocks.block_size
        self.steps, self.ahead, self.lookahead = steps, ahead, lookahead
        self._are_ahead = False  # blocks may have been given ahead of need

    def ask(self, running: Iterable[Sequence]) -> Asked:
        """What the running requests lack now. One that is known to have room costs no call."""
        ready, lacking, prompts = asked = Asked([], {}, [])
        most = self.steps.most
        for s in running:
            if s.has_room_until >= most:
                ready.append(s)
            elif s.row is None and not s.decodes:
                prompts.append(s)
                lacking[s] = self.lacks_after(s, s.remaining)
            elif (missing := self.lacks(s)) > 0:
                lacking[s] = missing
            elif s.row is None:
                lacking[s] = 0
            else:
                ready.append(s)
        return asked

    def lacks(self, sequence: Sequence) -> int:
        """Blocks that a decoding request lacks for the next step, less than 0 where it has more than it
        needs; of one with a row also until when it has enough: until then it is not computed again."""
        tokens, most, row = len(sequence.tokens) + self.ahead, sequence.max_len - 1, sequence.row
        if row is not None:  # as `in_flight`, without a call
            tokens += sequence.step_count.started - sequence.steps_read
        # Keys and values of a request's last token are never stored.
        left = len(sequence.blocks) * self.block_size - (tokens if tokens < most else most)
        if row is not None:
            sequence.has_room_until = self.steps.most + left
        return -(left // self.block_size)

    def lacks_after(self, sequence: Sequence, count: int) -> int:
        """Blocks that a request lacks when ``count`` more tokens of its prompt are computed; with the last of
        them decoding begins."""
        tokens = sequence.num_computed + count
        if count == sequence.remaining and self.ahead:
            tokens = min(len(sequence.tokens) + 1 + self.ahead, sequence.max_len - 1)
        return self.blocks.missing(sequence, tokens)

    def give(self, promised: list[tuple[Sequence, int]]) -> None:
        """Give all blocks that were promised, at once: a call for each of a large batch would cost more than
        the rest of the step. Of those that decode `lacks` was asked in this step."""
        self.blocks.give(promised)
        for sequence, count in promised:
            sequence.has_room_until += count * self.block_size

    def look_ahead(self, decodes: Iterable[Sequence], lacking: Iterable[Sequence]) -> None:
        """Blocks for ``lookahead`` more tokens, once a request with a row has used up its own: for all that
        have used half of theirs. ``lacking``: those that were not ready."""
        if not self.lookahead or all(s.row is None or len(s.blocks) <= s.blocks_on_device for s in lacking):
            return
        more: list[tuple[Sequence, int]] = []
        room = self.pool.num_unpinned // 2
        for s in decodes:
            if s.has_room_until < self.steps.most + self.lookahead // 2:
                tokens = min(len(s.tokens) + s.in_flight + self.ahead + self.lookahead, s.max_len - 1)
                more.append((s, self.blocks.missing(s, tokens)))
                room -= more[-1][1]
                if room < 0:
                    return
        self._are_ahead = True
        self.give(more)

    def trim(self, running: Iterable[Sequence]) -> None:
        """Take back the blocks that were given ahead of need."""
        if not self._are_ahead:
            return
        self._are_ahead = False
        for sequence in running:
            if sequence.decodes and (more := -self.lacks(sequence)) > 0:
                self.pool.free(sequence.blocks[-more:])
                del sequence.blocks[-more:]
                sequence.blocks_on_device = min(sequence.blocks_on_device, len(sequence.blocks))
                sequence.has_room_until -= more * self.block_size
