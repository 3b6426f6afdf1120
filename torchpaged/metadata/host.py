"""Host numbers on their way to the device, from pinned memory, so that nothing waits; and the slot
arithmetic: where in a paged cache the token at a position lies, ``block * block_size + offset``, on the host
and on the device.

    slot_of(17, blocks=[4, 7], block_size=16)              # 7 * 16 + 1
    slots_between(14, 18, blocks=[4, 7], block_size=16)    # array of 78, 79, 112, 113

The ops that move a batch on by themselves (``advance_step``, ``finish_step``) have it in their kernels."""

import itertools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from torchpaged.metadata.checks import integers
from torchpaged.metadata.fields import CODES, FIELDS
from torchpaged.metadata.tree import tree_numbers

#: So few numbers Python counts faster than torch.
_FEW = 64


def slot_of(position: int, blocks: Sequence[int], block_size: int) -> int:
    """The slot of the token at ``position``, whatever kind of integers ``blocks`` are."""
    return int(blocks[position // block_size]) * block_size + position % block_size


def slots_between(start: int, end: int, blocks: Sequence[int], block_size: int) -> "array[int]":
    """`slot_of` each position from ``start`` up to ``end``, as signed integers of 64 bits; -1 of those below
    0."""
    if end - start < _FEW:
        return array("q", [slot_of(at, blocks, block_size) if at >= 0 else -1 for at in range(start, end)])
    below = array("q", [-1]) * min(-start, end - start)
    first, start = max(start, 0) // block_size, max(start, 0)
    firsts = array("q", blocks[first : -(-end // block_size)])
    slots = array("q", bytes(8 * len(firsts) * block_size))
    if slots:
        starts = torch.frombuffer(firsts, dtype=torch.int64).mul_(block_size)[:, None]
        offsets = torch.arange(block_size, device="cpu")
        torch.add(starts, offsets, out=torch.frombuffer(slots, dtype=torch.int64).view(-1, block_size))
    return below + slots[start - first * block_size : end - first * block_size]


def positions_between(start: int, end: int) -> "array[int]":
    """The positions themselves."""
    if end - start < _FEW:
        return array("q", range(start, end))
    positions = array("q", bytes(8 * (end - start)))
    torch.arange(start, end, out=torch.frombuffer(positions, dtype=torch.int64), device="cpu")
    return positions


def slots_at(positions: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """`slot_of` on the device: positions ``[num_reqs, n]`` int64 of each request -> ``[num_reqs, n]`` int64;
    -1 of those below 0."""
    column = (positions // block_size).clamp(0, block_table.shape[1] - 1)
    slots = block_table.long().gather(1, column) * block_size + positions % block_size
    return torch.where(positions >= 0, slots, -1)


def to_device(
    numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Host numbers as a tensor ``[len(numbers)]`` on ``device``; the copy to a GPU is from pinned memory, so
    that nothing waits. They are copied: what the caller does with them later changes nothing."""
    if not isinstance(device, torch.device):  # a step on the host calls this often
        device = torch.device(device)
    pin, code = device.type == "cuda", CODES.get(dtype)
    if code is None or not len(numbers):
        return torch.tensor(numbers, dtype=dtype, pin_memory=pin, device="cpu").to(device, non_blocking=True)
    tensor = torch.frombuffer(array(code, numbers), dtype=dtype)  # a quarter of the time of `torch.tensor`
    return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=True)


def record_behind(event: torch.Event, device: torch.device) -> None:
    """Record an event behind what was launched on ``device``. Without a stream it would stand in that of the
    current device, which in a thread that chose none is the first one."""
    if torch.cuda.current_device() == device.index:
        event.record()
    else:
        event.record(torch.cuda.current_stream(device))


def host_numbers(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    tree_parents: Sequence[Sequence[int] | None] | None = None,
) -> dict[str, Sequence[int]]:
    """What the tensors of a batch hold but for the block table, by their names in `FIELDS`, of each token as
    an array; arguments as of `torchpaged.AttentionMetadata.from_lists`.

    Raises:
        ArgumentError: what is given as trees is none; lengths and blocks are checked before.
    """
    # integers of few bits, as arrays of numpy have them, would wrap around
    query_lens, seq_lens = integers("query_lens", query_lens), integers("seq_lens", seq_lens)
    contexts = [seq_len - query_len for query_len, seq_len in zip(query_lens, seq_lens, strict=True)]
    slots, positions = array("q"), array("q")
    for context, seq_len, blocks in zip(contexts, seq_lens, block_tables, strict=True):
        if context == seq_len - 1:  # a decode, as most rows of a batch are
            slots.append(slot_of(context, blocks, block_size))
            positions.append(context)
        else:
            slots += slots_between(context, seq_len, blocks, block_size)
            positions += positions_between(context, seq_len)
    starts = [0, *itertools.accumulate(query_lens)]
    numbers = {"seq_lens": seq_lens, "query_start_loc": starts, "slot_mapping": slots}
    if tree_parents is None:
        return numbers | {"positions": positions}
    return numbers | tree_numbers(tree_parents, query_lens, seq_lens)


def host_block_table(
    block_tables: Sequence[Sequence[int]], num_reqs: int, max_blocks_per_req: int, pin: bool = False
) -> Tensor:
    """The block table of a batch on the host, padded to ``[num_reqs, max_blocks_per_req]``."""
    field, size = FIELDS["block_table"], (num_reqs, max_blocks_per_req)
    table = torch.full(size, field.padding or 0, dtype=field.dtype, pin_memory=pin, device="cpu")
    width = max((len(blocks) for blocks in block_tables), default=0)
    if width:
        flat = array("i")  # one pass of C over the rows, where a tensor of lists looks at each number
        for blocks in block_tables:
            flat.extend(array("i", blocks))
            flat.extend([field.padding or 0] * (width - len(blocks)))
        table[: len(block_tables), :width] = torch.frombuffer(flat, dtype=table.dtype).view(-1, width)
    return table
