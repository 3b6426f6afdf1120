"""The static tensors that captured steps read, and their update in place from host lists.

`DecodeBuffers` holds decode steps, a token per row; `torchpaged.graphs.packed_buffers.PackedBuffers` steps of
any query lengths. A step's numbers travel as the bytes of one piece of pinned memory, so that a step costs
one copy to the device, whatever it holds. Padding is as `torchpaged.metadata.fields` says: slot -1, seq_len
0, null block 0, and a ``query_start_loc`` whose tail repeats its last value.
"""

import contextlib
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.graphs.staged import StagedMemory, Staging
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.checks import check_batch, count, integers
from torchpaged.metadata.fields import (
    CODES,
    FIELDS,
    METADATA_FIELDS,
    BatchSizes,
    make_batch_tensors,
    pad_batch_tensors,
)
from torchpaged.metadata.host import slot_of

_ALIGN = 64  # bytes that every field starts at a multiple of


class DecodeBatch(NamedTuple):
    """A decode step on the host, as `DecodeGraphRunner.run` takes it.

    Attributes:
        input_ids: the token of each row: host ints, or a device tensor ``[num_rows]`` int64 (no host copy
            then).
        seq_lens: KV tokens of each row, this step's included; at least 1.
        block_tables: each row's blocks.
    """

    input_ids: Sequence[int] | Tensor
    seq_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]


