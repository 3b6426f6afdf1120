"""DecodeGraphRunner: one captured graph per batch bucket, replayed for every batch and every length.

    runner = DecodeGraphRunner(step, max_batch_size=64, max_blocks_per_req=128, block_size=16, device="cuda")
    runner.capture()
    logits = runner.run(input_ids=[5, 9, 2], seq_lens=[17, 4, 33], block_tables=[[1, 2], [3], [4, 5, 6]])  # [3, vocab]

``step(input_ids, metadata) -> Tensor [num_rows, ...]`` is any callable. On a CPU the same code runs with an eager capture.
"""

from __future__ import annotations

import gc
import os
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError, CaptureError
from torchpaged.graphs.buckets import bucket_for, check_buckets, default_buckets
from torchpaged.graphs.buffers import DecodeBuffers
from torchpaged.graphs.capture import CaptureBackend, Captured, CudaCapture, EagerCapture, TapeCapture
from torchpaged.metadata import AttentionMetadata

Step = Callable[[Tensor, AttentionMetadata], Tensor]
Progress = Callable[[int, int, str], None]
Ranges = Callable[..., AbstractContextManager[None]]


@dataclass
class BucketReport:
    """What a bucket cost and did: capture time (ms), device memory taken (bytes), replays, padded rows replayed."""

    bucket: int
    capture_ms: float = 0.0
    num_bytes: int = 0
    hits: int = 0
    padded_rows: int = 0


