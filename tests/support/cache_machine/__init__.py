"""A state machine over the blocks of one cache: operations in any order (machine.py), and what must be true
after each (books.py).

    PYTHONPATH=.:tests/support python -m cache_machine 0 1000000    # seed, operations; prints what was done
"""

import time
from collections import Counter
from unittest.mock import patch

from cache_machine.machine import CacheMachine
from torchpaged.cache.disk_tier import DiskTier


def run_machines(seed: int, operations: int, each: int = 500) -> Counter[str]:
    """Machines of ``each`` operations; returns how often which was done, and tokens found in the prefix
    cache as "hit tokens"."""
    done: Counter[str] = Counter()
    for number in range(operations // each):
        machine = CacheMachine(seed * 1_000_003 + number)
        now = patch("torchpaged.cache.idle_blocks.time.monotonic", lambda machine=machine: machine.now)
        with now, patch("torchpaged.cache.requests.CHUNK", 1 + number % 3):
            try:
                for _ in range(each):
                    machine.step()
            except Exception as error:
                error.add_note(f"CacheMachine({seed * 1_000_003 + number}), {machine.done}")
                raise
        done += machine.done
        done["hit tokens"] += machine.prefixes.stats.hit_tokens
        done["disk tokens"] += machine.prefixes.stats.disk_tokens
        if isinstance(machine.host, DiskTier):
            done["disk errors"] += sum(machine.host.errors.values())
            machine.host.close()
        done["evicted blocks"] += machine.prefixes.stats.evicted_blocks
    return done


def main(seed: int, operations: int) -> None:
    """Run them, 10,000 operations a line at most."""
    begin, done = time.monotonic(), Counter[str]()
    for part in range(operations // 10_000):
        done += run_machines(seed * 1_000 + part, 10_000)
        if part % 10 == 9:
            print(f"{(part + 1) * 10_000:,} operations, {time.monotonic() - begin:.0f} s", flush=True)
    print(dict(done.most_common()))
