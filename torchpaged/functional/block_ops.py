"""Whole blocks inside the pools: `copy_blocks`."""

import itertools
import reprlib
from array import array
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchpaged.backends.choose.for_call import device_ops
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.block_ops.check import check_copy_blocks
from torchpaged.custom_ops.checks import check_tensors, refuse_grad
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.functional.arguments import run_op


def _pairs(block_mapping: Sequence[Sequence[int]]) -> Tensor:
    """A list of pairs as ``[num_pairs, 2]`` int64 on the host."""
    try:
        pairs = list(block_mapping)  # an iterator gives them once
        lens = {len(pair) for pair in pairs}
        numbers = array("q", itertools.chain.from_iterable(pairs))
    except (TypeError, OverflowError):
        lens, numbers = {0}, array("q")
    if not lens <= {2}:
        raise ArgumentError(
            "block_mapping", "pairs (source, destination) of ints", reprlib.repr(block_mapping)
        )
    return torch.tensor(numbers.tolist(), dtype=torch.int64, device="cpu").view(-1, 2)


def copy_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    block_mapping: Tensor | Sequence[tuple[int, int]],
    *,
    ops: BackendOps | None = None,
) -> None:
    """Copy whole blocks inside a pair of pools, in place.

    >>> k_cache = v_cache = torch.arange(4.0).reshape(4, 1, 1, 1)
    >>> copy_blocks(k_cache, v_cache.clone(), [(1, 3)])
    >>> k_cache.flatten().tolist()
    [0.0, 1.0, 2.0, 1.0]

    Args:
        k_cache, v_cache: the pools, as in `write_kv`.
        block_mapping: ``[num_pairs, 2]`` int64 of (source, destination), or a list of pairs; negative ids
            skip the pair. No block may be a destination twice, or source and destination.
        ops: whose kernels to run; default: those of the backend that every other entry point would choose.

    Raises:
        ArgumentError: an id is out of range, or destinations collide; nothing is copied then.
        BackendUnavailableError: the backend that was asked for is not usable here; with all reasons.
    """
    check_tensors(k_cache=k_cache, v_cache=v_cache)
    refuse_grad(k_cache=k_cache, v_cache=v_cache)
    if isinstance(block_mapping, Tensor):
        check_tensors(block_mapping=block_mapping)
    else:
        host = _pairs(block_mapping)
        block_mapping = host.to(k_cache.device)
        check_copy_blocks(k_cache, v_cache, block_mapping)
    run_op(
        "copy_blocks",
        partial(check_copy_blocks, k_cache, v_cache, block_mapping),
        (k_cache, v_cache, block_mapping),
        {},
        lambda: device_ops(k_cache.device) if ops is None else ops,
    )
