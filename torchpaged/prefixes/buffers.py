"""SharedPrefixes: the groups of a batch as tensors of fixed sizes, for eager calls and for graphs alike."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import repr_of_fields
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.host import host_block_table, to_device
from torchpaged.prefixes.groups import PrefixGroup


class StepPrefixes(NamedTuple):
    """A step's groups, and what of each request its group has not: `AttentionMetadata.prefixes`.

    Attributes:
        shared: the groups.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32, the blocks behind the shared ones.
        seq_lens: ``[num_reqs]`` int32, the tokens behind them.
    """

    shared: "SharedPrefixes"
    block_table: Tensor
    seq_lens: Tensor


@dataclass
class SharedPrefixes:
    """What attention of two passes, one of them over the prefixes, needs to know of the groups.

    Attributes:
        block_table: ``[max_num_groups, max_blocks_per_req]`` int32, the shared blocks of each group.
        lens: ``[max_num_groups]`` int32, their tokens; 0 = no group.
        query_start_loc: ``[max_num_groups + 1]`` int32, the groups' tokens in their own order.
        order: ``[num_tokens]`` int64: the batch's tokens, those of each group together, the others last.
        inverse: ``[num_tokens]`` int64, the place of each token in that order.
        shift: ``[num_reqs]`` int32, blocks of each request that its group has; 0 = in none.
        group_of_row: ``[num_reqs]`` int64; requests in no group say 0.
        block_size: tokens per block.
        query_lens: of the requests that the groups were made for; None before `set`.
    """

    block_table: Tensor
    lens: Tensor
    query_start_loc: Tensor
    order: Tensor
    inverse: Tensor
    shift: Tensor
    group_of_row: Tensor
    block_size: int
    query_lens: tuple[int, ...] | None = None

    __repr__ = repr_of_fields

    @classmethod
    def allocate(
        cls,
        *,
        max_num_groups: int,
        num_reqs: int,
        num_tokens: int,
        max_blocks_per_req: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "SharedPrefixes":
        """Buffers of these sizes, without a group. Those of requests and tokens are the batch's own sizes,
        padding included."""
        tokens = torch.arange(num_tokens, device=device)
        return cls(
            torch.zeros(max_num_groups, max_blocks_per_req, dtype=torch.int32, device=device),
            torch.zeros(max_num_groups, dtype=torch.int32, device=device),
            torch.zeros(max_num_groups + 1, dtype=torch.int32, device=device),
            tokens,
            tokens.clone(),
            torch.zeros(num_reqs, dtype=torch.int32, device=device),
            torch.zeros(num_reqs, dtype=torch.int64, device=device),
            block_size,
        )

    def set(
        self,
        groups: Sequence[PrefixGroup],
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
    ) -> None:
        """Write the groups of a batch into the buffers, in place; copies to a GPU don't wait for it.

        Args:
            groups: as `find_prefix_groups` finds them, or as the caller knows them.
            block_tables: of the batch's requests.
            query_lens: of the batch's requests, at most as many as the buffers were made for.
            seq_lens: KV tokens of each, the new ones included, or fewer: what the host knows that they have.
                A prefix lies before the queries of its requests, or they would see what is behind them.

        Raises:
            ArgumentError: more groups, requests or tokens than there is room for, a request in two groups, or
                one whose blocks are not its group's, or not before its queries; nothing is written then.
        """
        shared = self._check(groups, block_tables, query_lens, seq_lens)
        num_groups, width = self.block_table.shape
        num_reqs, num_tokens = self.shift.shape[0], self.order.shape[0]
        members = [row for group in groups for row in group.rows]
        starts = [0, *itertools.accumulate(query_lens)]
        tokens = [token for row in members for token in range(starts[row], starts[row + 1])]
        order = tokens + sorted(set(range(num_tokens)) - set(tokens))
        inverse = sorted(range(num_tokens), key=order.__getitem__)
        ends = itertools.accumulate(sum(query_lens[row] for row in group.rows) for group in groups)
        bounds = [0, *ends]
        shift, group_of_row = [0] * num_reqs, [0] * num_reqs
        for index, group in enumerate(groups):
            for row in group.rows:
                shift[row], group_of_row[row] = group.num_blocks, index
        lens = [group.num_blocks * self.block_size for group in groups]
        pin, device = self.lens.is_cuda, self.lens.device
        table = host_block_table(shared, num_groups, width, pin)
        self.block_table.copy_(table, non_blocking=True)
        for buffer, numbers in (
            (self.lens, lens + [0] * (num_groups - len(groups))),
            (self.query_start_loc, bounds + [bounds[-1]] * (num_groups - len(groups))),
            (self.order, order),
            (self.inverse, inverse),
            (self.shift, shift),
            (self.group_of_row, group_of_row),
        ):
            buffer.copy_(to_device(numbers, buffer.dtype, device))
        self.query_lens = tuple(query_lens)

    def _check(
        self,
        groups: Sequence[PrefixGroup],
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
    ) -> list[list[int]]:
        """Refuse what `set` can't write; the blocks of each group."""
        num_groups, width = self.block_table.shape
        num_reqs, num_tokens = self.shift.shape[0], self.order.shape[0]
        members = [row for group in groups for row in group.rows]
        for name, count, room in (
            ("groups", len(groups), num_groups),
            ("query_lens", len(query_lens), num_reqs),
            ("query_lens", sum(query_lens), num_tokens),
            ("groups", max((group.num_blocks for group in groups), default=0), width),
        ):
            if count > room:
                raise ArgumentError(name, f"at most {room}, for which the buffers were made", str(count))
        for name, lists in (("block_tables", block_tables), ("seq_lens", seq_lens)):
            if len(lists) != len(query_lens):
                raise ArgumentError(name, f"one for each of {len(query_lens)} requests", str(len(lists)))
        if len(set(members)) != len(members) or any(not 0 <= row < len(query_lens) for row in members):
            raise ArgumentError("groups", f"each of {len(query_lens)} requests at most once", str(members))
        shared = [list(block_tables[group.rows[0]][: group.num_blocks]) for group in groups]
        for group, blocks in zip(groups, shared, strict=True):
            _check_group(group, blocks, block_tables, query_lens, seq_lens, self.block_size)
        return shared

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The batch with these groups, for layers of `torchpaged.PagedAttention`; computed on the device, so
        that a captured step calls it within its graph. It is of these lengths: after lengths or tables
        changed in place, as by `torchpaged.advance_step`, call it anew.

        Raises:
            ArgumentError: the batch has other query lengths than the groups were made for, as far as the
                host knows both.
        """
        known = metadata.query_lens
        if known is not None and self.query_lens is not None and not _same_lens(known, self.query_lens):
            raise ArgumentError(
                "metadata",
                f"a batch of query lengths {list(self.query_lens)}, as these groups were made for",
                str(list(known)),
                "call prefixes.set for every batch whose query lengths change",
            )
        own = self.suffix(metadata.block_table, metadata.seq_lens)
        return replace(metadata, prefixes=StepPrefixes(self, *own))

    def clear(self) -> None:
        """No groups: all requests are read alone."""
        self.set([], [], [], [])

    def tensors(self) -> dict[str, Tensor]:
        """All buffers by name."""
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}

    def suffix(self, block_table: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """What of each request its group has not: ``(block_table, seq_lens)`` of the second pass.

        The same for all layers of a step: compute it once, on the device, within the graph.
        """
        width = block_table.shape[1]
        columns = torch.arange(width, device=block_table.device) + self.shift[:, None]
        table = block_table.gather(1, columns.clamp(max=width - 1))
        return table, (seq_lens - self.shift * self.block_size).clamp(min=0)


def _check_group(
    group: PrefixGroup,
    blocks: list[int],
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int,
) -> None:
    room, tokens = group.num_blocks * block_size, sum(query_lens[row] for row in group.rows)
    for row in group.rows:
        if list(block_tables[row][: group.num_blocks]) != blocks or len(blocks) < group.num_blocks:
            raise ArgumentError(
                "groups", f"requests of the same first {group.num_blocks} blocks", f"row {row}"
            )
    if tokens > room:
        raise ArgumentError(
            "groups",
            f"at most as many query tokens as the prefix has ({room})",
            str(tokens),
            "split the group, as find_prefix_groups does",
        )
    for row in group.rows:
        context = seq_lens[row] - query_lens[row]
        if context < room:
            raise ArgumentError(
                "groups",
                f"prefixes before the queries of their requests: row {row} has {context} tokens there",
                f"one of {room}",
                "find the groups anew after tokens were taken back",
            )


def _same_lens(known: Sequence[int], own: Sequence[int]) -> bool:
    """Whether the lengths are the same; padding rows behind them count nothing."""
    return tuple(known[: len(own)]) == tuple(own[: len(known)]) and not any(
        (*known[len(own) :], *own[len(known) :])
    )
