"""DecodeBuffers: the static tensors a captured decode step reads, and their update in place.

Each step's host values are packed into one int64 buffer and one int32 table, so that a step costs two copies to the device.
Padding contract: slot -1, seq_len 0, null block 0, and a ``query_start_loc`` whose tail repeats its last value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.metadata import AttentionMetadata, check_batch


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
        self, max_batch_size: int, max_blocks_per_req: int, block_size: int, device: torch.device | str, num_blocks: int | None = None
    ) -> None:
        for name, size in (("max_batch_size", max_batch_size), ("max_blocks_per_req", max_blocks_per_req), ("block_size", block_size)):
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        self.max_batch_size, self.max_blocks_per_req = max_batch_size, max_blocks_per_req
        self.block_size, self.num_blocks, self.device = block_size, num_blocks, torch.device(device)
        rows, self._pin = max_batch_size, self.device.type == "cuda"
        with torch.inference_mode(False):
            self.input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
            self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
            self.slot_mapping = torch.full((rows,), -1, dtype=torch.int64, device=device)
            self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
            self.query_start_loc = torch.zeros(rows + 1, dtype=torch.int32, device=device)
            self.block_table = torch.zeros(rows, max_blocks_per_req, dtype=torch.int32, device=device)
        for tensor in self.tensors().values():
            torch._dynamo.mark_static_address(tensor, guard=False)

    def tensors(self) -> dict[str, Tensor]:
        """All buffers by name."""
        names = ("input_ids", "positions", "slot_mapping", "seq_lens", "query_start_loc", "block_table")
        return {name: getattr(self, name) for name in names}

    def view(self, num_rows: int) -> tuple[Tensor, AttentionMetadata]:
        """The first ``num_rows`` rows as ``(input_ids, metadata)``; slices, no copies."""
        return self.input_ids[:num_rows], AttentionMetadata(
            self.block_table[:num_rows],
            self.seq_lens[:num_rows],
            self.query_start_loc[: num_rows + 1],
            self.slot_mapping[:num_rows],
            self.positions[:num_rows],
            max_query_len=1,
            block_size=self.block_size,
        )

    def load(
        self, input_ids: Sequence[int] | Tensor, seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]], padded_to: int
    ) -> None:
        """Put one decode step into the buffers.

        Args:
            input_ids: the token of each row: host ints, or a device tensor ``[num_rows]`` int64 (no host copy then).
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
            blocks[position // self.block_size] * self.block_size + position % self.block_size
            for blocks, position in zip(block_tables, last, strict=True)
        ]
        pad = [0] * (padded_to - rows)
        on_device = isinstance(input_ids, Tensor)
        longs = [*last, *pad, *slots, *([-1] * len(pad)), *([] if on_device else [*input_ids, *pad])]
        starts = [*range(rows + 1), *([rows] * len(pad))]
        ints = torch.zeros(padded_to, self.max_blocks_per_req, dtype=torch.int32, pin_memory=self._pin)
        width = max(len(blocks) for blocks in block_tables)
        flat = [[*blocks, *([0] * (width - len(blocks)))] for blocks in block_tables]
        ints[:rows, :width] = torch.tensor(flat, dtype=torch.int32)
        packed = torch.tensor(longs, dtype=torch.int64, pin_memory=self._pin).to(self.device, non_blocking=True)
        small = torch.tensor([*seq_lens, *pad, *starts], dtype=torch.int32, pin_memory=self._pin).to(self.device, non_blocking=True)
        # Fresh pinned memory each step: torch's host allocator keeps it until the copy is done, so nothing is overwritten early.
        self.positions[:padded_to].copy_(packed[:padded_to])
        self.slot_mapping[:padded_to].copy_(packed[padded_to : 2 * padded_to])
        if isinstance(input_ids, Tensor):
            self.input_ids[:rows].copy_(input_ids)
            self.input_ids[rows:padded_to].zero_()
        else:
            self.input_ids[:padded_to].copy_(packed[2 * padded_to :])
        self.seq_lens[:padded_to].copy_(small[:padded_to])
        self.query_start_loc[: padded_to + 1].copy_(small[padded_to:])
        self.block_table[:padded_to].copy_(ints, non_blocking=True)

    def load_padding(self, num_rows: int) -> None:
        """Make the first ``num_rows`` rows padding: a step over them writes nothing and reads nothing."""
        self.input_ids[:num_rows].zero_()
        self.positions[:num_rows].zero_()
        self.slot_mapping[:num_rows].fill_(-1)
        self.seq_lens[:num_rows].zero_()
        self.query_start_loc[: num_rows + 1].zero_()
        self.block_table[:num_rows].zero_()

    @contextlib.contextmanager
    def padding(self, num_rows: int) -> Iterator[None]:
        """The first ``num_rows`` rows are padding inside the block, for a warm-up or a capture; `load` fills them afterwards."""
        self.load_padding(num_rows)
        yield

    def reset(self) -> None:
        """Wait for the device after a step that failed or was interrupted; `load` writes every tensor anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check(
        self, input_ids: Sequence[int] | Tensor, seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]], padded_to: int
    ) -> None:
        """Refuse what `load` could not put into the buffers; raises `ArgumentError`."""
        rows = len(seq_lens)
        if isinstance(input_ids, Tensor) and (
            input_ids.dim() != 1 or input_ids.dtype != torch.int64 or input_ids.device.type != self.device.type
        ):
            raise ArgumentError("input_ids", f"[num_rows] int64 on {self.device.type}",
                                f"{list(input_ids.shape)} {input_ids.dtype} on {input_ids.device}")  # fmt: skip
        if len(input_ids) != rows:
            raise ArgumentError("input_ids", f"one token per row ({rows})", str(len(input_ids)))
        if not 0 < rows <= padded_to <= self.max_batch_size:
            raise ArgumentError("padded_to", f"{rows} to {self.max_batch_size} rows", str(padded_to))
        if min(seq_lens) < 1:
            raise ArgumentError("seq_lens", "at least 1 (this step's token included)", str(min(seq_lens)))
        check_batch([1] * rows, seq_lens, block_tables, self.block_size, self.num_blocks)
        if self.num_blocks is not None:  # columns past the length too: advance_step will write there
            highest = max(max(blocks) for blocks in block_tables)
            lowest = min(min(blocks) for blocks in block_tables)
            if highest >= self.num_blocks or lowest < 0:
                raise ArgumentError("block_tables", f"block ids in [0, {self.num_blocks})", f"ids in [{lowest}, {highest}]")
        widest = max(len(blocks) for blocks in block_tables)
        if widest > self.max_blocks_per_req:
            raise ArgumentError("block_tables", f"at most {self.max_blocks_per_req} blocks per request", str(widest))


def buffers_of_sizes(sizes: Mapping[str, int | None], device: torch.device | str, num_blocks: int | None) -> DecodeBuffers:
    """`DecodeBuffers` from sizes by name, of which none may be missing."""
    for name, size in sizes.items():
        if size is None:
            raise ArgumentError(name, "a number", "None", "give the three sizes, or rows=DecodeRows(...)")
    return DecodeBuffers(**sizes, device=device, num_blocks=num_blocks)  # type: ignore[arg-type]
