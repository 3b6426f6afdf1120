"""RequestBlocks: which blocks each request holds: those that others have computed, those that it gets, and
what stays of them when it ends.

    blocks = RequestBlocks(pool, block_size=16, prefixes=PrefixCache(pool, 16))
    blocks.begin(sequence)              # takes what is known of its first tokens
    blocks.give([(sequence, 3)])
    blocks.computed(sequence)           # others find what it has computed
    blocks.release(sequence)

Requests that begin with the same tokens share the full blocks of these: the first one computes them, the
others wait for that and take them. Those of requests that ended, or were put back, are there until the pool
needs them (`PrefixCache`).
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from torchpaged.cache import BlockPool, PrefixCache
from torchpaged.cache.cached_text import CachedText
from torchpaged.engine.sequence import Sequence

if TYPE_CHECKING:
    from torchpaged.hf.step_rings import StepRings


class RequestBlocks:
    """The blocks of all requests; arguments as of `torchpaged.engine.scheduler.Scheduler`."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        prefixes: PrefixCache | None = None,
        rings: "StepRings | None" = None,
        preemption: str = "auto",
    ) -> None:
        self.pool, self.block_size, self.prefixes, self.preemption = pool, block_size, prefixes, preemption
        self._rings, self._resets = rings, -1

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """No sequence holds blocks any more; ``sequences`` are all that may have."""
        for sequence in sequences:
            leave_arrival(sequence)
        self.pool.reset()
        if self._rings is not None and self._rings.num_resets == self._resets:
            self._reset_rings(self._rings)
        for sequence in sequences:
            sequence.blocks, sequence.num_computed, sequence.blocks_on_device = [], 0, 0
            sequence.cached = None

    def forget_prefixes(self, reason: str) -> None:
        """What blocks hold is of no use to requests that begin from now on."""
        if self.prefixes is not None:
            self.prefixes.clear(reason)

    # ----------------------------------------------------------------------------------------------- how many
    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a request lacks for so many tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(sequence.blocks))

    def need_alone(self, sequence: Sequence) -> int:
        """Blocks that a request lacks for all its tokens and one more."""
        return -(-(len(sequence.tokens) + 1) // self.block_size) - len(sequence.blocks)

    def need(self, sequence: Sequence) -> int:
        """The same, those left out that others share: a look through its text."""
        shared = 0 if self.prefixes is None else self._text(self.prefixes, sequence).num_shared()
        return self.need_alone(sequence) - shared

    # ------------------------------------------------------------------------------------------- given, taken
    def begin(self, sequence: Sequence) -> bool:
        """Give a request that begins the blocks of its first tokens that are there; False: another one is
        computing what they share, and that is waited for."""
        if self.prefixes is None:
            return True
        text = self._text(self.prefixes, sequence)
        if text.has_begun:
            return self.arrived(sequence)
        again = sequence.has_begun
        found = text.take(counts=not again, swapped=again and self.preemption == "swap")
        if found is None:
            return False
        sequence.has_begun = True
        text.promise()
        sequence.blocks, sequence.arrival = found, text.arrival
        sequence.num_computed = (len(found) - text.num_arriving) * self.block_size
        if text.resumes is not None and self._rings is not None:
            self._take_ring(self._rings, found[0])
            self._rings.resume(found[0], text.resumes)
        return self.arrived(sequence)

    def arrived(self, sequence: Sequence, waits: bool = False) -> bool:
        """Whether its blocks from the host are there, so that others find them, too; ``waits``: they are for
        all that is launched from now on, which waits for them."""
        if sequence.arrival is None or sequence.cached is None:
            return True
        if not waits and not sequence.arrival.ready():
            return False
        wait_for_arrival(sequence)
        sequence.num_computed += sequence.cached.num_arriving * self.block_size
        sequence.cached.computed(sequence.num_computed, sequence.blocks)
        return True

    def give(self, wanted: Seq[tuple[Sequence, int]]) -> None:
        """Each of these requests so many more blocks, which are free.

        Raises:
            BlockPoolExhaustedError: they are not; none is given then.
        """
        blocks, at = self.pool.allocate(sum([count for _, count in wanted])), 0
        for sequence, count in wanted:
            begins = not sequence.blocks
            sequence.blocks += blocks[at : at + count]
            at += count
            if begins and self._rings is not None:
                self._take_ring(self._rings, sequence.blocks[0])

    def computed(self, sequence: Sequence) -> None:
        """More of its prompt is computed: others may share that."""
        if sequence.cached is None:
            return
        sequence.cached.computed(sequence.num_computed, sequence.blocks)
        checkpoint = sequence.cached.checkpoint(sequence.num_computed)
        if checkpoint is not None and self._rings is not None:
            self._rings.keep(sequence.blocks[0], checkpoint)

    def release(self, sequence: Sequence) -> None:
        """It ends, or is put back: it holds none. What they hold is found by others, if it is kept."""
        leave_arrival(sequence)
        # Not those of another scheduler.
        if sequence.blocks and self._rings is not None and self._rings.num_resets == self._resets:
            self._rings.give(sequence.blocks[0])
        if sequence.cached is not None:
            self._leave(sequence, sequence.cached)
        self.pool.free(sequence.blocks)
        sequence.blocks, sequence.cached = [], None

    def put_back(self, sequence: Sequence) -> bool:
        """`release` one that is going to begin again; whether its blocks go to the host when others need
        them."""
        blocks, swaps = sequence.blocks, self._swaps(sequence)
        self.release(sequence)
        if not swaps and self.prefixes is not None:
            self.prefixes.save_none(blocks)
        sequence.num_computed = 0
        return swaps

    def _text(self, prefixes: PrefixCache, sequence: Sequence) -> CachedText:
        if sequence.cached is None:
            sequence.cached = prefixes.text(sequence.tokens, sequence.sampling.cache_salt)
        return sequence.cached

    def _swaps(self, sequence: Sequence) -> bool:
        host = None if self.prefixes is None else self.prefixes.host
        if host is None or self.preemption == "recompute":
            return False
        return self.preemption == "swap" or host.is_cheaper(len(sequence.blocks), self.block_size, out=True)

    def _leave(self, sequence: Sequence, text: CachedText) -> None:
        """Publish what was computed since the prompt, all at once: while it ran it was not asked for."""
        if sequence.finish_reason == "error":  # what it took may be the reason
            return text.forget()
        if self.prefixes is not None and self.prefixes.keeps:
            if sequence.num_computed > (known := len(text)):
                text.extend(sequence.tokens[known : sequence.num_computed])
            text.computed(sequence.num_computed, sequence.blocks)
        text.leave()

    def _take_ring(self, rings: "StepRings", block: int) -> None:
        # An engine that had them since has no requests any more: `CacheOwner` lets one engine run.
        if rings.num_resets != self._resets:
            self._reset_rings(rings)
        rings.take(block)

    def _reset_rings(self, rings: "StepRings") -> None:
        rings.reset()
        self._resets = rings.num_resets


def wait_for_arrival(sequence: Sequence) -> None:
    """What is launched from now on comes after what is on its way from the host to this one, if anything."""
    if sequence.arrival is not None:
        sequence.arrival.wait()
        sequence.arrival = None


def leave_arrival(sequence: Sequence) -> None:
    """The same for blocks that it gives back."""
    if sequence.arrival is not None:
        sequence.arrival.leave()
        sequence.arrival = None
