"""Threads that submit, stream, cancel and leave requests of one started Generator at random: each request
gets the tokens that it gets alone, all of them unless it was cancelled.

    PYTHONPATH=. python tests/support/many_threads.py 600 32 0    # seconds, threads, seed
"""

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torchpaged.engine import Generator, SamplingParams

WAYS = ("generate", "samples", "stream", "events", "cancel", "leave", "forget")


def in_threads(works: Sequence[Callable[[], None]], seconds: float = 250) -> None:
    """Run all side by side; raises what one of them raised, and where one hangs."""
    wrong: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if wrong:
        raise wrong[0]


class Caller:
    """One thread's calls.

    Args:
        generator: started.
        requests: prompts, and how to sample.
        want: their tokens alone.
        seed: of what it draws.
    """

    def __init__(
        self,
        generator: Generator,
        requests: Sequence[tuple[list[int], SamplingParams]],
        want: Sequence[list[int]],
        seed: int,
    ) -> None:
        self.generator, self.requests, self.want = generator, requests, want
        self.draw, self.done = random.Random(seed), Counter[str]()

    def turn(self) -> None:
        """One request, or several samples of one, in one of the `WAYS`."""
        which, way = self.draw.randrange(len(self.requests)), self.draw.choice(WAYS)
        (prompt, params), want = self.requests[which], self.want[which]
        self.done[way] += 1
        if way in ("generate", "samples"):
            prompts = [prompt] if way == "generate" else [prompt] * 3
            for output in self.generator.generate(prompts, params):
                assert output.token_ids == want, f"{output.token_ids} for {want}"
                self.done["tokens"] += len(want)
            return
        request, stop = self.generator.submit(prompt, params), self.draw.randrange(8)
        if way == "forget":
            self.generator.cancel(request)
        elif way == "events":
            self._compare(asyncio.run(self._listen(request)), want)
        else:
            self._stream(request, way, stop, want)

    def _stream(self, request: int, way: str, stop: int, want: list[int]) -> None:
        found, reason, stream = list[int](), None, self.generator.stream([request])
        for count, event in enumerate(stream):
            found += [] if event.token_id is None else [event.token_id]
            reason = event.finish_reason
            if way == "cancel" and count == stop:
                self.generator.cancel(request)
            elif way == "leave" and count == stop:
                break
        stream.close()  # type: ignore[attr-defined]
        assert reason in ("length", "cancelled") or way == "leave", reason
        self._compare(found, want, whole=way == "stream" or reason == "length")

    async def _listen(self, request: int) -> list[int]:
        return [e.token_id async for e in self.generator.events(request) if e.token_id is not None]

    def _compare(self, found: list[int], want: list[int], whole: bool = True) -> None:
        self.done["tokens"] += len(found)
        assert found == (want if whole else want[: len(found)]), f"{found} for {want}"


def run_threads(
    generator: Generator,
    requests: Sequence[tuple[list[int], SamplingParams]],
    want: Sequence[list[int]],
    *,
    threads: int,
    turns: int | None = None,
    seconds: float = 80.0,
    seed: int = 0,
) -> Counter[str]:
    """Let so many threads call a started Generator, each ``turns`` times, or None: for ``seconds``. Returns
    how often which call was made, and how many tokens were compared.

    Raises:
        AssertionError: wrong tokens, a thread that hangs, or blocks or requests that are left.
    """
    callers = [Caller(generator, requests, want, seed * 1000 + number) for number in range(threads)]
    end = time.monotonic() + seconds

    def work(caller: Caller) -> None:
        made = 0
        while made != turns and time.monotonic() < end:
            caller.turn()
            made += 1

    in_threads([lambda c=c: work(c) for c in callers], seconds + 60)  # type: ignore[misc]
    left = list(generator.stream())  # of those that were forgotten
    assert {event.finish_reason for event in left} <= {None, "length", "cancelled"}
    assert not generator.has_unfinished
    assert generator.pool.num_used == 0, "blocks were lost"
    return sum((caller.done for caller in callers), Counter())


def random_requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """With common beginnings, half of them drawn."""
    draw = random.Random(seed)
    heads = [draw.choices(range(8, 99), k=draw.choice((9, 20, 40))) for _ in range(3)]
    made = []
    for number in range(count):
        prompt = draw.choice([*heads, []])[: draw.randint(0, 40)] + draw.choices(
            range(8, 99), k=draw.randint(1, 9)
        )
        warm: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9} if number % 2 else {}
        made.append(
            (prompt, SamplingParams(max_new_tokens=draw.randint(1, 30), ignore_eos=True, seed=number, **warm))
        )
    return made


def main(seconds: float, threads: int, seed: int) -> None:
    """A tiny model, few blocks, launches of two steps."""
    from random_setups import model_of

    model, requests = model_of("Llama", False), random_requests(seed, 48)
    shape: dict[str, Any] = {"max_seq_len": 96, "block_size": 4, "prefill_chunk_size": 32, "compile": False}
    with Generator(model, max_batch_size=1, share_prefixes=False, graphs=False, **shape) as one:
        want = [one.generate([prompt], params)[0].token_ids for prompt, params in requests]
    with Generator(model, max_batch_size=16, num_blocks=90, steps_per_launch=2, **shape).start() as generator:
        done = run_threads(generator, requests, want, threads=threads, seconds=seconds, seed=seed)
        metrics = generator.metrics()
    print(dict(done))
    print(
        f"{metrics.finished}, {metrics.preemptions} preemptions, {generator.stats.mixed_steps} mixed steps, "
        f"{metrics.prefix_hit_rate:.2f} of prompts found"
    )


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
