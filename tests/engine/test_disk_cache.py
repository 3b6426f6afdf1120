"""An engine whose blocks go on from the host to a disk: tokens are those without, whatever the disk does; a
fault costs the request that meets it time alone."""

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import said_in_a_child
from late_disk import LateDisk
from tiered_engine import check_slots

from torchpaged import ArgumentError
from torchpaged.cache.disk_blocks import DiskBlocks
from torchpaged.cache.disk_tier import DiskTier
from torchpaged.engine import Generator, SamplingParams

pytestmark = pytest.mark.timeout(300)
DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(3, 99) for _ in range(DRAW.randint(12, 40))] for _ in range(12)]
PARAMS = [
    SamplingParams(max_new_tokens=6 + i, ignore_eos=True, temperature=0.9 * (i % 2), seed=i)
    for i in range(len(PROMPTS))
]
SIZES: dict[str, Any] = {"block_size": 4, "max_seq_len": 64}
#: Room for 19 blocks in the pool and 16 on the host.
SMALL: dict[str, Any] = {
    **SIZES,
    "num_blocks": 20,
    "max_batch_size": 4,
    "host_cache_memory": 16 * 4 * 2 * 2 * 2 * 16 * 4,
    "preemption": "swap",
}
STEPS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"graphs": False},
    "launches of 3": {"steps_per_launch": 3},
    "auto": {"preemption": "auto"},
}


def made(model: Any, folder: Path, **options: Any) -> tuple[Generator, DiskTier]:
    generator = Generator(model, **{**SMALL, **options}, disk_cache_path=folder, disk_cache_size=2**20)
    assert generator.prefix_cache is not None
    tier = generator.prefix_cache.host
    assert isinstance(tier, DiskTier)
    if options.get("preemption") != "auto":
        tier.recompute_seconds = None  # the disk is always faster
    return generator, tier


@pytest.fixture(scope="module")
def alone(model: Any) -> list[list[int]]:
    generator = Generator(model, **SIZES, max_batch_size=1, graphs=False, prefix_cache=False)
    return [output.token_ids for output in generator.generate(PROMPTS, PARAMS)]


def run(generator: Generator, want: list[list[int]], seed: int) -> None:
    order = random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS))
    outputs = generator.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    assert [output.token_ids for output in outputs] == [want[i] for i in order]
    assert generator.pool.num_free == generator.pool.num_usable
    assert generator.prefix_cache is not None
    assert generator.prefix_cache.host is not None
    check_slots(generator.prefix_cache.host)
    found = generator.stats.prefix_cache
    assert found.queried_tokens == found.hit_tokens + sum(found.missed_tokens.values())


def late(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr("torchpaged.engine.kept_prefixes.DiskBlocks", lambda *args: LateDisk(draw, *args))


@pytest.mark.slow_cases("launches of 3-*", "no graphs-late", "auto-threads")
@pytest.mark.parametrize("disk", ["threads", "late"])
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_tokens_are_the_same(
    model: Any,
    alone: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    disk: str,
) -> None:
    if disk == "late":
        late(monkeypatch)
    generator, tier = made(model, tmp_path, **options)
    with generator:
        for seed in range(4):
            run(generator, alone, seed)
            tier._settle_writes()  # or else threads may have written nothing so far
        if options.get("preemption") != "auto":
            assert generator.stats.prefix_cache.disk_tokens > 0
        assert not tier.errors
        metrics = generator.metrics()
        assert metrics.disk_blocks == tier.num_on_disk > 0
        text = metrics.prometheus()
        assert f"torchpaged_disk_tokens_total {metrics.disk_tokens}" in text
        assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="closed file"):
        tier.disk._file.fileno()


def test_a_slow_disk_is_not_read_for_requests_that_were_put_back(
    model: Any, alone: list[list[int]], tmp_path: Path
) -> None:
    generator, tier = made(model, tmp_path)
    with generator:
        tier.recompute_seconds = lambda: 0.0
        for seed in range(3):
            run(generator, alone, seed)
            tier._settle_writes()
        assert generator.stats.swapped > 0
        assert tier.num_on_disk > 0
        assert tier.read_blocks == 0


def every_byte(disk: Any) -> None:
    size = disk._file.seek(0, 2)
    disk._file.seek(0)
    data = bytes(byte ^ 1 for byte in disk._file.read(size))
    disk._file.seek(0)
    disk._file.write(data)


#: And what may be said of it: a write behind the end of a file that was cut off leaves a hole.
FAULTS: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "altered": (every_byte, {"wrong checksum"}),
    "truncated": (lambda disk: disk._file.truncate(0), {"truncated", "wrong checksum"}),
}


