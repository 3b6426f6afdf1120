"""HostBlocks: bytes go to the host and come back, whatever a layer keeps; on a CPU. On a GPU:
tests/gpu/test_swap.py."""

import contextlib
import copy
import ctypes
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchpaged import ArgumentError, NotCopyableError, PagedKVCache
from torchpaged.cache import KVLayerSpec, LatentLayerSpec, StateLayerSpec, host_copies
from torchpaged.cache.host_blocks import HostBlocks
from torchpaged.cache.host_copies import HostMemory
from torchpaged.cache.latent import IndexedLatentLayerSpec
from torchpaged.custom_ops.block_ops import many_copies

KV, LATENT, STATE = KVLayerSpec(2, 6, 10), LatentLayerSpec(12, 4), StateLayerSpec(4, 6)
CACHES: dict[str, dict[str, Any]] = {
    "bf16": {"layers": [KV, KV]},
    "e4m3, odd widths": {"layers": [KVLayerSpec(1, 5, 3)] * 3, "dtype": torch.float8_e4m3fn, "block_size": 3},
    "latents": {"layers": [LATENT, IndexedLatentLayerSpec(12, 4, 6)], "dtype": torch.float32},
    "several kinds": {"layers": [KV, STATE, LATENT], "max_num_reqs": 3},
    "a ring": {"layers": [KV, KV], "blocks_of": {1: 5}},
}


