"""Which keys a query sees: one definition for the reference, for kernels that are written in torch, and for
code that compares a mask with it."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError


class BlockSparse(NamedTuple):
    """The mask "vertical and slash" of Phi-3-small (arXiv:2404.14219). Positions are cut into blocks. A query
    in block ``i`` sees of block ``j``, up to its own position, all keys or none: those where ``i - j <
    local_blocks`` (the slash), and those where ``(j + shift) % vertical_stride == 0`` (the verticals), with
    ``shift = offset + head // heads_per_step * head_step`` for query head ``head``.

    Attributes:
        block_size: positions of a block of the mask; the cache's blocks may have another size.
        local_blocks: blocks of the slash, the query's own among them; at least 1.
        vertical_stride: blocks from one vertical to the next.
        offset: 1 in Phi-3-small; where a rank has some of the heads, with the shift of those before them.
        head_step: 0: all heads see the same verticals. Phi-3-small: ``max(1, vertical_stride // num_heads)``.
        heads_per_step: query heads that see the same: 1, or ``num_heads // num_kv_heads`` for one shift per
            kv head.
    """

    block_size: int
    local_blocks: int
    vertical_stride: int
    offset: int = 1
    head_step: int = 0
    heads_per_step: int = 1

    @classmethod
    def of(cls, numbers: list[int] | None) -> Self | None:
        """Out of what torch's dispatcher gives; raises `ArgumentError`."""
        if numbers is None or len(numbers) == len(cls._fields):
            return None if numbers is None else cls._make(numbers)
        raise ArgumentError("block_sparse", f"the numbers {', '.join(cls._fields)}", str(numbers))

    def verticals_of(self, group: int) -> int:
        """How many verticals of a stride any of ``group`` heads sees that have one kv head, if they lie in
        each stride at even distances; 0 if not, or where all blocks are seen."""
        step = self.head_step % self.vertical_stride
        alike = step == 0 or self.heads_per_step % group == 0
        count, step = (1, 1) if alike else (group, step)
        even = alike or self.heads_per_step == 1
        return count if even and count < self.vertical_stride and count * step <= self.vertical_stride else 0

    def sees(self, query: Tensor, key: Tensor, head: Tensor) -> Tensor:
        """As `Mask.sees`; whether the key is behind the query is not asked."""
        block = key // self.block_size
        shift = self.offset + head // self.heads_per_step * self.head_step
        local = query // self.block_size - block < self.local_blocks
        return local | ((block + shift) % self.vertical_stride == 0)


class Mask(NamedTuple):
    """The options of attention that hide keys by their positions, as `AttentionCall` has them."""

    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    chunk_size: int = 0
    block_sparse: BlockSparse | None = None

    def sees(self, query: Tensor, key: Tensor, head: Tensor | None = None) -> Tensor:
        """Whether a query at position ``query``, of query head ``head``, may attend to a key at position
        ``key``: bool that broadcasts to the shape of the three. Positions below 0, which see nothing, are the
        caller's to hide. ``head``: None will do for options that are alike for all heads."""
        seen = torch.ones_like(query == key)
        if self.causal:
            seen = seen & (key <= query)
        if self.window_left >= 0:
            seen = seen & (key >= query - self.window_left)
        if self.window_right >= 0:
            seen = seen & (key <= query + self.window_right)
        if self.chunk_size > 0:
            seen = seen & (key // self.chunk_size == query // self.chunk_size)
        if self.block_sparse is not None:
            assert head is not None, "heads differ"
            seen = seen & self.block_sparse.sees(query, key, head)
        return seen


def tree_positions(words: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions as the query tokens of one request count them under a tree mask.

    A query token sees the context and those query tokens before it whose bits its word has, and counts
    positions over these alone: the first query token that it sees stands right behind the context. So a node
    of a tree attends as the end of its branch would, were the branch a request of its own.

    Args:
        words: ``[S]`` int64, of the request's query tokens.
        num_keys: the request's length, its query tokens included.

    Returns:
        Positions ``[S]`` of the queries; ``[S, num_keys]`` of the keys, as each query counts them; and bool
        ``[S, num_keys]``: query tokens that the query does not see. All int64 but the last.
    """
    count, device = words.shape[0], words.device
    context = max(num_keys - count, 0)
    token = torch.arange(count, device=device)
    seen = ((words[:, None] >> token) & 1).bool() & (token < token[:, None]) | (token == token[:, None])
    before = seen.long().cumsum(-1) - seen.long()  # of each token, those that are seen before it
    queries = num_keys - count + before.diagonal()
    shown = token[count - (num_keys - context) :]  # those that are keys
    keys = torch.cat(
        [torch.arange(context, device=device).expand(count, -1), num_keys - count + before[:, shown]], dim=1
    )
    hidden = torch.cat([torch.zeros(count, context, dtype=torch.bool, device=device), ~seen[:, shown]], dim=1)
    return queries, keys, hidden
