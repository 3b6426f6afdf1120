"""What compilers report, and kernels that are compiled ahead of their launches; compilers and GPU are
stand-ins."""

import os
import runpy
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from torchpaged.custom_ops import ahead, compiles, launches
from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.triton import kernel_store, launching, stored_kernel
from torchpaged.custom_ops.triton.compile_together import compile_together

_NAMED = stored_kernel.KernelRef("", "some_kernel")


def test_torch_compile_reports_once_a_graph_and_after_a_reset() -> None:
    import torch._dynamo

    for _ in range(2):
        compiles.watch_torch()
        compiles.watch_torch()  # once is enough
        before = compiles.count()
        compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        for _ in range(2):
            compiled(torch.zeros(2))
        [event] = compiles.since(before)
        assert event.compiler == "torch.compile"
        assert 0 < event.seconds < 600
        compiled(torch.zeros(3, 3))
        assert compiles.count() == before + 2
        torch.compiler.reset()


class _Kernel:
    """A kernel of Triton's."""

    __name__ = "some_kernel"

    def __init__(self) -> None:
        self.warmed: list[Any] = []
        self.launched: list[Any] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.warmed.append((threading.current_thread().name, grid, options))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launched.append((grid, options))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors are on a GPU."""
    monkeypatch.setattr(kernel_store, "_on_cuda", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    yield


def test_triton_kernels_are_compiled_in_a_thread_once_for_each_specialisation(gpu: None) -> None:
    kernel, x = _Kernel(), torch.zeros(64)
    with ahead.gathering() as gathered:
        for size, at in ((16, x), (32, x), (16, x), (1, x), (16, x[1:])):
            kernel_store.launch_kernel(kernel, (2,), at, size, WIDTH=8)
        kernel_store.launch_kernel(kernel, (2,), x, 16, WIDTH=4)
    seen: list[tuple[int, int, str]] = []
    gathered.wait(lambda *now: seen.append(now))
    assert len(gathered.kernels) == len(kernel.warmed) == 4
    assert not kernel.launched
    assert {thread for thread, *_ in kernel.warmed} == {"torchpaged compiles some_kernel"}
    assert seen == [(n + 1, len(seen), "kernel some_kernel") for n in range(len(seen))]
    kernel_store.launch_kernel(kernel, (2,), x, 16, WIDTH=8)
    assert kernel.launched == [((2,), {"WIDTH": 8})]


class _Record(NamedTuple):
    x: torch.Tensor
    stride: int


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_threads_that_wait_hold_no_memory_of_a_step(gpu: None, dtype: torch.dtype, first: int) -> None:
    seen: list[Any] = []
    may_end = threading.Event()

    def warmup(*arguments: Any, **_: Any) -> None:
        assert may_end.wait(60)
        seen.extend(arguments)

    kernel = _Kernel()
    kernel.warmup = warmup  # type: ignore[assignment]
    x = torch.zeros(4096, dtype=dtype)[first:]
    given = x, _Record(x, 16), 3, None
    alive, wanted = weakref.ref(x), stored_kernel.specialise(_NAMED, stored_kernel.flatten(given))
    with ahead.gathering() as gathered:
        kernel_store.launch_kernel(kernel, (1,), *given)
    del x, given
    try:
        assert alive() is None
    finally:
        may_end.set()
        gathered.wait()
    assert stored_kernel.specialise(_NAMED, stored_kernel.flatten(seen)) == wanted
    assert type(seen[1]) is _Record
    assert seen[0].untyped_storage().nbytes() <= 64


def test_a_mixed_batch_s_kernels_are_gathered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launch: Any = SimpleNamespace(is_stored=lambda: pytest.fail("compiled where it stands"))
    device = torch.device("cuda", 0)
    with ahead.gathering():
        compile_together("a key of this test", device, launch, launch)
    with pytest.raises(pytest.fail.Exception, match="where it stands"):
        compile_together("a key of this test", device, launch, launch)


def test_other_threads_launch_meanwhile(gpu: None) -> None:
    kernel = _Kernel()
    with ahead.gathering() as gathered:
        other = threading.Thread(target=kernel_store.launch_kernel, args=(kernel, (1,), torch.zeros(4)))
        other.start()
        other.join()
    assert not gathered.kernels
    assert len(kernel.launched) == 1


def test_what_fails_to_compile_fails_at_its_launch_not_before() -> None:
    def fail() -> None:
        raise ValueError("no such instruction")

    with ahead.gathering() as gathered:
        gathered.compile("a", "some_kernel", fail)
        gathered.compile("a", "some_kernel", fail)
    gathered.wait()
    assert len(gathered.kernels) == 1


def test_nvrtc_kernels_end_their_op_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    may_end = threading.Event()

    def machine_code(file: str, *_: Any) -> bytes:
        assert may_end.wait(60)
        compiled.append(file)
        return b""

    monkeypatch.setattr(jit, "machine_code", machine_code)
    monkeypatch.setattr(jit, "unavailable", lambda: None)
    monkeypatch.setattr(jit, "Kernel", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    device, config = torch.device("cuda", 0), ("some constants",)
    with ahead.gathering() as gathered:
        for file in ("decode.cu", "decode.cu", "prefill.cu"):
            assert launches.around is not None
            with launches.around("paged_attention", ()):
                jit.kernel(file, "paged", config, device, shared_bytes=0)  # type: ignore[arg-type]
                raise AssertionError("launched")
        may_end.set()
        gathered.wait()
        assert sorted(compiled) == ["decode.cu", "prefill.cu"]
        assert len(gathered.kernels) == 2
        with pytest.raises(
            pytest.fail.Exception, match="loaded"
        ):  # an op's second kernel comes to be known, too
            jit.kernel("decode.cu", "paged", config, device, shared_bytes=0)  # type: ignore[arg-type]
    assert launches.around is None
    assert ahead.here() is None
    jit._ahead.clear()


def test_nothing_is_gathered_where_ops_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = object()
    monkeypatch.setattr(launches, "around", watch)
    with ahead.gathering() as gathered:
        assert ahead.here() is None
    assert not gathered.kernels
    assert launches.around is watch


def test_a_thread_gives_what_it_compiled() -> None:
    future: Future[Any] = ahead.in_a_thread(lambda: 5, "some_kernel")
    assert future.result(timeout=60) == 5


def test_a_host_of_many_cores_runs_no_compiler_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    room = runpy.run_path(ahead.__file__)["_ROOM"]
    assert [room.acquire(blocking=False) for _ in range(17)] == [True] * 16 + [False]
