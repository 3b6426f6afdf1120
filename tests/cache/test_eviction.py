"""Which block goes first: a user's policy, pins by priority and time; and any order of operations keeps the
books of a simple model."""

import random
from collections import Counter
from typing import Any

import pytest

from torchpaged import ArgumentError, BlockPool
from torchpaged.cache import LRU, EvictionPolicy, Pin, PrefixCache
from torchpaged.cache.idle_blocks import IdleBlocks


class LeastUsed:
    """A user's policy: the block that was hit least often; of equal ones the lowest."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.hits: Counter[int] = Counter()

    def add(self, block: int) -> None:
        self.blocks.add(block)

    def hit(self, block: int) -> None:
        self.blocks.remove(block)
        self.hits[block] += 1

    def drop(self, block: int) -> None:
        self.blocks.remove(block)
        del self.hits[block]

    def evict(self) -> int:
        block = min(self.blocks, key=lambda b: (self.hits[b], b))
        self.drop(block)
        return block


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("torchpaged.cache.idle_blocks.time.monotonic", lambda: now[0])
    return now


def fill(cache: PrefixCache, first: int, count: int = 2) -> list[int]:
    """A text of ``count`` full blocks and a token, computed and left; its tokens."""
    tokens = [*range(first, first + 4 * count), 7]
    text = cache.text(tokens)
    blocks = text.take()
    assert blocks is not None
    blocks += cache.pool.allocate(count + 1 - len(blocks))
    text.computed(4 * count, blocks)
    text.leave()
    cache.pool.free(blocks)
    return tokens


def known(cache: PrefixCache, tokens: list[int]) -> int:
    return len(cache.text(tokens).known())


def give_up(cache: PrefixCache, count: int) -> None:
    """The pool needs so many blocks that are known."""
    cache.pool.free(cache.pool.allocate(cache.pool.num_free - len(cache.pool.idle) + count))


def test_a_policy_of_ones_own() -> None:
    assert isinstance(LRU(), EvictionPolicy)
    cache = PrefixCache(BlockPool(12), 4, eviction=LeastUsed())
    often, seldom = fill(cache, 10), fill(cache, 100)
    for _ in range(3):
        fill(cache, 10)
    fill(cache, 100)
    give_up(cache, 2)
    assert (known(cache, often), known(cache, seldom)) == (2, 0), "the one left last was used less"


@pytest.mark.parametrize("wrong", ["unknown", "held", "pinned"])
def test_a_policy_that_gives_what_it_does_not_have(wrong: str) -> None:
    class Wrong(LRU):
        def evict(self) -> int:
            return block

    cache = PrefixCache(BlockPool(8), 4, eviction=Wrong())
    tokens, other = fill(cache, 10), fill(cache, 100)
    block = 77
    if wrong != "unknown":
        block = cache.text(tokens).known()[0]
    if wrong == "held":
        assert cache.text(tokens).take()
    if wrong == "pinned":
        cache.pin(tokens)
    with pytest.raises(ArgumentError, match=f"^eviction: .*, got block {block} of Wrong"):
        give_up(cache, 1)
    assert (known(cache, tokens), known(cache, other)) == (2, 2)


@pytest.mark.parametrize("call", ["add", "hit"])
def test_no_block_is_lost_by_a_policy_that_raises(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    cache = PrefixCache(BlockPool(8), 4, eviction=LRU())
    pool, tokens = cache.pool, fill(cache, 10)
    blocks = [] if call == "hit" else cache.text(tokens).take()

    def raises(self: LRU, block: int) -> None:
        raise KeyError(block)

    with monkeypatch.context() as patch:
        patch.setattr(LRU, call, raises)
        with pytest.raises(KeyError):
            cache.text(tokens).take() if call == "hit" else pool.free(blocks or [])
    held = [block for block in range(1, 8) if pool.ref_count(block)]
    assert sorted([*pool._free, *pool.idle, *held]) == list(range(1, 8))
    assert pool.num_used == len(held)


def test_blocks_that_a_policy_let_go_before_it_raised_are_given_up_still() -> None:
    class Second(LRU):
        hits = 0

        def hit(self, block: int) -> None:
            self.hits += 1
            if self.hits == 2:
                raise KeyError(block)
            super().hit(block)

    cache = PrefixCache(BlockPool(8), 4, eviction=Second())
    tokens = fill(cache, 10)
    with pytest.raises(KeyError):
        cache.text(tokens).take()
    assert (len(cache.pool.idle), known(cache, tokens)) == (2, 2)
    give_up(cache, 2)
    assert (len(cache.pool.idle), known(cache, tokens)) == (0, 0)


class Refuses(LRU):
    """Raises for one of the blocks that it is told of, ``after`` so many others."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call, self.raises, self.after = call, True, 0

    def told(self, call: str, block: int) -> None:
        if call != self.call or not self.raises:
            return
        if not self.after:
            self.raises = False
            raise KeyError(block)
        self.after -= 1

    def add(self, block: int) -> None:
        self.told("add", block)
        super().add(block)

    def hit(self, block: int) -> None:
        self.told("hit", block)
        super().hit(block)

    def drop(self, block: int) -> None:
        super().hit(block)
        self.told("drop", block)


