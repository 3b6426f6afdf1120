"""CheckpointedPrefixCache: where checkpoints are made, what is resumed and why no more; and any order of
operations keeps the books."""

from __future__ import annotations

import random
from typing import Any

import pytest

from torchpaged import ArgumentError, BlockPool
from torchpaged.cache.checkpoints import CheckpointedPrefixCache, CheckpointedText


def make(num_blocks: int = 64, num_checkpoints: int = 4, every: int = 16) -> CheckpointedPrefixCache:
    return CheckpointedPrefixCache(BlockPool(num_blocks), 4, num_checkpoints=num_checkpoints, every=every)


class Request:
    """One text as an engine runs it, in chunks of ``most`` tokens."""

    def __init__(self, cache: CheckpointedPrefixCache, tokens: list[int], most: int = 1000) -> None:
        self.cache, self.tokens, self.most = cache, tokens, most
        self.text = cache.text(tokens)
        self.blocks: list[int] = []
        self.num_computed, self.kept = -1, list[int]()

    def begin(self) -> bool:
        blocks = self.text.take()
        if blocks is None:
            return False
        self.text.promise()
        self.blocks, self.num_computed = blocks, len(blocks) * 4
        return True

    def step(self) -> bool:
        """A chunk; whether more follow."""
        left = len(self.tokens) - self.num_computed
        self.num_computed += self.text.chunk(self.num_computed, min(self.most, left))
        self.blocks += self.cache.pool.allocate(-(-self.num_computed // 4) - len(self.blocks))
        self.text.computed(self.num_computed, self.blocks)
        if self.text.checkpoint(self.num_computed) is not None:
            self.kept.append(self.num_computed)
        return self.num_computed < len(self.tokens)

    def end(self) -> None:
        self.text.leave()
        self.cache.pool.free(self.blocks)

    def run(self) -> Request:
        assert self.begin()
        while self.step():
            pass
        self.end()
        return self


def hit(cache: CheckpointedPrefixCache, tokens: list[int]) -> int:
    before = cache.stats.hit_tokens
    Request(cache, tokens).run()
    return cache.stats.hit_tokens - before


def test_a_checkpoint_about_every_so_many_tokens() -> None:
    """Where chunks end anyway, on a block's border, or after twice the half of ``every``."""
    tokens = list(range(80))
    assert Request(make(), tokens).run().kept == [16, 32, 48, 64]
    assert Request(make(), tokens, most=15).run().kept == [12, 24, 36, 48, 60, 72]
    assert Request(make(every=32), tokens, most=10).run().kept == [16, 32, 48, 64]
    assert Request(make(every=400), tokens).run().kept == []


def test_hits_end_at_the_last_checkpoint_and_the_reason_is_said() -> None:
    cache, tokens = make(), list(range(70))
    Request(cache, tokens).run()
    shifted = [*tokens[:30], *range(100, 140)]
    one = Request(cache, shifted).run()
    assert one.text.resumes is not None
    assert cache.stats.hit_tokens == 16
    assert cache.stats.missed_tokens == {"tail": 2 + 2, "new": 68 + 68 - 28, "no checkpoint": 12}
    assert one.kept == [28, 44, 60]  # the end of what they share, and behind it


def test_the_end_of_what_is_shared_gets_a_checkpoint() -> None:
    """Found by the second text, for the third one on."""
    cache, system = make(every=64), list(range(42))
    assert [hit(cache, [*system, 100 + i, 7, 7]) for i in range(4)] == [0, 0, 40, 40]
    assert cache.stats.checkpoints == 1


@pytest.mark.parametrize("own", [5, 105])
def test_how_long_the_own_part_is_costs_no_hits(own: int) -> None:
    """64 questions about a text of 250 tokens: 63 hit, however far behind the text they end. A cache with a
    state at a prompt's last block alone would lose all of them to 100 tokens more."""
    cache, text = make(num_blocks=512, num_checkpoints=8, every=64), list(range(250))
    found = [hit(cache, [*text, *range(1000 * i, 1000 * i + own)]) for i in range(1, 65)]
    assert found == [0, 192] + 62 * [248]
    assert cache.stats.missed_tokens["no checkpoint"] == 248 - 192


def test_the_least_recently_used_goes_first() -> None:
    cache = make(num_checkpoints=2)
    texts = [[100 * i + j for j in range(17)] for i in range(3)]
    for tokens in texts[:2]:
        Request(cache, tokens).run()
    assert hit(cache, texts[0]) == 16
    Request(cache, texts[2]).run()  # takes the second one's
    assert hit(cache, texts[0]) == 16
    before = dict(cache.stats.missed_tokens)
    assert hit(cache, texts[1]) == 0
    assert cache.stats.missed_tokens["checkpoint evicted"] == 16
    assert before.get("checkpoint evicted") is None
    assert cache.stats.evicted_checkpoints >= 1


def test_a_long_text_takes_no_place_of_those_that_were_used() -> None:
    cache, system = make(num_checkpoints=2, every=8), list(range(17))
    Request(cache, system).run()
    assert hit(cache, system) == 16
    Request(cache, list(range(100, 150))).run()
    assert hit(cache, system) == 16


def test_checkpoints_go_with_their_blocks() -> None:
    cache = make(num_blocks=9)
    Request(cache, list(range(21))).run()
    assert len(cache.checkpoints) == 1
    cache.pool.free(cache.pool.allocate(8))
    assert not cache.checkpoints
    assert hit(cache, list(range(21))) == 0
    assert cache.stats.missed_tokens["evicted"] == 20


def test_who_comes_meanwhile_waits_for_a_checkpoint() -> None:
    """Of the first text, at the end of what it shares; of one that found blocks and no checkpoint, too."""
    cache, tokens = make(every=400), list(range(30))
    first, others = Request(cache, tokens), [Request(cache, [*tokens[:25], 9 * i, 0]) for i in (100, 200)]
    assert first.begin()
    assert [one.begin() for one in others] == [False, False]
    assert others[0].text.num_shared() == 5  # without the first one
    assert first.step()
    assert first.kept == [24]
    assert [one.begin() for one in others] == [True, True]
    assert cache.stats.hit_tokens == 48
    for one in (first, *others):
        one.end()

    cache = make(every=64)
    Request(cache, tokens).run()
    second, third = Request(cache, tokens), Request(cache, tokens)
    assert second.begin()
    assert not third.begin()
    second.end()  # it is cancelled: the other computes it
    assert third.begin()
    third.step()
    assert third.kept == [28]


def test_no_block_for_the_copy_of_the_first_one() -> None:
    """Nothing is taken then: a request is known by its first block."""
    cache, tokens = make(num_blocks=7), list(range(24))
    Request(cache, tokens).run()
    held = cache.pool.allocate(2)  # gives up what lies behind the checkpoint
    text = cache.text(tokens)
    assert text.take() == []
    assert text.resumes is None
    cache.pool.free(held)
    assert cache.pool.num_free == 6


def test_what_is_refused() -> None:
    for options in ({"every": 6}, {"every": 0}, {"num_checkpoints": 0}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            make(**options)


# ------------------------------------------------------------------------------------------ a state machine
class Machine:
    """Requests in any order; what each block and checkpoint holds is written down as well."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.pool = BlockPool(self.r.choice([9, 17, 30]))
        sizes = {"num_checkpoints": self.r.choice([1, 2, 5]), "every": self.r.choice([2, 4, 16])}
        self.cache = CheckpointedPrefixCache(self.pool, 2, keep=self.r.random() < 0.8, **sizes)
        self.systems = [self.r.choices(range(2), k=12) for _ in range(3)]
        self.waiting: list[tuple[CheckpointedText, list[int]]] = []
        self.live: list[dict[str, Any]] = []
        self.memory: dict[int, Any] = {}  # by block: its tokens and all before, and the weights
        self.states: dict[int, Any] = {}  # the same by checkpoint
        self.weights = 0

    def step(self) -> None:
        self.r.choice(
            [self.ask, self.take, self.take, self.grow, self.grow, self.grow, self.leave, self.rarely]
        )()
        self.check()

    def ask(self) -> None:
        if len(self.waiting) < 4:
            tokens = self.r.choice(self.systems)[: self.r.randint(0, 12)] + self.r.choices(range(2), k=3)
            self.waiting.append((self.cache.text(tokens), tokens))

    def take(self) -> None:
        if not self.waiting:
            return
        text, tokens = self.waiting.pop(self.r.randrange(len(self.waiting)))
        assert text.num_shared() >= 0
        blocks = text.take()
        if blocks is None:
            assert self.live  # else it would wait for ever
            self.waiting.append((text, tokens))
            return
        count = len(blocks) * 2
        assert count < len(tokens)
        state = None
        if blocks:
            assert text.resumes is not None
            assert self.pool.ref_count(blocks[0]) == 1
            assert self.states[text.resumes.checkpoint] == (tokens[:count], self.weights)
            self.memory[blocks[0]] = self.memory[text.resumes.first_block]
            state = tokens[:count]
        for place, block in enumerate(blocks):
            assert self.memory[block] == (tokens[: (place + 1) * 2], self.weights)
        text.promise()
        one = {"text": text, "tokens": tokens, "blocks": blocks, "computed": count, "state": state}
        self.live.append(one | {"weights": self.weights})

    def grow(self) -> None:
        if not self.live:
            return
        one = self.r.choice(self.live)
        tokens, text, before = one["tokens"], one["text"], one["computed"]
        if before == len(tokens):
            return self.end(one)
        count = text.chunk(before, min(self.r.randint(1, 9), len(tokens) - before))
        assert count >= 1
        end = before + count
        need = -(-end // 2) - len(one["blocks"])
        if need > self.pool.num_free:
            return self.end(self.r.choice(self.live))
        one["blocks"] += self.pool.allocate(need)
        for place in range(before // 2, -(-end // 2)):
            assert self.pool.ref_count(one["blocks"][place]) == 1  # nothing shared is written
            self.memory[one["blocks"][place]] = tokens[: min(end, (place + 1) * 2)], one["weights"]
        one["computed"], one["state"] = end, tokens[:end]
        text.computed(end, one["blocks"])
        checkpoint = text.checkpoint(end)
        if checkpoint is not None:
            self.states[checkpoint] = one["state"], one["weights"]

    def end(self, one: dict[str, Any]) -> None:
        self.live.remove(one)
        if self.r.random() < 0.1:
            one["text"].forget()
        else:
            one["text"].leave()
        self.pool.free(one["blocks"])

    def leave(self) -> None:
        if self.live and self.r.random() < 0.4:
            self.end(self.r.choice(self.live))

    def rarely(self) -> None:
        if self.r.random() < 0.05:
            self.cache.clear("weights")
            self.weights += 1
        elif self.r.random() < 0.1:
            held = self.pool.allocate(self.r.randint(0, self.pool.num_free))
            self.memory |= dict.fromkeys(held, "another's")
            self.pool.free(held)

    def check(self) -> None:
        cache = self.cache
        known = set(self.pool._kept)
        assert set(cache.checkpoints) <= known
        assert sorted([*cache.checkpoints.values(), *cache._free]) == list(range(cache.num_checkpoints))
        texts = {one["text"] for one in self.live}
        assert set(cache._coming.values()) <= texts
        assert set(cache._coming) <= known
        assert cache._evicted <= known
        assert set(cache._unused) <= set(cache.checkpoints)
        assert set(cache._promised.values()) <= texts
        if not self.live:
            assert self.pool.num_used == 0


@pytest.mark.parametrize("seed", range(40))
def test_any_order_keeps_the_books(seed: int) -> None:
    machine = Machine(seed)
    for _ in range(400):
        machine.step()
    while machine.live:
        machine.end(machine.live[0])
        machine.check()
