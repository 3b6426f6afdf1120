"""PackedBuffers: the static tensors that a captured prefill step reads, and their update in place.

    buffers = PackedBuffers([64, 512], max_num_reqs=8, max_blocks_per_req=128, block_size=16, device="cuda")
    buffers.load(input_ids, query_lens=[7, 30], seq_lens=[7, 95], block_tables=[[1], [2, 3, 4, 5, 6, 7]],
                 logits_indices=[6], padded_to=64)
    input_ids, metadata, logits_indices = buffers.view(64)

All tensors of a bucket lie in one piece of memory, so that a step costs one copy to the device, whatever it
holds. Padding is as `torchpaged.metadata.fields` says: tokens past the last request
have slot -1, requests past the last one no tokens and seq_len 0; further ``logits_indices`` are 0, and
the reader of the logits drops them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import switch
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.metadata import AttentionMetadata, integers
from torchpaged.metadata.checks import check_batch
from torchpaged.metadata.fields import FIELDS, BatchSizes, pad_batch_tensors
from torchpaged.metadata.slots import slots_between
from torchpaged.metadata.tree import MAX_TREE_TOKENS, depths_of, known_trees, words_of

_ALIGN = 64  # bytes that every field starts at a multiple of
#: Fields as they lie, one behind the other, and how `array` calls numbers of their dtypes.
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
_CODES = {torch.int64: "q", torch.int32: "i"}


class PackedBuffers:
    """Static inputs of packed steps, for every bucket of tokens.

    Args:
        buckets: numbers of tokens, ascending.
        max_num_reqs: requests of a step at most.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        device: where the tensors live.
        num_blocks: blocks in the pools, to check ids against; None skips that check.
        max_query_len: most tokens of a request in a step; None: all of a bucket.
        trees: whether a request's tokens may be a tree (`torchpaged.tree_mask_from_parents`), at most 64 of
            them.
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
        for name, size in (
            ("max_num_reqs", max_num_reqs),
            ("max_blocks_per_req", max_blocks_per_req),
            ("block_size", block_size),
        ):
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        self.buckets, self.max_num_reqs, self.max_blocks_per_req = (
            list(buckets),
            max_num_reqs,
            max_blocks_per_req,
        )
        self.block_size, self.num_blocks, self.device = block_size, num_blocks, torch.device(device)
        if max_query_len is not None and max_query_len < 1:
            raise ArgumentError("max_query_len", "at least 1 token, or None", str(max_query_len))
        most = MAX_TREE_TOKENS if trees else self.buckets[-1]
        self.trees, self.max_query_len = trees, most if max_query_len is None else min(max_query_len, most)
        self._order = (*_ORDER, "tree_mask") if trees else _ORDER
        with torch.inference_mode(False):
            self._bytes = torch.zeros(
                sum(self._num_bytes(self.buckets[-1])), dtype=torch.uint8, device=device
            )

    def tensors(self) -> dict[str, Tensor]:
        """What a captured step reads or writes, by name."""
        return {"packed": self._bytes}

    def view(self, bucket: int) -> tuple[Tensor, AttentionMetadata, Tensor]:
        """``(input_ids, metadata, logits_indices)`` of a bucket; slices, no copies. Unless less was said,
        ``max_query_len`` is the bucket: one request may have all its tokens."""
        fields = self._fields(bucket)
        metadata = AttentionMetadata.view(
            fields,
            self._sizes(bucket),
            max_query_len=min(bucket, self.max_query_len),
            block_size=self.block_size,
        )
        return fields["input_ids"], metadata, fields["logits_indices"]

    def fits(self, num_reqs: int, num_tokens: int) -> bool:
        """Whether a step of these sizes has a bucket."""
        return 0 < num_reqs <= self.max_num_reqs and 0 < num_tokens <= self.buckets[-1]

    def load(
        self,
        input_ids: Sequence[int],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        logits_indices: Sequence[int],
        padded_to: int,
        tree_parents: Trees | None = None,
    ) -> None:
        """Put one step into the tensors of the bucket ``padded_to``, and nothing waits for it.

        Args:
            input_ids: the tokens of all requests, one request after the other.
            query_lens: tokens of each request.
            seq_lens: KV tokens of each request, this step's included.
            block_tables: each request's blocks.
            logits_indices: the tokens whose logits are wanted, at most ``max_num_reqs``.
            padded_to: the bucket.
            tree_parents: of each request the parents of its tokens, or None where each continues the one
                before it; as `AttentionMetadata.from_lists` takes them.

        Raises:
            ArgumentError: lengths, tokens, blocks or sizes don't fit; nothing is written then.
        """
        step = (input_ids, query_lens, seq_lens, block_tables, logits_indices, padded_to)
        self.check(*step, tree_parents)
        packed = self._packed(*step, tree_parents)
        # Fresh pinned memory each step: torch's host allocator keeps it until the copy is done, so nothing is
        # overwritten early.
        staged = torch.empty(
            len(packed), dtype=torch.uint8, pin_memory=self.device.type == "cuda", device="cpu"
        )
        staged.copy_(torch.frombuffer(packed, dtype=torch.uint8))
        self._bytes[: len(packed)].copy_(staged, non_blocking=True)

    def _packed(
        self,
        input_ids: Sequence[int],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        logits_indices: Sequence[int],
        bucket: int,
        tree_parents: Trees | None,
    ) -> bytearray:
        """A step as the bytes of a bucket's fields, built from lists: a tensor operation each would cost the
        host several times as much."""
        positions: list[int] = []
        slots: list[int] = []
        table: list[int] = []
        for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
            positions += range(seq_len - query_len, seq_len)
            slots += slots_between(seq_len - query_len, seq_len, blocks, self.block_size)
            table += FIELDS["block_table"].pad(blocks, self.max_blocks_per_req)
        trees: list[list[int]] = []
        if self.trees:
            trees = known_trees(tree_parents or [None] * len(query_lens), query_lens, seq_lens)
            contexts = [seq_len - query_len for seq_len, query_len in zip(seq_lens, query_lens, strict=True)]
            positions = [
                context + depth
                for context, parents in zip(contexts, trees, strict=True)
                for depth in depths_of(parents)
            ]
        values = (
            input_ids,
            positions,
            slots,
            logits_indices,
            seq_lens,
            [0, *itertools.accumulate(query_lens)],
            table,
            *([[word for parents in trees for word in words_of(parents)]] if self.trees else []),
        )
        packed = bytearray()
        for name, numbers, num_bytes in zip(self._order, values, self._num_bytes(bucket), strict=True):
            field = FIELDS[name]
            packed += array(_CODES[field.dtype], field.pad(numbers, num_bytes // field.dtype.itemsize))
        return packed

    @contextlib.contextmanager
    def padding(self, bucket: int) -> Iterator[None]:
        """The bucket holds nothing but padding inside the block, for a warm-up or a capture; `load` fills
        it afterwards."""
        pad_batch_tensors(self._fields(bucket), self._sizes(bucket))
        yield

    def reset(self) -> None:
        """Wait for the device after a step that failed or was interrupted; `load` writes every
        tensor anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(
        self,
        input_ids: Sequence[int],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        logits_indices: Sequence[int],
        padded_to: int,
        tree_parents: Trees | None = None,
    ) -> None:
        """Refuse what `load` could not put into the tensors; raises `ArgumentError`."""
        for name, numbers in (
            ("input_ids", input_ids),
            ("query_lens", query_lens),
            ("seq_lens", seq_lens),
            ("logits_indices", logits_indices),
        ):
            integers(name, numbers)
        if padded_to not in self.buckets:
            raise ArgumentError("padded_to", f"one of the buckets {self.buckets}", str(padded_to))
        if not 0 < len(query_lens) <= self.max_num_reqs:
            raise ArgumentError(
                "query_lens",
                f"1 to {self.max_num_reqs} requests",
                str(len(query_lens)),
                "run the step without a graph",
            )
        if min(query_lens) < 1:
            raise ArgumentError("query_lens", "at least 1 token per request", str(min(query_lens)))
        if sum(query_lens) != len(input_ids) or len(input_ids) > padded_to:
            raise ArgumentError(
                "input_ids",
                f"as many tokens as query_lens says ({sum(query_lens)}), at most {padded_to}",
                str(len(input_ids)),
            )
        if len(logits_indices) > self.max_num_reqs or any(
            not 0 <= index < len(input_ids) for index in logits_indices
        ):
            raise ArgumentError(
                "logits_indices",
                f"at most {self.max_num_reqs} tokens in [0, {len(input_ids)})",
                str(list(logits_indices)),
            )
        if any(length < tokens for length, tokens in zip(seq_lens, query_lens, strict=False)):
            raise ArgumentError(
                "seq_lens",
                "at least the tokens of this step",
                f"{list(seq_lens)} for {list(query_lens)} tokens",
            )
        if max(query_lens) > self.max_query_len:
            raise ArgumentError(
                "query_lens", f"at most {self.max_query_len} tokens per request", str(max(query_lens))
            )
        if tree_parents is not None:
            if not self.trees:
                raise ArgumentError(
                    "tree_parents", "None: these buffers were made without trees", "trees", "pass trees=True"
                )
            known_trees(tree_parents, query_lens, seq_lens)
        check_batch(query_lens, seq_lens, block_tables, self.block_size, self.num_blocks)
        widest = max(len(blocks) for blocks in block_tables)
        if widest > self.max_blocks_per_req:
            raise ArgumentError(
                "block_tables", f"at most {self.max_blocks_per_req} blocks per request", str(widest)
            )

    def _sizes(self, bucket: int) -> BatchSizes:
        return BatchSizes(self.max_num_reqs, bucket, self.max_blocks_per_req)

    def _num_bytes(self, bucket: int) -> list[int]:
        """Bytes of each field of a bucket, with the gap behind it."""
        sizes = self._sizes(bucket)
        fields = [FIELDS[name] for name in self._order]
        return [
            -(-math.prod(field.shape(sizes)) * field.dtype.itemsize // _ALIGN) * _ALIGN for field in fields
        ]

    def _fields(self, bucket: int) -> dict[str, Tensor]:
        """The tensors of a bucket by name."""
        sizes, fields = self._sizes(bucket), {}
        parts = self._bytes[: sum(self._num_bytes(bucket))].split(self._num_bytes(bucket))
        for name, part in zip(self._order, parts, strict=True):
            shape = FIELDS[name].shape(sizes)
            fields[name] = part.view(FIELDS[name].dtype)[: math.prod(shape)].view(shape)
        return fields
