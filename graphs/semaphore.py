"""The semaphore of a runner's tensors: zeros between launches, which nothing but an interrupted launch changes."""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import SemaphoreError


def clear_semaphore(semaphore: Tensor) -> None:
    """After a step that failed or was interrupted and may have left it set; waits for the device first."""
    if semaphore.device.type == "cuda":
        torch.cuda.synchronize(semaphore.device)
    semaphore.zero_()


def check_semaphore(semaphore: Tensor, launch: str) -> None:
    """After a launch, in debug mode; waits for it.

    Raises:
        SemaphoreError: the semaphore is not all zeros.
    """
    left = semaphore.nonzero().flatten()[:4].tolist()
    if left:
        raise SemaphoreError(
            f"semaphore: expected zeros after {launch}, got {semaphore[left].tolist()} at {left}; parts of its attention were merged too early or not at "
            "all, so that its results are wrong: a launch before it was cut short, or two that share the semaphore ran on two streams at once. "
            "Give each stream its own, call reset(), and compute these requests again"
        )
