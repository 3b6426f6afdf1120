"""Any order of operations on a cache's blocks keeps its books and its contents; a broken one is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
from cache_machine import run_machines

from torchpaged import ArgumentError
from torchpaged.cache import BlockPool, PrefixCache
from torchpaged.cache.idle_blocks import IdleBlocks
from torchpaged.cache.requests import CacheRequests
from torchpaged.cache.row_blocks import RowBlocks
from torchpaged.cache.runs import Runs

pytest.importorskip("safetensors", reason="safetensors is not installed")


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_operations(seed: int) -> None:
    done = run_machines(seed, 10_000)
    assert done["hit tokens"] > 200
    assert done["evicted blocks"] > 100
    assert done["restored blocks"] > 0
    assert done["swapped in"] > 0
    assert done["disk tokens"] > 0
    assert done["failed copies"] > 5
    assert done["exhausted"] > 100


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_any_order_of_many_operations(seed: int) -> None:
    assert run_machines(seed, 100_000)["hit tokens"] > 2000


def no_salt(runs: Any, front: Any, data: Any, place: int, extra: Any) -> Any:
    return (*front, None, bytes(data[place * runs.step : (place + 1) * runs.step]))


def stays_open(runs: Any, run: Any, end: int = 0) -> None:
    del run.tokens[len(run.blocks) * runs.step :]


def lost(pool: Any, blocks: Any) -> None:
    pool._held.difference_update(blocks)


def pinned_first(idle: Any, most: int = 1) -> list[int]:
    block = next(iter([*idle._priorities, *idle._in_order()]))
    idle.drop(block)
    return [block]


def owns_first(rows: Any, tables: Any) -> None:
    olds = [blocks[-1] for blocks in tables]
    for blocks in tables:
        [blocks[-1]] = rows.pool.allocate(1)
    rows._copier()([(old, blocks[-1]) for old, blocks in zip(olds, tables, strict=True)])
    rows.pool.free(olds)


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "tenants share": (Runs, "key", no_salt),
    "what was behind other tokens is found": (Runs, "cut", stays_open),
    "other weights' blocks are found": (PrefixCache, "clear", lambda cache, reason: None),
    "freed blocks are lost": (BlockPool, "free", lost),
    "a forked row writes without a copy": (CacheRequests, "_shared_tails", lambda rows, lens: []),
    "a reordered row writes without a copy": (RowBlocks, "unshare", lambda rows, kept: None),
    "a copy that fails takes the block": (CacheRequests, "_own_tails", owns_first),
    "pins go first": (IdleBlocks, "evict", pinned_first),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_cache_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, fault = FAULTS[name]
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises((AssertionError, ArgumentError)):  # the library's own checks may come first
        run_machines(0, 20_000)
