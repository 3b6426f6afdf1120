"""PackedBuffers: the static tensors that a captured prefill step reads, and their update in place.

    buffers = PackedBuffers([64, 512], max_num_reqs=8, max_blocks_per_req=128, block_size=16, device="cuda")
    buffers.load(input_ids, query_lens=[7, 30], seq_lens=[7, 95], block_tables=[[1], [2, 3, 4, 5, 6, 7]], logits_indices=[6], padded_to=64)
    input_ids, metadata, logits_indices = buffers.view(64)

All tensors of a bucket lie in one piece of memory, so that a step costs one copy to the device, whatever it holds.
Padding contract: tokens past the last request have slot -1, requests past the last one no tokens and seq_len 0, so that
``query_start_loc`` repeats its last value; further ``logits_indices`` are 0, and whoever reads the logits drops them.
"""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.metadata import AttentionMetadata, check_batch

_ALIGN = 8  # numbers of 8 bytes: every field starts at a multiple of 64 bytes


class PackedFields(NamedTuple):
    """A bucket's tensors: ``input_ids``, ``positions``, ``slot_mapping [bucket]`` and ``logits_indices [max_num_reqs]`` int64;
    ``seq_lens [max_num_reqs]``, ``query_start_loc [max_num_reqs + 1]`` and ``block_table [max_num_reqs, max_blocks_per_req]`` int32."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logits_indices: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    block_table: Tensor


class PackedBuffers:
    """Static inputs of packed steps, for every bucket of tokens.

    Args:
        buckets: numbers of tokens, ascending.
        max_num_reqs: requests of a step at most.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        device: where the tensors live.
        num_blocks: blocks in the pools, to check ids against; None skips that check.
    """

    def __init__(
        self, buckets: Sequence[int], max_num_reqs: int, max_blocks_per_req: int, block_size: int, device: torch.device | str,
        num_blocks: int | None = None,
    ) -> None:  # fmt: skip
        for name, size in (("max_num_reqs", max_num_reqs), ("max_blocks_per_req", max_blocks_per_req), ("block_size", block_size)):
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        self.buckets, self.max_num_reqs, self.max_blocks_per_req = list(buckets), max_num_reqs, max_blocks_per_req
        self.block_size, self.num_blocks, self.device = block_size, num_blocks, torch.device(device)
        with torch.inference_mode(False):
            self._words = torch.zeros(self._num_words(self.buckets[-1]), dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """What a captured step reads or writes, by name."""
        return {"packed": self._words}

    def view(self, bucket: int) -> tuple[Tensor, AttentionMetadata, Tensor]:
        """``(input_ids, metadata, logits_indices)`` of a bucket; slices, no copies. ``max_query_len`` is the bucket: one request may
        have all its tokens."""
        fields = self._fields(self._words, bucket)
        metadata = AttentionMetadata(
            fields.block_table, fields.seq_lens, fields.query_start_loc, fields.slot_mapping, fields.positions, max_query_len=bucket,
            block_size=self.block_size,
        )  # fmt: skip
        return fields.input_ids, metadata, fields.logits_indices

    def fits(self, num_reqs: int, num_tokens: int) -> bool:
        """Whether a step of these sizes has a bucket."""
        return 0 < num_reqs <= self.max_num_reqs and 0 < num_tokens <= self.buckets[-1]

    def load(
        self, input_ids: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]],
        logits_indices: Sequence[int], padded_to: int,
    ) -> None:  # fmt: skip
        """Put one step into the tensors of the bucket ``padded_to``, and nothing waits for it.

        Args:
            input_ids: the tokens of all requests, one request after the other.
            query_lens: tokens of each request.
            seq_lens: KV tokens of each request, this step's included.
            block_tables: each request's blocks.
            logits_indices: the tokens whose logits are wanted, at most ``max_num_reqs``.
            padded_to: the bucket.

        Raises:
            ArgumentError: lengths, tokens, blocks or sizes don't fit; nothing is written then.
        """
        self.check(input_ids, query_lens, seq_lens, block_tables, logits_indices, padded_to)
        packed = self._packed(input_ids, query_lens, seq_lens, block_tables, logits_indices, self._sizes(padded_to))
        # Fresh pinned memory each step: torch's host allocator keeps it until the copy is done, so nothing is overwritten early.
        staged = torch.empty(len(packed) // 8, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        staged.copy_(torch.frombuffer(packed, dtype=torch.int64))
        self._words[: staged.shape[0]].copy_(staged, non_blocking=True)

    def _packed(
        self, input_ids: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]],
        logits_indices: Sequence[int], sizes: Sequence[int],
    ) -> bytearray:  # fmt: skip
        """A step as the bytes of a bucket's fields, built from lists: a tensor operation each would cost the host several times as much."""
        positions: list[int] = []
        slots: list[int] = []
        table: list[int] = []
        for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
            first = seq_len - query_len
            positions += range(first, seq_len)
            for index in range(first // self.block_size, -(-seq_len // self.block_size)):
                start, slot = index * self.block_size, blocks[index] * self.block_size
                slots += range(slot + max(first - start, 0), slot + min(seq_len - start, self.block_size))
            table += blocks
            table += [0] * (self.max_blocks_per_req - len(blocks))
        longs, ints = array("q"), array("i")
        for numbers, size, fill in zip((input_ids, positions, slots, logits_indices), sizes[:4], (0, 0, -1, 0), strict=True):
            longs.extend(numbers)
            longs.extend([fill] * (size - len(numbers)))
        starts = [0, *itertools.accumulate(query_lens)]
        for numbers, size, fill in zip((seq_lens, starts, table), sizes[4:], (0, starts[-1], 0), strict=True):
            ints.extend(numbers)
            ints.extend([fill] * (2 * size - len(numbers)))
        return bytearray(longs) + bytearray(ints)

    @contextlib.contextmanager
    def padding(self, bucket: int) -> Iterator[None]:
        """The bucket holds nothing but padding inside the block, for a warm-up or a capture; `load` fills it afterwards."""
        fields = self._fields(self._words, bucket)
        for field in fields:
            field.zero_()
        fields.slot_mapping.fill_(-1)
        yield

    def reset(self) -> None:
        """Wait for the device after a step that failed or was interrupted; `load` writes every tensor anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(
        self, input_ids: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]],
        logits_indices: Sequence[int], padded_to: int,
    ) -> None:  # fmt: skip
        """Refuse what `load` could not put into the tensors; raises `ArgumentError`."""
        if padded_to not in self.buckets:
            raise ArgumentError("padded_to", f"one of the buckets {self.buckets}", str(padded_to))
        if not 0 < len(query_lens) <= self.max_num_reqs:
            raise ArgumentError("query_lens", f"1 to {self.max_num_reqs} requests", str(len(query_lens)), "run the step without a graph")
        if min(query_lens) < 1:
            raise ArgumentError("query_lens", "at least 1 token per request", str(min(query_lens)))
        if sum(query_lens) != len(input_ids) or len(input_ids) > padded_to:
            raise ArgumentError(
                "input_ids", f"as many tokens as query_lens says ({sum(query_lens)}), at most {padded_to}", str(len(input_ids))
            )
        if len(logits_indices) > self.max_num_reqs or any(not 0 <= index < len(input_ids) for index in logits_indices):
            raise ArgumentError("logits_indices", f"at most {self.max_num_reqs} tokens in [0, {len(input_ids)})", str(list(logits_indices)))
        if any(length < tokens for length, tokens in zip(seq_lens, query_lens, strict=False)):
            raise ArgumentError("seq_lens", "at least the tokens of this step", f"{list(seq_lens)} for {list(query_lens)} tokens")
        check_batch(query_lens, seq_lens, block_tables, self.block_size, self.num_blocks)
        widest = max(len(blocks) for blocks in block_tables)
        if widest > self.max_blocks_per_req:
            raise ArgumentError("block_tables", f"at most {self.max_blocks_per_req} blocks per request", str(widest))

    def _sizes(self, bucket: int) -> list[int]:
        """Words of 8 bytes of each field, rounded up."""
        longs = (bucket, bucket, bucket, self.max_num_reqs)
        ints = (self.max_num_reqs, self.max_num_reqs + 1, self.max_num_reqs * self.max_blocks_per_req)
        return [-(-words // _ALIGN) * _ALIGN for words in (*longs, *(-(-count // 2) for count in ints))]

    def _num_words(self, bucket: int) -> int:
        return sum(self._sizes(bucket))

    def _fields(self, words: Tensor, bucket: int) -> PackedFields:
        """``words``, on the host or the device, as the fields of a bucket."""
        reqs = self.max_num_reqs
        parts = words[: self._num_words(bucket)].split(self._sizes(bucket))
        input_ids, positions, slot_mapping = (part[:bucket] for part in parts[:3])
        seq_lens, starts, table = (part.view(torch.int32) for part in parts[4:])
        table = table[: reqs * self.max_blocks_per_req].view(reqs, self.max_blocks_per_req)
        return PackedFields(input_ids, positions, slot_mapping, parts[3][:reqs], seq_lens[:reqs], starts[: reqs + 1], table)
