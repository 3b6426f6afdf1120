"""PackedBuffers: the static tensors that a captured prefill step reads, and their update in place.

    buffers = PackedBuffers([64, 512], max_num_reqs=8, max_blocks_per_req=128, block_size=16, device="cuda")
    batch = PackedBatch(input_ids, [7, 30], [7, 95], [[1], [2, 3, 4, 5, 6, 7]], logits_indices=[6])
    buffers.check(batch, padded_to=64)  # `put` looks at nothing
    buffers.put(batch, padded_to=64)
    input_ids, metadata, logits_indices = buffers.view(64)

All tensors of a bucket lie in one piece of memory. Padding is as in `torchpaged.graphs.buffers`: tokens past
the last request have slot -1, requests past the last one no tokens and seq_len 0; further ``logits_indices``
are 0, and the reader of the logits drops them.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_sizes, switch
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.graphs.buffers import StepBuffers
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.checks import integers
from torchpaged.metadata.fields import CODES, FIELDS, TREE_FIELDS, BatchSizes
from torchpaged.metadata.host import host_numbers
from torchpaged.metadata.tree import MAX_TREE_TOKENS, tree_numbers

#: Fields in the order of their memory.
_ORDER = (
    "input_ids",
    "positions",
    "slot_mapping",
    "logits_indices",
    "seq_lens",
    "query_start_loc",
    "block_table",
)
Trees = Sequence[Sequence[int] | None]


class PackedBatch(NamedTuple):
    """A packed step on the host, as `PackedGraphRunner.run` takes it; ``filled`` requests of a token each,
    which are not in the lists, stand in front of those that are."""

    input_ids: Sequence[int]
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    logits_indices: Sequence[int]
    tree_parents: Trees | None = None
    filled: int = 0


class PackedBuffers(StepBuffers):
    """Static inputs of packed steps, for every bucket of tokens.

    Args:
        buckets: numbers of tokens, ascending.
        max_num_reqs: requests of a step at most.
        max_blocks_per_req, block_size, device, num_blocks: as in `StepBuffers`.
        max_query_len: most tokens of a request in a step; None: all of a bucket.
        trees: whether a request's tokens may be a tree, as `AttentionMetadata.from_lists` takes one, at most
            64 of them.
    """

    def __init__(
        self,
        buckets: Sequence[int],
        max_num_reqs: int,
        max_blocks_per_req: int,
        block_size: int,
        device: torch.device | str,
        num_blocks: int | None = None,
        max_query_len: int | None = None,
        trees: bool = False,
    ) -> None:
        switch("trees", trees)
        order = (*_ORDER, *TREE_FIELDS) if trees else _ORDER
        super().__init__(max_blocks_per_req, block_size, device, num_blocks, order, max_num_reqs=max_num_reqs)
        if max_query_len is not None:
            check_sizes(max_query_len=max_query_len)
        self.buckets, self.max_num_reqs, self.trees = list(buckets), max_num_reqs, trees
        most = MAX_TREE_TOKENS if trees else self.buckets[-1]
        self.max_query_len = most if max_query_len is None else min(max_query_len, most)
        self._make_staging(self.buckets[-1])
        self._parts = {bucket: self._bytes[: self._num_bytes(bucket)] for bucket in self.buckets}

    def _sizes(self, bucket: int) -> BatchSizes:
        return BatchSizes(self.num_reqs(bucket), bucket, self.max_blocks_per_req)

    def num_reqs(self, bucket: int) -> int:
        """Requests of a bucket's batch: each has a token at least, so that small buckets need fewer."""
        return min(self.max_num_reqs, bucket)

    def _fields(self, bucket: int) -> dict[str, Tensor]:
        return self._split(self._bytes, bucket)

    def tensors(self) -> dict[str, Tensor]:
        """What a captured step reads or writes, by name."""
        return {"packed": self._bytes}

    def view(self, bucket: int) -> tuple[Tensor, AttentionMetadata, Tensor]:
        """``(input_ids, metadata, logits_indices)`` of a bucket; slices, no copies. Unless less was said,
        ``max_query_len`` is the bucket: one request may have all its tokens."""
        fields, most = self._fields(bucket), min(bucket, self.max_query_len)
        metadata = AttentionMetadata.view(
            fields, self._sizes(bucket), max_query_len=most, block_size=self.block_size
        )
        return fields["input_ids"], metadata, fields["logits_indices"]

    def fits(self, num_reqs: int, num_tokens: int) -> bool:
        """Whether a step of these sizes has a bucket."""
        return 0 < num_reqs <= self.max_num_reqs and 0 < num_tokens <= self.buckets[-1]

    def put(self, batch: PackedBatch, padded_to: int) -> None:
        """Put a batch that `check` let pass into the bucket ``padded_to``; nothing waits for it."""
        trees = (batch.tree_parents or [None] * len(batch.query_lens)) if self.trees else None
        numbers = host_numbers(batch.query_lens, batch.seq_lens, batch.block_tables, self.block_size, trees)
        numbers["input_ids"] = batch.input_ids
        if batch.filled:
            numbers = _behind(batch.filled, numbers)
        numbers["logits_indices"] = batch.logits_indices
        memory = self._staged(numbers, batch.block_tables, padded_to, batch.filled)
        self._staging.send(memory, self._parts[padded_to])

    def check(self, batch: PackedBatch, padded_to: int) -> None:
        """Refuse what could not be `put` into the tensors; raises `ArgumentError`."""
        input_ids, query_lens, seq_lens, block_tables, logits_indices, tree_parents, filled = batch
        for name, numbers in {"input_ids": input_ids, "logits_indices": logits_indices}.items():
            integers(name, numbers)
        query_lens, seq_lens = integers("query_lens", query_lens), integers("seq_lens", seq_lens)
        if padded_to not in self.buckets:
            raise ArgumentError("padded_to", f"one of the buckets {self.buckets}", str(padded_to))
        if filled and self.trees:
            raise ArgumentError("filled", "0 where tokens may be trees", str(filled), "list all requests")
        self._check_lens(query_lens, filled)
        tokens = filled + len(input_ids)
        if sum(query_lens) + filled != tokens or tokens > padded_to:
            raise ArgumentError(
                "input_ids",
                f"as many tokens as query_lens says ({sum(query_lens)}), at most {padded_to - filled}",
                str(len(input_ids)),
            )
        if len(logits_indices) > self.max_num_reqs or any(not 0 <= i < tokens for i in logits_indices):
            raise ArgumentError(
                "logits_indices",
                f"at most {self.max_num_reqs} tokens in [0, {tokens})",
                str(list(logits_indices)),
            )
        if tree_parents is not None:
            if not self.trees:
                raise ArgumentError(
                    "tree_parents", "None: these buffers were made without trees", "trees", "pass trees=True"
                )
            tree_numbers(tree_parents, query_lens, seq_lens)  # refuses what is no tree
        self._check_blocks(query_lens, seq_lens, block_tables)

    def _check_lens(self, query_lens: Sequence[int], filled: int) -> None:
        if not 0 < len(query_lens) <= self.max_num_reqs - filled:
            raise ArgumentError(
                "query_lens",
                f"1 to {self.max_num_reqs - filled} requests",
                str(len(query_lens)),
                "run the step without a graph",
            )
        if min(query_lens) < 1:
            raise ArgumentError("query_lens", "at least 1 token per request", str(min(query_lens)))
        if max(query_lens) > self.max_query_len:
            raise ArgumentError(
                "query_lens", f"at most {self.max_query_len} tokens per request", str(max(query_lens))
            )


def _behind(filled: int, numbers: dict[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """A batch's numbers behind those of ``filled`` requests of one token each, which are padding so far."""
    made: dict[str, Sequence[int]] = {}
    for name, found in numbers.items():
        made[name] = FIELDS[name].pad((), filled) + array(CODES[FIELDS[name].dtype], found)
    made["query_start_loc"] = [*range(filled), *(filled + start for start in numbers["query_start_loc"])]
    return made
