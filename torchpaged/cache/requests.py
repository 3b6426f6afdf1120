"""CacheRequests: the requests of a batch that hold blocks of a `PagedKVCache`, and the metadata of their
steps, so that no caller builds block tables by hand.

    rows = cache.allocate(2)
    metadata = rows.append([7, 3])      # a prefill of 7 and 3 tokens
    metadata = rows.append([1, 1])      # a decode step
    beams = rows.fork([0, 0, 1])        # two go on from request 0, one from request 1; they share blocks
    metadata = beams.append([1, 1, 1])  # the last block of request 0 is copied before two write into it
    rows.free()

Host data only, but for the metadata that it makes.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchpaged.cache.block_pool import BlockPool
from torchpaged.custom_ops.checks import check_sizes, is_int
from torchpaged.custom_ops.errors import ArgumentError, BlockPoolExhaustedError
from torchpaged.custom_ops.words import counted, one_line, shortened
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.encoder import CrossMetadata

#: Blocks.
CHUNK = 64


class RowHolds:
    """How a row holds its blocks, so that forks of long rows cost little; the caller keeps its table.

    A fork makes chunks of `CHUNK` full blocks of its parent, each with a count of the rows that share it; a
    further row is one more in each count. The pool sees one holder of a chunk's blocks, however many rows
    share it. Blocks behind the chunks, at first all, a row holds one by one, as other holders do.
    """

    def __init__(self) -> None:
        self._chunks: list[list[int]] = []  # of each a list of one number, how many rows share it

    def fork(self, pool: BlockPool, table: list[int], num_full: int) -> "tuple[list[int], RowHolds]":
        """Another row with the same blocks, the first ``num_full`` of which no row writes into."""
        twin, chunks = RowHolds(), self._chunks
        while (len(chunks) + 1) * CHUNK <= num_full:
            chunks.append([1])
        behind = pool.fork(table[len(chunks) * CHUNK :])
        for chunk in chunks:
            chunk[0] += 1
        twin._chunks = chunks.copy()
        return table[: len(chunks) * CHUNK] + behind, twin

    def free(self, pool: BlockPool, table: list[int], kept: int, num_full: int) -> None:
        """Give up all blocks but the first ``kept``, of which ``num_full`` stay full: the row may write into
        the others. The table is cut."""
        chunks = self._chunks
        pool.free(table[max(kept, len(chunks) * CHUNK) :])
        while len(chunks) * CHUNK > num_full:
            chunk = chunks.pop()
            first = len(chunks) * CHUNK
            end = max(first, min(kept, first + CHUNK))
            if chunk[0] == 1:
                pool.free(table[end : first + CHUNK])
            else:
                pool.fork(table[first:end])
                chunk[0] -= 1
        del table[kept:]


class CacheRequests:
    """Requests and their blocks.

    Args:
        pool: gives the blocks.
        num_reqs: requests; none holds a token yet.
        block_size: tokens per block.
        max_seq_len: tokens of a request at most; None: no limit but the pool's. It is also the width of the
            block tables: a captured step needs one.
        device: where metadata goes.

    Attributes:
        seq_lens: tokens that each request holds.
        block_tables: blocks of each request.

    Copies and pickles are made together with the cache, ``copy.deepcopy((cache, rows))``: it holds the blocks
    and says which are free. A pickle can't know what else is in it: one without the cache is refused when it
    is used.
    """

    _ALONE = (
        "requests",
        "copied together with their cache, which holds the blocks",
        "a copy of the requests alone",
        "copy.deepcopy((cache, requests)); for rows of the same cache, cache.allocate",
    )

    def __init__(
        self,
        pool: BlockPool,
        num_reqs: int,
        block_size: int,
        max_seq_len: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_sizes(num_reqs=num_reqs)
        if max_seq_len is not None:
            check_sizes(max_seq_len=max_seq_len)
        self.pool, self.block_size, self.max_seq_len, self.device = pool, block_size, max_seq_len, device
        self.seq_lens = [0] * num_reqs
        self.block_tables: list[list[int]] = [[] for _ in range(num_reqs)]
        self._holds = [RowHolds() for _ in range(num_reqs)]

    def __copy__(self) -> "CacheRequests":
        raise ArgumentError(*self._ALONE)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CacheRequests":
        """Together with their cache alone: two owners of the same blocks, each with free ones of its own,
        would write over each other's tokens."""
        if id(self.pool) not in memo:
            raise ArgumentError(*self._ALONE)
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __len__(self) -> int:
        return len(self.seq_lens)

    def __repr__(self) -> str:
        held = [len(blocks) for blocks in self.block_tables]
        return one_line(
            self,
            f"seq_lens={shortened(self.seq_lens, 5)}",
            f"num_blocks={shortened(held, 5)}",
            f"block_size={self.block_size}",
            f"max_seq_len={self.max_seq_len}",
        )

    @property
    def max_blocks_per_req(self) -> int | None:
        """Width of the block tables; None: the longest request's."""
        return None if self.max_seq_len is None else -(-self.max_seq_len // self.block_size)

    def _require_cache(self) -> None:
        if self.pool.is_alone:
            raise ArgumentError(
                "requests",
                "unpickled together with their cache, which holds the blocks",
                "requests that were pickled alone",
                "pickle.dumps((cache, requests)); for rows of the same cache, cache.allocate",
            )

    def _lens(self, name: str, lens: Sequence[int]) -> list[int]:
        """``lens`` as ints, one for each request; first of all that a step or a change asks."""
        self._require_cache()
        numbers = list(lens) if isinstance(lens, Iterable) else [lens]
        if len(numbers) != len(self) or not all(is_int(n) and n >= 0 for n in numbers):
            raise ArgumentError(
                name,
                f"an int of at least 0 for each of {counted(len(self), 'request')}",
                repr(lens),
                "give a list: tensor.tolist()" if isinstance(lens, torch.Tensor) else "",
            )
        return [int(n) for n in numbers]

    def append(self, query_lens: Sequence[int]) -> AttentionMetadata:
        """The next step: each request is so many tokens longer.

        What a request writes no other sees: a partly filled block that it shares (`fork`) is copied first,
        all such blocks of the step in one copy per layer, on the current stream.

        Args:
            query_lens: new tokens of each request; 0: it takes no part in the step.

        Returns:
            The step's batch: slots, positions and tables of these tokens.

        Raises:
            ArgumentError: another number of requests, or more tokens than ``max_seq_len``.
            BlockPoolExhaustedError: the pool has too few blocks; no request is longer then.
        """
        lens = self._lens("query_lens", query_lens)
        totals = [held + new for held, new in zip(self.seq_lens, lens, strict=True)]
        if self.max_seq_len is not None and max(totals) > self.max_seq_len:
            raise ArgumentError(
                "query_lens",
                f"at most max_seq_len={self.max_seq_len} tokens per request",
                f"{max(totals)} in request {totals.index(max(totals))}",
                "allocate with a larger max_seq_len",
            )
        wanted = [
            -(-total // self.block_size) - len(blocks)
            for total, blocks in zip(totals, self.block_tables, strict=True)
        ]
        shared = self._shared_tails(lens)
        need = len(shared) + sum(n for n in wanted if n > 0)
        if need > self.pool.num_free:
            raise BlockPoolExhaustedError(need, self.pool.num_free, self.pool.num_usable)
        if shared:
            self._own_tails(shared)
        for blocks, count in zip(self.block_tables, wanted, strict=True):
            blocks += self.pool.allocate(max(count, 0))
        self.seq_lens = totals
        return AttentionMetadata.from_lists(lens, totals, self.block_tables, **self._options)

    def _shared_tails(self, query_lens: Sequence[int]) -> list[list[int]]:
        """The tables of the requests that must copy their last block before they write into it. Of several
        that share one, the last keeps it if no others hold it."""
        leaving: Counter[int] = Counter()
        shared = []
        for new, held, blocks in zip(query_lens, self.seq_lens, self.block_tables, strict=True):
            if new and held % self.block_size and self.pool.is_shared(blocks[-1], leaving[blocks[-1]]):
                leaving[blocks[-1]] += 1
                shared.append(blocks)
        return shared

    def _own_tails(self, tables: Sequence[list[int]]) -> None:
        """Give each of ``tables`` a copy of its last block; for all of them, or none."""
        own = self.pool.allocate(len(tables))
        try:
            self._copier()([(blocks[-1], block) for blocks, block in zip(tables, own, strict=True)])
        except BaseException:
            self.pool.free(own)
            raise
        for blocks, block in zip(tables, own, strict=True):
            self.pool.free(blocks[-1:])
            blocks[-1] = block

    def _copier(self) -> Callable[[list[tuple[int, int]]], None]:
        copier = self.pool.copier
        if copier is None:
            raise ArgumentError(
                "requests",
                "requests of a PagedKVCache that exists, and whose layers all keep blocks of its pool",
                "others",
                "keep the cache; layers with states or rings (blocks_of) are copied by "
                "PagedKVCache.copy_requests, and their requests' blocks shared by BlockPool.fork",
            )
        return copier

    def fork(self, parents: Sequence[int] | None = None) -> "CacheRequests":
        """Requests that go on from these, which stay as they are: samples of a prompt, beams.

            beams, old = rows.fork([0, 0, 1]), rows
            old.free()  # beams alone hold the blocks now

        Nothing is copied yet: a request shares all blocks of its parent. Before one writes into a partly
        filled block that it shares, `append` copies that block. Both sides may grow, be truncated and freed
        in any order. Of long requests 64 full blocks are shared as one, and have one holder in the pool.

        Args:
            parents: request ``i`` of the new ones holds what request ``parents[i]`` holds; default: each
                once.

        Raises:
            ArgumentError: a request that there is not, none at all, or a cache whose layers do not all keep
                blocks of its pool (states, rings).
        """
        self._require_cache()
        self._copier()
        asked: Any = range(len(self)) if parents is None else parents
        numbers = list(asked) if isinstance(asked, Iterable) else []
        if not numbers or not all(is_int(n) and 0 <= n < len(self) for n in numbers):
            raise ArgumentError("parents", f"numbers of requests from 0 to {len(self) - 1}", str(parents))
        forks = CacheRequests(self.pool, len(numbers), self.block_size, self.max_seq_len, self.device)
        forks.seq_lens = [self.seq_lens[n] for n in numbers]
        forked = [
            self._holds[n].fork(self.pool, self.block_tables[n], self.seq_lens[n] // self.block_size)
            for n in numbers
        ]
        forks.block_tables, forks._holds = [list(part) for part in zip(*forked, strict=True)]
        return forks

    def cross(self, query_lens: Sequence[int], written: AttentionMetadata | None = None) -> CrossMetadata:
        """Queries of a decoder over all tokens that the requests hold, for
        `torchpaged.layers.CrossAttention`.

        Args:
            query_lens: queries of each request.
            written: what `append` gave for the encoder's tokens, in the step that writes them.

        Raises:
            ArgumentError: another number of requests.
        """
        return CrossMetadata.from_lists(
            self._lens("query_lens", query_lens),
            self.seq_lens,
            self.block_tables,
            written=written,
            **self._options,
        )

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "num_blocks": self.pool.num_blocks,
            "max_blocks_per_req": self.max_blocks_per_req,
            "device": self.device,
        }

    def truncate(self, seq_lens: Sequence[int]) -> None:
        """Take tokens back, and with them the blocks that hold no other.

        Args:
            seq_lens: tokens that each request keeps.

        Raises:
            ArgumentError: more than a request holds; nothing is taken back then.
        """
        lens = self._lens("seq_lens", seq_lens)
        if any(new > held for new, held in zip(lens, self.seq_lens, strict=True)):
            raise ArgumentError("seq_lens", f"at most what is held, {self.seq_lens}", str(lens))
        for blocks, holds, length in zip(self.block_tables, self._holds, lens, strict=True):
            holds.free(self.pool, blocks, -(-length // self.block_size), length // self.block_size)
        self.seq_lens = lens

    def free(self) -> None:
        """Give all blocks back; the requests hold nothing then, and may begin anew."""
        self.truncate([0] * len(self))
