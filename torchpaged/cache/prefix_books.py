"""PrefixBooks: which blocks of a pool hold which tokens, and what texts promise to compute.

A key is the name of the block in front and the bytes of a block's own tokens, so that nothing rests on a
hash. `torchpaged.cache.PrefixCache` is what users have of it, and `CachedText` moves through it. Host data
only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from struct import Struct
from typing import NamedTuple

from torchpaged.cache.block_pool import NULL_BLOCK, BlockPool
from torchpaged.cache.eviction import EvictionPolicy, check_policy
from torchpaged.cache.host_tier import HostTier
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError, NotCopied
from torchpaged.custom_ops.words import counted, one_line, repr_of_fields

#: Why tokens were not found: they were new; the pool needed their blocks; they fill no block, or are
#: the last block of a text, whose last token is always computed since its logits are wanted.
NEW, EVICTED, TAIL = "new", "evicted", "tail"
#: Of a token's id in a key.
TOKEN_BYTES = 8


@dataclass
class PrefixCacheStats:
    """Counters of a `PrefixCache`. ``queried_tokens`` are ``hit_tokens`` and all of ``missed_tokens``.

    Attributes:
        queried_tokens: of texts that asked for what is known.
        hit_tokens: those that were known.
        missed_tokens: the others by the reason why a hit ended where it did: "new", they had not been
            computed; "evicted", the pool needed the blocks, so that a larger one would have had them; "tail",
            they fill no block, or are the block with a text's last token, which is always computed; what
            `PrefixCache.clear` was told; the two reasons of `torchpaged.cache.checkpoints`; and "disk: ..."
            of blocks that did not come back as they were written.
        evicted_blocks: blocks given up for other tokens.
        host_tokens: brought back from the host, for requests that were put back as well.
        disk_tokens: those of them that came from a disk.
        checkpoints, evicted_checkpoints: kept so far, and given up for others.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    missed_tokens: dict[str, int] = field(default_factory=dict)
    evicted_blocks: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    checkpoints: int = 0
    evicted_checkpoints: int = 0

    def __repr__(self) -> str:
        return repr_of_fields(self)


class KnownBlock(NamedTuple):
    """A block's tokens and what is in front of them.

    Attributes:
        parent: the place of the block in front in a list of such; -1: it begins a text.
        tokens: ids, 8 bytes each.
        extra: what `PrefixCache.text` was told, of a block that begins a text.
    """

    parent: int
    tokens: bytes
    extra: Hashable


class Resumed(NamedTuple):
    """What a text goes on from besides the blocks that it took, see `torchpaged.cache.checkpoints`.

    Attributes:
        checkpoint: of its state.
        first_block: the one that its own first block is to be a copy of.
    """

    checkpoint: int
    first_block: int


