"""RollingBlocks: blocks for layers with a sliding window, so many per row as the window needs, used over and
over. Host data only, no tensors.

    rolling = RollingBlocks(window=512, step=512, block_size=16, num_rings=8)
    rolling.allocate(batch=2)
    rolling.table(0, width=640)     # 65 block ids, repeated: block i of the row lies in ring place i % 65

A row's blocks form a ring. The block table repeats it, so that a token takes the place of one that no query
can see any more: nothing is allocated, freed or sent to the device while a row grows, and its memory does not
depend on its length. Mistral's rolling buffer (https://arxiv.org/abs/2310.06825, section 2), in blocks.
"""

from collections.abc import Sequence

from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import counted, one_line


def blocks_per_ring(window: int, step: int, block_size: int) -> int:
    """Blocks that hold, wherever they begin, ``step`` new tokens and what the first of them sees."""
    return -(-(window - 1 + step) // block_size) + 1


class RollingBlocks:
    """Rings of blocks. Their ids are those of a pool of their own; block 0 is its null block.

    Args:
        window: tokens that a query sees, its own one included.
        step: new tokens of a row that are written before the first of them attends, at most.
        block_size: tokens per block.
        num_rings: rings that there are.

    Attributes:
        num_rings: as given; an owner may raise it before there are pools.
        blocks_per_ring: blocks of a ring.
        rings: which ring each row has.

    Raises:
        ArgumentError: a size below 1.
    """

    def __init__(self, window: int, step: int, block_size: int, num_rings: int) -> None:
        sizes = {"window": window, "step": step, "block_size": block_size, "num_rings": num_rings}
        check_sizes(**sizes)
        self.window, self.step, self.block_size, self.num_rings = window, step, block_size, num_rings
        self.blocks_per_ring = blocks_per_ring(window, step, block_size)
        self.rings: list[int] = []

    def __repr__(self) -> str:
        rings = f"{counted(self.num_rings, 'ring')} of {counted(self.blocks_per_ring, 'block')}"
        return one_line(self, rings, f"window={self.window}", f"block_size={self.block_size}")

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self.num_rings * self.blocks_per_ring + 1

    def allocate(self, batch: int) -> None:
        """Give ``batch`` rows a ring each; there were none before.

        Raises:
            ArgumentError: there are fewer rings.
        """
        self._require(batch)
        self.rings = list(range(batch))

    def free(self) -> None:
        """Give all rings back."""
        self.rings = []

    def blocks(self, ring: int) -> list[int]:
        """The block ids of a ring, in order."""
        first = ring * self.blocks_per_ring + 1
        return list(range(first, first + self.blocks_per_ring))

    def table(self, ring: int, width: int) -> list[int]:
        """A row's block table of ``width`` columns: its ring, repeated."""
        blocks = self.blocks(ring)
        return (blocks * -(-width // len(blocks)))[:width]

    def reindex(self, parents: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """New row ``i`` is a fork of old row ``parents[i]``, which holds ``lengths[parents[i]]`` tokens.

        A parent's first child keeps its ring; each further child takes a free one. Nothing is shared: every
        row writes all of its ring sooner or later.

        Returns:
            The copies that are needed, ``(source, destination)`` blocks; none is both.

        Raises:
            ArgumentError: more rows than rings; nothing is changed then.
        """
        self._require(len(parents))
        kept = {self.rings[parent] for parent in parents}
        free = [ring for ring in range(self.num_rings) if ring not in kept]
        rings: list[int] = []
        copies: list[tuple[int, int]] = []
        seen: set[int] = set()
        for parent in parents:
            ring = self.rings[parent]
            if parent in seen:
                used = min(-(-max(lengths[parent], 0) // self.block_size), self.blocks_per_ring)
                source, ring = ring, free.pop(0)
                copies += list(zip(self.blocks(source)[:used], self.blocks(ring)[:used], strict=True))
            seen.add(parent)
            rings.append(ring)
        self.rings = rings
        return copies

    def keeps(self, length: int, longest: int) -> bool:
        """Whether a row cut to ``length`` tokens has all that its next query sees, if it once held
        ``longest``."""
        first = max(length + 1 - self.window, 0) // self.block_size
        return length <= 0 or (longest - 1) // self.block_size < first + self.blocks_per_ring

    def _require(self, batch: int) -> None:
        if batch > self.num_rings:
            raise ArgumentError("batch", f"at most {self.num_rings} rows, which have rings", str(batch))