class StepBuffers:
    """What both kinds have: sizes, and the way of a step's numbers to the device.

    Args:
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        device: where the tensors live.
        num_blocks: blocks in the pools, to check ids against; None skips that check.
        order: the fields of a step.
        at_least_one: further sizes, by name.
    """

    def __init__(
        self,
        max_blocks_per_req: int,
        block_size: int,
        device: torch.device | str,
        num_blocks: int | None,
        order: Sequence[str],
        **at_least_one: int,
    ) -> None:
        check_sizes(**at_least_one, max_blocks_per_req=max_blocks_per_req, block_size=block_size)
        self.max_blocks_per_req, self.block_size = max_blocks_per_req, block_size
        self.num_blocks, self.device = num_blocks, torch.device(device)
        self._order = tuple(order)
        self._layouts: dict[int, list[tuple[str, int, tuple[int, ...]]]] = {}

    def _sizes(self, bucket: int) -> BatchSizes:
        """Of the batch that a bucket holds."""
        raise NotImplementedError

    def _fields(self, bucket: int) -> Mapping[str, Tensor]:
        """The tensors of a bucket, or larger ones, by name."""
        raise NotImplementedError

    @contextlib.contextmanager
    def padding(self, bucket: int) -> Iterator[None]:
        """The bucket holds nothing but padding inside the block, for a warm-up or a capture; `put` fills
        it afterwards."""
        pad_batch_tensors(self._fields(bucket), self._sizes(bucket))
        yield

    def reset(self) -> None:
        """Wait for the device after a step that failed or was interrupted; `put` writes every
        tensor anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _check_blocks(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> None:
        check_batch(query_lens, seq_lens, block_tables, self.block_size, self.num_blocks)
        widest = max(len(blocks) for blocks in block_tables)
        if widest > self.max_blocks_per_req:
            raise ArgumentError(
                "block_tables", f"at most {self.max_blocks_per_req} blocks per request", str(widest)
            )

    def _layout(self, bucket: int) -> list[tuple[str, int, tuple[int, ...]]]:
        """Of each field of a bucket its name, its bytes with the gap behind it, and its shape."""
        if bucket not in self._layouts:
            sizes, layout = self._sizes(bucket), []
            for field in (FIELDS[name] for name in self._order):
                shape = field.shape(sizes)
                num_bytes = -(-math.prod(shape) * field.dtype.itemsize // _ALIGN) * _ALIGN
                layout.append((field.name, num_bytes, shape))
            self._layouts[bucket] = layout
        return self._layouts[bucket]

    def _num_bytes(self, bucket: int) -> int:
        return sum(num_bytes for _, num_bytes, _ in self._layout(bucket))

    def _make_staging(self, bucket: int) -> None:
        """For steps of up to ``bucket``, and the bytes where their numbers arrive."""
        self._staging = Staging(self._num_bytes(bucket), self.device)
        self._no_blocks = memoryview(array("i", bytes(4 * self.max_blocks_per_req)))
        with torch.inference_mode(False):
            self._bytes = torch.zeros(self._num_bytes(bucket), dtype=torch.uint8, device=self.device)

    def _staged(
        self,
        numbers: Mapping[str, Sequence[int]],
        block_tables: Sequence[Sequence[int]],
        bucket: int,
        first_row: int = 0,
    ) -> StagedMemory:
        """A step's fields, padded, in memory to be sent, with blocks from ``first_row`` on; what is in front
        of these is of no meaning. From lists, since a tensor operation each would cost the host several times
        as much."""
        memory, first, width = self._staging.take(), 0, self.max_blocks_per_req
        for name, num_bytes, _ in self._layout(bucket):
            field = FIELDS[name]
            size = field.dtype.itemsize
            words, at, end = memory.words[CODES[field.dtype]], first // size, (first + num_bytes) // size
            if name == "block_table":
                at += first_row * width
                for blocks in block_tables:
                    words[at : at + len(blocks)] = array("i", blocks)
                    words[at + len(blocks) : at + width] = self._no_blocks[len(blocks) :]
                    at += width
                words[at:end] = array("i", bytes(size * (end - at)))
            else:
                words[at:end] = field.pad(numbers[name], end - at)
            first += num_bytes
        return memory

    def _split(self, memory: Tensor, bucket: int) -> dict[str, Tensor]:
        """The fields of a bucket that lie in these bytes, by name."""
        fields, first = {}, 0
        for name, num_bytes, shape in self._layout(bucket):
            end = first + math.prod(shape) * FIELDS[name].dtype.itemsize
            fields[name] = memory[first:end].view(FIELDS[name].dtype).view(shape)
            first += num_bytes
        return fields


class DecodeBuffers(StepBuffers):
    """Static decode inputs for up to ``max_batch_size`` rows, the same tensors for every bucket.

    Args:
        max_batch_size: rows.
        max_blocks_per_req, block_size, device, num_blocks: as in `StepBuffers`.

    Attributes:
        input_ids, positions, slot_mapping: ``[max_batch_size]`` int64.
        seq_lens: ``[max_batch_size]`` int32.
        query_start_loc: ``[max_batch_size + 1]`` int32.
        block_table: ``[max_batch_size, max_blocks_per_req]`` int32.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_blocks_per_req: int,
        block_size: int,
        device: torch.device | str,
        num_blocks: int | None = None,
    ) -> None:
        fields = (*METADATA_FIELDS, "input_ids")
        super().__init__(
            max_blocks_per_req, block_size, device, num_blocks, fields, max_batch_size=max_batch_size
        )
        self.max_batch_size = max_batch_size
        self._tensors = make_batch_tensors(fields, self._sizes(max_batch_size), device)
        (
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.slot_mapping,
            self.positions,
            self.input_ids,
        ) = self._tensors.values()
        for tensor in self._tensors.values():
            torch._dynamo.mark_static_address(tensor, guard=False)
        self._make_staging(max_batch_size)

    def _sizes(self, bucket: int) -> BatchSizes:
        """One token per row."""
        return BatchSizes(bucket, bucket, self.max_blocks_per_req)

    def _fields(self, bucket: int) -> Mapping[str, Tensor]:
        return self._tensors

    def tensors(self) -> dict[str, Tensor]:
        """All buffers by name."""
        return dict(self._tensors)

    def view(self, num_rows: int) -> tuple[Tensor, AttentionMetadata]:
        """The first ``num_rows`` rows as ``(input_ids, metadata)``; slices, no copies."""
        metadata = AttentionMetadata.view(
            self._tensors, self._sizes(num_rows), max_query_len=1, block_size=self.block_size
        )
        return self.input_ids[:num_rows], metadata

    def put(self, batch: DecodeBatch, padded_to: int) -> None:
        """Put one decode step, which was `check`-ed, into the buffers; rows behind its own, up to the bucket
        ``padded_to``, become padding."""
        input_ids, seq_lens, block_tables = batch
        rows = len(seq_lens)
        last = [length - 1 for length in integers("seq_lens", seq_lens)]
        numbers = {
            "positions": last,
            "slot_mapping": [
                slot_of(position, blocks, self.block_size)
                for blocks, position in zip(block_tables, last, strict=True)
            ],
            "seq_lens": seq_lens,
            "query_start_loc": range(rows + 1),
            "input_ids": [] if isinstance(input_ids, Tensor) else input_ids,
        }
        memory, arrived = self._staged(numbers, block_tables, padded_to), self._bytes
        self._staging.send(memory, arrived[: self._num_bytes(padded_to)])
        new = self._split(arrived, padded_to)
        if isinstance(input_ids, Tensor):
            del new["input_ids"]
            self.input_ids[:rows].copy_(input_ids)
            self.input_ids[rows:padded_to].zero_()
        for name, tensor in new.items():
            self._tensors[name][: len(tensor)].copy_(tensor)

    def check(self, batch: DecodeBatch, padded_to: int) -> None:
        """Refuse what could not be `put` into the buffers; raises `ArgumentError`."""
        input_ids, seq_lens, block_tables = batch
        rows = count("seq_lens", seq_lens)
        if not isinstance(input_ids, Tensor):
            integers("input_ids", input_ids)
        elif (input_ids.dim(), input_ids.dtype, input_ids.device.type) != (1, torch.int64, self.device.type):
            raise ArgumentError(
                "input_ids",
                f"[num_rows] int64 on {self.device.type}",
                f"{list(input_ids.shape)} {input_ids.dtype} on {input_ids.device}",
            )
        if len(input_ids) != rows:
            raise ArgumentError("input_ids", f"one token per row ({rows})", str(len(input_ids)))
        if not 0 < rows <= padded_to <= self.max_batch_size:
            raise ArgumentError("padded_to", f"{rows} to {self.max_batch_size} rows", str(padded_to))
        if min(integers("seq_lens", seq_lens)) < 1:
            raise ArgumentError("seq_lens", "at least 1 (this step's token included)", str(min(seq_lens)))
        self._check_blocks([1] * rows, seq_lens, block_tables)
        if self.num_blocks is not None:  # columns past the length too: advance_step will write there
            highest = max(max(blocks) for blocks in block_tables)
            lowest = min(min(blocks) for blocks in block_tables)
            if highest >= self.num_blocks or lowest < 0:
                raise ArgumentError(
                    "block_tables", f"block ids in [0, {self.num_blocks})", f"ids in [{lowest}, {highest}]"
                )