@pytest.mark.parametrize("then", ["give up", "take", "forget"])
def test_blocks_that_a_policy_refused_come_back(then: str) -> None:
    """It is told of the others, and of those once they are left again; it is asked for them last."""
    policy = Refuses("add")
    cache = PrefixCache(BlockPool(8), 4, eviction=policy)
    pool = cache.pool
    with pytest.raises(KeyError):
        fill(cache, 10, 3)
    tokens = [*range(10, 22), 7]
    assert (known(cache, tokens), len(policy._order)) == (3, 2)
    if then == "take":
        pool.free(cache.text(tokens).take() or [])
        assert len(policy._order) == 3
    if then == "forget":
        cache.clear("a test")
        assert len(policy._order) == 0
    assert sorted(pool.allocate(7)) == list(range(1, 8))


def test_no_pin_is_left_where_a_policy_raises() -> None:
    policy, pool = Refuses("hit"), BlockPool(8)
    cache = PrefixCache(pool, 4, eviction=policy)
    tokens = fill(cache, 10, 3)
    policy.after = 2  # of three blocks
    with pytest.raises(KeyError):
        cache.pin(tokens)
    assert (pool.num_pinned, len(pool.idle)) == (0, 3)
    pin, policy.call, policy.raises = cache.pin(tokens), "add", True
    with pytest.raises(KeyError):
        cache.unpin(pin)
    assert (pool.num_pinned, len(pool.idle)) == (0, 3)
    assert sorted(pool.allocate(7)) == list(range(1, 8))


@pytest.mark.parametrize("forgets", ["all", "its text"])
def test_blocks_are_forgotten_though_a_policy_raises(forgets: str) -> None:
    cache = PrefixCache(BlockPool(8), 4, eviction=Refuses("drop"))
    pool, text = cache.pool, cache.text([*range(12), 7])
    assert text.take() == []
    text.computed(12, blocks := pool.allocate(3))
    pool.free(blocks)
    with pytest.raises(KeyError):
        cache.clear("a test") if forgets == "all" else text.forget()
    assert (len(pool.idle), pool.num_free) == (0, 7)
    assert sorted(pool.allocate(7)) == list(range(1, 8))


def test_blocks_whose_pin_has_ended_cost_a_text_what_others_do(clock: list[float]) -> None:
    cache = PrefixCache(BlockPool(12), 4)
    tokens = fill(cache, 10)
    cache.pin(tokens, ttl=5)
    text = cache.text(tokens)
    assert text.num_shared() == 2, "as long as they are pinned, no other text could have them"
    clock[0] += 5
    assert text.num_shared() == 0


@pytest.mark.parametrize("eviction", ["lru", LRU, object()], ids=["str", "class", "object"])
def test_what_is_no_policy(eviction: Any) -> None:
    pool = BlockPool(8)
    with pytest.raises(ArgumentError, match="^eviction: expected None, or an object with add, hit, drop"):
        PrefixCache(pool, 4, eviction=eviction)
    PrefixCache(pool, 4)


def test_pins_go_last_and_lower_priorities_first() -> None:
    cache = PrefixCache(BlockPool(12), 4)
    texts = [fill(cache, first) for first in (10, 100, 1000, 2000)]
    pins = [cache.pin(texts[i], priority=priority) for i, priority in ((0, 2), (1, 1))]
    assert [pin.num_tokens for pin in pins] == [8, 8]
    assert cache.pool.num_pinned == 4
    for left in ([2, 2, 0, 2], [2, 2, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]):
        give_up(cache, 2)
        assert [known(cache, text) for text in texts] == left
    assert (cache.pool.num_pinned, cache.pool.num_free) == (0, 11)
    fill(cache, 10)
    assert cache.pool.num_pinned == 0, "a pin ends with what its blocks held"


def test_of_a_pinned_text_the_last_block_goes_first() -> None:
    cache = PrefixCache(BlockPool(8), 4)
    tokens = fill(cache, 10, 3)
    cache.pin(tokens)
    give_up(cache, 1)
    assert known(cache, tokens) == 2


def test_pins_that_ended_early_are_not_kept(clock: list[float]) -> None:
    """A server pins a prefix for each request, and gives it up long before its time."""
    idle = IdleBlocks(None, {1: None}, set())
    idle.add([1])
    kept = idle.pin([1], 4, 5.0, 1)
    for _ in range(1000):
        idle.unpin(idle.pin([1], 4, 1e5, 0))
    assert len(idle._ends) < 50
    assert idle.num_pinned == 1
    clock[0] += 6
    assert idle.num_pinned == 0
    idle.unpin(kept)


