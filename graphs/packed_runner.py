"""PackedGraphRunner: one captured graph per number of tokens, replayed for prefill steps of any requests
and lengths.

    runner = PackedGraphRunner(model, buckets=[64, 512], max_num_reqs=8, max_blocks_per_req=128,
                               block_size=16, device="cuda")
    if runner.fits(num_reqs=2, num_tokens=37):
        # [1, vocab]
        logits = runner.run(input_ids, query_lens=[7, 30], seq_lens=[7, 95], block_tables=tables,
                            logits_indices=[6])

``step(input_ids, metadata, logits_indices) -> Tensor [max_num_reqs, ...]`` is any callable. A step of up to
about a thousand tokens ends on a GPU before Python has launched the next one's kernels; a replay launches
them at once. Which bucket a step takes depends on its number of tokens alone, which the host knows anyway. On
a CPU the same code runs with an eager capture.
"""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.graphs.bucketed import BucketedGraphs
from torchpaged.graphs.buckets import bucket_for, check_buckets
from torchpaged.graphs.capture_options import CaptureOptions
from torchpaged.graphs.packed_buffers import PackedBatch, PackedBuffers, Trees
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.checks import count

PackedStep = Callable[[Tensor, AttentionMetadata, Tensor], Tensor]
Fill = Callable[[Tensor, AttentionMetadata], None]


class PackedGraphRunner(BucketedGraphs):
    """Captures a prefill step per bucket of tokens and replays it.

    Args:
        step: ``step(input_ids, metadata, logits_indices) -> [max_num_reqs, ...]``, with ``input_ids [n]`` and
            ``logits_indices [max_num_reqs]`` int64; must not read device values on the host.
        buckets: numbers of tokens to capture.
        max_num_reqs: requests of a step at most; a bucket of fewer tokens holds as many as it has tokens.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        num_blocks: blocks in the pools, to check ids against; None skips that check.
        max_query_len: most tokens of a request in a step; None: all of a bucket. Attention kernels are chosen
            by it.
        trees: whether a request's tokens may be a tree of drafts, at most 64 of them. Words of bits are then
            an input of the graph like positions, so that one capture serves all trees of a bucket. The step's
            layers need a backend that takes them.
        device: where the step runs.
        pool: memory pool of ``capture`` to share with another runner whose replays never overlap with these,
            such as ``DecodeGraphRunner.pool``; default: one of its own.
        options: as in `DecodeGraphRunner`, but ``warmup_iters`` is 1 unless it is given, and a replay has no
            range: its caller's says what it is.

    Attributes:
        buffers: the `PackedBuffers` that the graphs read.

    Warm-up and capture run on padding only, so that they write nothing into the caches. `BucketedGraphs` has
    what any bucketed graphs do: ``capture``, ``capture_for``, ``reset``, ``report``, ``histogram``.
    """

    STEP, BUCKET, RANGES_REPLAYS = "prefill step", "prefill", False

    def __init__(
        self,
        step: PackedStep,
        *,
        buckets: Sequence[int],
        max_num_reqs: int,
        max_blocks_per_req: int,
        block_size: int,
        num_blocks: int | None = None,
        max_query_len: int | None = None,
        trees: bool = False,
        device: torch.device | str = "cpu",
        pool: Any = None,
        **options: Unpack[CaptureOptions],
    ) -> None:
        sizes = check_buckets(buckets, None)
        self.buffers = PackedBuffers(
            sizes, max_num_reqs, max_blocks_per_req, block_size, device, num_blocks, max_query_len, trees
        )
        options.setdefault("warmup_iters", 1)
        super().__init__(
            self.buffers, lambda bucket: step, buckets=sizes, device=device, pool=pool, **options
        )
        self._require_graphs(self.buffers.max_query_len)

    def fits(self, num_reqs: int, num_tokens: int) -> bool:
        """Whether a step of these sizes has a bucket."""
        return self.buffers.fits(num_reqs, num_tokens)

    def run(
        self,
        input_ids: Sequence[int],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        logits_indices: Sequence[int],
        tree_parents: Trees | None = None,
        fill: Fill | None = None,
        filled: int = 0,
    ) -> Tensor:
        """One step; its bucket is captured first if it is not.

        Args:
            input_ids: the tokens of all requests, one request after the other.
            query_lens: tokens of each request, at least 1.
            seq_lens: KV tokens of each request, this step's included.
            block_tables: each request's blocks.
            logits_indices: the tokens whose logits are wanted.
            tree_parents: of each request the parents of its tokens, or None where each continues the one
                before it; as `AttentionMetadata.from_lists` takes them.
            fill: called as ``fill(input_ids, metadata)`` with the bucket's tensors once the step is in them,
                right in front of the replay: puts over it what the device alone knows. Query lengths stay.
            filled: requests of one token each in front of the listed ones, which ``fill`` writes whole:
                tokens, positions, slots, lengths and blocks; the lists say nothing of them, but
                ``logits_indices`` counts their tokens. A batch of hundreds of decodes costs the host
                nothing then.

        Returns:
            ``[len(logits_indices), ...]``: a slice of the graph's own memory, valid until the next replay of
            a graph of its pool.

        Raises:
            ArgumentError: what does not fit together or into a bucket (`fits`); nothing is written then.
            CaptureError: the bucket can't be captured, or a captured address moved (debug mode); no cache
                was written.
            SemaphoreError: the session's semaphore is not zero behind the step (debug mode): its result
                is wrong.
        """
        if filled and (fill is None or self._plans_replays):
            expected = "0: fill is None" if fill is None else "0 with a session that plans by lengths"
            raise ArgumentError("filled", expected, str(filled), "list all requests")
        count("input_ids", input_ids)
        batch = PackedBatch(
            input_ids, query_lens, seq_lens, block_tables, logits_indices, tree_parents, filled
        )
        with torch.inference_mode():
            return self.run_known(batch, fill, checks=True)

    def run_known(self, batch: PackedBatch, fill: Fill | None = None, checks: bool = False) -> Tensor:
        """`run` of lists that the caller's own books have made, in inference mode: they are checked with
        ``checks`` or in debug mode alone."""
        num_tokens = len(batch.input_ids) + batch.filled
        bucket = bucket_for(self.buckets, num_tokens)
        if checks or self.debug:
            self.buffers.check(batch, bucket)
        if bucket not in self._graphs:
            self._capture_one(bucket)
        self.buffers.put(batch, bucket)
        if fill is not None:
            fill(*self.view(bucket)[:2])
        host = self.host_lengths(batch.query_lens, batch.seq_lens, self.buffers.num_reqs(bucket))
        return self.start(num_tokens, host=host).output[: len(batch.logits_indices)]
