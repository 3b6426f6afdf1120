"""PackedGraphRunner: one captured graph per number of tokens, replayed for prefill steps of any requests and lengths.

    runner = PackedGraphRunner(model, buckets=[64, 512], max_num_reqs=8, max_blocks_per_req=128, block_size=16, device="cuda")
    if runner.fits(num_reqs=2, num_tokens=37):
        logits = runner.run(input_ids, query_lens=[7, 30], seq_lens=[7, 95], block_tables=tables, logits_indices=[6])   # [1, vocab]

``step(input_ids, metadata, logits_indices) -> Tensor [max_num_reqs, ...]`` is any callable. A step of up to about a thousand tokens
ends on a GPU before Python has launched the next one's kernels; a replay launches them at once. Which bucket a step takes depends on its
number of tokens alone, which the host knows anyway. On a CPU the same code runs with an eager capture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import checks_device_values
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.graphs.addresses import CapturedAddresses
from torchpaged.graphs.buckets import bucket_for, check_buckets
from torchpaged.graphs.capture import CaptureBackend, Captured, CudaCapture, EagerCapture
from torchpaged.graphs.capture_bucket import capture_bucket
from torchpaged.graphs.packed_buffers import PackedBuffers
from torchpaged.graphs.report import BucketReport, describe_bucket
from torchpaged.graphs.step import NoSession, Ranges, StepSession, no_range
from torchpaged.metadata import AttentionMetadata, HostLengths

PackedStep = Callable[[Tensor, AttentionMetadata, Tensor], Tensor]


class PackedGraphRunner:
    """Captures a prefill step per bucket of tokens and replays it.

    Args:
        step: ``step(input_ids [n] int64, metadata, logits_indices [max_num_reqs] int64) -> [max_num_reqs, ...]``; must not read device
            values on the host.
        buckets: numbers of tokens to capture.
        max_num_reqs: requests of a step at most.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        num_blocks: blocks in the pools, to check ids against; None skips that check.
        device: where the step runs.
        capture: "auto" (CUDA graphs on a GPU, eager elsewhere) or a `CaptureBackend`.
        pool: memory pool of ``capture`` to share with another runner whose replays never overlap with these, such as
            ``DecodeGraphRunner.pool``; default: one of its own.
        warmup_iters: runs before each capture.
        progress: called with ``(done, total, text)`` after each bucket.
        watch, debug, ranges, session: as in `DecodeGraphRunner`; a replay has no range, its caller's says what it is.

    Warm-up and capture run on padding only, so that they write nothing into the caches.
    """

    def __init__(
        self, step: PackedStep, *, buckets: Sequence[int], max_num_reqs: int, max_blocks_per_req: int, block_size: int,
        num_blocks: int | None = None, device: torch.device | str = "cpu", capture: str | CaptureBackend = "auto", pool: Any = None,
        warmup_iters: int = 1, progress: Callable[[int, int, str], None] | None = None,
        watch: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]] | None = None, debug: bool | None = None,
        ranges: Ranges | None = None, session: StepSession | None = None,
    ) -> None:  # fmt: skip
        self.buckets, self.device = check_buckets(buckets, max(buckets, default=0)), torch.device(device)
        self.buffers = PackedBuffers(self.buckets, max_num_reqs, max_blocks_per_req, block_size, device, num_blocks)
        if isinstance(capture, str):
            if capture != "auto":
                raise ArgumentError("capture", "'auto' or a CaptureBackend", repr(capture))
            capture = CudaCapture(self.device) if self.device.type == "cuda" else EagerCapture()
        self._step, self._backend = step, capture
        self._pool = capture.new_pool() if pool is None else pool
        self._warmup_iters, self._progress = warmup_iters, progress
        self._session: StepSession = NoSession() if session is None else session
        self._addresses = CapturedAddresses(lambda: {**self.buffers.tensors(), **self._session.tensors()}, watch)
        self._debug = checks_device_values() if debug is None else debug
        self._ranges = no_range if ranges is None else ranges
        self._dirty = False  # inside a capture or a replay, or one of them did not come to its end
        self._graphs: dict[int, Captured] = {}
        self._views: dict[int, tuple[Tensor, AttentionMetadata, Tensor]] = {}
        self._reports = {n: BucketReport(n) for n in self.buckets}

    def capture(self) -> None:
        """Capture every bucket that is not captured yet, largest first, so that the smaller ones reuse its memory.

        Raises:
            CaptureError: names the bucket and the cause; what that capture took is freed, the others stay.
        """
        todo = [n for n in reversed(self.buckets) if n not in self._graphs]
        gc.collect()  # what nobody uses any more gives its memory to the graphs
        for done, bucket in enumerate(todo):
            self._capture_one(bucket)
            if self._progress:
                self._progress(done + 1, len(todo), describe_bucket(bucket, self.device, "prefill"))

    def fits(self, num_reqs: int, num_tokens: int) -> bool:
        """Whether a step of these sizes has a bucket."""
        return self.buffers.fits(num_reqs, num_tokens)

    def capture_for(self, num_tokens: int) -> int:
        """The bucket of ``num_tokens`` tokens, captured unless it was; raises as `capture` does."""
        bucket = bucket_for(self.buckets, num_tokens)
        if bucket not in self._graphs:
            self._capture_one(bucket)
        return bucket

    def run(
        self, input_ids: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]],
        logits_indices: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """One step; its bucket is captured first if it is not.

        Args:
            input_ids: the tokens of all requests, one request after the other.
            query_lens: tokens of each request, at least 1.
            seq_lens: KV tokens of each request, this step's included.
            block_tables: each request's blocks.
            logits_indices: the tokens whose logits are wanted.

        Returns:
            ``[len(logits_indices), ...]``: a slice of the graph's own memory, valid until the next replay of a graph of its pool.

        Raises:
            ArgumentError: what does not fit together or into a bucket (`fits`); nothing is written then.
            CaptureError: the bucket can't be captured, or a captured address moved (debug mode); no cache was written.
            SemaphoreError: the session's semaphore is not zero behind the step (debug mode): its result is wrong.
        """
        if self._dirty:
            self.reset()
        bucket = bucket_for(self.buckets, len(input_ids))
        if bucket not in self._graphs:
            self.buffers.check(input_ids, query_lens, seq_lens, block_tables, logits_indices, bucket)
            self._capture_one(bucket)
        if self._debug:
            self._addresses.check(bucket)
        report, graph = self._reports[bucket], self._graphs[bucket]
        with torch.inference_mode():
            self.buffers.load(input_ids, query_lens, seq_lens, block_tables, logits_indices, bucket)
            self._dirty = True
            if self._session.plans_every_step:
                pad = [0] * (self.buffers.max_num_reqs - len(seq_lens))
                self._session.plan(self._view(bucket)[1], HostLengths([*query_lens, *pad], [*seq_lens, *pad]))
            graph.replay()
            self._dirty = False
        if self._debug:
            self._session.check(f"a replay of bucket {bucket}")
        report.hits += 1
        report.padded_rows += bucket - len(input_ids)
        return graph.output[: len(logits_indices)]

    def reset(self) -> None:
        """Make the session as new after a capture or replay that failed or was interrupted; waits for the device. The next `run` does it by itself."""
        with torch.inference_mode():
            self.buffers.reset()
            self._session.reset()
        self._dirty = False

    def launch_eager(self, bucket: int) -> Tensor:
        """The bucket's step on padding, without a graph: the kernels that a replay runs."""
        with torch.inference_mode(), self.buffers.padding(bucket):
            if self._session.plans:
                self._session.plan(self._view(bucket)[1])
            return self._step(*self._view(bucket))

    def report(self) -> list[BucketReport]:
        """Per bucket: capture time, memory, replays and padded tokens."""
        return [self._reports[bucket] for bucket in self.buckets]

    def _view(self, bucket: int) -> tuple[Tensor, AttentionMetadata, Tensor]:
        """One view per bucket: a session knows the batch that it planned by its identity."""
        if bucket not in self._views:
            self._views[bucket] = self.buffers.view(bucket)
        return self._views[bucket]

    def _capture_one(self, bucket: int) -> None:
        arguments = self._view(bucket)

        def launch() -> Tensor:
            return self._step(*arguments)

        self._dirty = True
        with self._ranges("capture", padded=bucket), torch.inference_mode(), self.buffers.padding(bucket):
            self._session.reset()
            try:
                if self._session.plans:
                    self._session.plan(arguments[1])
                graph = capture_bucket(
                    launch, self._backend, self._pool, self._reports[bucket], self.device, warmup_iters=self._warmup_iters,
                    step="prefill step", eager=launch,
                )  # fmt: skip
            finally:
                self._session.reset()
        self._addresses.note(bucket)
        self._graphs[bucket] = graph
        self._dirty = False
