"""Tokens on their way to the host, read one launch late.

LaunchRing: those of a graph's launches, written into pinned memory by the graph itself.

    ring = rows.ring                        # the op `finish_step` writes it, from inside the graph
    runner.launch(num_rows)
    launch = ring.take()                    # an event behind the launch; the host goes on
    tokens = ring.read(launch, num_rows)    # waits for that event only

A copy from the device to the host would need the copy engine, microseconds away from the kernels before and
behind it, and as many of the host. Which slot a launch writes is counted on the device, so that one graph
serves all; the host counts along, and each slot holds the number of its launch, so that tokens of another one
are never taken for it.

CopiedTokens: those of other steps, copied there.

    copied = CopiedTokens(tokens)           # a copy to pinned memory and an event; the host goes on
    ...                                     # the next launch is on its way meanwhile
    tokens = copied.read()                  # waits for that event only
"""

import contextlib
import weakref

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError, TorchpagedError
from torchpaged.metadata.host import record_behind


class RingFullError(TorchpagedError, RuntimeError):
    """More launches in flight than the ring holds; read the oldest first."""


class _Memory:
    """Host memory by the CUDA array interface (version 3), which torch turns into a tensor of the GPU without
    a copy."""

    def __init__(self, host: Tensor) -> None:
        self._host = host  # the tensor made of this keeps it
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<i8",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


_ATTEMPTS = 8
#: Memory of rings that are gone, by device: a launch may still be writing it, which torch's allocator of
#: pinned memory does not know of.
_retired: list[tuple[torch.device, Tensor]] = []


def _free_retired() -> None:
    """Give back what no launch can write any more. Waits for the devices, so only where a ring is made."""
    gone = list[tuple[torch.device, Tensor]]()
    with contextlib.suppress(IndexError):  # until none is left: a finalizer may come between any two
        while True:
            gone.append(_retired.pop())
    for device in {device for device, _ in gone}:
        torch.cuda.synchronize(device)