def test_several_pins_of_a_block_and_their_ends(clock: list[float]) -> None:
    cache = PrefixCache(BlockPool(12), 4)
    tokens, other = fill(cache, 10), fill(cache, 100)
    short, long = cache.pin(tokens, ttl=5, priority=9), cache.pin(tokens, ttl=50)
    cache.pin(other, priority=3)
    clock[0] += 5
    give_up(cache, 2)
    assert (known(cache, tokens), known(cache, other)) == (0, 2), "its priority of 9 has ended"
    tokens = fill(cache, 10)
    pin = cache.pin(tokens, ttl=5)
    clock[0] += 5
    assert cache.pool.num_pinned == 2
    for ended in (short, long, pin):
        cache.unpin(ended)  # nothing any more
    assert cache.pool.num_pinned == 2
    give_up(cache, 2)
    assert (known(cache, tokens), known(cache, other)) == (0, 2)


def test_a_held_block_is_pinned_once_it_is_left() -> None:
    cache = PrefixCache(BlockPool(12), 4)
    tokens, other = fill(cache, 10), fill(cache, 100)
    held = cache.text(tokens).take() or []
    pin = cache.pin(tokens)
    assert cache.pool.num_pinned == 0
    cache.pool.free(held)
    assert cache.pool.num_pinned == 2
    cache.unpin(pin)
    give_up(cache, 2)
    assert (known(cache, tokens), known(cache, other)) == (2, 0), "unpinned, it is the one left last"


def test_what_is_forgotten_is_pinned_no_more() -> None:
    cache = PrefixCache(BlockPool(12), 4)
    tokens = fill(cache, 10)
    pin = cache.pin(tokens)
    cache.clear("weights")
    assert cache.pool.num_pinned == 0
    fill(cache, 10)
    assert cache.pool.num_pinned == 0
    cache.unpin(pin)
    assert cache.pin([5, 6]).num_tokens == 0


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"ttl": 0}, "^ttl: expected None, or seconds above 0, got 0"),
        ({"ttl": float("nan")}, "^ttl: "),
        ({"ttl": True}, "^ttl: "),
        ({"priority": 1.5}, "^priority: expected an integer, got 1.5"),
    ],
    ids=str,
)
def test_pins_that_cannot_be(asked: dict[str, Any], match: str) -> None:
    cache = PrefixCache(BlockPool(12), 4)
    tokens = fill(cache, 10)
    with pytest.raises(ArgumentError, match=match):
        cache.pin(tokens, **asked)
    assert cache.pool.num_pinned == 0
    with pytest.raises(ArgumentError, match="^keep: expected True for pins"):
        PrefixCache(BlockPool(4), 4, keep=False).pin([1, 2])


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_operations(seed: int, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a model that keeps lists and looks through all of them."""
    monkeypatch.setattr("torchpaged.cache.idle_blocks._MOST_STALE", 3)
    draw, held = random.Random(seed), set(range(1, 12))
    idle = IdleBlocks(None, dict.fromkeys(held), held)
    left: list[int] = []  # idle, longest left first
    pins: list[tuple[Pin, set[int]]] = []

    def priority(block: int) -> float:
        return max((p.priority for p, blocks in pins if block in blocks), default=float("-inf"))

    def moved(blocks: set[int], before: dict[int, float]) -> None:
        """A pin or an end of one makes blocks those left last, where it concerns them."""
        nonlocal left
        again = [b for b in before if b in blocks]
        left = [b for b in left if b not in again] + again

    for _ in range(600):
        clock[0] += draw.random()
        for ended in sorted((p for p in pins if p[0].until <= clock[0]), key=lambda p: p[0].until):
            pins.remove(ended)
            moved(ended[1], dict.fromkeys(b for b in reversed(ended[0].blocks) if b in left))
        block, what = draw.randrange(1, 12), draw.choice("aaahdeepu")
        assert idle.num_pinned == sum(priority(b) > float("-inf") for b in left)
        if what == "a" and block not in left:
            idle.add([block])
            left.append(block)
        elif what == "h" and block in left:
            idle.hit([block])
            left.remove(block)
        elif what == "d":
            idle.drop(block)
            left = [b for b in left if b != block]
            for _, blocks in pins:
                blocks.discard(block)
        elif what == "e" and left:
            want = min(left, key=lambda b: (priority(b), left.index(b)))
            assert idle.evict() == [want]
            left.remove(want)
            for _, blocks in pins:
                blocks.discard(want)
        elif what == "p":
            some = draw.sample(range(1, 12), 3)
            ttl = draw.choice([None, draw.random() * 20])
            pins.append((idle.pin(some, 0, ttl, draw.randrange(3)), set(some)))
            moved(set(some), dict.fromkeys(b for b in reversed(some) if b in left))
        elif what == "u" and pins:
            gone = pins.pop(draw.randrange(len(pins)))
            idle.unpin(gone[0])
            moved(gone[1], dict.fromkeys(b for b in reversed(gone[0].blocks) if b in left))
        held.difference_update(left)
        held.update(set(range(1, 12)).difference(left))
        assert set(idle) == set(left)
        assert len(idle) == len(left)
