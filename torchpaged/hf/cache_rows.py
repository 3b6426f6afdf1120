"""The rows of a paged cache: the blocks, the length and the padding of each, and how a forward moves them on.

The device's tensors move on in place, inside compiled code too. The host counts along as far as it sees
the forwards: a compiled step has no hook there. What generate() does to the rows between forwards:
row_changes.py.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchpaged.backends import Limits
from torchpaged.cache import BlockPool, RollingBlocks
from torchpaged.cache.row_blocks import RowBlocks
from torchpaged.custom_ops.errors import ArgumentError, BlockPoolExhaustedError, UnsupportedModelError
from torchpaged.custom_ops.words import counted
from torchpaged.hf.query_starts import QueryStarts
from torchpaged.hf.row_table import ANOTHER_PROMPT, RingTable, RowTable, assert_fits, incomplete, other_rows
from torchpaged.metadata import AttentionMetadata, HostLengths
from torchpaged.metadata.fields import BatchSizes, make_batch_tensors


class CacheRows:
    """The rows of a `PagedCache`.

    Args:
        limits: rows at most, blocks of a row, and the blocks that there are.
        max_seq_len: tokens per row at most, padding included.

    Attributes:
        pool, blocks: which row has which block.
        rolling: the rings of the layers with a window; None if no layer has them.
        ready: whether the rows have blocks, and the tensors below are filled.
        block_table: ``[max_rows, blocks_per_row]`` int32, of the layers that don't roll.
        seq_lens: ``[max_rows]`` int32, tokens of each row without padding.
        num_rows, total: int64 scalar tensors, rows of the batch, and tokens per row with padding.
        written_total: likewise, without a forward that has not completed.
        query_starts: of its forwards.
        padding: left padding of each row, in tokens; None before a mask told any.
        cut_padding: whether a row holds nothing but padding, so that the next mask may say more.
        num_forwards: that began since the last reset, as far as the host knows.
        grows: whether rows take blocks as they grow: the pool can't hold as many full rows as there may be.
            Else each has all of its blocks from the start, and no step needs the host.
    """

    block_table: Tensor
    seq_lens: Tensor
    num_rows: Tensor
    total: Tensor
    written_total: Tensor
    query_starts: QueryStarts

    def __init__(self, limits: Limits, max_seq_len: int) -> None:
        sizes = limits.need("max_num_reqs", "max_blocks_per_req", "num_blocks", "block_size")
        self.max_rows, self.blocks_per_row, num_blocks, self.block_size = sizes
        self.max_seq_len = max_seq_len
        self.pool = BlockPool(num_blocks)
        self.blocks = RowBlocks(self.pool, self.block_size, self.blocks_per_row)
        self.grows = self.max_rows * self.blocks_per_row > self.pool.num_usable
        self._table = RowTable(self.blocks, self.max_rows, self.blocks_per_row)
        self.rolling: RingTable | None = None
        self._device: torch.device | None = None  # of the tensors; None before there are any
        self.hands_use_cache_on = False  # whether the model was seen to, see row_refusals.py
        self.forget()

    def roll(self, blocks: RollingBlocks) -> None:
        """Give every row a ring of ``blocks`` too, before the first batch."""
        self.rolling = RingTable(blocks, self.max_rows, self.blocks_per_row)

    @property
    def tables(self) -> list[RowTable]:
        """Of all layers, and of those that roll."""
        return [self._table] if self.rolling is None else [self._table, self.rolling]

    def forget(self) -> None:
        """Before another batch. The tensors stay where compiled code knows them; `begin` fills them again."""
        for table in self.tables:
            table.blocks.free()
        if self.rolling is not None:
            self.rolling.longest = 0
        self.ready = False
        self.padding: list[int] | None = None
        self.gathered_padding: list[int] | None = None  # likewise, of keys that are gathered with it
        self.cut_padding = False
        self.num_forwards = 0
        self.generates = False  # for a generate() whose use_cache was looked at, see row_refusals.py
        self._covered = self.max_seq_len  # tokens per row that the rows' blocks have room for
        self.expects_candidates = False  # of tokens that it holds, see row_refusals.py
        self.is_padded = False  # or has pictures, as far as `padding` does not tell, likewise
        self.first_place: Tensor | int = 0  # of the first tokens: PaliGemma's positions begin at 1
        self.looked_at = 0  # the forward that it looked at last
        self.attended = 0  # the forward whose first attention was looked at
        self.attended_by: weakref.ref[nn.Module] | None = None  # whose module, see row_refusals.py
        self._is_open = False  # whether a forward began and did not complete
        self._bound = 0  # tokens per row at most, as far as the host knows
        self._counted: int | None = None  # exactly, while the host has seen every forward
        # By rows, tokens per row and whether it is of rings: those of one token stay as they are, the tensors
        # move on in place; others are of the forward that runs.
        self._steps: dict[tuple[int, int, bool], AttentionMetadata] = {}

    def begin(self, batch: int, device: torch.device, padding: list[int] | None, query_len: int) -> None:
        """Give ``batch`` rows their blocks and an empty start behind their ``padding``; none had any before.
        ``query_len``: tokens per row of the forward that comes.

        Raises:
            BlockPoolExhaustedError: there are too few blocks.
        """
        if self._device != device:
            self._make_tensors(device)
        first = min(-(-query_len // self.block_size), self.blocks_per_row)
        self.blocks.blocks_per_row = first if self.grows else self.blocks_per_row
        self._require_blocks(batch, self.blocks.blocks_per_row)
        for table in self.tables:
            table.blocks.allocate(batch)
        with torch.inference_mode(False):
            self._cover()
            self.seq_lens.zero_()
            self.total.zero_()
            self.written_total.zero_()
            self.num_rows.fill_(batch)
            self.upload()
            if padding is not None:
                self.add_padding(padding)
        self.padding, self._counted = padding, 0
        self.cut_padding = padding is not None and max(padding) >= query_len
        self.ready = True

    def require_device(self, name: str, device: torch.device) -> None:
        """Refuse a layer whose keys lie elsewhere than the rows' tables and lengths."""
        if device != self._device:
            raise UnsupportedModelError(
                f"{name}: its layers lie on {self._device} and {device} (device_map), and a PagedCache keeps "
                "its tables and lengths on one; load the model on one device, or use "
                "DynamicCache(config=model.config)"
            )

    def _require_blocks(self, batch: int, more: int) -> None:
        """``more`` for each row. Say which number to raise, before the pool says only that it is empty."""
        pool, full = self.pool, batch * self.blocks_per_row
        if batch * more > pool.num_free:
            raise BlockPoolExhaustedError(
                batch * more,
                pool.num_free,
                pool.num_usable,
                f"{counted(batch, 'row')} of max_seq_len={self.max_seq_len} take {full} blocks and the null "
                f"block if they share none: build the PagedCache with num_blocks={full + 1}, or without "
                "num_blocks",
            )

    def _cover(self) -> None:
        """The rows have other numbers of blocks than before: how many tokens of each have room."""
        self._covered = min(self.blocks.blocks_per_row * self.block_size, self.max_seq_len)
        self._limit.fill_(self._covered)

    def _grow(self, tokens: int) -> None:
        """Give the rows blocks for ``tokens`` each."""
        wanted = -(-tokens // self.block_size)
        self._require_blocks(len(self.blocks), wanted - self.blocks.blocks_per_row)
        self.blocks.grow(wanted)
        self._table.upload()
        self._cover()

    def _make_tensors(self, device: torch.device) -> None:
        sizes = BatchSizes(self.max_rows, self.max_rows, self.blocks_per_row)
        self.seq_lens = make_batch_tensors(("seq_lens",), sizes, device)["seq_lens"]
        self.query_starts = QueryStarts(self.max_rows, device)
        for table in self.tables:
            table.make_tensors(device)
        self.block_table = self._table.table
        with torch.inference_mode(False):  # an inference tensor could not be advanced under no_grad later
            scalars = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
            self.total, self.written_total, self.num_rows, self._limit = scalars
        for tensor in (self.seq_lens, *scalars):
            # guard=False: a new cache must not recompile the model
            torch._dynamo.mark_static_address(tensor, guard=False)
        self._device = device

    def upload(self) -> None:
        """Block ids of all rows to the device's tables."""
        for table in self.tables:
            table.upload()

    def add_padding(self, more: Sequence[int]) -> None:
        """So many of each row's tokens are padding, besides those that were known to be."""
        self.seq_lens[: len(more)] -= torch.tensor(more, dtype=torch.int32, device=self.seq_lens.device)

    # ------------------------------------------------------------------------------------------- one forward
    def advance(self, batch: int, query_len: int) -> None:
        """A forward begins: every row is ``query_len`` tokens longer (in place, in the graph).

        Raises:
            ArgumentError: other rows than this batch's, more tokens than fit, or rows of a broken forward.
        """
        if not torch.compiler.is_compiling():
            if batch != len(self.blocks.rows):
                raise other_rows(len(self.blocks.rows), batch)
            self.require_room(query_len)
            self.require_complete()
            self._is_open = True
            self.num_forwards += 1
            self._counted = None if self._counted is None else self._counted + query_len
            self._steps = {key: step for key, step in self._steps.items() if key[1] == query_len == 1}
        else:
            self._counted = None  # a trace does it again at each run, the counting above it would do once
        fits = (self.total + query_len <= self._limit) & (self.total == self.written_total)
        assert_fits(fits & (self.num_rows == batch))
        self.seq_lens[:batch].add_(query_len)
        if query_len == 1:
            positions = self._positions(batch, 1)
            for table in self.tables:
                table.note_decode(positions)
        else:
            self.query_starts.fill(query_len)
        # Last: a kernel that no op reads lies between the lengths and an op of states, which reads them early
        # (docs/stream_order.md).
        self.total.add_(query_len)

    def complete(self) -> None:
        """The forward's tokens are in every layer: noted on the device, which compiled steps look at, and on
        the host, which may have seen the forward begin, though its last layer is compiled."""
        self.written_total.copy_(self.total)
        self._is_open = False

    def step(
        self, batch: int, query_len: int, rolls: bool = False, writes: bool = False
    ) -> AttentionMetadata:
        """The forward that runs as a batch of ``batch`` requests of ``query_len`` queries each, with the
        slots of their tokens; of a layer that ``rolls``, those in its rings. ``writes``: into these slots."""
        if torch.compiler.is_compiling():  # what is kept would be an output of the graph
            return self._step(batch, query_len, rolls)
        key = batch, query_len, rolls
        # Where compiled code moved the rows on, what is kept has the slots of a forward before.
        is_stale = writes and query_len > 1 and not self._is_open
        if is_stale or key not in self._steps:
            self._steps[key] = self._step(*key)
        return self._steps[key]

    def _step(self, batch: int, query_len: int, rolls: bool) -> AttentionMetadata:
        table = self.rolling if rolls else self._table
        assert table is not None
        if query_len == 1:
            slots = table.decode_slots(batch)
        else:
            slots = table.slots_of(self._positions(batch, query_len))
        starts = self.query_starts.of(batch, query_len)
        return AttentionMetadata(table.table[:batch], self.seq_lens[:batch], starts, slots, None, query_len)

    def _positions(self, batch: int, query_len: int) -> Tensor:
        first = self.seq_lens[:batch, None].long() - query_len
        return first + torch.arange(query_len, device=self.seq_lens.device)[None]

    def host_lengths(self, batch: int, query_len: int) -> HostLengths | None:
        """The lengths of `metadata` without reading the device; None where a compiled forward moved them
        on."""
        if self._counted is None:
            return None
        padding = self.padding or [0] * batch
        return HostLengths([query_len] * batch, [self._counted - left for left in padding])

    def gather(self, pool: Tensor, batch: int) -> Tensor:
        """Dense mode: every row's tokens by position (padding included).

        Returns:
            ``[batch, num_kv_heads, max_seq_len, head_dim]``.
        """
        rows = pool[self.block_table[:batch].long()].flatten(1, 2)[:, : self.max_seq_len]
        padding = (self.total - self.seq_lens[:batch]).long()
        index = torch.arange(self.max_seq_len, device=pool.device)[None] - padding[:, None]
        index = index.clamp_min(0)[:, :, None, None].expand_as(rows)
        return rows.gather(1, index).transpose(1, 2)

    def first_position(self, query_len: int) -> int | None:
        """Where the tokens of the forward that runs begin, padding included; None where a compiled forward
        moved the lengths on."""
        return None if self._counted is None else self._counted - query_len

    # ------------------------------------------------------------------------------------ what the host knows
    def lengths(self) -> list[int]:
        """Tokens of each row without padding; reads the device, which graphs move on without the host."""
        lengths: list[int] = self.seq_lens[: len(self.blocks)].tolist()
        return lengths

    def recount(self) -> int:
        """Tokens per row with padding, read from the device: what the host knows from here on."""
        self._bound = self._counted = int(self.total)
        return self._bound

    def require_room(self, query_len: int) -> None:
        """Refuse tokens past ``max_seq_len``; where rows grow, give them blocks for these.

        Every call counts its tokens, so that compiled steps, which do not count on the host, stay covered by
        the hook before them. A step may be counted twice: then the bound passes the limit early, and one read
        of ``total`` settles it.
        """
        exact = self.ready and self.total.device.type == "cpu"
        if exact or self._bound + query_len > self._covered:
            self._bound = int(self.total) if self.ready else 0
        if self._bound + query_len > self.max_seq_len:
            again = f"; {ANOTHER_PROMPT}" if self.ready and query_len > 1 else ""
            raise ArgumentError(
                "max_seq_len",
                f"room for {self._bound + query_len} tokens per row (padding included)",
                str(self.max_seq_len),
                f"build a PagedCache with a larger max_seq_len, or generate fewer tokens{again}",
            )
        if self._bound + query_len > self._covered:
            self._grow(self._bound + query_len)
        self._bound += query_len

    def replay(self, query_len: int) -> None:
        """A forward that a graph holds runs once more: room for its tokens, of which the host sees no more.

        Raises:
            ArgumentError: as `require_room`.
        """
        self.require_room(query_len)
        self._counted = None

    def knows_room(self, query_len: int) -> bool:
        """Whether `require_room` need not read the device, nor give blocks."""
        return self._bound + query_len <= self._covered

    def forget_recorded(self) -> None:
        """The forward that has begun was recorded by a capture that failed: nothing of it ran."""
        self._is_open, self._counted = False, None

    def require_complete(self) -> None:
        """Refuse rows whose last forward raised between two layers. On a GPU a compiled one is found by
        `advance`'s assertion."""
        lost = self.ready and self.total.device.type == "cpu" and int(self.total) != int(self.written_total)
        if self._is_open or lost:
            raise incomplete()
