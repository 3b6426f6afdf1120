"""DecodeRows: the running requests of a decode batch, kept on the device from step to step.

    rows = DecodeRows(max_batch_size=64, max_blocks_per_req=128, block_size=16, vocab_size=32000,
                      device="cuda", ops=backend.ops)
    rows.write({0: RowState(input_id=5, seq_len=17, blocks=[1, 2], seed=7, counter=0, remaining=64)})
    # inside the graph: sample, accept, move on
    logits = model(*rows.view(8)); rows.finish_step(logits, 8, step=0)
    rows.tokens_out[0]                                               # [max_batch_size] int64, -1 in idle rows

A row holds one request: its token, length and blocks, how it samples and when it ends. An idle row has
seq_len 0 and slot -1; idle rows may lie between busy ones. Updates are stream-ordered: one copy from pinned
memory, then device kernels; nothing waits.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.device.logits_stage import LogitsStage
from torchpaged.engine.device.request_state import (
    FLOATS,
    HEAD_WORDS,
    INTS,
    LONGS,
    MAX_STOP_TOKEN_IDS,
    RowState,
    packed_rows,
)
from torchpaged.engine.device.token_rings import LaunchRing
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.fields import FIELDS, METADATA_FIELDS, BatchSizes, pad_batch_tensors
from torchpaged.metadata.host import to_device

#: What makes a row idle: its length and slot are a padding row's.
IDLE = {name: FIELDS[name].padding for name in ("seq_lens", "slot_mapping")}
#: Arguments of the op ``finish_step``, in its order.
_FINISHED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seeds",
    "block_table",
    "stop_token_ids",
    "input_ids",
    "positions",
    "seq_lens",
    "slot_mapping",
    "counters",
    "remaining",
    "seen",
)
_finished_of = operator.attrgetter(*_FINISHED)


class DecodeRows:
    """Static tensors of up to ``max_batch_size`` requests, all idle, and what is done to them: by captured
    steps, and by the host between launches.

    Args:
        max_batch_size: rows.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        vocab_size: of the logits.
        device: where the tensors live.
        ops: whose ``finish_step`` ends a step.
        steps_per_launch: rows of ``tokens_out``.
        launches_in_flight: launches whose tokens may be unread at once, for ``ring``.
        stage: what is done to logits in front of ``finish_step``; None: nothing.
        find_slots: gives the slots of layers with a state, of a block table; None: there are no such layers.

    Attributes:
        input_ids, positions, slot_mapping, seeds, counters: ``[max_batch_size]`` int64.
        seq_lens, remaining, top_k: ``[max_batch_size]`` int32.
        temperature, top_p, min_p, repetition_penalty: ``[max_batch_size]`` float32.
        stop_token_ids: ``[max_batch_size, 16]`` int64, -1 = none.
        block_table: ``[max_batch_size, max_blocks_per_req]`` int32.
        state_slots: ``[max_batch_size]`` int32, looked up where rows change, not in each step.
        seen: ``[max_batch_size, ceil(vocab_size / 32)]`` int32, a bit per token.
        logits_words: ``[max_batch_size, stage.num_words]`` int32, what requests bring for ``stage``.
        query_start_loc: ``[max_batch_size + 1]`` int32, 0, 1, 2 ...: every row has one query token, idle
            ones too.
        tokens_out: ``[steps_per_launch, max_batch_size]`` int64, what the last launch produced; -1 where a
            row was idle.
        ring: the launches' tokens on the host: `LaunchRing`.

    Raises:
        ArgumentError: a size below 1.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_blocks_per_req: int,
        block_size: int,
        vocab_size: int,
        device: torch.device | str,
        ops: BackendOps,
        steps_per_launch: int = 1,
        launches_in_flight: int = 4,
        stage: LogitsStage | None = None,
        find_slots: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        sizes = {
            "max_batch_size": max_batch_size,
            "max_blocks_per_req": max_blocks_per_req,
            "block_size": block_size,
            "vocab_size": vocab_size,
            "steps_per_launch": steps_per_launch,
            "launches_in_flight": launches_in_flight,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        self.max_batch_size, self.max_blocks_per_req = max_batch_size, max_blocks_per_req
        self.block_size, self.vocab_size, self.device = block_size, vocab_size, torch.device(device)
        self.steps_per_launch, self._ops = steps_per_launch, ops
        self.stage = LogitsStage() if stage is None else stage
        self._find_slots = find_slots
        self._first_rows: dict[int, dict[str, Tensor]] = {}  # by number, what `finish_rows` takes of them
        rows = max_batch_size
        padded = -(-rows // 16) * 16  # each field starts at a multiple of 64 bytes
        with torch.inference_mode(False):
            self._longs = torch.zeros(len(LONGS), padded, dtype=torch.int64, device=device)
            self._ints = torch.zeros(len(INTS), padded, dtype=torch.int32, device=device)
            self._floats = torch.zeros(len(FLOATS), padded, dtype=torch.float32, device=device)
            self.stop_token_ids = torch.full((rows, MAX_STOP_TOKEN_IDS), -1, dtype=torch.int64, device=device)
            self.block_table = FIELDS["block_table"].make(BatchSizes(rows, rows, max_blocks_per_req), device)
            self.seen = torch.zeros(rows, -(-vocab_size // 32), dtype=torch.int32, device=device)
            self.logits_words = torch.zeros(rows, self.stage.num_words, dtype=torch.int32, device=device)
            self.state_slots = torch.zeros(rows, dtype=torch.int32, device=device)
            self.query_start_loc = torch.arange(rows + 1, dtype=torch.int32, device=device)
            self.tokens_out = torch.full((steps_per_launch, padded), -1, dtype=torch.int64, device=device)
        self.input_ids, self.positions, self.slot_mapping, self.seeds, self.counters = (
            x[:rows] for x in self._longs
        )
        self.seq_lens, self.remaining, self.top_k = (x[:rows] for x in self._ints)
        self.temperature, self.top_p, self.min_p, self.repetition_penalty = (x[:rows] for x in self._floats)
        self.slot_mapping.fill_(IDLE["slot_mapping"])
        self.repetition_penalty.fill_(1.0)
        self.top_p.fill_(1.0)
        self.ring = LaunchRing(
            launches_in_flight, steps_per_launch, max_batch_size, device, self.stage.record_words
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything a captured step reads or writes, by name."""
        names = (*_FINISHED, "query_start_loc", "tokens_out", "logits_words", "state_slots")
        own = {name: getattr(self, name) for name in names}
        if self.ring.records is not None:
            own["records"] = self.ring.records
        return own | {"ring": self.ring.slots, "launches": self.ring.launches}

    def view(self, num_rows: int) -> tuple[Tensor, AttentionMetadata]:
        """The first ``num_rows`` rows as ``(input_ids, metadata)``; slices, no copies."""
        tensors = {name: getattr(self, name) for name in METADATA_FIELDS}
        sizes = BatchSizes(num_rows, num_rows, self.max_blocks_per_req)
        metadata = AttentionMetadata.view(tensors, sizes, max_query_len=1, block_size=self.block_size)
        if self._find_slots is not None:
            metadata.state_slots = self.state_slots[:num_rows]
        return self.input_ids[:num_rows], metadata

    # ------------------------------------------------------------------------------------------ on the device
    def finish_step(self, logits: Tensor, num_rows: int, step: int) -> None:
        """End a step of the first ``num_rows`` rows: sample a token each and make the rows ready for the
        next step.

        The last step of a launch ends it for ``ring``: a caller other than the runner calls ``ring.count()``
        then, as that does.

        Args:
            logits: ``[num_rows, vocab_size]``.
            num_rows: rows of the step.
            step: of the launch: which row of ``tokens_out`` receives the tokens.
        """
        n = slice(num_rows)
        described = self.logits_words[n], self.counters[n], self.input_ids[n], self.seq_lens[n]
        records = self.ring.records
        slot = None if records is None else self.ring.slot()
        self._ops.finish_step(
            self.stage.process(logits, *described),
            *[tensor[n] for tensor in _finished_of(self)],
            self.tokens_out[step, n],
            block_size=self.block_size,
            ring=self.ring.slots,
            launches=self.ring.launches,
            step=step,
        )
        if records is not None and slot is not None:
            told = self.stage.logprobs(logits, self.tokens_out[step, n])
            records[:, step, n].index_copy_(0, slot, told[None])

    def finish_rows(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """As `finish_step` for chosen rows, whose logits come from a packed batch. For captures only of rows
        0, 1, 2 ...: other ones are copied from a host list.

        Args:
            logits: ``[len(rows), vocab_size]``.
            rows: as `write` left them, ``seq_len`` being the prompt's length, or the step before.

        Returns:
            ``[len(rows)]`` int64, the sampled tokens.
        """
        count = len(rows)
        if list(rows) == list(range(count)):  # as where no row is idle: in place
            fields = self._first_rows.get(count)
            if fields is None:
                names = *_FINISHED, "logits_words"
                fields = self._first_rows[count] = {name: getattr(self, name)[:count] for name in names}
            return self._finish(logits, fields)
        # Fields begin at multiples of 16 bytes: Triton would compile anew for other alignments.
        padded = to_device([*rows, *[rows[-1]] * (-count % 4)], torch.int64, self.device)
        index = padded[:count]
        longs, ints, floats = (
            x.index_select(1, padded)[:, :count] for x in (self._longs, self._ints, self._floats)
        )
        fields = dict(zip((*LONGS, *INTS, *FLOATS), chain(longs, ints, floats), strict=True))
        for name in ("block_table", "stop_token_ids", "seen", "logits_words"):
            fields[name] = getattr(self, name).index_select(0, index)
        tokens = self._finish(logits, fields)
        self._longs.index_copy_(1, index, longs)
        self._ints.index_copy_(1, index, ints)
        self.seen.index_copy_(0, index, fields["seen"])
        return tokens

    def _finish(self, logits: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """``finish_step`` of rows with these fields, outside a launch; their tokens."""
        described = (fields[name] for name in ("logits_words", "counters", "input_ids", "seq_lens"))
        logits = self.stage.process(logits, *described)
        # Filled, right in front of the op: a kernel that writes nothing of what the op reads early comes
        # between those that wrote the fields and the op.
        tokens = torch.full_like(fields["input_ids"], -1)
        self._ops.finish_step(
            logits, *[fields[name] for name in _FINISHED], tokens, block_size=self.block_size
        )
        return tokens

    def copy_to(self, rows: Sequence[int], input_ids: Tensor, metadata: AttentionMetadata) -> None:
        """Make the next steps of chosen rows the first requests of a packed batch, which has a token for each
        of them. Not for captures: it reads a host list.

        Args:
            rows: in the batch's order.
            input_ids: ``[num_tokens]`` int64, of the batch.
            metadata: its tensors, with positions, slots and ``max_blocks_per_req`` columns.
        """
        index = to_device(rows, torch.int64, self.device)
        batch = {"input_ids": input_ids} | metadata.tensors()
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "block_table"):
            torch.index_select(getattr(self, name), 0, index, out=batch[name][: len(rows)])

    # ------------------------------------------------------------------------------------------ from the host
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
        data = staged.to(self.device, non_blocking=True)
        longs, floats, rows = data.view(torch.int64), data.view(torch.float32), list(states)
        are_neighbours = rows == list(range(rows[0], rows[0] + len(rows)))

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
        if with_seen:
            put(self.seen, 0, data[:, seen : seen + num_words])
        self._look_up_slots()

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
            self._look_up_slots()

    def _look_up_slots(self) -> None:
        if self._find_slots is not None:
            self.state_slots.copy_(self._find_slots(self.block_table))

    def _make_idle(self, index: Tensor) -> None:
        for name, padding in IDLE.items():
            getattr(self, name).index_fill_(0, index, padding)

    @contextlib.contextmanager
    def padding(self, num_rows: int) -> Iterator[None]:
        """The first ``num_rows`` rows are idle inside the block, for a warm-up or a capture, and as they
        were afterwards."""
        state = (self._longs, self._ints, self._floats, self.seen, self.tokens_out, self.ring.launches)
        before = [tensor.clone() for tensor in state]
        try:
            self.ring.launches[:1].fill_(-1)  # tokens of launches in flight stay where they are
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
