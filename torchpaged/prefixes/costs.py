"""When a pass over shared prefixes pays: a model of its costs, with its constants as data.

    groups = groups_that_pay(block_tables, query_lens, seq_lens, layer, block_size=16, costs=costs_of(device))

What a group saves is the time in which the plain path reads its prefix for all requests but one. What it
costs is the products of all its queries with the prefix. What all groups save together must exceed the
launches of a second pass and of the merge. Nothing of this looks at the device: block tables and lengths are
the host's own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import repr_of_fields
from torchpaged.prefixes.groups import PrefixGroup, find_prefix_groups


class CascadeCosts(NamedTuple):
    """Constants of a kind of device.

    Attributes:
        launch_us: microseconds of the prefixes' launch and the merge, whatever they compute.
        number_us: microseconds per number of queries and outputs, which are copied and merged.
        bytes_per_us: rate at which the plain path reads blocks that many requests share.
        flop_per_us: rate of the products in the prefix pass.
        evidence: where the numbers come from.
    """

    launch_us: float
    number_us: float
    bytes_per_us: float
    flop_per_us: float
    evidence: str

    def __repr__(self) -> str:
        return repr_of_fields(self)


class LayerShape(NamedTuple):
    """What of an attention layer costs depend on: heads, widths, and bytes per number in the pools."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    kv_itemsize: int


#: By compute capability; None: any other GPU, and CPUs, which have no launches but the same reads.
COSTS: dict[tuple[int, int] | None, CascadeCosts] = {
    (9, 0): CascadeCosts(
        18.0, 4.0e-6, 1.0e7, 3.0e8, "fitted on an H200: benchmarks/results/h200_cascade_op.json"
    ),
    None: CascadeCosts(32.0, 3.0e-5, 2.0e6, 1.0e8, "not verified here: estimated from Hopper's"),
}


def costs_of(device: torch.device | str) -> CascadeCosts:
    """The constants of a device."""
    device = torch.device(device)
    key = None
    if device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None:
        key = torch.cuda.get_device_capability(device)
    return COSTS.get(key, COSTS[None])


def check_cascade(cascade: bool | CascadeCosts) -> None:
    """Refuse an option ``cascade`` that is neither a switch nor costs."""
    if not isinstance(cascade, (bool, CascadeCosts)):
        raise ArgumentError("cascade", "True, False or CascadeCosts", repr(cascade))


def saved_us(
    group: PrefixGroup, num_tokens: int, layer: LayerShape, block_size: int, costs: CascadeCosts
) -> float:
    """Microseconds that a group saves per layer, launches aside; below 0: it costs more.

    Args:
        group: the requests and their shared blocks.
        num_tokens: query tokens of them together.
        layer: the attention.
        block_size: tokens per block.
        costs: of the device.
    """
    width = layer.head_dim + layer.head_dim_v
    copied = num_tokens * layer.num_heads * width
    read = group.saved_blocks * block_size * layer.num_kv_heads * width * layer.kv_itemsize
    products = 2 * num_tokens * group.num_blocks * block_size * layer.num_heads * width
    return read / costs.bytes_per_us - products / costs.flop_per_us - copied * costs.number_us


def groups_that_pay(
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    layer: LayerShape,
    *,
    block_size: int,
    costs: CascadeCosts,
    max_num_groups: int | None = None,
) -> list[PrefixGroup]:
    """The groups that are worth a pass of their own; none if they are not worth it together.

    Args:
        block_tables, query_lens, seq_lens, block_size: as in `find_prefix_groups`.
        layer: the attention of the layers.
        costs: of the device.
        max_num_groups: the most groups; those that save least are left out. None: any number.

    Raises:
        ArgumentError: from `find_prefix_groups`.
    """
    found = find_prefix_groups(block_tables, query_lens, seq_lens, block_size=block_size)
    saved = {
        group: saved_us(group, sum(query_lens[row] for row in group.rows), layer, block_size, costs)
        for group in found
    }
    best = sorted((group for group in found if saved[group] > 0), key=saved.__getitem__, reverse=True)
    best = best[:max_num_groups]
    return sorted(best) if sum(saved[group] for group in best) > costs.launch_us else []
