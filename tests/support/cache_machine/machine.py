"""`CacheMachine`: operations in any order on the blocks of one cache.

Texts of tenants with a prefix cache, pins, rows (rows.py) and plain holders. Every token that one of them
writes has a number of its own for all that is in front of it, so that reading tells what it is.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from late_disk import LateDisk

from cache_machine.books import NULL_WORD
from cache_machine.rows import Rows
from torchpaged import ArgumentError, PagedKVCache
from torchpaged.cache import Pin, PrefixCache
from torchpaged.cache.cached_text import CachedText
from torchpaged.cache.disk_tier import DiskTier
from torchpaged.cache.host_blocks import Arrival, HostBlocks
from torchpaged.cache.host_tier import HostTier
from torchpaged.cache.snapshots import load_prefixes, save_prefixes
from torchpaged.custom_ops.errors import BlockPoolExhaustedError


@dataclass
class Request:
    """A text, its tokens, whose it is and of which weights; ``computed`` of them are in ``blocks``."""

    text: CachedText
    tokens: list[int]
    salt: Any
    weights: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    arrival: Arrival | None = None


class CacheMachine(Rows):
    """One cache and its holders. Few tokens and short blocks, so that texts share, wait and collide in their
    places all the time.

    Args:
        seed: of all that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.size = self.r.choice([1, 2, 3])
        keep, slots = self.r.random() < 0.8, self.r.choice([0, 3, 5, 8, 40])
        shape = {"block_size": self.size, "num_blocks": self.r.choice([9, 17, 29, 49])}
        self.kv = PagedKVCache.uniform(1, 1, 1, dtype=torch.float32, **shape)
        self.pool = self.kv.pool
        budget = slots * self.kv.bytes_per_block
        self._folder = TemporaryDirectory()
        self.disk: LateDisk | None = None
        self.host: HostTier | None = None
        if keep and slots:
            blocks, row = HostBlocks(self.kv, budget), self.kv.bytes_per_block
            self.host = HostTier(blocks)
            if slots < 40:
                self.disk = LateDisk(self.r, self._folder.name, self.r.choice([3, 20, 200]) * row, row)
                self.host = DiskTier(blocks, self.disk)
        self.prefixes = PrefixCache(self.pool, self.size, keep=keep, host=self.host)
        self.words = self.kv[0][0].view(-1, self.size).numpy()
        self.words[:], self.words[0] = numpy.nan, NULL_WORD
        self.systems = [self.r.choices(range(2), k=8) for _ in range(3)]
        self.waiting: list[Request] = []
        self.requests: list[Request] = []
        self.rows, self.batch = [], None
        self.others: list[list[int]] = []
        self.stale: list[list[int]] = []  # tables that were freed
        self.pins: list[Pin] = []
        self.numbers: dict[Any, int] = {}
        self.weights, self.now, self.forgot = 0, 0.0, False
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        """One operation, and a look at everything. One that the pool has no blocks for changes nothing."""
        weights = {move: weight for weight, moves in self._moves().items() for move in moves}
        [move] = self.r.choices(list(weights), list(weights.values()))
        idle, self.forgot = self.pins_and_idle(), False
        try:
            move()
        except BlockPoolExhaustedError:
            self.done["exhausted"] += 1
        self.done[move.__name__] += 1
        self.check(*idle)

    def _moves(self) -> dict[float, list[Any]]:
        return {
            4: [self.take, self.grow],
            2: [self.ask, self.end, self.append],
            1: [self.fork, self.truncate, self.allocate, self.begin_batch, self.reindex, self.write_batch],
            0.9: [self.hold, self.release, self.use_stale, self.pin, self.unpin, self.cancel, self.rarely],
        }

    def content(self, tokens: list[int], salt: Any, weights: int) -> list[float]:
        """What a text's places hold: each token depends on all before."""
        found, last = [], self.number("begin", salt, weights)
        for token in tokens:
            last = self.number(last, token)
            found.append(last)
        return found

    # ------------------------------------------------------------------------------------ texts of tenants
    def ask(self) -> None:
        if len(self.waiting) < 4:
            tokens = self.r.choices(range(2), k=self.r.randint(1, 4))
            tokens = self.r.choice(self.systems)[: self.r.randint(0, 8)] + tokens
            if self.requests and self.r.random() < 0.5:  # the next turn of a chat
                tokens = self.r.choice(self.requests).tokens[:20] + tokens[:3]
            salt = self.r.choice([None, None, "a", "b"])
            self.waiting.append(Request(self.prefixes.text(tokens, salt), tokens, salt))

    def take(self) -> None:
        if not self.waiting:
            return
        one = self.waiting.pop(self.r.randrange(len(self.waiting)))
        shared = one.text.num_shared()
        found = one.text.take(counts=self.r.random() < 0.9)
        if found is None:
            assert shared, "it waits for nothing"
            self.waiting.append(one)
            return
        assert len(found) * self.size < len(one.tokens)
        self.done["swapped in"] += one.text.num_arriving
        one.arrival, one.blocks, one.weights = one.text.arrival, found, self.weights
        one.computed = (len(found) - one.text.num_arriving) * self.size
        if self.r.random() < 0.7:
            one.text.promise()
        self.requests.append(one)  # `check` reads what it took

    def arrive(self, one: Request) -> bool:
        """Whether what the host or the disk had is there, or what of it could be had."""
        if one.arrival is not None:
            if not one.arrival.ready():
                if self.r.random() < 0.5:
                    return False
                one.arrival.wait()
            one.arrival = None
            one.computed += one.text.num_arriving * self.size
            if self.r.random() < 0.5:
                self.publish(one)
        return True

    def grow(self) -> None:
        if not self.requests:
            return
        one = self.r.choice(self.requests)
        if not self.arrive(one):
            return
        if one.computed == len(one.tokens):
            one.tokens = one.tokens + self.r.choices(range(2), k=self.r.randint(1, 4))
        end = min(len(one.tokens), one.computed + self.r.randint(1, 6))
        one.blocks += self.pool.allocate(max(-(-end // self.size) - len(one.blocks), 0))
        self.write(one.blocks, one.computed, self.content(one.tokens[:end], one.salt, one.weights))
        one.computed = end
        if self.r.random() < 0.6:
            self.publish(one)

    def publish(self, one: Request) -> None:
        if one.computed > len(one.text):
            one.text.extend(one.tokens[len(one.text) : one.computed])
        one.text.computed(one.computed, one.blocks)

    def end(self) -> None:
        """It has ended, was put back, cancelled while it ran, or failed: what it knew is forgotten then."""
        if not self.requests:
            return
        one = self.requests.pop(self.r.randrange(len(self.requests)))
        if one.arrival is not None:
            one.arrival.leave()
        how = self.r.random()
        if how < 0.6:
            self.publish(one)
        elif how < 0.65:
            self.forgot = True
            one.text.forget()
        one.text.leave()
        self.free(one.blocks)

    def snapshot(self) -> None:
        """What is known goes into a file, or comes back from one of the same weights."""
        path = Path(self._folder.name) / str(self.weights)
        if not path.exists() or self.r.random() < 0.3:
            save_prefixes(path, self.prefixes, self.kv, {})
            self.done["saved"] += 1
        elif self.prefixes.keeps:
            self.done["restored blocks"] += load_prefixes(path, self.prefixes, self.kv, {}) // self.size

    def cancel(self) -> None:
        """One that waits."""
        if self.waiting:
            self.waiting.pop(self.r.randrange(len(self.waiting))).text.leave()

    def pin(self) -> None:
        if self.prefixes.keeps and self.requests and len(self.pins) < 3:
            one = self.r.choice(self.requests)
            ttl = self.r.choice([None, 5.0, 20.0])
            made = self.prefixes.pin(one.tokens, one.salt, ttl=ttl, priority=self.r.randrange(3))
            assert made.num_tokens == len(made.blocks) * self.size <= len(one.tokens)
            self.pins.append(made)

    def unpin(self) -> None:
        self.now += self.r.random()
        if self.pins and self.r.random() < 0.5:
            self.prefixes.unpin(self.pins.pop(self.r.randrange(len(self.pins))))

    # ------------------------------------------------------------------------------------- plain holders, all
    def hold(self) -> None:
        if len(self.others) < 3:
            self.others.append(self.pool.allocate(self.r.randint(0, 3)))
        elif self.requests:
            one = self.r.choice(self.requests)
            self.others.append(self.pool.fork(one.blocks[: one.computed // self.size]))

    def release(self) -> None:
        if self.others:
            self.free(self.others.pop(self.r.randrange(len(self.others))))

    def use_stale(self) -> None:
        """A table that was freed gives nothing: no block of it is held, shared or freed again through it."""
        if self.stale:
            table = self.stale.pop(self.r.randrange(len(self.stale)))
            self.settle()
            free = [block for block in table if block in self.pool._free]
            for block in free[:3]:
                for call in (self.pool.fork, self.pool.free, lambda blocks: self.pool.keep(blocks[:1], None)):
                    try:
                        call([block])
                    except ArgumentError:
                        continue
                    raise AssertionError(f"block {block} is free, and was taken")
                assert numpy.isnan(self.words[block]).all()

    def rarely(self) -> None:
        what = self.r.random()
        self.forgot = what < 0.03
        if what < 0.03:  # other weights
            self.prefixes.clear("changed")
            self.weights += 1
        elif what < 0.3:
            self.snapshot()
        elif what < 0.6 and self.disk is not None:
            self.disk.spoil()
        if 0.02 < what < 0.03:  # a step broke off
            self.pool.reset()
            self.requests, self.waiting, self.others, self.rows, self.batch = [], [], [], [], None

    # ------------------------------------------------------------------------------------------------ content
    def free(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        self.stale = [*self.stale[-5:], blocks]

    def texts(self) -> list[tuple[list[int], list[float]]]:
        """All tables, and what must be read through them."""
        found = [
            (one.blocks, self.content(one.tokens[: one.computed], one.salt, one.weights))
            for one in self.requests
        ]
        for rows, texts in self.rows:
            found += zip(rows.block_tables, texts, strict=True)
        if self.batch is not None:
            found += zip(self.batch[0].rows, self.batch[1], strict=True)
        return found
