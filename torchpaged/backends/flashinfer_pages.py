"""Pages as FlashInfer's plans take them."""

from typing import NamedTuple

import torch
from torch import Tensor


class Pages(NamedTuple):
    """The page table's host part: ``indptr [B + 1]``, ``last [B]``, int32, and the number of pages."""

    indptr: Tensor
    last: Tensor
    total: int


def host_pages(lens: list[int], block_size: int, device: torch.device) -> Pages:
    """Of requests with ``lens`` keys each; for copies to ``device``."""
    count = [-(-max(length, 0) // block_size) for length in lens]
    indptr = cumulated(count, device)
    last = [(length - 1) % block_size + 1 if length > 0 else 0 for length in lens]
    return Pages(
        indptr,
        torch.tensor(last, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu"),
        sum(count),
    )


def cumulated(numbers: list[int], device: torch.device) -> Tensor:
    """``[len(numbers) + 1]`` int32 on the host, from 0; pinned by torch's allocator, which waits for
    copies."""
    sums = [0]
    for number in numbers:
        sums.append(sums[-1] + number)
    return torch.tensor(sums, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")
