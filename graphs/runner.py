"""DecodeGraphRunner: one captured graph per batch bucket, replayed for every batch and every length.

    runner = DecodeGraphRunner(step, max_batch_size=64, max_blocks_per_req=128, block_size=16, device="cuda")
    runner.capture()
    # [3, vocab]
    logits = runner.run(input_ids=[5, 9, 2], seq_lens=[17, 4, 33], block_tables=[[1, 2], [3], [4, 5, 6]])

``step(input_ids, metadata) -> Tensor [num_rows, ...]`` is any callable. On a CPU the same code runs with an
eager capture.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_callable, shape_of
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import counted
from torchpaged.graphs.buckets import bucket_for
from torchpaged.graphs.buffers import DecodeBatch, DecodeBuffers
from torchpaged.graphs.capture_options import CaptureOptions
from torchpaged.graphs.decode import DecodeGraphs, Prefixes
from torchpaged.graphs.step import Step
from torchpaged.metadata import HostLengths
from torchpaged.metadata.checks import count


class DecodeGraphRunner(DecodeGraphs):
    """Captures a decode step per bucket and replays it.

    Args:
        step: ``step(input_ids [n] int64, metadata) -> [n, ...]``; must not read device values on the host.
        max_batch_size: rows of the largest bucket.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        num_blocks: blocks in the pools, to check ids against; None skips that check.
        buckets: batch sizes to capture; default `default_buckets`.
        device: where the step runs.
        compile: run the step through ``torch.compile(fullgraph=True)``, once per bucket.
        prefixes: a `torchpaged.prefixes.AutomaticPrefixes`: steps whose requests share blocks that are worth
            a pass of their own take a second graph of their bucket, over ``metadata.prefixes``; for layers of
            `torchpaged.PagedAttention`, and no session that plans. None: one graph per bucket.
        options: ``capture``, ``warmup_iters``, ``warms_each``, ``progress``, ``watch``, ``debug``,
            ``ranges`` and ``session`` of `BucketedGraphs`. ``ranges`` are called around eager steps, too,
            never inside the step. A session whose backend declares no graphs of decode steps is refused.

    Attributes:
        buffers: the `DecodeBuffers` that the graphs read.

    Warm-up and capture run on padding rows only, so that they write nothing into the caches. `BucketedGraphs`
    has what any bucketed graphs do: ``capture``, ``capture_for``, ``reset``, ``report``, ``histogram``.
    """

    STILL_WORKS = "; run_eager() still works"

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
        compile: bool = True,
        prefixes: Prefixes | None = None,
        **options: Unpack[CaptureOptions],
    ) -> None:
        check_callable("step", step, "step(input_ids, metadata)", optional=False)
        self.buffers = DecodeBuffers(max_batch_size, max_blocks_per_req, block_size, device, num_blocks)
        super().__init__(self.buffers, step, buckets=buckets, compile=compile, prefixes=prefixes, **options)
        self._require_graphs(1)

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
            ArgumentError: rows, lengths or block ids don't fit; nothing is written then. Or, at first use of
                a bucket, the step does not return a row per token.
            CaptureError: a captured address moved (debug mode), or the bucket can't be captured (first use).
        """
        rows = count("seq_lens", seq_lens)
        bucket = bucket_for(self.buckets, rows)
        self.buffers.check(DecodeBatch(input_ids, seq_lens, block_tables), bucket)
        if not self.is_captured(bucket):
            if isinstance(input_ids, Tensor):
                input_ids = input_ids.clone()  # it may be a slice of the buffers, which a capture overwrites
            self.capture_for(rows)
        graphs = self._graphs_for(bucket, block_tables, seq_lens)
        bucket = bucket_for(graphs.buckets, rows)
        with torch.inference_mode():
            self.buffers.put(DecodeBatch(input_ids, seq_lens, block_tables), bucket)
            host = self.host_lengths([1] * rows, seq_lens, bucket)
            return graphs.start(rows, host=host).output[:rows]

    def _capture_one(self, bucket: int) -> None:
        super()._capture_one(bucket)
        output: object = self._graphs[bucket].output
        if isinstance(output, Tensor) and output.dim() and output.shape[0] == bucket:
            return
        del self._graphs[bucket]
        raise ArgumentError(
            "step",
            f"a function that returns a tensor of {counted(bucket, 'row')} for {counted(bucket, 'token')}",
            f"shape {shape_of(output)}" if isinstance(output, Tensor) else type(output).__name__,
        )

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

    def run_eager(
        self,
        input_ids: Sequence[int] | Tensor,
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
    ) -> Tensor:
        """The same step without graph, padding or compilation."""
        rows = count("seq_lens", seq_lens)
        with self._ranges("run_eager", batch=rows), torch.inference_mode():
            batch = DecodeBatch(input_ids, seq_lens, block_tables)
            self.buffers.check(batch, rows)
            self.buffers.put(batch, rows)
            return self.start_eager(rows, self._step, HostLengths([1] * rows, seq_lens))
