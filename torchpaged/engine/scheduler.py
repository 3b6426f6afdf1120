"""Scheduler: which requests run in the next step, and get blocks for it (`RequestBlocks` says which blocks,
`BlockDemand` how many).

Continuous batching (Orca, OSDI 2022) over a block pool (vLLM, arXiv:2309.06180): decoding rows always run,
prompts are prefilled in chunks within a token budget, and when the pool runs dry the youngest request is put
back and recomputed later. The oldest request is never put back, so that there is always progress.

Before a request with a row in the decode loop is put back the caller reads what is in flight
(`short_of_blocks`).
"""

import math
import sys
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchpaged.cache import BlockPool, PrefixCache
from torchpaged.engine.block_demand import Asked, BlockDemand
from torchpaged.engine.chunk_budget import ChunkBudget, least_padded
from torchpaged.engine.outputs import LatencyHistogram
from torchpaged.engine.request_blocks import RequestBlocks
from torchpaged.engine.sequence import Sequence, StepCount

if TYPE_CHECKING:
    from torchpaged.hf.step_rings import StepRings


@dataclass
class Schedule:
    """One step: sequences that decode, chunks ``(sequence, tokens)`` to prefill, those put back to wait, and
    whether any was given blocks. ``promised``: ``(sequence, blocks)`` to be given; ``room``: blocks that are
    left then."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    put_back: list[Sequence] = field(default_factory=list)
    blocks_added: bool = False
    promised: list[tuple[Sequence, int]] = field(default_factory=list)
    room: int = 0


class Scheduler:
    """Owns the waiting and running requests and their blocks.

    Args:
        pool: the blocks.
        block_size: tokens per block.
        max_batch_size: requests that run at once.
        prefill_chunk_size: tokens of a step that computes prompts, of all requests together.
        ahead: tokens beyond those it may have that a decoding request needs room for: 0 where the host is
            asked before each step; the steps of a launch, where the device goes on by itself and looks up the
            slot of the step after them.
        lookahead: further tokens that every decoding request gets blocks for while the pool is mostly free
            and no request waits, so that block tables change rarely.
        prefixes: by which requests share blocks, of the same pool; None: they do not.
        one_prompt_per_step: a step prefills one request at most, so that its chunks are those it has alone.
        mixes: decodes run in one pass with the chunks, and count: these get the rest of
            ``prefill_chunk_size``, and half of it at least.
        buckets: numbers of tokens of captured steps with chunks, ascending, by now: chunks are as long as
            fills one (`least_padded`). Where nothing decodes, and no request would wait longer for its second
            token, a step has as many as the largest.
        max_query_len: prompt tokens of one request per step; None: as many as a step has.
        budget: prompt tokens of a step with decodes; None: not bounded further.
        rings: get each request's first block; None: no layer keeps rings.
        preemption: one of `PREEMPTIONS`.
        steps: of the decode loop; None: there is none.

    Attributes:
        blocks: what each request holds.
        max_running: requests that run at once from now on; fewer than ``max_batch_size`` after errors.
        preemptions, swapped: requests put back, and those of them whose blocks go to the host.
        queue: seconds that requests waited until they ran first.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_batch_size: int,
        prefill_chunk_size: int,
        ahead: int = 0,
        lookahead: int = 0,
        *,
        prefixes: PrefixCache | None = None,
        one_prompt_per_step: bool = False,
        mixes: bool = False,
        buckets: Seq[int] = (),
        max_query_len: int | None = None,
        budget: ChunkBudget | None = None,
        rings: "StepRings | None" = None,
        preemption: str = "auto",
        steps: StepCount | None = None,
    ) -> None:
        self.blocks = RequestBlocks(pool, block_size, prefixes, rings, preemption)
        self.pool, self.block_size, self.prefixes = pool, block_size, prefixes
        self.max_batch_size, self.prefill_chunk_size = max_batch_size, prefill_chunk_size
        self.max_running, self.steps = max_batch_size, steps or StepCount()
        self._demand = BlockDemand(self.blocks, self.steps, ahead, lookahead)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # as a set in order, oldest first: one leaves by O(1)
        self.preemptions, self.swapped, self.budget = 0, 0, budget
        self.queue = LatencyHistogram()
        self._one_prompt_per_step, self._mixes, self._buckets = one_prompt_per_step, mixes, buckets
        self._max_query_len = sys.maxsize if max_query_len is None else max_query_len

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is, and free its blocks."""
        if sequence in self.running:
            del self.running[sequence]
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.blocks.release(sequence)

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Start over with ``sequences``, whatever was half done: all of them wait, and none holds
        blocks."""
        self.waiting, self.running = deque(sorted(sequences, key=lambda s: s.request_id)), {}
        self.blocks.reset(self.waiting)

    def ask(self) -> Asked:
        """What the running requests lack now."""
        return self._demand.ask(self.running)

    def short_of_blocks(self, asked: Asked) -> bool:
        """Whether the next `schedule` may have to put a request back."""
        missing = sum(asked.lacking.values())
        return missing > 0 and missing > self._room()

    def schedule(self, asked: Asked | None = None) -> Schedule:
        """Choose the next step and allocate its blocks; ``asked``: what `ask` gave, if nothing changed since;
        None: it is asked."""
        step, budget, (decodes, lacking, prompts) = Schedule(), -1, asked or self.ask()
        asking = [*lacking]
        if self.waiting and len(self.running) < self.max_running:
            admitted = self._admit(prompts)
            asking += admitted
            prompts += admitted
        # First: whose prompt is known but for its last token decodes, and leaves the chunks one token less.
        begun = [sequence for sequence in asking if sequence.row is not None or self.blocks.begin(sequence)]
        if not begun and not decodes:
            begun = [s for s in asking if s.arrival is not None and self.blocks.arrived(s, waits=True)]
        if begun:
            step.room = self._room()
        for sequence in begun:
            if step.put_back and sequence in step.put_back:
                continue  # meanwhile, to make room for an older one
            count = 0
            if sequence.row is not None:
                missing = lacking[sequence]
            elif sequence.decodes:
                missing = self._demand.lacks(sequence)
            else:
                budget = self._prompt_tokens(prompts, begun, step) if budget < 0 else budget
                if not (count := self._chunk(sequence, budget)):
                    continue
                missing = self._demand.lacks_after(sequence, count)
            if missing > step.room and not self._make_room(sequence, missing, step):
                continue
            if missing > 0:
                step.promised.append((sequence, missing))
                step.room -= missing
            if count:
                step.chunks.append((sequence, count))
                budget = 0 if self._one_prompt_per_step else budget - count
            else:
                decodes.append(sequence)
        self._give(step)
        step.decodes = decodes
        if step.put_back:  # they hold no blocks any more, and all others do
            step.chunks = [(one, count) for one, count in step.chunks if one.blocks]
            step.decodes = [one for one in decodes if one.blocks]
        if step.blocks_added and not self.waiting:
            self._demand.look_ahead(step.decodes, lacking)
        if self.prefixes is not None and self.prefixes.host is not None:
            self.prefixes.host.flush()
        return step

    def _chunk(self, sequence: Sequence, most: int) -> int:
        """Tokens of its prompt that a request has in a step, of ``most`` at most."""
        count = min(sequence.remaining, most, self._max_query_len)
        if not count or sequence.cached is None:
            return count
        return sequence.cached.chunk(sequence.num_computed, count)

    def _prompt_tokens(self, prompts: list[Sequence], begun: list[Sequence], step: Schedule) -> int:
        """Prompt tokens of the next step at most; ``prompts``: all that did not decode before it; ``begun``:
        of these those that may run, among others."""
        most, decodes = self.prefill_chunk_size, 0
        if any(s.wants_token for s in self.running):  # or else none decodes: rows run all together
            prompts = [s for s in prompts if not s.decodes and s not in step.put_back]
            decodes = len(self.running) - len(prompts)
        if self._mixes:
            most = max(most - decodes, -(-most // 2))
        if self.budget is not None and decodes:
            most = min(most, self.budget.tokens)
        if not self._buckets:
            return most
        if not decodes:
            larger = min(self._buckets[-1], self._undelayed(begun))
            return least_padded(self._buckets, 0, larger) if larger > most else most
        if self._mixes:
            most = least_padded(self._buckets, decodes, min(most, sum(s.remaining for s in prompts)))
        return most

    def _undelayed(self, begun: Iterable[Sequence]) -> int:
        """Tokens of the oldest prompts up to the first that decodes behind them: in one step, that one has
        its token no later than in several. Where a chunk of it ends ahead, as layers that roll and copies of
        states want it, what younger prompts had of the step would come before the rest of it."""
        tokens, most = 0, self._buckets[-1]
        for sequence in begun:
            if sequence.decodes:
                continue
            tokens += self._chunk(sequence, most - tokens)
            if tokens >= most or sequence.max_len > len(sequence.tokens) + 1:
                break
        return tokens

    @property
    def prefills_left(self) -> bool:
        """Whether a running request has tokens of its prompt to compute."""
        return not all(s.decodes for s in self.running)

    def _room(self) -> int:
        """Blocks that running requests may be given: pinned ones only where one runs alone, which no other
        can make room for."""
        return self.pool.num_unpinned if len(self.running) > 1 else self.pool.num_free

    def _admit(self, prompts: list[Sequence]) -> list[Sequence]:
        """Start waiting requests while there are rows, and blocks for all their tokens and one more; those
        that were started. ``prompts``: of those that ran before, all with tokens of their prompt left."""
        admitted: list[Sequence] = []
        need_of, room = self.blocks.need_alone, self.pool.num_unpinned
        promised = sum(map(need_of, prompts))
        while self.waiting and len(self.running) < self.max_running:
            need = need_of(self.waiting[0])
            if self.running and need + promised > room and need_of == self.blocks.need_alone:
                need_of = self.blocks.need  # what they share is looked up only where there is too little
                promised = sum(map(need_of, [*prompts, *admitted]))
                need = need_of(self.waiting[0])
            if self.running and need + promised > room:
                self._demand.trim(self.running)
                room = self.pool.num_unpinned
                if need + promised > room:
                    break
            promised += need
            # Behind the others, whatever its id, which a thread may have got before it got in: put back for
            # it would be one whose tokens in flight were not read.
            self.running[sequence := self.waiting.popleft()] = None
            sequence.has_room_until = -math.inf  # it was not looked at since it has a row
            admitted.append(sequence)
            if sequence.began is None:
                sequence.began = time.perf_counter()
                self.queue.add(sequence.began - sequence.submitted)
        return admitted

    def _make_room(self, sequence: Sequence, missing: int, step: Schedule) -> bool:
        """Put back younger requests until there are so many blocks for ``sequence``; False: itself, too."""
        self._give(step)
        self._demand.trim(self.running)
        step.room = self._room()
        # Never for the oldest alone: `max_len` keeps a request within the pool.
        while missing > step.room:
            youngest, _ = self.running.popitem()
            self.swapped += self.blocks.put_back(youngest)
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            step.put_back.append(youngest)
            step.room = self._room()
            if youngest is sequence:
                return False
        return True

    def _give(self, step: Schedule) -> None:
        if step.promised:
            self._demand.give(step.promised)
            step.promised, step.blocks_added = [], True
