"""What blocks and tokens cost the host: microseconds of its thread for the prefix cache per request that
finds nothing, for a scheduler's step at 256 requests, the tokens of that step and their events, and for
forks; and how much of the blocks in use holds tokens under a log-normal load.

    PYTHONPATH=. python benchmarks/bench_blocks.py [--rows 256] [--output FILE]

No model runs: tokens are drawn at random, in arrays as the engine has them. Of a step ``schedule`` is what
`Scheduler` and `PrefixCache` do on the host, ``tokens`` the way of each request's token from a launch to it,
and ``events`` what `Generator.step` makes of these; no text. Times are those of the thread
(`time.thread_time`), and what is compared runs in turns of a request or of 25 steps, so that other processes
count little and alike. The last line is one JSON document.
"""

import random
import statistics
import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from documents import command_line, finish
from measuring import conditions

from torchpaged.cache import BlockPool, PrefixCache
from torchpaged.cache.requests import CacheRequests
from torchpaged.engine.acceptor import Acceptor
from torchpaged.engine.batch_steps import BatchSteps
from torchpaged.engine.decisions import LOOKAHEAD
from torchpaged.engine.hand_out import HandOut
from torchpaged.engine.launches import Launch, Launches
from torchpaged.engine.metrics import measured
from torchpaged.engine.outputs import GeneratorStats, TextStream
from torchpaged.engine.sampling import SamplingParams
from torchpaged.engine.scheduler import Schedule, Scheduler
from torchpaged.engine.sequence import Inbox, Sequence, StepCount

BLOCK_SIZE = 16
#: Steps of a load before the next one's.
TURN = 25
#: Medians and deviations of the logarithm of lengths: means of 215 and 198 when cut at 1,024 (ShareGPT's).
PROMPT, OUTPUT, LONGEST = (114.5, 1.25), (124.5, 1.0), 1024


def drawn(rng: random.Random, median: float, deviation: float) -> int:
    return min(LONGEST, max(4, round(median * rng.lognormvariate(0.0, deviation))))


