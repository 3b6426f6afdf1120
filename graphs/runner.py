"""DecodeGraphRunner: one captured graph per batch bucket, replayed for every batch and every length.

    runner = DecodeGraphRunner(step, max_batch_size=64, max_blocks_per_req=128, block_size=16, device="cuda")
    runner.capture()
    logits = runner.run(input_ids=[5, 9, 2], seq_lens=[17, 4, 33], block_tables=[[1, 2], [3], [4, 5, 6]])  # [3, vocab]

``step(input_ids, metadata) -> Tensor [num_rows, ...]`` is any callable. On a CPU the same code runs with an eager capture.

With `DecodeRows` as its buffers the graph holds the whole step, sampling and bookkeeping included, ``steps_per_launch`` times over;
a launch then takes nothing from the host::

    runner = DecodeGraphRunner(step, rows=rows, device="cuda")
    runner.replay(num_rows); rows.tokens_out
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import checks_device_values
from torchpaged.custom_ops.errors import ArgumentError, CaptureError
from torchpaged.graphs.addresses import CapturedAddresses
from torchpaged.graphs.buckets import bucket_for, check_buckets, default_buckets
from torchpaged.graphs.buffers import DecodeBuffers, buffers_of_sizes
from torchpaged.graphs.capture import CaptureBackend, Captured, CudaCapture, EagerCapture, TapeCapture
from torchpaged.graphs.capture_bucket import capture_bucket
from torchpaged.graphs.report import BucketReport, describe_bucket
from torchpaged.graphs.rows import DecodeRows
from torchpaged.graphs.step import NoSession, Ranges, Step, StepSession, bucket_step, no_range
from torchpaged.metadata import AttentionMetadata, HostLengths

Progress = Callable[[int, int, str], None]


class DecodeGraphRunner:
    """Captures a decode step per bucket and replays it.

    Args:
        step: ``step(input_ids [n] int64, metadata) -> [n, ...]``; must not read device values on the host.
        max_batch_size: rows of the largest bucket.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        num_blocks: blocks in the pools, to check ids against; None skips that check.
        rows: in place of these four: `DecodeRows`, whose sampling and bookkeeping become part of the graph, ``rows.steps_per_launch``
            steps a replay. `replay` and `capture` are all there is then; `run` and `run_eager` load batches from the host.
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
        session: the `torchpaged.Session` that the step's layers share. Its `plan` is called outside the graph, before a capture and, if it plans
            every step, before each replay; it is made as new after what was cut short, and checked with ``debug``. None: the layers have
            sessions of their own, which need no plan.

    Warm-up and capture run on padding rows only, so that they write nothing into the caches.
    """

    def __init__(
        self,
        step: Step,
        *,
        max_batch_size: int | None = None,
        max_blocks_per_req: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        rows: DecodeRows | None = None,
        buckets: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        capture: str | CaptureBackend = "auto",
        compile: bool = True,
        warmup_iters: int = 2,
        progress: Progress | None = None,
        watch: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]] | None = None,
        debug: bool | None = None,
        ranges: Ranges | None = None,
        session: StepSession | None = None,
    ) -> None:
        sizes = {"max_batch_size": max_batch_size, "max_blocks_per_req": max_blocks_per_req, "block_size": block_size}
        self.buffers = buffers_of_sizes(sizes, device, num_blocks) if rows is None else None
        if rows is not None and any(size is not None for size in (*sizes.values(), num_blocks)):
            raise ArgumentError("rows", "DecodeRows or sizes", "both", "the rows know their sizes")
        self.rows = rows
        self._session: StepSession = NoSession() if session is None else session
        if rows is not None and rows.steps_per_launch > 1 and self._session.plans_every_step:
            raise ArgumentError("rows", "steps_per_launch=1 with a backend that plans every step on the host", str(rows.steps_per_launch))
        max_batch_size = self._static.max_batch_size
        self.buckets = check_buckets(default_buckets(max_batch_size) if buckets is None else buckets, max_batch_size)
        self.device = torch.device(device)
        self._eager_step = step
        self._steps = {n: torch.compile(bucket_step(step, n), fullgraph=True, dynamic=False) if compile else step for n in self.buckets}
        if isinstance(capture, str):
            if capture != "auto":
                raise ArgumentError("capture", "'auto' or a CaptureBackend", repr(capture))
            capture = CudaCapture(self.device) if self.device.type == "cuda" else EagerCapture()
        if compile and isinstance(capture, TapeCapture):
            raise ArgumentError("compile", "False with a TapeCapture", "True", "the tape can't see the kernels that Inductor generates")
        self._backend = capture
        self._stepwise = isinstance(capture, EagerCapture)  # Python at each replay, which may be interrupted between steps
        self._pool = capture.new_pool()
        self._warmup_iters, self._progress = warmup_iters, progress
        self._addresses = CapturedAddresses(lambda: {**self._static.tensors(), **self._session.tensors()}, watch)
        self._debug = checks_device_values() if debug is None else debug
        self._ranges = no_range if ranges is None else ranges
        self._dirty = False  # inside a capture or a launch, or one of them did not come to its end
        self._graphs: dict[int, Captured] = {}
        self._views: dict[int, tuple[Tensor, AttentionMetadata]] = {}
        self._reports = {n: BucketReport(n) for n in self.buckets}
        self._seen: dict[int, int] = {}

    def capture(self) -> None:
        """Capture every bucket that is not captured yet, largest first, so that the smaller ones reuse its memory.

        Raises:
            CaptureError: names the bucket and the cause; what that capture took is freed, the others stay, and `run_eager` works.
        """
        todo = [n for n in reversed(self.buckets) if n not in self._graphs]
        gc.collect()  # what nobody uses any more gives its memory to the graphs
        for done, bucket in enumerate(todo):
            self._capture_one(bucket)
            if self._progress:
                self._progress(done + 1, len(todo), describe_bucket(bucket, self.device))

    def capture_for(self, num_rows: int) -> None:
        """Capture the bucket of ``num_rows`` rows unless it is captured; raises as `capture` does."""
        bucket = bucket_for(self.buckets, num_rows)
        if bucket not in self._graphs:
            self._capture_one(bucket)

    def _capture_one(self, bucket: int) -> None:
        eager = "run_eager()" if self.rows is None else "launch_eager()"
        self._dirty = True
        with self._ranges("capture", padded=bucket), torch.inference_mode(), self._static.padding(bucket):
            self._session.reset()
            try:
                if self._session.plans:
                    self._session.plan(self._view(bucket)[1])
                graph = capture_bucket(
                    self._launch(bucket, self._steps[bucket]), self._backend, self._pool, self._reports[bucket], self.device,
                    warmup_iters=self._warmup_iters, step="decode step", eager=self._launch(bucket, self._eager_step),
                    advice=f"; {eager} still works",
                )  # fmt: skip
            finally:
                self._session.reset()
        self._addresses.note(bucket)
        self._graphs[bucket] = graph
        self._dirty = False

    def _view(self, num_rows: int) -> tuple[Tensor, AttentionMetadata]:
        """One view per number of rows: a session knows the batch that it planned by its identity."""
        if num_rows not in self._views:
            self._views[num_rows] = self._static.view(num_rows)
        return self._views[num_rows]

    def _launch(self, bucket: int, step: Step) -> Callable[[], Tensor]:
        """What one replay does: a step over the buffers, or whole steps over the rows."""
        input_ids, metadata = self._view(bucket)
        rows = self.rows
        if rows is None:
            return lambda: step(input_ids, metadata)

        def launch() -> Tensor:
            for index in range(rows.steps_per_launch):
                rows.finish_step(step(input_ids, metadata), bucket, index)
            return rows.tokens_out

        return launch

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
        rows, buffers = len(seq_lens), self._host_buffers("run")
        bucket = bucket_for(self.buckets, rows)
        buffers.check(input_ids, seq_lens, block_tables, bucket)
        if bucket not in self._graphs:
            if isinstance(input_ids, Tensor):
                input_ids = input_ids.clone()  # it may be a slice of the buffers, which a capture overwrites
            self._capture_one(bucket)
        with torch.inference_mode():
            buffers.load(input_ids, seq_lens, block_tables, bucket)
            pad = [0] * (bucket - rows) if self._session.plans_every_step else []
            return self._start(rows, host=HostLengths([1] * rows + pad, [*seq_lens, *pad])).output[:rows]

    def replay(self, num_rows: int) -> Tensor:
        """Replay the bucket of ``num_rows`` rows on the buffers or rows as they are.

        Returns:
            The step's output for these rows; with `DecodeRows`, ``[steps_per_launch, num_rows]`` int64 tokens.

        Raises:
            RingFullError: with `DecodeRows`, ``rows.ring`` has no place for its tokens; nothing is launched then.
            SemaphoreError: the session's semaphore is not zero behind the launch (debug mode): its results are wrong.
        """
        output = self._start(num_rows).output
        return output[:num_rows] if self.rows is None else output[:, :num_rows]

    def launch(self, num_rows: int) -> None:
        """`replay` for callers that know where the result will be, such as ``rows.tokens_out``: a view costs as much as the launch. Its
        bucket is captured first if it is not; raises as `capture` does."""
        self._start(num_rows, capture=True)

    def _start(self, num_rows: int, capture: bool = False, host: HostLengths | None = None) -> Captured:
        if self._dirty:
            self.reset()
        if self.rows is not None:
            self.rows.ring.check_room()
        bucket = bucket_for(self.buckets, num_rows)
        graph = self._graphs.get(bucket)
        if graph is None:
            if not capture:
                raise CaptureError(f"bucket {bucket}: not captured yet; call capture() or run() first")
            self._capture_one(bucket)
            graph = self._graphs[bucket]
        debug, rows = self._debug, self.rows
        if debug:
            self._addresses.check(bucket)
        report = self._reports[bucket]
        report.hits += 1
        self._seen[num_rows] = self._seen.get(num_rows, 0) + 1
        report.padded_rows += bucket - num_rows
        with self._ranges("replay", batch=num_rows, padded=bucket):
            self._dirty = True
            if self._session.plans_every_step:
                self._session.plan(self._view(bucket)[1], host)
            if rows is not None:
                rows.ring.begin()
            if rows is not None and self._stepwise:
                with rows.whole():
                    graph.replay()
            else:
                graph.replay()
        if rows is not None:
            rows.ring.count()
        self._dirty = False
        if debug:
            self._session.check(f"a replay of bucket {bucket}")
        return graph

    def reset(self) -> None:
        """Make host and device agree again after a capture or launch that failed or was interrupted; requests stay in their rows.

        Waits for the device, makes the session as new, and counts a launch that the device began and the host did not (``rows.ring.settle``). The
        next launch does it by itself.
        """
        with torch.inference_mode():
            self._static.reset()
            self._session.reset()
        self._dirty = False

    def run_eager(self, input_ids: Sequence[int] | Tensor, seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]) -> Tensor:
        """The same step without graph, padding or compilation."""
        buffers = self._host_buffers("run_eager")
        if self._dirty:
            self.reset()
        with self._ranges("run_eager", batch=len(seq_lens)), torch.inference_mode():
            buffers.load(input_ids, seq_lens, block_tables, len(seq_lens))
            self._dirty = True
            if self._session.plans:
                self._session.plan(self._view(len(seq_lens))[1], HostLengths([1] * len(seq_lens), seq_lens))
            output = self._eager_step(*self._view(len(seq_lens)))
            self._dirty = False
            return output

    def launch_eager(self, num_rows: int) -> Tensor:
        """What `replay` does, without graph, padding or compilation: for `DecodeRows`.

        If it is interrupted between its steps, the rows are as before it on a CPU, and of no known state on a GPU: write them again.
        """
        if self.rows is None:
            raise ArgumentError("rows", "a runner over DecodeRows", "one over DecodeBuffers", "call run_eager()")
        if self._dirty:
            self.reset()
        self.rows.ring.check_room()
        with self._ranges("run_eager", batch=num_rows), torch.inference_mode():
            self._dirty = True
            if self._session.plans:
                self._session.plan(self._view(num_rows)[1])
            self.rows.ring.begin()
            with self.rows.whole() if self.device.type == "cpu" else contextlib.nullcontext():  # its copies are no part of the step
                tokens = self._launch(num_rows, self._eager_step)()[:, :num_rows]
        self.rows.ring.count()
        self._dirty = False
        return tokens

    def report(self) -> list[BucketReport]:
        """Per bucket: capture time, memory, replays and padded rows."""
        return [self._reports[bucket] for bucket in self.buckets]

    @property
    def capture_backend(self) -> CaptureBackend:
        """How its steps become graphs."""
        return self._backend

    @property
    def pool(self) -> Any:
        """The memory pool of its graphs, for another runner of the same `capture_backend` whose replays never overlap with these."""
        return self._pool

    @property
    def _static(self) -> DecodeBuffers | DecodeRows:
        static = self.buffers if self.rows is None else self.rows
        assert static is not None
        return static

    def _host_buffers(self, asked: str) -> DecodeBuffers:
        if self.buffers is None:
            raise ArgumentError("rows", "a runner over DecodeBuffers", "one over DecodeRows", f"{asked}() loads a batch from the host: call "
                                "rows.write() and replay()")  # fmt: skip
        return self.buffers

    def histogram(self) -> dict[int, int]:
        """How often each number of rows was replayed: for `buckets_by_cost`."""
        return dict(sorted(self._seen.items()))
