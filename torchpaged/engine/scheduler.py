"""Scheduler: who runs in the next step, and which blocks each one holds.

Continuous batching (Orca, OSDI 2022) over a block pool (vLLM, arXiv:2309.06180): decoding rows always run, prompts are prefilled
in chunks within a token budget, and when the pool runs dry the youngest request is put back and recomputed later. The oldest
request is never put back, so that there is always progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torchpaged.cache import BlockPool
from torchpaged.engine.sequence import Sequence


@dataclass
class Step:
    """One step: sequences that decode one token, chunks ``(sequence, tokens)`` to prefill, and those out of room."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns the waiting and running requests and their blocks.

    Args:
        pool: the blocks.
        block_size: tokens per block.
        max_batch_size: requests that run at once.
        prefill_chunk_size: prompt tokens per step, of all requests together.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_batch_size: int, prefill_chunk_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self.max_batch_size, self.prefill_chunk_size = max_batch_size, prefill_chunk_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def schedule(self) -> Step:
        """Choose the next step and allocate its blocks."""
        self._admit()
        step, budget = Step(), self.prefill_chunk_size
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # put back meanwhile, to make room for an older one
            count = 1 if sequence.remaining == 1 else min(sequence.remaining, budget)
            if not count:
                continue
            if not self._reserve(sequence, sequence.num_computed + count, step):
                continue
            if sequence.remaining == 1:
                step.decodes.append(sequence)
            else:
                step.chunks.append((sequence, count))
                budget -= count
        return step

    def _admit(self) -> None:
        """Start waiting requests while there are rows, and blocks for all their tokens and one more."""
        promised = sum(self.blocks_for(len(s) + 1) - len(s.blocks) for s in self.running if s.remaining > 1)
        while self.waiting and len(self.running) < self.max_batch_size:
            need = self.blocks_for(len(self.waiting[0]) + 1)
            if self.running and need + promised > self.pool.num_free:
                return
            promised += need
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.request_id)

    def _reserve(self, sequence: Sequence, num_tokens: int, step: Step) -> bool:
        """Give ``sequence`` blocks for ``num_tokens`` tokens, putting back younger requests if need be."""
        missing = self.blocks_for(num_tokens) - len(sequence.blocks)
        while missing > self.pool.num_free:
            youngest = self.running[-1]
            if youngest is not sequence:
                self._put_back(youngest)
                continue
            if len(self.running) > 1:
                self._put_back(sequence)
            else:  # alone, and the whole pool is not enough
                step.exhausted.append(sequence)
            return False
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)
        return True

    def _put_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.blocks)
        sequence.blocks = []
