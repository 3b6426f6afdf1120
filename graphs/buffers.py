"""DecodeBuffers: the static tensors a captured decode step reads, and their update in place.

Each step's host values are packed into one int64 buffer and one int32 table, so that a step costs two copies
to the device. Padding is as `torchpaged.metadata.fields` says: slot -1, seq_len 0, null
block 0, and a ``query_start_loc`` whose tail repeats its last value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.metadata import AttentionMetadata, count, integers
from torchpaged.metadata.checks import check_batch
from torchpaged.metadata.fields import (
    FIELDS,
    METADATA_FIELDS,
    BatchSizes,
    make_batch_tensors,
    pad_batch_tensors,
)
from torchpaged.metadata.host import host_block_table, to_device
from torchpaged.metadata.slots import slot_of


class DecodeBuffers:
    """Static decode inputs for up to ``max_batch_size`` rows.

    Args:
        max_batch_size: rows.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        device: where the tensors live.
        num_blocks: blocks in the pools, to check ids against; None skips that check.

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
        for name, size in (
            ("max_batch_size", max_batch_size),
            ("max_blocks_per_req", max_blocks_per_req),
            ("block_size", block_size),
        ):
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        self.max_batch_size, self.max_blocks_per_req = max_batch_size, max_blocks_per_req
        self.block_size, self.num_blocks, self.device = block_size, num_blocks, torch.device(device)
        self._pin = self.device.type == "cuda"
        self._tensors = make_batch_tensors(
            (*METADATA_FIELDS, "input_ids"), self._sizes(max_batch_size), device
        )
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

    def _sizes(self, num_rows: int) -> BatchSizes:
        """Of a decode step: one token per row."""
        return BatchSizes(num_rows, num_rows, self.max_blocks_per_req)

    def tensors(self) -> dict[str, Tensor]:
        """All buffers by name."""
        return dict(self._tensors)

    def view(self, num_rows: int) -> tuple[Tensor, AttentionMetadata]:
        """The first ``num_rows`` rows as ``(input_ids, metadata)``; slices, no copies."""
        metadata = AttentionMetadata.view(
            self._tensors, self._sizes(num_rows), max_query_len=1, block_size=self.block_size
        )
        return self.input_ids[:num_rows], metadata

    def load(
        self,
        input_ids: Sequence[int] | Tensor,
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        padded_to: int,
    ) -> None:
        """Put one decode step into the buffers.

        Args:
            input_ids: the token of each row: host ints, or a device tensor ``[num_rows]`` int64 (no host
                copy then).
            seq_lens: KV tokens of each row, this step's included; at least 1.
            block_tables: each row's blocks.
            padded_to: the bucket; rows from ``num_rows`` on become padding.

        Raises:
            ArgumentError: lengths, rows or ids don't fit; nothing is written then.
        """
        rows = len(seq_lens)
        self.check(input_ids, seq_lens, block_tables, padded_to)
        last = [length - 1 for length in seq_lens]
        slots = [
            slot_of(position, blocks, self.block_size)
            for blocks, position in zip(block_tables, last, strict=True)
        ]
        longs = FIELDS["positions"].pad(last, padded_to) + FIELDS["slot_mapping"].pad(slots, padded_to)
        if not isinstance(input_ids, Tensor):
            longs += FIELDS["input_ids"].pad(input_ids, padded_to)
        ints = FIELDS["seq_lens"].pad(seq_lens, padded_to) + FIELDS["query_start_loc"].pad(
            range(rows + 1), padded_to + 1
        )
        table = host_block_table(block_tables, padded_to, self.max_blocks_per_req, self._pin)
        packed, small = to_device(longs, torch.int64, self.device), to_device(ints, torch.int32, self.device)
        # Fresh pinned memory each step: torch's host allocator keeps it until the copy is done, so nothing is
        # overwritten early.
        self.positions[:padded_to].copy_(packed[:padded_to])
        self.slot_mapping[:padded_to].copy_(packed[padded_to : 2 * padded_to])
        if isinstance(input_ids, Tensor):
            self.input_ids[:rows].copy_(input_ids)
            self.input_ids[rows:padded_to].zero_()
        else:
            self.input_ids[:padded_to].copy_(packed[2 * padded_to :])
        self.seq_lens[:padded_to].copy_(small[:padded_to])
        self.query_start_loc[: padded_to + 1].copy_(small[padded_to:])
        self.block_table[:padded_to].copy_(table, non_blocking=True)

    def load_padding(self, num_rows: int) -> None:
        """Make the first ``num_rows`` rows padding: a step over them writes nothing and reads nothing."""
        pad_batch_tensors(self._tensors, self._sizes(num_rows))

    @contextlib.contextmanager
    def padding(self, num_rows: int) -> Iterator[None]:
        """The first ``num_rows`` rows are padding inside the block, for a warm-up or a capture; `load` fills
        them afterwards."""
        self.load_padding(num_rows)
        yield

    def reset(self) -> None:
        """Wait for the device after a step that failed or was interrupted; `load` writes every
        tensor anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(
        self,
        input_ids: Sequence[int] | Tensor,
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        padded_to: int,
    ) -> None:
        """Refuse what `load` could not put into the buffers; raises `ArgumentError`."""
        rows = count("seq_lens", seq_lens)
        if isinstance(input_ids, Tensor) and (
            input_ids.dim() != 1
            or input_ids.dtype != torch.int64
            or input_ids.device.type != self.device.type
        ):
            raise ArgumentError(
                "input_ids",
                f"[num_rows] int64 on {self.device.type}",
                f"{list(input_ids.shape)} {input_ids.dtype} on {input_ids.device}",
            )
        if not isinstance(input_ids, Tensor):
            integers("input_ids", input_ids)
        if len(input_ids) != rows:
            raise ArgumentError("input_ids", f"one token per row ({rows})", str(len(input_ids)))
        if not 0 < rows <= padded_to <= self.max_batch_size:
            raise ArgumentError("padded_to", f"{rows} to {self.max_batch_size} rows", str(padded_to))
        if min(integers("seq_lens", seq_lens)) < 1:
            raise ArgumentError("seq_lens", "at least 1 (this step's token included)", str(min(seq_lens)))
        check_batch([1] * rows, seq_lens, block_tables, self.block_size, self.num_blocks)
        if self.num_blocks is not None:  # columns past the length too: advance_step will write there
            highest = max(max(blocks) for blocks in block_tables)
            lowest = min(min(blocks) for blocks in block_tables)
            if highest >= self.num_blocks or lowest < 0:
                raise ArgumentError(
                    "block_tables", f"block ids in [0, {self.num_blocks})", f"ids in [{lowest}, {highest}]"
                )
        widest = max(len(blocks) for blocks in block_tables)
        if widest > self.max_blocks_per_req:
            raise ArgumentError(
                "block_tables", f"at most {self.max_blocks_per_req} blocks per request", str(widest)
            )
