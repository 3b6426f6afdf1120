"""Host numbers on their way to the device: from pinned memory, so that nothing waits."""

import itertools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from torchpaged.metadata.checks import integers
from torchpaged.metadata.fields import CODES, FIELDS
from torchpaged.metadata.slots import positions_between, slot_of, slots_between
from torchpaged.metadata.tree import tree_numbers


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