class DecodeGraphRunner:
    """Captures a decode step per bucket and replays it.

    Args:
        step: ``step(input_ids [n] int64, metadata) -> [n, ...]``; must not read device values on the host.
        max_batch_size: rows of the largest bucket.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        num_blocks: blocks in the pools, to check ids against; None skips that check.
        buckets: batch sizes to capture; default `default_buckets`.
        device: where the step runs.
        capture: "auto" (CUDA graphs on a GPU, eager elsewhere) or a `CaptureBackend`.
        compile: run the step through ``torch.compile(fullgraph=True)``. Shapes are static per bucket: one compile a bucket, none
            per length, and kernels tuned to the size. (One dynamic compile for all would fail on models that branch on sizes.)
        warmup_iters: runs before each capture.
        progress: called with ``(done, total, text)`` after each bucket.
        watch: tensors whose addresses the graph relies on besides the buffers, such as the KV pools, by name; or a function that
            gives them, so that a replaced attribute is noticed too. Checked with ``debug``.
        debug: check every address at replay; default from ``TORCHPAGED_CHECK=1``.
        ranges: called as ``ranges("replay", batch=3, padded=4)`` around each capture, replay and eager step, for a profiler:
            gives a context manager, such as `torchpaged.profiling.range` does. Never called inside the step.

    Warm-up and capture run on padding rows only, so that they write nothing into the caches.
    """

    def __init__(
        self,
        step: Step,
        *,
        max_batch_size: int,
        max_blocks_per_req: int,
        block_size: int,
        num_blocks: int | None = None,
        buckets: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        capture: str | CaptureBackend = "auto",
        compile: bool = True,
        warmup_iters: int = 2,
        progress: Progress | None = None,
        watch: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]] | None = None,
        debug: bool | None = None,
        ranges: Ranges | None = None,
    ) -> None:
        self.buffers = DecodeBuffers(max_batch_size, max_blocks_per_req, block_size, device, num_blocks)
        self.buckets = check_buckets(default_buckets(max_batch_size) if buckets is None else buckets, max_batch_size)
        self.device = torch.device(device)
        self._eager_step = step
        self._steps = {n: torch.compile(_bucket_step(step, n), fullgraph=True, dynamic=False) if compile else step for n in self.buckets}
        if isinstance(capture, str):
            if capture != "auto":
                raise ArgumentError("capture", "'auto' or a CaptureBackend", repr(capture))
            capture = CudaCapture(self.device) if self.device.type == "cuda" else EagerCapture()
        if compile and isinstance(capture, TapeCapture):
            raise ArgumentError("compile", "False with a TapeCapture", "True", "the tape can't see the kernels that Inductor generates")
        self._backend = capture
        self._pool = capture.new_pool()
        self._warmup_iters, self._progress = warmup_iters, progress
        self._watch = watch if callable(watch) else dict(watch or {})
        self._debug = os.environ.get("TORCHPAGED_CHECK") == "1" if debug is None else debug
        self._ranges = _no_range if ranges is None else ranges
        self._graphs: dict[int, Captured] = {}
        self._addresses: dict[int, dict[str, int]] = {}  # per bucket, as captured
        self._reports = {n: BucketReport(n) for n in self.buckets}

    def capture(self) -> None:
        """Capture every bucket that is not captured yet, largest first, so that the smaller ones reuse its memory.

        Raises:
            CaptureError: names the bucket and the cause; what that capture took is freed, the others stay, and `run_eager` works.
        """
        todo = [n for n in reversed(self.buckets) if n not in self._graphs]
        for done, bucket in enumerate(todo):
            self._capture_one(bucket)
            if self._progress:
                self._progress(done + 1, len(todo), self._describe(bucket))

    def _capture_one(self, bucket: int) -> None:
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection during a capture could free device memory inside it
        try:
            with self._ranges("capture", padded=bucket):
                self._warm_up_and_capture(bucket)
        finally:
            if was_enabled:
                gc.enable()

    def _warm_up_and_capture(self, bucket: int) -> None:
        self.buffers.load_padding(bucket)
        input_ids, metadata = self.buffers.view(bucket)
        step = self._steps[bucket]
        started, before = time.perf_counter(), self._memory()
        try:
            with torch.inference_mode():
                self._backend.warmup(lambda: step(input_ids, metadata), self._warmup_iters)
                self._graphs[bucket] = self._backend.capture(lambda: step(input_ids, metadata), self._pool)
        except Exception as error:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CaptureError(f"bucket {bucket}: the decode step could not be captured: {reason}; run_eager() still works") from error
        report = self._reports[bucket]
        report.capture_ms, report.num_bytes = (time.perf_counter() - started) * 1e3, self._memory() - before
        self._addresses[bucket] = {name: tensor.data_ptr() for name, tensor in self._fixed().items()}

    def run(self, input_ids: Sequence[int] | Tensor, seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]) -> Tensor:
        """One decode step.

        Args:
            input_ids: one token per row: host ints or a device tensor int64.
            seq_lens: KV tokens per row, this step's included.
            block_tables: blocks per row.

        Returns:
            The step's output for these rows: a slice of the graph's own memory, valid until the next run.

        Raises:
            ArgumentError: rows, lengths or block ids don't fit; nothing is written then.
            CaptureError: a captured address moved (debug mode), or the bucket can't be captured (first use).
        """
        rows = len(seq_lens)
        bucket = bucket_for(self.buckets, rows)
        self.buffers.check(input_ids, seq_lens, block_tables, bucket)
        if bucket not in self._graphs:
            if isinstance(input_ids, Tensor):
                input_ids = input_ids.clone()  # it may be a slice of the buffers, which a capture overwrites
            self._capture_one(bucket)
        with torch.inference_mode():
            self.buffers.load(input_ids, seq_lens, block_tables, bucket)
            return self.replay(rows)

    def replay(self, num_rows: int) -> Tensor:
        """Replay the bucket of ``num_rows`` rows on the buffers as they are (after `advance_step`, say)."""
        bucket = bucket_for(self.buckets, num_rows)
        if bucket not in self._graphs:
            raise CaptureError(f"bucket {bucket}: not captured yet; call capture() or run() first")
        if self._debug:
            self._check_addresses(bucket)
        report = self._reports[bucket]
        report.hits += 1
        report.padded_rows += bucket - num_rows
        with self._ranges("replay", batch=num_rows, padded=bucket), torch.inference_mode():
            graph = self._graphs[bucket]
            graph.replay()
            return graph.output[:num_rows]

    def run_eager(self, input_ids: Sequence[int] | Tensor, seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]) -> Tensor:
        """The same step without graph, padding or compilation."""
        with self._ranges("run_eager", batch=len(seq_lens)), torch.inference_mode():
            self.buffers.load(input_ids, seq_lens, block_tables, len(seq_lens))
            return self._eager_step(*self.buffers.view(len(seq_lens)))

    def report(self) -> list[BucketReport]:
        """Per bucket: capture time, memory, replays and padded rows."""
        return [self._reports[bucket] for bucket in self.buckets]

    def _fixed(self) -> dict[str, Tensor]:
        return {**self.buffers.tensors(), **(self._watch() if callable(self._watch) else self._watch)}

    def _check_addresses(self, bucket: int) -> None:
        captured = self._addresses[bucket]
        for name, tensor in self._fixed().items():
            if tensor.data_ptr() != captured[name]:
                raise CaptureError(
                    f"{name}: expected at {captured[name]:#x}, where it was captured, got {tensor.data_ptr():#x}; "
                    "captured tensors must be updated in place, never replaced"
                )

    def _memory(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _describe(self, bucket: int) -> str:
        if self.device.type != "cuda":
            return f"batch {bucket}"
        free, _ = torch.cuda.mem_get_info(self.device)
        return f"batch {bucket}, {free / 2**30:.1f} GiB free"


_NO_RANGE: AbstractContextManager[None] = nullcontext()


def _no_range(name: str, **payload: object) -> AbstractContextManager[None]:
    return _NO_RANGE


def _bucket_step(step: Step, bucket: int) -> Step:
    """``step`` as a function with a code object of its own.

    Dynamo keeps its compiled entries, and counts its recompile limit, per code object: shared by all buckets, the limit of 8
    would end the ninth.
    """

    def bucket_step(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        return step(input_ids, metadata)

    code = bucket_step.__code__.replace(co_name=f"decode_{bucket}")
    return types.FunctionType(code, bucket_step.__globals__, code.co_name, None, bucket_step.__closure__)
