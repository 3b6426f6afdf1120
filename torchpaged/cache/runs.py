"""Runs: which blocks hold which tokens, and which tokens lost theirs lately.

Blocks that follow each other are a `Run`, which has their tokens: a text is compared with these as a whole,
and only where it leaves one run for another, or ends one, is a key looked up. A key is a place in a run and
the bytes of the tokens behind it, so that nothing rests on a hash. Host data only.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from torchpaged.cache.block_pool import NULL_BLOCK, BlockPool

#: Of a token's id in a key.
TOKEN_BYTES = 8


class Run:
    """Blocks of texts that follow each other, in the order in which they were first known.

    Attributes:
        key: by which it is found, behind the last block of another run: see `Runs.key`.
        tokens: of its blocks, `TOKEN_BYTES` each; also of those that were given up, as long as these are
            remembered, so that what is behind them is found again once they are known.
        blocks: those that are known, and `NULL_BLOCK` where one was given up; the last one is known.
        is_open: whether more can follow its last tokens; False: some of them are not remembered any more.
    """

    __slots__ = ("blocks", "is_open", "key", "tokens")

    def __init__(self, key: Any = None) -> None:
        self.key: Key = key
        self.blocks: list[int] = []
        self.tokens, self.is_open = bytearray(), True

    def block(self, place: int) -> int:
        """The one at a place; `NULL_BLOCK`: it is not known."""
        return self.blocks[place] if place < len(self.blocks) else NULL_BLOCK

    def lose(self, blocks: list[int], at: int) -> tuple[int, int]:
        """Those from ``at`` on, as far as they are its last ones, last first, or one are not known any more:
        the end of their places, and how many. Costs O(1) per block, of one that is not its last O(blocks of
        the run)."""
        own, end = self.blocks, len(self.blocks)
        count = most = min(end, len(blocks) - at)
        if own[: -most - 1 : -1] != blocks[at : at + most]:
            count = next(n for n in range(most) if own[-1 - n] != blocks[at + n])
        if count:
            del own[-count:]
        else:
            end, count = own.index(blocks[at]) + 1, 1
            own[end - 1] = NULL_BLOCK
        while own and own[-1] == NULL_BLOCK:
            own.pop()
        return end, count


#: A run, and the place of a block in it; -1: in front of the first.
Place: TypeAlias = tuple[Run, int]
#: A place, what a text's first block depends on besides tokens, and the tokens of the block behind the place.
Key: TypeAlias = tuple[Run, int, Hashable, bytes]


class Runs:
    """All runs of a cache. Texts are given as ``data``, their tokens' bytes, and ``extra``, what else the
    first block depends on.

    Args:
        pool: of the blocks.
        step: bytes of a block's tokens.
        remembered: at least so many blocks that were given up last are remembered, with those in front of
            them in their runs.

    Attributes:
        step: as given.
        origin: in front of every text, in a run without blocks.
        by_key: all runs but that one.
        num_lost: blocks that were given up since those remembered longest were forgotten.
    """

    def __init__(self, pool: BlockPool, step: int, remembered: int) -> None:
        self._pool, self.step, self._remembered = pool, step, remembered
        self.origin: Place = Run(), -1
        self.origin[0].is_open = False
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.by_key: dict[Key, Run] = {}
        # Runs that lost blocks, the latest and those before them, with the end of the places of these.
        self._lost: dict[Run, int] = {}
        self._lost_before: dict[Run, int] = {}
        self.num_lost = 0

    # --------------------------------------------------------------------------------------------- looking up
    def key(self, front: Place, data: bytes | bytearray, place: int, extra: Hashable) -> Key:
        """Of a text's block ``place`` behind what is at ``front``; ``extra`` counts where texts begin."""
        run, at = front
        tokens = bytes(data[place * self.step : (place + 1) * self.step])
        return run, at, extra if run is self.origin[0] else None, tokens

    def follow(
        self, front: Place, data: bytes | bytearray, place: int, end: int, extra: Hashable
    ) -> tuple[Run, int, int, Key | None]:
        """Where the tokens of a text's blocks from ``place`` on, at most to ``end``, are behind ``front``,
        known or remembered: a run, the place of the first, and how many are there in a row. If none is: 0,
        and the key of the first."""
        run, at = front
        if len(run.tokens) > (at + 1) * self.step:
            count = num_alike(run.tokens, at + 1, data, place, end, self.step)
            if count:
                return run, at + 1, count, None
        key = self.key(front, data, place, extra)
        child = self.by_key.get(key)
        if child is None:
            return run, at + 1, 0, key
        return child, 0, num_alike(child.tokens, 0, data, place, end, self.step), None

    def find(
        self, front: Place, data: bytes | bytearray, place: int, end: int, extra: Hashable
    ) -> tuple[list[int], Place, Key | None, bool]:
        """The blocks with the tokens of a text's blocks from ``place`` on, at most to ``end``, behind what is
        at ``front``; where the last of them is; the key of the next, None at ``end``; and whether that one is
        remembered."""
        blocks: list[int] = []  # `list[int]()` takes a microsecond
        while place < end:
            run, at, count, key = self.follow(front, data, place, end, extra)
            if key is not None:
                return blocks, front, key, False
            known = run.blocks[at : at + count]
            if NULL_BLOCK in known:
                del known[known.index(NULL_BLOCK) :]
            if known:
                blocks += known
                place, front = place + len(known), (run, at + len(known) - 1)
            if len(known) < count:
                return blocks, front, self.key(front, data, place, extra), True
        return blocks, front, None, False

    # ------------------------------------------------------------------------------------ known, and given up
    def append(self, key: Key, tokens: bytes | bytearray, blocks: Sequence[int]) -> Place:
        """Keys and values of ``tokens`` are in ``blocks``: the first of them, which has this key, is nowhere
        yet. The place of the last of them."""
        run, place = key[0], key[1] + 1
        if not run.is_open or len(run.tokens) != place * self.step:
            run, place = Run(key), 0
        self._pool.keep(blocks, run)
        run.tokens += tokens
        run.blocks += [NULL_BLOCK] * (place - len(run.blocks))
        run.blocks += blocks
        if not place:
            self.by_key[key] = run
        return run, place + len(blocks) - 1

    def fill(self, run: Run, place: int, blocks: Sequence[int]) -> None:
        """The tokens from ``place`` on are in ``blocks``; those that are known stay where they are."""
        new = [n for n in range(len(blocks)) if run.block(place + n) == NULL_BLOCK]
        if not new:
            return
        self._pool.keep([blocks[n] for n in new], run)
        run.blocks += [NULL_BLOCK] * (place + new[-1] + 1 - len(run.blocks))
        for n in new:
            run.blocks[place + n] = blocks[n]

    def lose(self, blocks: list[int], run_of: Mapping[int, Run]) -> list[tuple[Run, int, list[int]]]:
        """What ``blocks`` of these runs hold is not known any more. In parts: a run, the end of the places,
        and the blocks there, last first."""
        parts: list[tuple[Run, int, list[int]]] = []
        at, ends = 0, self._lost
        while at < len(blocks):
            run = run_of[blocks[at]]
            end, count = run.lose(blocks, at)
            parts.append((run, end, blocks[at : at + count]))
            if end > ends.get(run, 0):
                ends[run] = end
            at += count
        self.num_lost += at
        if self.num_lost >= self._remembered:
            oldest, self._lost_before = self._lost_before, self._lost
            self._lost, self.num_lost = {}, 0
            for run in oldest:
                self.cut(run, self._lost_before.get(run, 0))
        return parts

    def cut(self, run: Run, end: int = 0) -> None:
        """What it has lost behind its last block, from place ``end`` on, is not remembered any more."""
        size = max(len(run.blocks), end) * self.step
        if len(run.tokens) > size:
            del run.tokens[size:]
            run.is_open = False  # what was behind these tokens is behind no others
        if not size and self.by_key.get(run.key) is run:
            del self.by_key[run.key]


def num_alike(one: bytearray, at: int, other: bytes | bytearray, place: int, end: int, step: int) -> int:
    """How many blocks of ``step`` bytes of one text, from ``at`` on, are those of another from ``place`` on,
    at most to its ``end``, up to the first that is not. What is compared is at most a few times what is the
    same."""

    def are_alike(begin: int, end: int) -> bool:
        mine = one[(at + begin) * step : (at + end) * step]
        return mine == other[(place + begin) * step : (place + end) * step]

    count = min(len(one) // step - at, end - place)
    same, most = 0, min(count, 8)
    while are_alike(same, most):
        if most == count:
            return count
        same, most = most, min(count, 4 * most)
    most -= 1
    while same < most:
        middle = (same + most + 1) // 2
        same, most = (middle, most) if are_alike(same, middle) else (same, middle - 1)
    return same