@pytest.mark.slow_cases("truncated-calls", "altered-start*")
@pytest.mark.parametrize("background", [False, True], ids=["calls", "start()"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_come_back_is_computed(
    model: Any, alone: list[list[int]], tmp_path: Path, fault: str, background: bool
) -> None:
    happen, reasons = FAULTS[fault]
    generator, tier = made(model, tmp_path)
    with generator:
        if background:
            generator.start()
        for seed in range(4):
            run(generator, alone, seed)
            with generator._calls.held():
                tier._settle_writes()
                happen(tier.disk)
        metrics = generator.metrics()
        said, missed = metrics.disk_errors.keys(), generator.stats.prefix_cache.missed_tokens
        assert set() < said <= reasons
        assert sum(missed.get(f"disk: {reason}", 0) for reason in said) > 0
        for reason in said:
            assert f'torchpaged_disk_errors_total{{reason="{reason}"}}' in metrics.prometheus()
        assert not generator.stats.finished.get("error")


def test_a_full_disk(
    model: Any, alone: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, tier = made(model, tmp_path)
    monkeypatch.setattr(DiskBlocks, "_write_row", lambda *_: OSError(28, "No space left on device"))
    for seed in range(3):
        run(generator, alone, seed)
    tier._settle_writes()
    assert generator.metrics().disk_errors.keys() == {"no space left on device"}
    assert generator.metrics().disk_blocks == 0


@pytest.mark.slow_cases("2", "3")
@pytest.mark.parametrize("seed", range(4))
def test_faults_cancels_and_late_reads_in_any_order(
    model: Any, alone: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    late(monkeypatch, seed)
    draw, (generator, tier) = random.Random(seed), made(model, tmp_path, graphs=seed % 2 == 0)
    wanted: dict[int, tuple[list[int], bool]] = {}
    found: dict[int, list[int]] = {}
    disk: Any = tier.disk
    for _ in range(150):
        if draw.random() < 0.3 and len(generator._requests) < 8:
            i = draw.randrange(len(PROMPTS))
            request = generator.submit(PROMPTS[i], PARAMS[i])
            wanted[request], found[request] = (alone[i], True), []
        if draw.random() < 0.05 and generator._requests:
            request = draw.choice(list(generator._requests))
            generator.cancel(request)
            wanted[request] = wanted[request][0], False
        if draw.random() < 0.05:
            disk.spoil()
        if draw.random() < 0.02:
            generator.reset_prefix_cache()
        for event in generator.step():
            if event.token_id is not None:
                found[event.request_id].append(event.token_id)
    for event in generator.stream():
        if event.token_id is not None:
            found[event.request_id].append(event.token_id)
    for request, (tokens, is_whole) in wanted.items():
        assert found[request] == (tokens if is_whole else tokens[: len(found[request])])
    assert generator.pool.num_free == generator.pool.num_usable
    assert tier.read_blocks > 0
    check_slots(tier)


def test_what_is_refused(model: Any, tmp_path: Path) -> None:
    folder, host = {"disk_cache_path": tmp_path}, {"host_cache_memory": 2**20}
    file = tmp_path / "file"
    file.touch()
    for options, match in (
        (folder | host, "^disk_cache_size: expected a folder with disk_cache_size, and bytes"),
        ({"disk_cache_size": 2**20, **host}, "^disk_cache_path: expected a folder with disk_cache_size"),
        (folder | host | {"disk_cache_size": 0}, "^disk_cache_size: expected at least 1"),
        (folder | host | {"disk_cache_size": 100}, "^disk_cache_size: expected at least [0-9]* bytes"),
        (host | {"disk_cache_size": 2**20, "disk_cache_path": file}, "^disk_cache_path: expected None or a"),
        (host | {"disk_cache_size": 2**20, "disk_cache_path": 7}, "^disk_cache_path: expected None or a"),
    ):
        with pytest.raises(ArgumentError, match=match):
            Generator(model, **SIZES, **options)


@pytest.mark.parametrize("size", [2**20, 2**13])
def test_without_memory_on_the_host_it_has_some_for_what_comes_and_goes(
    model: Any, alone: list[list[int]], tmp_path: Path, size: int
) -> None:
    """For four of the longest texts, however little the disk holds."""
    options = {**SMALL, "host_cache_memory": None, "disk_cache_path": tmp_path, "disk_cache_size": size}
    with Generator(model, **options) as generator:
        assert generator.prefix_cache is not None
        tier = generator.prefix_cache.host
        assert isinstance(tier, DiskTier)
        tier.recompute_seconds = None
        assert tier.blocks.num_slots == 4 * SIZES["max_seq_len"] // SIZES["block_size"]
        for seed in range(4):
            run(generator, alone, seed)
            tier._settle_writes()
        assert generator.metrics().disk_blocks > 0
        if size == 2**20:
            assert generator.stats.prefix_cache.disk_tokens > 0


@pytest.mark.parametrize("call", ["generate", "close"])
def test_a_forked_process_is_refused_by_name(
    model: Any, alone: list[list[int]], tmp_path: Path, call: str
) -> None:
    """It has no threads of the disk: a write under way at the fork would never end there."""
    generator, _ = made(model, tmp_path)
    run(generator, alone, seed=0)
    calls = {"generate": lambda: generator.generate(PROMPTS, PARAMS), "close": generator.close}
    said = said_in_a_child({call: calls[call]})[call]
    assert re.match(rf"TorchpagedError: .*disk_cache_path.*process {os.getpid()}.*fork", said), said
    run(generator, alone, seed=1)
    generator.close()
