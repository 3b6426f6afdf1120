"""Checks of slots and positions, for every op that writes tokens into pools."""

import torch
from torch import Tensor

from torchpaged.custom_ops import pools
from torchpaged.custom_ops.checks import reads_values
from torchpaged.custom_ops.errors import ArgumentError


def check_slots(slot_mapping: Tensor, cache: Tensor) -> None:
    """Slots ``[num_tokens]`` in pools shaped like ``cache [num_blocks, block_size, ...]``: -1 or inside,
    and one token each; raises `ArgumentError`. Looks only where values are read."""
    if slot_mapping.numel() and reads_values(cache.device) and not _are_few_good_slots(slot_mapping, cache):
        low, high = (int(x) for x in torch.aminmax(slot_mapping))
        num_slots = cache.shape[0] * cache.shape[1]
        if low < -1 or high >= num_slots:
            raise ArgumentError(
                "slot_mapping",
                f"slots in [-1, {num_slots})",
                f"values in [{low}, {high}]",
                "the pool is too small or the block table wrong",
            )
        _check_distinct_slots(slot_mapping, cache.shape[1])


def check_positions(positions: Tensor, cos_sin: Tensor) -> None:
    """Each of ``positions`` has a row in ``cos_sin [max_position, rotary_dim]``; raises `ArgumentError`.
    Looks only where values are read."""
    if positions.numel() and reads_values(positions.device):
        low, high = (int(x) for x in torch.aminmax(positions))
        if low < 0 or high >= cos_sin.shape[0]:
            raise ArgumentError(
                "positions",
                f"positions in [0, {cos_sin.shape[0]}), those of padding included",
                f"values in [{low}, {high}]",
                "give cos_sin more rows",
            )


def _are_few_good_slots(slot_mapping: Tensor, cache: Tensor) -> bool:
    """Whether these slots are so few that Python can look at them, and all right; if not, the ops of torch
    say what is wrong."""
    if slot_mapping.shape[0] > pools.FEW or slot_mapping.device.type != "cpu":
        return False
    num_blocks, block_size = cache.shape[:2]
    slots = slot_mapping.tolist()
    own = [slot for slot in slots if slot >= block_size]
    return min(slots) >= -1 and max(slots) < num_blocks * block_size and len(set(own)) == len(own)


def _check_distinct_slots(slot_mapping: Tensor, block_size: int) -> None:
    """No two tokens have one slot, but for -1 and the slots of block 0, which hold no request's tokens."""
    if slot_mapping.shape[0] < 2:
        return
    slots = slot_mapping.sort().values
    twice = (slots[1:] == slots[:-1]) & (slots[1:] >= block_size)
    if bool(twice.any()):
        slot = int(slots[1:][twice][0])
        raise ArgumentError(
            "slot_mapping",
            "one token per slot",
            f"slot {slot} (block {slot // block_size}) several times",
            "two requests share a block that is still written: give each its own",
        )
