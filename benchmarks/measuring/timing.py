"""Timing: a round over all layers' caches per sample, contenders in turns, median with p20 and p80.

On a GPU a round is captured into one CUDA graph and replayed, with an event between replays that are queued
back to back, so that neither Python nor launch latency is in the figures. On a CPU a round is a plain loop
under ``time.perf_counter``.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
BURST = 4  # replays of one contender before it is the next one's turn
MAX_CALLS = 24  # calls of a round, where fewer layers than that fill the L2 cache


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over ``samples`` rounds."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int


class Sampler(Protocol):
    """Measures one contender, ``count`` rounds at a time; a sample is in microseconds per call."""

    def burst(self, count: int) -> list[float]:
        """``count`` samples."""


class CudaSampler:
    """Rounds as replays of one captured CUDA graph. Raises what the capture raises."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = list(calls)  # what they hold (workspaces, metadata, semaphores) must outlive the graph
        self.num_calls = len(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:  # compiles kernels and allocates workspaces, which a capture must not do
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = [call() for call in calls]  # what they return stays alive with the graph
        self.burst(1)

    def burst(self, count: int) -> list[float]:
        """``count`` replays behind an untimed one, which takes the switch from the last contender and the
        launch latency."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        self.graph.replay()
        marks[0].record()
        for mark in marks[1:]:
            self.graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [
            before.elapsed_time(after) * 1e3 / self.num_calls for before, after in itertools.pairwise(marks)
        ]


class CpuSampler:
    """Rounds as a plain loop."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        calls[0]()

    def burst(self, count: int) -> list[float]:
        """``count`` rounds."""
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            for call in self.calls:
                call()
            samples.append((time.perf_counter() - start) * 1e6 / len(self.calls))
        return samples


def make_sampler(calls: Sequence[Call], device: torch.device) -> Sampler:
    """The sampler for ``device``."""
    return CudaSampler(calls) if device.type == "cuda" else CpuSampler(calls)


def calls_per_round(num_layers: int, ideal_us: float) -> int:
    """Whole turns over the layers, enough of them for about 2 ms: a short graph would measure its
    own launch."""
    wanted = max(1, min(MAX_CALLS, round(2000 / max(ideal_us, 1e-3))))
    return num_layers * -(-wanted // num_layers)


def interleave(samplers: dict[str, Sampler], repeats: int) -> dict[str, Timing]:
    """At least ``repeats`` samples of every sampler, in bursts taken in turns, so that clocks and heat hit
    all alike."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(-(-repeats // BURST)):
        for name, sampler in samplers.items():
            samples[name] += sampler.burst(BURST)
    return {name: _timing(values) for name, values in samples.items()}


def _timing(samples: list[float]) -> Timing:
    cuts = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(statistics.median(samples), cuts[0], cuts[3], len(samples))


def _best_seconds(call: Call, device: torch.device, seconds: float = 0.3) -> float:
    """Seconds of the fastest of several calls."""
    call()
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begin)
    return best


def measure_bandwidth(device: torch.device) -> tuple[float, str]:
    """Bytes per second of the memory, the best of a read-only sum and a copy (bytes read and written), and
    which it was."""
    numel = (
        min(4 << 30, torch.cuda.mem_get_info(device)[0] // 4) if device.type == "cuda" else 256 << 20
    ) // 4
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    rates = {
        "read-only sum": numel * 4 / _best_seconds(source.sum, device),
        "copy": numel * 8 / _best_seconds(lambda: target.copy_(source), device),
    }
    how = max(rates, key=rates.__getitem__)
    return rates[how], f"measured by a {how} of {numel * 4 >> 20} MiB"


def measure_flop_rate(device: torch.device) -> tuple[float, str]:
    """FLOP per second of a matrix product: 8192³ bf16 on a GPU, 1024³ fp32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    rate = 2 * size**3 / _best_seconds(lambda: a @ b, device)
    return rate, f"measured by a {str(dtype).removeprefix('torch.')} matrix product of {size}³"