def shared_memory(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pinned int64 memory of -1, as a tensor of the host and as one of ``device``. Needs NumPy, by which
    torch reads the array interface.

    Raises:
        TorchpagedError: the device does not share the host's addresses, or NumPy is not installed.
    """
    _free_retired()
    # blocks that torch had pinned for another GPU and kept: held, until a new one is pinned for this one
    foreign = []
    with torch.cuda.device(device):
        for _ in range(_ATTEMPTS):
            host = torch.full(shape, -1, dtype=torch.int64, pin_memory=True, device="cpu")
            try:
                tensor = torch.as_tensor(_Memory(host), device=device)
            except RuntimeError as error:
                raise TorchpagedError(
                    f"no view of pinned memory on {device} ({error}); whole steps in a graph need NumPy"
                ) from error
            if tensor.data_ptr() == host.data_ptr():
                return host, tensor
            foreign.append(host)
    raise TorchpagedError(
        f"{device} can't write pinned host memory at its own address, which whole steps in a graph need"
    )


class LaunchRing:
    """Slots for the tokens of ``depth`` launches, each of ``num_steps`` steps over up to ``num_rows`` rows.

    Args:
        depth: launches whose tokens may be unread at once.
        num_steps: steps per launch.
        num_rows: rows.
        device: where the launches run; on a CPU everything is immediate.
        record_words: words that are stored of each token besides, by torch's ops of the launch.

    Attributes:
        slots: ``[depth + 1, num_steps + 1, num_rows]`` int64, pinned, as a tensor of ``device``;
            ``slots[i, num_steps, 0]`` is the number of the launch whose tokens slot i holds, the last slot is
            for warm-ups.
        launches: ``[2]`` int64 on the device: launches so far, and 0. Negative: a warm-up, which goes to the
            last slot and is not counted.
        records: ``[depth + 1, num_steps, num_rows, record_words]`` int64, pinned
            likewise; None without words.
    """

    def __init__(
        self, depth: int, num_steps: int, num_rows: int, device: torch.device | str, record_words: int = 0
    ) -> None:
        device = torch.device(device)
        on_gpu = device.type == "cuda"
        self._depth = depth
        with torch.inference_mode(False):
            self._host, self.slots = self._memory((depth + 1, num_steps + 1, num_rows), device)
            self.records: Tensor | None = None
            if record_words:
                shape = (depth + 1, num_steps, num_rows, record_words)
                self._host_records, self.records = self._memory(shape, device)
            self.launches = torch.zeros(2, dtype=torch.int64, device=device)
        # torch.Event finds the current stream in C++: 0.5 us to record; torch.cuda.Event makes a Python
        # object of it, 4.5 us
        self._events = [torch.Event(device) for _ in range(depth)] if on_gpu else None
        self._launched = 0
        self._unread: list[int] = []  # taken launches, in order
        self._views: dict[tuple[int, int], Tensor] = {}  # made once, since reading is host time

    def _memory(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory of -1 of the host, and the same as a tensor of the device."""
        if device.type != "cuda":
            host = torch.full(shape, -1, dtype=torch.int64, device="cpu")
            return host, host
        host, tensor = shared_memory(shape, device)
        weakref.finalize(self, _retired.append, (device, host)).atexit = False
        return host, tensor

    def slot(self) -> Tensor:
        """``[1]`` int64 on the device: the slot of the launch that runs; in it, before its last step ends."""
        launch, last = self.launches[:1], self._depth
        return torch.where(launch < 0, last, launch % last)

    @property
    def launched(self) -> int:
        """Launches counted so far, which is the number of the next one."""
        return self._launched

    @property
    def unread(self) -> list[int]:
        """Launches that were taken and not read, in order."""
        return list(self._unread)

    def check_room(self) -> None:
        """Before a launch: raises RingFullError if its slot holds tokens that were taken and not read."""
        if self._unread and self._unread[0] <= self._launched - self._depth:
            launch = self._unread[0]
            raise RingFullError(
                f"launch {launch} was taken and not read, and the next one needs its slot; read({launch}, "
                "...) first"
            )

    def count(self) -> None:
        """Called after a launch was started, by the code that started it."""
        self._launched += 1

    def reset(self) -> None:
        """After a launch that failed: have the device count on from the host's number, whether it began one
        more or not. Waits for the device. Launches that were taken can still be read."""
        if self.launches.device.type == "cuda":
            torch.cuda.synchronize(self.launches.device)
        self.launches[:1].fill_(self._launched)
        self.launches[1:].zero_()

    def forget(self) -> None:
        """Launches that were taken will not be read."""
        self._unread.clear()

    def take(self) -> int:
        """The number of the newest launch, whose tokens will be read; nothing may have been launched on
        another stream since."""
        launch = self._launched - 1
        if launch < 0 or launch in self._unread:
            raise ArgumentError(
                "take",
                "a launch since the last call",
                "none",
                "take() once behind each launch whose tokens you want",
            )
        if self._events is not None:
            record_behind(self._events[launch % self._depth], self.launches.device)
        self._unread.append(launch)
        return launch

    def _wait(self, launch: int) -> int:
        """Wait for a launch that was taken and not read; returns its slot."""
        if launch not in self._unread:
            raise ArgumentError("launch", f"one of those taken and not read, {self._unread}", str(launch))
        slot = launch % self._depth
        if self._events is not None:
            self._events[slot].synchronize()
        return slot

    def read_records(self, launch: int, num_rows: int) -> Tensor:
        """``[num_steps, num_rows, record_words]`` int64 on the host: the slot itself, which `read` frees, as
        long as that is not called. Raises as `read`."""
        return self._host_records[self._wait(launch), :, :num_rows]

    def read(self, launch: int, num_rows: int) -> list[list[int]]:
        """Tokens of a launch that was taken, as ``[steps][rows]``; waits until they are there, and frees
        the slot.

        Raises:
            ArgumentError: the launch was not taken, or read before.
            TorchpagedError: the slot holds another launch's tokens: one was counted that did not run.
        """
        slot = self._wait(launch)
        view = self._views.get((slot, num_rows))
        if view is None:
            view = self._views[slot, num_rows] = self._host[slot, :, :num_rows]
        *tokens, (number, *_) = view.tolist()
        if number != launch:
            raise TorchpagedError(
                f"the slot of launch {launch} holds launch {number}: LaunchRing.count() was called without "
                "a launch"
            )
        self._unread.remove(launch)
        return tokens


class CopiedTokens:
    """Tokens, or records of them, on their way to pinned memory of their own, by a copy with an event
    behind it.

    Args:
        tokens: int64; on a CPU the copy is immediate.
    """

    def __init__(self, tokens: Tensor) -> None:
        on_gpu = tokens.is_cuda
        self._host = torch.empty(tokens.shape, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        self._host.copy_(tokens, non_blocking=True)
        # torch.Event finds the current stream in C++: 0.5 us to record; torch.cuda.Event makes a Python
        # object of it, 4.5 us
        self._event = torch.Event(tokens.device) if on_gpu else None
        if self._event is not None:
            record_behind(self._event, tokens.device)

    def wait(self) -> Tensor:
        """The tokens in host memory; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def read(self) -> list[int]:
        """The tokens of ``[n]``; waits until they are there."""
        tokens: list[int] = self.wait().tolist()
        return tokens