def prefix_cache_us(num_requests: int = 200, prompt: int = 550, output: int = 550) -> dict[str, float]:
    """Medians of a request that finds nothing, and of the same one without a cache."""
    rng = random.Random(0)
    total, first = -(-(prompt + output) // BLOCK_SIZE), -(-prompt // BLOCK_SIZE)
    taken = {"without": list[float](), "with": list[float]()}
    bare, pool = BlockPool(4 * total), BlockPool(4 * total)
    cache = PrefixCache(pool, BLOCK_SIZE)
    for _ in range(num_requests):
        tokens = array("q", [rng.randrange(1, 100_000) for _ in range(prompt + output)])
        began = time.thread_time()
        blocks = bare.allocate(total)
        bare.free(blocks)
        taken["without"].append(time.thread_time() - began)
        began = time.thread_time()
        text = cache.text(tokens[:prompt])
        text.num_shared()
        assert text.take() == []
        text.promise()
        blocks = pool.allocate(first)
        text.computed(prompt, blocks)
        blocks += pool.allocate(total - first)
        text.extend(tokens[prompt:-1])
        text.computed(prompt + output - 1, blocks)
        text.leave()
        pool.free(blocks)
        taken["with"].append(time.thread_time() - began)
    # The pool is full from the fourth request on: from then on blocks are given up, too.
    each = {name: 1e6 * statistics.median(seconds[4:] or seconds) for name, seconds in taken.items()}
    return each | {"us": each["with"] - each["without"], "blocks": total}


def hit_us(num_tokens: int = 8192) -> float:
    """A hit of so many tokens, from the ids to the blocks."""
    cache = PrefixCache(BlockPool(num_tokens // BLOCK_SIZE + 3), BLOCK_SIZE)
    tokens = array("q", range(num_tokens + 1))
    text = cache.text(tokens)
    blocks = (text.take() or []) + cache.pool.allocate(num_tokens // BLOCK_SIZE + 1)
    text.computed(num_tokens, blocks)
    text.leave()
    cache.pool.free(blocks)
    taken = []
    for _ in range(20):
        began = time.thread_time()
        found = cache.text(tokens).take() or []
        taken.append(time.thread_time() - began)
        assert len(found) == num_tokens // BLOCK_SIZE
        cache.pool.free(found)
    return 1e6 * statistics.median(taken)


def fork_us(num_tokens: int) -> dict[str, float]:
    """Of one request: another holder of each block, and `CacheRequests.fork`, whose forks share chunks of
    blocks, without the tensors of a cache; each at its first and its later calls."""
    pool = BlockPool(num_tokens // BLOCK_SIZE + 2)
    pool.copied_by(_COPIER.copy)
    rows = CacheRequests(pool, 1, BLOCK_SIZE)
    rows.append([num_tokens])
    blocks, taken = rows.block_tables[0], {"holders": list[float](), "rows": list[float]()}
    for _ in range(50):
        began = time.thread_time()
        child = pool.fork(blocks)
        taken["holders"].append(time.thread_time() - began)
        pool.free(child)
    for _ in range(50):
        began = time.thread_time()
        fork = rows.fork()
        taken["rows"].append(time.thread_time() - began)
        fork.free()
    found = {name: 1e6 * statistics.median(seconds) for name, seconds in taken.items()}
    return found | {"rows, first": 1e6 * taken["rows"][0]}


class _NoTensors:
    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Nothing to copy."""


_COPIER = _NoTensors()


class Load:
    """Requests of log-normal lengths through a `Scheduler`, without a model.

    Args:
        rows: requests at once.
        num_blocks: of the pool.
        lookahead: tokens ahead of need, as of `Generator`.
        cached: with a prefix cache.
    """

    def __init__(
        self, rows: int, num_blocks: int, lookahead: int = 0, cached: bool = True, seed: int = 0
    ) -> None:
        self.rng, pool = random.Random(seed), BlockPool(num_blocks)
        prefixes = PrefixCache(pool, BLOCK_SIZE) if cached else None
        self.stats, self.count, self.steps = GeneratorStats(num_blocks), 0, StepCount()
        options: dict[str, Any] = {"prefixes": prefixes, "mixes": True, "steps": self.steps}
        self.scheduler = Scheduler(pool, BLOCK_SIZE, rows, 2048, 1, lookahead, **options)
        self.requests, self.inbox = dict[int, Sequence](), Inbox()
        # Of the decode loop what tokens meet on their way.
        none: Any = None
        stage: Any = SimpleNamespace(stage=SimpleNamespace(record_words=0))
        self.loop: Any = SimpleNamespace(launches=Launches(stage), release=self._release)
        acceptor = Acceptor(self.requests, self.scheduler, self.loop, self.stats)
        self.batch = BatchSteps(self.scheduler, self.loop, none, acceptor, none, self.stats, True, True)
        self.scheduler.remove = self._remove  # type: ignore[method-assign]
        self.ending = 0.0  # seconds of a step's requests that ended, which are the scheduler's
        self.seconds: dict[str, list[float]] = {"schedule": [], "tokens": [], "events": []}
        self.utilisation: list[float] = []

    def submit(self) -> None:
        prompt = [self.rng.randrange(1, 100_000) for _ in range(drawn(self.rng, *PROMPT))]
        params = SamplingParams(drawn(self.rng, *OUTPUT))
        most = len(prompt) + params.max_new_tokens
        one = Sequence(self.count, prompt, params, 0, TextStream(None), most, inbox=self.inbox)
        one.end_token_ids = (0,)
        self.requests[self.count] = one
        self.scheduler.add(one)
        self.count += 1

    def step(self) -> None:
        began = time.thread_time()
        asked = self.scheduler.ask()
        self.scheduler.short_of_blocks(asked)
        plan: Schedule = self.scheduler.schedule(asked)
        for sequence, count in plan.chunks:
            sequence.num_computed += count
            self.scheduler.blocks.computed(sequence)
        scheduled = time.thread_time() - began
        for sequence in plan.put_back:
            sequence.row = None
        ends = [s for s, _ in plan.chunks if s.remaining == 0]
        self._launch([*plan.decodes, *ends], len(plan.decodes))
        self.ending = 0.0
        began = time.thread_time()
        self.batch._collect(self.loop, keep=0)
        accepted = time.thread_time()
        assert len(HandOut(self.inbox).take()) == len(plan.decodes) + len(ends)
        self.seconds["events"].append(time.thread_time() - accepted)
        self.seconds["tokens"].append(accepted - began - self.ending)
        self.seconds["schedule"].append(scheduled + self.ending)

    def _launch(self, sequences: list[Sequence | None], decodes: int) -> None:
        """A packed batch, as `DecodeLoop.finish_packed` says."""
        for sequence in filter(None, sequences):
            if sequence.row is None:
                sequence.row, sequence.step_count = 0, self.steps
                sequence.steps_read = self.steps.started
            sequence.steps_read -= 1
        self.steps.most += 1
        copied: Any = SimpleNamespace(read=[self.rng.randrange(1, 100_000) for _ in sequences].copy)
        self.loop.launches.add(Launch(-1, copied, sequences, 1, decodes))

    def _release(self, sequence: Sequence) -> None:
        sequence.row = None

    def _remove(self, sequence: Sequence) -> None:
        began = time.thread_time()
        Scheduler.remove(self.scheduler, sequence)
        self.ending += time.thread_time() - began

    def run(self, steps: int) -> None:
        for _ in range(steps):
            while len(self.scheduler.waiting) < 4:
                self.submit()
            self.step()
            if len(self.seconds["schedule"]) % 8 == 0:
                self.utilisation.append(measured(self.scheduler, self.stats).utilisation)


def spread(values: list[float]) -> dict[str, float]:
    kept = sorted(values)
    return {
        "mean_us": statistics.mean(kept),
        "p50_us": kept[len(kept) // 2],
        "p99_us": kept[int(0.99 * len(kept))],
    }


def loads(rows: int, steps: int) -> dict[str, Any]:
    """A pool that holds all requests, and one that holds three quarters of what they would take."""
    all_loads = {
        f"{name}, {'with' if cached else 'without'} prefix cache": Load(rows, num_blocks, LOOKAHEAD, cached)
        for name, num_blocks in (("room", rows * 66), ("short", rows * 20))
        for cached in (False, True)
    }
    for _ in range(-(-steps // TURN)):
        for load in all_loads.values():
            load.run(TURN)
    found = {}
    for name, load in all_loads.items():
        found[name] = {
            part: spread([1e6 * x for x in seconds[steps // 3 :]]) for part, seconds in load.seconds.items()
        } | {
            "running": len(load.scheduler.running),
            "preemptions": load.scheduler.preemptions,
            "utilisation": statistics.mean(load.utilisation[len(load.utilisation) // 3 :]),
        }
    return found


def main() -> None:
    args = command_line(__doc__, rows=(256, "requests at once"), steps=(1500, "of each load"), output=Path)
    runs = [prefix_cache_us() for _ in range(5)]
    document = {
        "conditions": conditions.collect(torch.device("cpu")),
        "prefix_cache": sorted(runs, key=lambda run: run["us"])[len(runs) // 2],
        "hit_8k_us": hit_us(),
        "fork_us": {str(n): fork_us(n) for n in (1024, 8192, 131_072)},
        "steps": loads(args.rows, args.steps),
    }
    for name, value in document.items():
        print(f"{name}: {value}", file=sys.stderr)
    finish(document, args.output)


if __name__ == "__main__":
    main()