def filled(layers: Sequence[Any], **options: Any) -> tuple[PagedKVCache, dict[str, torch.Tensor]]:
    """A cache of random bytes, NaN and infinities among them, and its pools that blocks share, as bytes."""
    cache = PagedKVCache(layers, **{"block_size": 4, "num_blocks": 12, **options})
    pools = {}
    for name, pool in cache.tensors().items():
        as_bytes = pool.view(torch.uint8)
        as_bytes.copy_(torch.randint(0, 256, as_bytes.shape, dtype=torch.uint8))
        if int(name.split("[")[1][:-1]) not in cache.blocks_of:
            pools[name] = as_bytes
    return cache, pools


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_blocks_come_back_as_they_left(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, pools = filled(**options)
    monkeypatch.setattr(host_copies, "_PIECE", 4096)  # slots lie in several pieces of memory
    host = HostBlocks(cache, 40 * cache.bytes_per_block + 4096)
    assert host.bytes_per_block == cache.bytes_per_block
    others = {name: x.clone() for name, x in cache.tensors().items() if name not in pools}
    want = {name: pool.clone() for name, pool in pools.items()}
    slots = [*torch.randperm(host.num_slots)[:5].tolist(), 0]
    slots = list(dict.fromkeys(slots))
    out = [7, 3, 11, 1, 9, 2][: len(slots)]
    host.swap_out(out, slots)
    for pool in pools.values():
        pool[1:].fill_(0xFF)
    back = [2, 11, 4, 7, 1, 8][: len(slots)]
    arrival = host.swap_in(slots, back)
    assert arrival.ready()
    arrival.wait()
    for name, pool in pools.items():
        assert torch.equal(pool[back], want[name][out]), name
        rest = sorted(set(range(1, 12)) - set(back))
        assert (pool[rest] == 0xFF).all(), "blocks that were not asked for"
    assert all(
        torch.equal(cache.tensors()[n].view(torch.uint8), x.view(torch.uint8)) for n, x in others.items()
    )
    host.swap_out([], [])
    assert host.swap_in([], []).ready()


def test_all_layers_of_a_block_lie_together() -> None:
    cache, pools = filled([KV, LATENT])
    host = HostBlocks(cache, 2**20)
    host.swap_out([5], [3])
    want = torch.cat([pool[5].flatten() for pool in pools.values()])
    assert torch.equal(host._memory.pieces[0][3], want)


@pytest.mark.parametrize("out", [True, False])
def test_all_slots_are_one_call_of_the_driver(out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are one copy, but where a piece of memory ends; on a CPU, whose driver is this function."""
    calls = list[tuple[int, int, int]]()

    def driver(*given: Any) -> int:
        count, how, stream = given[3].value, given[4]._obj, given[7].value
        columns = [(ctypes.c_uint64 * count).from_address(pointer.value) for pointer in given[:3]]
        for to, source, size in zip(*columns, strict=True):
            ctypes.memmove(to, source, size)
        calls.append((count, how.source_order, stream))
        return 0

    monkeypatch.setattr(many_copies, "_call", lambda: driver)
    memory = HostMemory(40 * 24, 24, False)
    assert memory._rows == 2  # slots of a piece
    slots, stream = [3, 4, 17, 0, 6, 7, 8], SimpleNamespace(cuda_stream=77)
    buffer = torch.randint(0, 256, (9, 24), dtype=torch.uint8)
    held = torch.randint(0, 256, (memory.num_slots, 24), dtype=torch.uint8)
    for slot, row in enumerate(held):
        memory.pieces[slot // 2][slot % 2] = row
    want_held, want_buffer = held.clone(), buffer.clone()
    if out:
        want_held[slots] = buffer[:7]
    else:
        want_buffer[:7] = held[slots]
    memory.copy(buffer, slots, out, stream)  # type: ignore[arg-type]
    assert torch.equal(torch.cat(memory.pieces)[: len(held)], want_held)
    assert torch.equal(buffer, want_buffer)
    assert calls == [(6, 1, 77)]


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_copies, "_call", lambda: lambda *given: 1)
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed: 1"):
        many_copies.copy_many([1], [2], [3], 0)


def test_a_finalizer_calls_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may come in the middle of another engine's capture: memory that is gone waits for
    the next call of our own."""
    told: list[Any] = []
    monkeypatch.setattr(host_copies, "_tell_allocator", lambda *given: told.append(given))
    monkeypatch.setattr(host_copies, "_Buffers", lambda *_: SimpleNamespace(stream="a stream", buffers=[]))
    monkeypatch.setattr(host_copies, "BlockPacking", lambda *_: SimpleNamespace(tables=[]))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    memory = HostMemory(64, 16, False)
    copies = host_copies.GPUCopies([], [0], memory, torch.device("cpu"))
    pieces = memory.pieces
    del copies, memory
    assert not told
    HostBlocks(filled([KV])[0], memory_budget=1 << 20)
    [(kept, streams, _)] = told
    assert kept is pieces and streams == ("a stream", "a stream")


class _Driver:
    """Devices, streams and events in place of torch's: an event that is given no stream takes that of the
    device that is current, as torch.Event does. ``ahead``: of each stream, those that it waited for."""

    def __init__(self) -> None:
        self.device, self.stream, self.ahead = 0, dict[int, str](), dict[str, set[str]]()

    def current(self, device: torch.device | None = None) -> str:
        index = self.device if device is None else device.index or 0
        return self.stream.get(index, f"current of {index}")

    @contextlib.contextmanager
    def on(self, device: torch.device, stream: str | None = None) -> Iterator[None]:
        before = self.device, dict(self.stream)
        self.device = device.index or 0
        if stream is not None:
            self.stream[self.device] = stream
        yield
        self.device, self.stream = before

    def named(self, device: torch.device, name: str) -> str:
        """A stream of this name, which is current within its block."""
        driver = self

        class Stream(str):
            def __enter__(self) -> None:
                self.on = driver.on(device, str(self))
                self.on.__enter__()

            def __exit__(self, *error: object) -> None:
                self.on.__exit__(None, None, None)

        return Stream(name)

    def event(self, device: torch.device) -> SimpleNamespace:
        recorded: list[str] = []

        def wait(stream: str | None = None) -> None:
            self.ahead.setdefault(stream or self.current(), set()).update(recorded[-1:])

        return SimpleNamespace(
            device=device, record=lambda stream=None: recorded.append(stream or self.current()), wait=wait
        )


def test_copies_are_in_the_order_of_their_own_device_whichever_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, device, names = _Driver(), torch.device("cuda", 1), iter(("out", "in", "unpacks"))
    nothing = SimpleNamespace(tables=[], run=lambda *given, **options: None)
    monkeypatch.setattr(host_copies, "BlockPacking", lambda *_: nothing)
    monkeypatch.setattr(host_copies, "to_device", lambda numbers, *_: numbers)
    monkeypatch.setattr(
        host_copies, "record_behind", lambda event, device: event.record(driver.current(device))
    )
    monkeypatch.setattr(
        host_copies,
        "torch",
        SimpleNamespace(
            Event=driver.event,
            empty=lambda *sizes, **_: SimpleNamespace(record_stream=lambda stream: None),
            uint8=None,
            int64=None,
            cuda=SimpleNamespace(
                Stream=lambda _: driver.named(device, next(names)),
                current_stream=driver.current,
                device=driver.on,
            ),
        ),
    )
    monkeypatch.setattr(host_copies._Buffers, "parts", lambda self, count: [(0, [0] * count, self._free[0])])
    memory: Any = SimpleNamespace(pieces=[], copy=lambda *given: None)
    copies = host_copies.GPUCopies([], [64], memory, device)
    copies.out([1, 2], [0, 1])
    copies.into([0, 1], [3, 4]).wait()
    assert driver.ahead == {
        "current of 1": {"unpacks"},
        "out": {"current of 1"},
        "in": {"out"},
        "unpacks": {"current of 1", "in"},
    }


def test_rates_are_measured_and_the_null_block_stays() -> None:
    cache, pools = filled([KV])
    want = {name: pool.clone() for name, pool in pools.items()}
    host = HostBlocks(cache, 2**16)
    assert host.out_rate > 0 < host.in_rate
    assert all(torch.equal(pool, want[name]) for name, pool in pools.items())
    assert repr(host) == f"HostBlocks({host.num_slots} blocks, 64.00 KiB, of 'cpu')"


def test_what_is_refused() -> None:
    cache, _ = filled([KV])
    with pytest.raises(ArgumentError, match="^memory_budget: expected at least 256 bytes, .* got 255"):
        HostBlocks(cache, 255)
    with pytest.raises(ArgumentError, match="^memory_budget: "):
        HostBlocks(cache, 0)
    with pytest.raises(ArgumentError, match="^cache: expected one with layers that keep blocks"):
        HostBlocks(filled([KV], blocks_of={0: 5})[0], 2**20)
    host = HostBlocks(cache, 2**16)
    with pytest.raises(ArgumentError, match="^slots: expected one for each of 2 blocks, got 1"):
        host.swap_out([1, 2], [0])
    with pytest.raises(NotCopyableError):
        copy.deepcopy(host)


def test_two_threads_give_back_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one takes the last between the look and the taking."""

    class Taken(list[Any]):
        def __bool__(self) -> bool:
            self.clear()
            return True

    monkeypatch.setattr(host_copies, "_retired", Taken([()]))
    host_copies.free_retired()
