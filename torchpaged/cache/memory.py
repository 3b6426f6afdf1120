"""How much memory a device has: what can never fit is refused before it is allocated."""

import os

import torch


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory that ``device`` has, used or not; None where that can't be told."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
