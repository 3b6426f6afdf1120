"""DecodeGraphRunner: one captured graph per batch bucket, replayed for every batch and every length.

    runner = DecodeGraphRunner(step, max_batch_size=64, max_blocks_per_req=128, block_size=16, device="cuda")
    runner.capture()
    # [3, vocab]
    logits = runner.run(input_ids=[5, 9, 2], seq_lens=[17, 4, 33], block_tables=[[1, 2], [3], [4, 5, 6]])

``step(input_ids, metadata) -> Tensor [num_rows, ...]`` is any callable. On a CPU the same code runs with an
eager capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.graphs.addresses import Watch
from torchpaged.graphs.bucketed import BucketedGraphs, Progress, StaticInputs
from torchpaged.graphs.buckets import bucket_for, check_buckets, default_buckets
from torchpaged.graphs.buffers import DecodeBuffers
from torchpaged.graphs.capture import CaptureBackend
from torchpaged.graphs.prefixes import Prefixes, PrefixGraphs, require_no_plans
from torchpaged.graphs.step import Ranges, Step, StepSession, decode_steps
from torchpaged.metadata import HostLengths, count


class DecodeGraphRunner(BucketedGraphs):
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
        compile: run the step through ``torch.compile(fullgraph=True)``, once per bucket.
        warmup_iters: runs before each capture.
        progress: called with ``(done, total, text)`` after each bucket.
        watch: tensors whose addresses the graph relies on besides the buffers, such as the KV pools, by name;
            or a function that gives them, so that a replaced attribute is noticed too. Checked
            with ``debug``.
        debug: check every address at replay; default from ``TORCHPAGED_CHECK=1``.
        ranges: called as ``ranges("replay", batch=3, padded=4)`` around each capture, replay and eager step,
            for a profiler: gives a context manager, such as `torchpaged.profiling.range` does. Never called
            inside the step.
        session: the `torchpaged.Session` that the step's layers share. Its `plan` is called outside the
            graph, before a capture and, if it plans every step, before each replay; it is made as new after
            what was cut short, and checked with ``debug``. Refused where its backend declares no graphs of
            decode steps. None: the layers have sessions of their own, which need no plan.
        prefixes: a `torchpaged.prefixes.AutomaticPrefixes`: steps whose requests share blocks that are worth
            a pass of their own take a second graph of their bucket, over ``metadata.prefixes``; for layers of
            `torchpaged.PagedAttention`, and no session that plans. None: one graph per bucket.

    Attributes:
        buffers: the `DecodeBuffers` that the graphs read.

    Warm-up and capture run on padding rows only, so that they write nothing into the caches. `BucketedGraphs`
    has what any bucketed graphs do: ``capture``, ``capture_for``, ``reset``, ``report``, ``histogram``.
    """

    STEP, BUCKET, STILL_WORKS = "decode step", "batch", "; run_eager() still works"

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
        watch: Watch | None = None,
        debug: bool | None = None,
        ranges: Ranges | None = None,
        session: StepSession | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        require_no_plans(prefixes, session)
        self.buffers = DecodeBuffers(max_batch_size, max_blocks_per_req, block_size, device, num_blocks)
        sizes = check_buckets(default_buckets(max_batch_size) if buckets is None else buckets, max_batch_size)
        self._eager_step = step
        options: dict[str, Any] = {
            "buckets": sizes,
            "device": device,
            "warmup_iters": warmup_iters,
            "progress": progress,
            "watch": watch,
            "debug": debug,
            "ranges": ranges,
            "session": session,
        }
        steps = decode_steps(step, sizes, compile, capture)
        super().__init__(self.buffers, steps, eager=lambda bucket: step, capture=capture, **options)
        self._require_graphs(1)
        options |= {"capture": self.capture_backend, "pool": self.pool}

        def make(inputs: StaticInputs, step: Step) -> BucketedGraphs:
            steps = decode_steps(step, sizes, compile, capture)
            return BucketedGraphs(inputs, steps, eager=lambda bucket: step, **options)

        self._with_prefixes = None if prefixes is None else PrefixGraphs(prefixes, self.buffers, step, make)

    def capture(self, buckets: Sequence[int] | None = None) -> None:
        """As `BucketedGraphs.capture`; then, of these buckets, the second graphs of those whose requests may
        come to share what pays."""
        super().capture(buckets)
        if self._with_prefixes is not None:
            self._with_prefixes.capture(self.buckets if buckets is None else buckets)

    def run(
        self,
        input_ids: Sequence[int] | Tensor,
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
    ) -> Tensor:
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
        rows = count("seq_lens", seq_lens)
        bucket = bucket_for(self.buckets, rows)
        self.buffers.check(input_ids, seq_lens, block_tables, bucket)
        if not self.is_captured(bucket):
            if isinstance(input_ids, Tensor):
                input_ids = input_ids.clone()  # it may be a slice of the buffers, which a capture overwrites
            self.capture_for(rows)
        graphs: BucketedGraphs | None = None
        if self._with_prefixes is not None:
            graphs = self._with_prefixes.find(bucket, block_tables, seq_lens)
        with torch.inference_mode():
            self.buffers.load(input_ids, seq_lens, block_tables, bucket)
            host = self.host_lengths([1] * rows, seq_lens, bucket)
            return (self if graphs is None else graphs).start(rows, host=host).output[:rows]

    def replay(self, num_rows: int) -> Tensor:
        """Replay the bucket of ``num_rows`` rows on the buffers as they are.

        Returns:
            The step's output for these rows.

        Raises:
            CaptureError: the bucket is not captured, or a captured address moved (debug mode).
            SemaphoreError: the session's semaphore is not zero behind the launch (debug mode): its results
                are wrong.
        """
        return self.start(num_rows).output[:num_rows]

    def launch(self, num_rows: int) -> None:
        """`replay` for callers that know where the result will be: a view costs as much as the launch. Its
        bucket is captured first if it is not; raises as `capture` does."""
        self.start(num_rows, capture=True)

    def run_eager(
        self,
        input_ids: Sequence[int] | Tensor,
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
    ) -> Tensor:
        """The same step without graph, padding or compilation."""
        rows = count("seq_lens", seq_lens)
        self.recover()
        with self._ranges("run_eager", batch=rows), torch.inference_mode():
            self.buffers.load(input_ids, seq_lens, block_tables, rows)
            return self.start_eager(rows, self._eager_step, HostLengths([1] * rows, seq_lens))
