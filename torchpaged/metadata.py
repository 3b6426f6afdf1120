"""AttentionMetadata: one batch of requests as tensors, in vLLM's words.

    metadata = AttentionMetadata.from_lists(query_lens=[1, 5], seq_lens=[33, 5], block_tables=[[4, 7, 2], [9]], block_size=16)

``seq_lens`` counts the KV tokens of a request *including* the ones this step adds, so the new tokens of request ``r`` sit at
positions ``seq_lens[r] - query_lens[r] ... seq_lens[r] - 1``. The tensors may be slices of static buffers (graphs/).
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError


@dataclass
class AttentionMetadata:
    """What one attention step needs to know about its batch; every layer shares it.

    Attributes:
        block_table: ``[num_reqs, max_blocks_per_req]`` int32; entries past a request's last block may be garbage.
        seq_lens: ``[num_reqs]`` int32, KV tokens including this step's; 0 = padding row.
        query_start_loc: ``[num_reqs + 1]`` int32, first token of each request in the packed batch (``cu_seqlens_q``
            elsewhere); the tail repeats the last value.
        slot_mapping: ``[num_tokens]`` int64, ``block * block_size + offset`` of every token; -1 = write nothing.
        positions: ``[num_tokens]`` int64, each token's position in its sequence.
        max_query_len: host int, an upper bound of the query lengths; 1 marks a decode batch.
        block_size: host int, the tokens per block that ``slot_mapping`` and ``block_table`` were made for; None = nobody said. A cache of
            another block size is refused (`check_block_size`).
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    slot_mapping: Tensor
    positions: Tensor
    max_query_len: int
    block_size: int | None = None

    @property
    def num_reqs(self) -> int:
        """Requests in the batch, padding rows included."""
        return self.block_table.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens in the batch, padding included."""
        return self.slot_mapping.shape[0]

    def to(self, device: torch.device | str) -> AttentionMetadata:
        """The same batch on ``device``; copies from pinned memory do not block."""
        names = ("block_table", "seq_lens", "query_start_loc", "slot_mapping", "positions")
        moved: dict[str, Any] = {n: getattr(self, n).to(device, non_blocking=True) for n in names}
        return replace(self, **moved)

    def check_block_size(self, block_size: int) -> None:
        """Refuse a cache whose blocks hold ``block_size`` tokens if the batch was made for another size. Host ints only: it may be traced.

        Raises:
            ArgumentError: they differ. In a traced call dynamo's own error.
        """
        if self.block_size is not None and self.block_size != block_size:
            if torch.compiler.is_compiling():  # dynamo can't make an ArgumentError, and its own error quotes this one
                raise ValueError(
                    f"kv_cache: expected blocks of {self.block_size} tokens, as this batch was made for, got blocks of {block_size}"
                )
            raise ArgumentError("kv_cache", f"blocks of {self.block_size} tokens, as this batch's slots and tables were made for",
                                f"blocks of {block_size}", "build the metadata with the cache's block_size")  # fmt: skip

    @classmethod
    def from_lists(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        num_blocks: int | None = None,
        max_blocks_per_req: int | None = None,
        max_query_len: int | None = None,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Build the batch on the host, check it, and move it to ``device`` in one go.

        Args:
            query_lens: new tokens of each request.
            seq_lens: KV tokens of each request, the new ones included.
            block_tables: the blocks each request owns, in order; at least ``ceil(seq_len / block_size)`` each.
            block_size: tokens per block.
            num_blocks: blocks in the pool, to check ids against; None skips that check.
            max_blocks_per_req: width of the table; default: the longest row.
            max_query_len: upper bound to state; default: the longest query of this batch.
            device: where the tensors go.

        Raises:
            ArgumentError: lengths, blocks or ids do not fit together.
        """
        check_batch(query_lens, seq_lens, block_tables, block_size, num_blocks)
        width = max((len(row) for row in block_tables), default=1) or 1
        if max_blocks_per_req is not None:
            if width > max_blocks_per_req:
                raise ArgumentError("block_tables", f"at most {max_blocks_per_req} blocks per request", str(width))
            width = max_blocks_per_req
        pin = torch.device(device).type == "cuda"
        table = torch.zeros(len(seq_lens), width, dtype=torch.int32, pin_memory=pin)
        slots: list[int] = []
        positions: list[int] = []
        for row, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
            table[row, : len(blocks)] = torch.tensor(list(blocks), dtype=torch.int32)
            for position in range(seq_len - query_len, seq_len):
                positions.append(max(position, 0))
                slots.append(blocks[position // block_size] * block_size + position % block_size if position >= 0 else -1)
        starts = [0, *itertools.accumulate(query_lens)]
        host = cls(  # all pinned: a copy from other memory waits for everything before it
            table,
            torch.tensor(list(seq_lens), dtype=torch.int32, pin_memory=pin),
            torch.tensor(starts, dtype=torch.int32, pin_memory=pin),
            torch.tensor(slots, dtype=torch.int64, pin_memory=pin),
            torch.tensor(positions, dtype=torch.int64, pin_memory=pin),
            max_query_len=max(1, *query_lens, 1) if max_query_len is None else max_query_len,
            block_size=block_size,
        )
        return host.to(device)


class HostLengths(NamedTuple):
    """Lengths of a batch as the host knows them, for a backend that plans there: without them it would have to read the device."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]


def to_device(numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Host numbers as a tensor ``[len(numbers)]`` on ``device``; the copy to a GPU is from pinned memory, so that nothing waits."""
    device = torch.device(device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def check_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    num_blocks: int | None = None,
) -> None:
    """Refuse a batch whose lengths and blocks do not fit together; raises `ArgumentError`.

    That includes a block twice in one request, and two requests that write one slot. Shared blocks that are only read are fine.
    """
    if not isinstance(block_size, numbers.Integral) or isinstance(block_size, bool) or block_size < 1:
        raise ArgumentError("block_size", "an int of at least 1 token", repr(block_size))
    if not len(query_lens) == len(seq_lens) == len(block_tables):
        raise ArgumentError(
            "block_tables", f"one row and one length per request ({len(seq_lens)})",
            f"{len(query_lens)} query_lens, {len(seq_lens)} seq_lens, {len(block_tables)} rows",
        )  # fmt: skip
    for row, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
        if query_len < 0 or seq_len < 0:
            raise ArgumentError("seq_lens", "lengths of at least 0", f"query_len {query_len}, seq_len {seq_len} in row {row}")
        needed = -(-seq_len // block_size)
        if len(blocks) < needed:
            raise ArgumentError("block_tables", f"{needed} blocks of {block_size} for {seq_len} tokens in row {row}", f"{len(blocks)}",
                                "allocate before building the batch")  # fmt: skip
        ids = blocks[:needed]
        if needed and type(ids[0]) is not int:  # of an array or tensor, whose items are no keys to look up
            ids = [int(block) for block in ids]
        low, high = min(ids, default=1), max(ids, default=0)
        if low < 1 or (num_blocks is not None and high >= num_blocks):
            raise ArgumentError("block_tables", f"block ids in [1, {num_blocks or 'num_blocks'}) (0 is the null block)",
                                f"ids in [{low}, {high}] in row {row}")  # fmt: skip
        if len(set(ids)) < needed:
            raise ArgumentError("block_tables", "every block once per request", f"a block several times in row {row}: {list(ids)}")
    _check_one_writer(query_lens, seq_lens, block_tables, block_size)


def _check_one_writer(query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]], block_size: int) -> None:
    writers: dict[int, list[tuple[int, int, int]]] = {}  # block -> (first slot, end, row) of what each request writes into it
    for row, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
        first = max(seq_len - query_len, 0)
        for column in range(first // block_size, -(-seq_len // block_size) if seq_len > first else 0):
            start, end = max(first - column * block_size, 0), min(seq_len - column * block_size, block_size)
            block = int(blocks[column])
            for other_start, other_end, other in writers.setdefault(block, []):
                if start < other_end and other_start < end:
                    raise ArgumentError("block_tables", "one request per slot that is written",
                                        f"rows {other} and {row}, which both write slot {max(start, other_start)} of block {block}",
                                        "requests may share blocks they only read; give each a block of its own to write")  # fmt: skip
            writers[block].append((start, end, row))
