"""What FlashInfer's plans are made of: pages and wrappers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.package import INSTALL
from torchpaged.custom_ops.errors import PlanError
from torchpaged.custom_ops.pools import FP8


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


@dataclass
class Decoder:
    """A decode wrapper of one number of requests, and what a graph knows of it."""

    wrapper: Any
    planned: bool = False
    copied: torch.cuda.Event | None = None
    captured: tuple[int, ...] | None = None  # the plan's integers at its capture


def baked_integers(wrapper: Any) -> tuple[int, ...]:
    """The numbers of a wrapper's plan that a captured launch keeps. FlashInfer has no public name for them.

    Raises:
        PlanError: this version keeps them elsewhere, so that replays can't be checked.
    """
    plan = getattr(wrapper, "_plan_info", None)
    if plan is None:
        raise PlanError(
            f"flashinfer: expected a wrapper with a plan to compare replays with, got none; {INSTALL}"
        )
    return tuple(int(number) for number in plan)


def prefill_kernels(head_dim: int, kv_dtype: torch.dtype, device: torch.device) -> str:
    """Which of its prefill kernels serve prompts: "fa3" on Hopper where they have the width, else "fa2"."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return "fa3" if hopper and head_dim in (64, 128, 256) and kv_dtype not in FP8 else "fa2"
