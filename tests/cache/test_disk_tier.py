"""Blocks that leave the host come back from a file with what they held, or not at all: random operations, and
every fault of a disk."""

import errno
import itertools
import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tiered_engine import SIZE, TieredEngine, check_slots

from torchpaged import ArgumentError
from torchpaged.cache.disk_blocks import DiskBlocks
from torchpaged.cache.disk_tier import DiskTier

pytestmark = pytest.mark.timeout(300)  # a hang is a failure


def tier(engine: TieredEngine) -> DiskTier:
    assert isinstance(engine.host, DiskTier)
    return engine.host


def settle(engine: TieredEngine) -> None:
    tier(engine)._settle_writes()


TEXTS = [list(range(100 * i, 100 * i + 17)) for i in range(12)]


def on_disk(folder: Path) -> TieredEngine:
    """Twelve texts of four blocks were computed: the pool holds seven blocks, the host twenty, a file the
    others."""
    engine = TieredEngine(8, 20, folder, 60)
    for text in TEXTS:
        engine.run(text)
        settle(engine)
    assert tier(engine).num_on_disk > 8
    return engine


@pytest.mark.parametrize(("num_slots", "num_places"), [(1, 30), (5, 3), (5, 30), (12, 300)])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_order_texts_come_in(seed: int, num_slots: int, num_places: int, tmp_path: Path) -> None:
    draw, engine = random.Random(seed), TieredEngine(14, num_slots, tmp_path, num_places)
    systems = [[draw.randrange(1000) for _ in range(draw.randrange(4, 25))] for _ in range(5)]
    for turn in range(200):
        tokens = draw.choice(systems)[: draw.randrange(1, 30)] + [draw.randrange(3) for _ in range(6)]
        engine.run(tokens, draw.choice([None, "salt"]))
        if draw.random() < 0.5 or num_places < num_slots:  # few are read back unless each write is waited for
            settle(engine)
        if draw.random() < 0.02:
            engine.prefixes.clear("weights")
            assert (len(engine.host), tier(engine).num_on_disk) == (0, 0)
        if draw.random() < 0.1:  # it is cancelled while its blocks are on their way
            left = engine.prefixes.text(tokens)
            blocks = left.take() or []
            if left.arrival is not None:
                left.arrival.leave()
            (left.forget if draw.random() < 0.5 else left.leave)()
            engine.cache.pool.free(blocks)
            for one in list(tier(engine)._returning):
                one.job.wait()
            engine.host.flush()
            engine.check_books()
        if turn == 100:
            engine.host.recompute_seconds = lambda: draw.choice([0.0, 1e-9, 1e9])
    assert tier(engine).read_blocks > 0 or num_slots == 1
    assert tier(engine).num_on_disk <= num_places
    assert not tier(engine).errors


