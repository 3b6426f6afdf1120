"""DecodeRows: the running requests of a decode batch, kept on the device from step to step.

    rows = DecodeRows(max_batch_size=64, max_blocks_per_req=128, block_size=16, vocab_size=32000,
                      device="cuda", ops=backend.ops)
    rows.write({0: RowState(input_id=5, seq_len=17, blocks=[1, 2], seed=7, counter=0, remaining=64)})
    logits = model(*rows.view(8)); rows.finish_step(logits, 8, step=0)    # `StepRows`, inside the graph

A row holds one request: its token, length and blocks, how it samples and when it ends. An idle row has
seq_len 0 and slot -1; idle rows may lie between busy ones. Updates are stream-ordered: one copy from pinned
memory, then device kernels; nothing waits.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.device.request_state import (
    HEAD_WORDS,
    INTS,
    LONGS,
    MAX_STOP_TOKEN_IDS,
    RowState,
    packed_rows,
)
from torchpaged.engine.device.step_rows import IDLE, StepRows
from torchpaged.metadata.fields import BatchSizes, pad_batch_tensors
from torchpaged.metadata.host import to_device


class DecodeRows(StepRows):
    """Rows that the host writes between launches. Arguments, attributes and errors are `StepRows`'s."""

    _line: Tensor | None = None  # of `send_first`, on the device

    def write(self, states: Mapping[int, RowState]) -> None:
        """Put requests into rows.

        Raises:
            ArgumentError: a row, length or block list that does not fit; nothing is written then.
        """
        if not states:
            return
        for row, state in states.items():
            if not 0 <= row < self.max_batch_size:
                raise ArgumentError("states", f"rows in [0, {self.max_batch_size})", str(row))
            state.check(self.block_size, self.max_blocks_per_req)
        with_seen = any(state.seen is not None for state in states.values())
        num_words = self.seen.shape[1] if with_seen else 0
        staged = packed_rows(
            states,
            self.block_size,
            self.max_blocks_per_req,
            num_words,
            self.stage.num_words,
            self.device.type == "cuda",
        )
        self._put(staged.to(self.device, non_blocking=True), list(states), num_words)
        self.look_up_slots()

    def _put(self, data: Tensor, rows: Sequence[int], num_seen_words: int) -> None:
        """Lines of `packed_rows`, on the device, into rows."""
        longs, floats = data.view(torch.int64), data.view(torch.float32)
        are_neighbours = list(rows) == list(range(rows[0], rows[0] + len(rows)))

        def put(field: Tensor, dim: int, new: Tensor) -> None:
            if are_neighbours:
                field.narrow(dim, rows[0], len(rows)).copy_(new)
            else:
                field.index_copy_(dim, longs[:, 0], new)

        stops = 1 + len(LONGS)
        ints = 2 * (stops + MAX_STOP_TOKEN_IDS)
        blocks = 2 + HEAD_WORDS
        words = blocks + self.max_blocks_per_req
        seen = words + self.stage.num_words
        put(self._longs, 1, longs[:, 1:stops].t())
        put(self.stop_token_ids, 0, longs[:, stops : stops + MAX_STOP_TOKEN_IDS])
        put(self._ints, 1, data[:, ints : ints + len(INTS)].t())
        put(self._floats, 1, floats[:, ints + len(INTS) : blocks].t())
        put(self.block_table, 0, data[:, blocks:words])
        if self.stage.num_words:
            put(self.logits_words, 0, data[:, words:seen])
        if num_seen_words:
            put(self.seen, 0, data[:, seen : seen + num_seen_words])

    def send_first(self, state: RowState) -> None:
        """Send a request without ``seen`` on its way into row 0, where `begin_first` puts it.

        Raises:
            ArgumentError: as `write`; nothing is sent then.
        """
        state.check(self.block_size, self.max_blocks_per_req)
        sizes = self.block_size, self.max_blocks_per_req, 0, self.stage.num_words
        staged = packed_rows({0: state}, *sizes, self.device.type == "cuda")
        if self._line is None:
            with torch.inference_mode(False):
                self._line = torch.zeros_like(staged, device=self.device)
        self._line.copy_(staged, non_blocking=True)

    def begin_first(self, logits: Tensor) -> Tensor:
        """For captures, behind a `send_first`: put what that sent last into row 0, and draw its token from
        ``logits [1, vocab_size]``; ``[1]`` int64. `look_up_slots` is the caller's."""
        assert self._line is not None
        self._put(self._line, [0], 0)
        return self.finish_rows(logits, [0])

    def append_blocks(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        """Write ``(row, column, block)`` into the block table, ahead of the step that needs it.

        Raises:
            ArgumentError: a place outside the table; nothing is written then.
        """
        for row, column, block in blocks:
            if not (0 <= row < self.max_batch_size and 0 <= column < self.max_blocks_per_req and block > 0):
                raise ArgumentError(
                    "blocks",
                    (
                        f"rows in [0, {self.max_batch_size}), columns in [0, {self.max_blocks_per_req}), "
                        "blocks from 1 on"
                    ),
                    f"row {row}, column {column}, block {block}",
                    "make max_blocks_per_req hold the longest request",
                )
        if blocks:
            data = to_device(
                [
                    *(row * self.max_blocks_per_req + column for row, column, _ in blocks),
                    *(x[2] for x in blocks),
                ],
                torch.int64,
                self.device,
            )
            self.block_table.view(-1).index_copy_(0, data[: len(blocks)], data[len(blocks) :].int())

    def clear(self, rows: Sequence[int]) -> None:
        """Make rows idle."""
        if rows:
            self._make_idle(to_device(rows, torch.int64, self.device))

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move rows ``(from, to)``, without the host knowing what they hold; the old places become idle."""
        if pairs:
            data = to_device(
                [*(old for old, _ in pairs), *(new for _, new in pairs)], torch.int64, self.device
            )
            old, new = data[: len(pairs)], data[len(pairs) :]
            for fields in (self._longs, self._ints, self._floats):
                fields.index_copy_(1, new, fields.index_select(1, old))
            words = (self.logits_words,) if self.stage.num_words else ()
            for table in (self.block_table, self.stop_token_ids, self.seen, *words):
                table.index_copy_(0, new, table.index_select(0, old))
            self._make_idle(old)
            self.look_up_slots()

    def look_up_slots(self) -> None:
        """Of layers with a state, where rows changed."""
        if self._find_slots is not None:
            self.state_slots.copy_(self._find_slots(self.block_table))

    def _make_idle(self, index: Tensor) -> None:
        for name, padding in IDLE.items():
            getattr(self, name).index_fill_(0, index, padding)

    @contextlib.contextmanager
    def padding(self, num_rows: int) -> Iterator[None]:
        """The first ``num_rows`` rows are idle inside the block, for a warm-up or a capture, and as they
        were afterwards."""
        launches = [self.ring.launches] if "ring" in vars(self) else []
        state = [self._longs, self._ints, self._floats, self.seen, self.tokens_out, *launches]
        state += self.block_table[:num_rows], self.stop_token_ids[:num_rows], self.logits_words[:num_rows]
        before = [tensor.clone() for tensor in state]
        try:
            for counted in launches:
                counted[:1].fill_(-1)  # tokens of launches in flight stay where they are
            names = (*IDLE, "input_ids", "positions")
            pad_batch_tensors(
                {name: getattr(self, name) for name in names},
                BatchSizes(num_rows, num_rows, self.max_blocks_per_req),
            )
            yield
        finally:
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)

    def reset(self) -> None:
        """After a launch that failed: waits for the device, and makes it count launches as the host does.

        What the rows hold then is not known: `write` or `clear` every one.
        """
        self.ring.reset()