class PrefixBooks(NotCopied):
    """What the blocks of a pool hold, by keys; arguments and attributes are those of `PrefixCache`."""

    _BOUND, _ADVICE = "it says what the blocks of one pool hold", "make a new one of the copied pool"

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        keep: bool = True,
        eviction: EvictionPolicy | None = None,
        host: HostTier | None = None,
    ) -> None:
        check_sizes(block_size=block_size)
        check_policy(eviction)
        pool.watch(self._given_up, keep, eviction, None if host is None else host.flush)
        self.host, self._not_saved = host, set[int]()  # of the latter: blocks that go to no host
        self.pool, self.block_size, self.keeps = pool, block_size, keep
        self.stats = PrefixCacheStats()
        self._table: dict[Hashable, int] = {}  # blocks by key
        self._keys: list[Hashable] = [None] * pool.num_blocks  # of what is in `_table`, or was, by block
        self._names = [b""] * pool.num_blocks  # with which the keys behind a block begin
        self._promised: dict[Hashable, bytes] = {}  # names of what texts compute, by key
        # By key: the names of blocks that were given up for others, or why others are not known any more, the
        # latest and those before them. No pairs of both: so many objects would bring the garbage collector.
        self._lost: dict[Hashable, bytes | str] = {}
        self._lost_before: dict[Hashable, bytes | str] = {}
        self._new_names = map(Struct("<q").pack, count(1))  # that no key had
        self._version = 0  # another one when what is known or held may have changed
        self._drops = 0  # blocks that are not known any more
        self._epoch = 0  # times that all were forgotten

    def __repr__(self) -> str:
        return one_line(self, *self._facts())

    def _facts(self) -> list[str]:
        """Of its repr, the most important one first."""
        facts = [
            f"{len(self)} of {counted(self.pool.num_usable, 'block')} known",
            f"{self.stats.hit_tokens} of {counted(self.stats.queried_tokens, 'token')} found",
            f"block_size={self.block_size}",
        ]
        return facts if self.host is None else [*facts, f"{counted(len(self.host), 'block')} on the host"]

    def __len__(self) -> int:
        """Blocks whose tokens are known."""
        return len(self._table)

    def clear(self, reason: str) -> None:
        """Forget all blocks; those that are held stay so. Texts of before publish nothing any more.

        Args:
            reason: why, for `PrefixCacheStats.missed_tokens`.
        """
        self._note(self._table, repeat(reason))
        self._table, self._promised = {}, {}
        self._keys = [None] * len(self._keys)
        self._not_saved.clear()  # of what the blocks held
        if self.host is not None:
            self.host.clear()
        self._version, self._drops, self._epoch = self._version + 1, self._drops + 1, self._epoch + 1
        self.pool.drop_all()

    # ---------------------------------------------------------------------------------------------- snapshots
    def known(self) -> list[tuple[KnownBlock, int]]:
        """What is known, and in which block, what is in front of a block before it. Blocks whose beginning
        was given up are left out: they are not found."""
        step, behind = self.block_size * TOKEN_BYTES, dict[bytes, list[tuple[bytes, int]]]()
        found: list[tuple[KnownBlock, int]] = []
        for key, block in self._table.items():
            if isinstance(key, bytes) and len(key) > step:
                behind.setdefault(key[:-step], []).append((key[-step:], block))
            else:
                extra, tokens = key if isinstance(key, tuple) else (None, key)
                found.append((KnownBlock(-1, tokens, extra), block))
        for parent, (_, block) in enumerate(found):  # it grows meanwhile
            for tokens, child in behind.get(self._names[block], ()):
                found.append((KnownBlock(parent, tokens, None), child))
        return found

    def find(self, texts: Sequence[KnownBlock]) -> list[int | None]:
        """The blocks that hold these; None: unknown."""
        found: list[int | None] = []
        for text in texts:
            parent = found[text.parent] if text.parent >= 0 else NULL_BLOCK
            found.append(None if parent is None else self._table.get(self._key_of(text, parent)))
        return found

    def publish(self, texts: Sequence[KnownBlock], blocks: Sequence[int]) -> None:
        """Each of ``texts`` is in one of ``blocks``, which the caller holds: others find it from now on. What
        is known already stays where it is."""
        for text, block in zip(texts, blocks, strict=True):
            key = self._key_of(text, blocks[text.parent] if text.parent >= 0 else NULL_BLOCK)
            if key not in self._table:
                name = self._promised.get(key) or self._known_name(key) or next(self._new_names)
                self._fill([key], [name], [block], [key])

    def _key_of(self, text: KnownBlock, parent: int) -> Hashable:
        if text.parent >= 0:
            return self._names[parent] + text.tokens
        return text.tokens if text.extra is None else (text.extra, text.tokens)

    # ------------------------------------------------------------------------------------------- the books
    def _known_name(self, key: Hashable) -> bytes | None:
        """The name that this key had before, as long as that is remembered, so that what is behind it is
        found again. None: it gets a new one, and nothing is known behind it."""
        if isinstance(name := self._remembered(key), bytes):
            return name
        return None if self.host is None else self.host.name(key)

    def _note(self, keys: Iterable[Hashable], what: Iterable[bytes | str]) -> None:
        """Remember the names of what is not known any more, or why it is not, and was until now, of as many
        blocks as the pool has or more, of fewer than three times as many. A key that is known again stays
        there, under the name that it has."""
        self._lost.update(zip(keys, what, strict=False))
        if len(self._lost) >= self.pool.num_blocks:
            self._lost_before, self._lost = self._lost, {}

    def _remembered(self, key: Hashable) -> bytes | str | None:
        """What `_note` was told last of a key that is not known; None: nothing, or it is forgotten."""
        return self._lost.get(key) or self._lost_before.get(key)

    def _fill(
        self,
        keys: Sequence[Hashable],
        names: Sequence[bytes],
        blocks: Sequence[int],
        promised: Sequence[Hashable],
    ) -> None:
        """Keys and values of ``keys``, which are not known, are in ``blocks``; they have these names.

        ``promised``: those of ``keys`` that may have been promised."""
        if not self.pool._kept.isdisjoint(blocks):
            block = next(block for block in blocks if block in self.pool._kept)
            raise ArgumentError("blocks", "blocks of these tokens alone", f"block {block} of other tokens")
        self.pool.keep(blocks)
        keys_of, names_of = self._keys, self._names
        self._table.update(zip(keys, blocks, strict=True))
        for key, name, block in zip(keys, names, blocks, strict=True):
            keys_of[block], names_of[block] = key, name
        for key in promised:
            self._promised.pop(key, None)
        self._version += 1

    def _given_up(self, blocks: Sequence[int]) -> None:
        """The pool needs ``blocks``, or they have no holders and nothing is kept."""
        keys, names = self._forgotten(blocks), [self._names[block] for block in blocks]
        if self.keeps:
            self._note(keys, names)
            self.stats.evicted_blocks += len(keys)
        if self.host is not None:
            for key, name, block in zip(keys, names, blocks, strict=True):
                if block not in self._not_saved:
                    self.host.save(key, name, block)
            self._not_saved.difference_update(blocks)

    def _forgotten(self, blocks: Sequence[int]) -> list[Hashable]:
        """What ``blocks`` hold is not known any more; their keys."""
        keys = [self._keys[block] for block in blocks]
        for key in keys:
            del self._table[key]
        self._version, self._drops = self._version + 1, self._drops + 1
        return keys