def test_a_hit_comes_back_from_the_file(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    assert not list(tmp_path.iterdir()), "the file has no name"
    for _ in range(2):
        for text in TEXTS:
            assert engine.run(text) == 4
            settle(engine)
    stats, disk = engine.prefixes.stats, tier(engine)
    assert 0 < stats.disk_tokens == disk.read_blocks * SIZE <= stats.host_tokens
    assert disk.written_blocks <= len(TEXTS) * 4 + 8, "a copy that the file has is not written again"


def flip(engine: TieredEngine) -> str:
    file = tier(engine).disk._file.fileno()
    size = os.fstat(file).st_size
    data = bytearray(os.pread(file, size, 0))
    data[:] = bytes(byte ^ 1 for byte in data)
    os.pwrite(file, data, 0)
    return "wrong checksum"


def truncate(engine: TieredEngine) -> str:
    os.ftruncate(tier(engine).disk._file.fileno(), 10)
    return "truncated"


def lost_write(engine: TieredEngine) -> str:
    file = tier(engine).disk._file.fileno()
    os.pwrite(file, bytes(os.fstat(file).st_size), 0)
    return "wrong checksum"


def unreadable(engine: TieredEngine) -> str:
    file = os.open(os.devnull, os.O_WRONLY)  # reading it is refused
    os.dup2(file, tier(engine).disk._file.fileno())
    os.close(file)
    return os.strerror(errno.EBADF).lower()


@pytest.mark.parametrize("fault", [flip, truncate, lost_write, unreadable])
def test_a_block_that_does_not_come_back_is_computed(
    fault: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, noted = on_disk(tmp_path), list[int]()
    before, reason = tier(engine).read_blocks, fault(engine)
    monkeypatch.setattr(tier(engine).disk, "note_read", lambda num_rows, _: noted.append(num_rows))
    with caplog.at_level(logging.WARNING):
        for text in TEXTS:
            engine.run(text)  # checks what it reads
            settle(engine)
    disk, missed = tier(engine), engine.prefixes.stats.missed_tokens
    # What is written behind the end of a file that was cut off leaves a hole, perhaps while others are read.
    said = disk.errors.keys() & {reason, *(["wrong checksum"] if fault is truncate else [])}
    assert sum(disk.errors[one] for one in said) > 1
    assert sum(missed.get(f"disk: {one}", 0) for one in said) > 0
    assert sum(noted) == disk.read_blocks - before, "the rate is that of blocks that came back"
    assert len(caplog.records) == len(disk.errors), "each said once"
    assert disk.errors.keys() == said
    if fault in (flip, lost_write):  # what was written since is right
        read, errors = disk.read_blocks, disk.errors[reason]
        for _ in range(2):
            for text in TEXTS:
                engine.run(text)
                settle(engine)
        assert disk.read_blocks > read
        assert disk.errors[reason] == errors


@pytest.mark.parametrize("room", [0, 5])
def test_a_full_disk_takes_no_more(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, write = TieredEngine(8, 20, tmp_path, 60), DiskBlocks._write_row

    def full(disk: DiskBlocks, slot: int, row: Any) -> Any:
        return write(disk, slot, row) if slot < room else OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskBlocks, "_write_row", full)
    for _ in range(3):
        for text in TEXTS:
            engine.run(text)
            settle(engine)
    disk = tier(engine)
    assert disk.errors.keys() == {"no space left on device"}
    assert disk.num_on_disk <= room
    assert disk.written_blocks > room or not room, "what it has room for is used over and over"
    assert disk._num_places < 60
    assert len(caplog.records) == 1
    tried = disk.errors["no space left on device"]
    for text in TEXTS:
        engine.run(text)
    assert disk.errors["no space left on device"] == tried, "it is not tried again"


def test_nothing_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes that never end: the host goes on as if there were no disk. Reads: others go on."""
    engine, gate = TieredEngine(8, 20, tmp_path, 60), threading.Event()
    write, read = DiskBlocks._write_row, DiskBlocks._read_row
    try:
        with monkeypatch.context() as patch:
            patch.setattr(DiskBlocks, "_write_row", lambda *a: gate.wait() and write(*a))
            for text in TEXTS:
                engine.run(text)
            assert tier(engine)._writing
            assert not tier(engine).num_on_disk
            gate.set()
            settle(engine)
        for text in TEXTS:
            engine.run(text)
            settle(engine)
        gate.clear()
        monkeypatch.setattr(DiskBlocks, "_read_row", lambda *a: gate.wait(60) and read(*a))
        waiting, other = engine.prefixes.text(TEXTS[0]), engine.prefixes.text(TEXTS[0])
        blocks = waiting.take()
        assert blocks is not None
        waiting.promise()
        assert waiting.arrival is not None
        assert not waiting.arrival.ready()
        assert other.take() is None, "it waits for the same blocks"
        engine.host.flush()
        waiting.arrival.leave()
        waiting.leave()
        engine.cache.pool.free(blocks)
        mine = engine.cache.pool.allocate(engine.cache.pool.num_free)
        engine.host.flush()
        pools = list(engine.cache.tensors().values())
        for pool in pools:
            pool[mine] = 7.0
        assert tier(engine)._returning, "it is still read"
        gate.set()
        tier(engine)._returning[0].job.wait()
        engine.host.flush()
        assert all((pool[mine] == 7.0).all() for pool in pools), "its blocks are others' now"
        engine.cache.pool.free(mine)
        engine.check_books()
        assert engine.run(TEXTS[0]) == 4
    finally:
        gate.set()


def test_forgotten_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, read = on_disk(tmp_path), DiskBlocks._read_row
    gate = threading.Event()
    monkeypatch.setattr(DiskBlocks, "_read_row", lambda *a: gate.wait(60) and read(*a))
    text = engine.prefixes.text(TEXTS[0])
    blocks = text.take()
    assert blocks is not None
    assert text.arrival is not None
    gate.set()
    engine.prefixes.clear("other weights")
    check_slots(engine.host)
    assert text.arrival.ready()
    engine.check(TEXTS[0], blocks, text.num_arriving)
    text.leave()
    engine.cache.pool.free(blocks)
    assert engine.run(TEXTS[0]) == 0


def test_what_is_faster_to_compute_stays_there(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    disk = tier(engine)
    disk.blocks.in_rate, disk.disk.in_rate = 1e12, 1.0
    read, disk.recompute_seconds = disk.read_blocks, lambda: 1e-6
    for text in TEXTS:
        engine.run(text)
    assert disk.read_blocks == read
    assert disk.loaded_blocks > 0, "but what the host has came back"


def test_texts_of_more_than_half_the_host_are_found_again(tmp_path: Path) -> None:
    """Each pushes out the one before whole, the beginning last."""
    engine = TieredEngine(6, 7, tmp_path, 60)
    for text in TEXTS:
        engine.run(text)
        settle(engine)
    for text in TEXTS[2:8]:
        assert engine.run(text) == 4
        settle(engine)


def test_a_disk_that_was_slow_for_a_while_is_tried_again(tmp_path: Path) -> None:
    """Nothing but a read tells that it is faster now; a tenth of the speed that pays takes 75 refusals."""
    engine = on_disk(tmp_path)
    disk = tier(engine)
    disk.blocks.in_rate, seconds = 1e12, SIZE * 1e-4
    disk.recompute_seconds, disk.disk.in_rate = lambda: 1e-4, 0.1 * disk.blocks.bytes_per_block / seconds
    read, turns = disk.read_blocks, 0
    while disk.read_blocks == read:
        engine.run(TEXTS[turns % len(TEXTS)])
        settle(engine)
        turns += 1
        assert turns < 200
    assert turns > 70


def test_what_waits_behind_other_reads_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two hits is worth it, the second behind it is not; nor is the time until somebody asks
    taken for the disk's. By a clock that each look moves on."""
    engine, read = on_disk(tmp_path), DiskBlocks._read_row
    disk = tier(engine)
    rate = disk.disk.in_rate = 10 * disk.blocks.bytes_per_block
    disk.blocks.in_rate, disk.recompute_seconds = 1e12, lambda: 0.15 / SIZE
    gate, ticks = threading.Event(), itertools.count()
    monkeypatch.setattr("torchpaged.cache.disk_blocks.time.perf_counter", lambda: next(ticks) * 1e-3)
    monkeypatch.setattr(DiskBlocks, "_read_row", lambda *a: gate.wait(60) and read(*a))
    keys = list(disk._on_disk)
    cold = [key for key in keys if disk._is_cold(key)]
    assert len(cold) >= 8
    assert disk.worth_loading(cold[:4], SIZE) == 4
    first, second = engine.cache.pool.allocate(4), cold[4:8]
    arrival = disk.load(cold[:4], first)
    assert disk.worth_loading(second, SIZE) == 0
    assert disk.disk.in_rate > rate
    gate.set()
    arrival.wait()
    assert disk.worth_loading(second, SIZE) == 4
    one: Any = disk.disk.read([(0, disk.blocks.row(0))], [0], lambda: None)
    one.wait()
    seconds = one.seconds
    next(ticks)
    assert 0 < one.seconds == seconds
    engine.cache.pool.free(first)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="^size: expected at least 64 bytes, those of a block, got 63"):
        DiskBlocks(tmp_path, 63, 64)
    with pytest.raises(ArgumentError, match="^folder: expected one that can be written to, got .*none"):
        DiskBlocks(tmp_path / "none", 640, 64)
    disk = DiskBlocks(tmp_path, 640, 64)
    assert repr(disk) == "DiskBlocks(10 blocks, 640 bytes)"
    disk.close()
    disk.close()


def test_a_disk_that_is_full_at_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torchpaged.cache.disk_blocks.os.pwrite", full)
    with pytest.raises(ArgumentError, match="^folder: expected one with room for blocks, .*No space left"):
        DiskBlocks(tmp_path, 640, 64)
