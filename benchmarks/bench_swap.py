"""Blocks between a GPU and pinned host memory: bytes per second next to the link's, the time of the host, and
what a captured step costs while copies run.

    PYTHONPATH=. python benchmarks/bench_swap.py [--output FILE]

Checks that what comes back is what left, then times. The link is `copy_` of 256 MiB. ``runs``: neighbouring
slots; ``scattered``: drawn. The last line is one JSON document.
"""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from documents import command_line, finish
from measuring import conditions

from torchpaged import PagedKVCache
from torchpaged.cache.host_blocks import HostBlocks

#: Layers, kv heads and head_dim.
SHAPES = {"llama-8b": (32, 8, 128), "llama-1b": (16, 8, 64)}
NUM_BLOCKS, NUM_SLOTS = 1400, 1300


def seconds_of(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Of one call among ``count`` back to back, and those of the host in it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    on_host = time.perf_counter() - began
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count, on_host / count


def link() -> dict[str, float]:
    there = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    seconds = {}
    for _ in range(2):  # the first touches the memory
        seconds["out"] = seconds_of(lambda: there.copy_(here, non_blocking=True), 8)[0]
        seconds["in"] = seconds_of(lambda: here.copy_(there, non_blocking=True), 8)[0]
    return {way: 2**28 / 1e9 / value for way, value in seconds.items()}


def made(shape: str) -> tuple[PagedKVCache, HostBlocks]:
    layers, heads, dim = SHAPES[shape]
    cache = PagedKVCache.uniform(layers, heads, dim, num_blocks=NUM_BLOCKS, device="cuda")
    return cache, HostBlocks(cache, NUM_SLOTS * cache.bytes_per_block)


def check(cache: PagedKVCache, host: HostBlocks) -> None:
    pools, blocks = list(cache.tensors().values()), random.Random(0).sample(range(1, NUM_BLOCKS), 100)
    for pool in pools:
        pool.normal_()
    want = [pool[blocks] for pool in pools]
    host.swap_out(blocks, list(range(100)))
    for pool in pools:
        pool.zero_()
    host.swap_in(list(range(100)), blocks).wait()
    assert all(torch.equal(pool[blocks], before) for pool, before in zip(pools, want, strict=True))


def rates(cache: PagedKVCache, host: HostBlocks, of_link: dict[str, float]) -> dict[str, Any]:
    found, rng = {}, random.Random(1)
    for count, again in ((16, 40), (1024, 4)):
        blocks = rng.sample(range(1, NUM_BLOCKS), count)
        for kind, slots in (
            ("runs", list(range(count))),
            ("scattered", rng.sample(range(host.num_slots), count)),
        ):
            for way in ("out", "in"):

                def copy(way: str = way, slots: list[int] = slots, blocks: list[int] = blocks) -> object:
                    return host.swap_out(blocks, slots) if way == "out" else host.swap_in(slots, blocks)

                copy()
                seconds, on_host = seconds_of(copy, again)
                rate = count * host.bytes_per_block / seconds / 1e9
                found[f"{count} blocks, {kind}, {way}"] = {
                    "gb_per_s": rate,
                    "of_link": rate / of_link[way],
                    "host_us": 1e6 * on_host,
                    "alone_gb_per_s": rate * seconds / min(seconds_of(copy, 1)[0] for _ in range(5)),
                }
    return found


def step_during_copies(host: HostBlocks, turns: int = 7) -> dict[str, dict[str, float]]:
    """Of a captured chain of matrix products, alone and with 24 blocks copied every six replays:
    milliseconds, the median of ``turns``, and how much slower it is than alone in the same turn, since
    clocks change."""
    weights = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(60)]
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        y = x
        for weight in weights:
            y = y @ weight

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def mean(during: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(121)]
        events[0].record()
        for n in range(120):
            if n % 6 == 0:
                during()
            graph.replay()
            events[n + 1].record()
        torch.cuda.synchronize()
        return statistics.mean(a.elapsed_time(b) for a, b in itertools.pairwise(events[10:]))

    one, other = list(range(1, 25)), list(range(100, 124))
    ways: dict[str, Callable[[], object]] = {
        "alone": lambda: None,
        "during copies out": lambda: host.swap_out(one, one),
        "during copies in": lambda: host.swap_in(one, other),
        "during both": lambda: (host.swap_out(one, one), host.swap_in(other, other)),
    }
    mean(ways["alone"])
    seen = [{name: mean(way) for name, way in ways.items()} for _ in range(turns)]
    return {
        name: {
            "ms": statistics.median(turn[name] for turn in seen),
            "slower": statistics.median(turn[name] / turn["alone"] for turn in seen) - 1,
        }
        for name in ways
    }


def main() -> None:
    args = command_line(__doc__, output=Path)
    document: dict[str, Any] = {"conditions": conditions.collect(torch.device("cuda")), "link": link()}
    print(document["link"], file=sys.stderr)
    for shape in SHAPES:
        cache, host = made(shape)
        check(cache, host)
        document[shape] = rates(cache, host, document["link"])
        document[shape]["measured_gb_per_s"] = [host.out_rate / 1e9, host.in_rate / 1e9]
        print(shape, document[shape], file=sys.stderr)
        if shape == "llama-8b":
            document["step"] = step_during_copies(host)
            print(document["step"], file=sys.stderr)
        del cache, host
    finish(document, args.output)


if __name__ == "__main__":
    main()
