"""Host numbers on their way to the device: from pinned memory, so that nothing waits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from torchpaged.metadata.fields import FIELDS


def to_device(
    numbers: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Host numbers as a tensor ``[len(numbers)]`` on ``device``; the copy to a GPU is from pinned memory, so
    that nothing waits."""
    if not isinstance(device, torch.device):  # a step on the host calls this often
        device = torch.device(device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda", device="cpu").to(
        device, non_blocking=True
    )


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
            flat.extend(blocks)
            flat.extend([field.padding or 0] * (width - len(blocks)))
        table[: len(block_tables), :width] = torch.frombuffer(flat, dtype=table.dtype).view(-1, width)
    return table
