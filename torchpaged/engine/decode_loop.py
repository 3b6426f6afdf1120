"""DecodeLoop: whole decode steps launched ahead of the host.

The running requests live in rows on the device (`DecodeRows`); a launch replays one graph that runs the
model, samples, and makes the rows ready for the next step, K times over. The host sends only what the device
can't know: new requests, freed rows, blocks ahead of need. It reads tokens one launch late, while the next
launch runs.

    loop.place(sequence)            # or loop.finish_packed(sequences, logits)
    loop.launch()                   # K steps; returns at once
    for launch, steps, logprobs in loop.launches.collect(keep=1): ...

Blocks of a finished request may be given away at once: whatever still writes into them was launched earlier
on the same stream.
"""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import NotCopied
from torchpaged.engine.device import CopiedTokens, DecodeRows, LogitsStage, RowState, WholeStepRunner
from torchpaged.engine.launches import Launch, Launches
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.sequence import Sequence, StepCount
from torchpaged.graphs.buckets import bucket_for
from torchpaged.graphs.capture import Captured
from torchpaged.profiling import range as profile_range

#: Launches whose tokens may be on their way at once.
MAX_IN_FLIGHT = 4


def decode_rows(
    model: PagedModelProtocol,
    max_batch_size: int,
    max_blocks_per_req: int,
    steps_per_launch: int = 1,
    stage: LogitsStage | None = None,
) -> DecodeRows:
    """Rows for requests of ``model``: so many, of so many blocks at most.

    Args:
        steps_per_launch: decode steps per launch.
        stage: what is done to logits in front of sampling; None: nothing.
    """
    rings = getattr(model, "rings", None)
    return DecodeRows(
        max_batch_size,
        max_blocks_per_req,
        model.kv_cache.block_size,
        model.vocab_size,
        torch.device(model.device),
        model.session.ops,
        steps_per_launch,
        MAX_IN_FLIGHT,
        stage,
        None if rings is None else rings.slots_of,
    )


class DecodeLoop(NotCopied):
    """Graphs and launches of one model over its rows.

    Args:
        model: the paged model.
        rows: of `decode_rows`.
        options: further arguments of `WholeStepRunner` (``buckets``, ``compile``, ``progress``, ``capture``,
            ``prefixes`` ...).

    Attributes:
        runner: the graph runner.
        rows: the device's state.
        launches: those whose tokens were not read yet.
        step_count: decode steps so far.
        blocks_added: whether a request with a row may have been given blocks since blocks were last sent; who
            gives them sets it. The search through all rows costs more than the rest of a launch on the host,
            and most launches can do without.
    """

    def __init__(self, model: PagedModelProtocol, rows: DecodeRows, **options: Any) -> None:
        self.rows, self.steps_per_launch = rows, rows.steps_per_launch
        self.runner = WholeStepRunner(
            lambda input_ids, metadata: model(input_ids, metadata, None),
            rows,
            ranges=profile_range,
            session=model.session,
            **options,
        )
        self._sequences: list[Sequence | None] = [None] * rows.max_batch_size  # by row
        self._busy_rows: list[Sequence] | None = None
        self._has_idle_rows = False  # since rows were last moved together
        self.blocks_added = False
        self._to_write: dict[int, RowState] = {}
        self._to_clear: list[int] = []
        self.launches = Launches(self.rows)
        self._regroup = True  # whether rows changed since it was found which of them share blocks
        self.step_count = StepCount()

    # ------------------------------------------------------------------------------------------------ rows
    def place(self, sequence: Sequence) -> None:
        """Give ``sequence`` the lowest idle row; its newest token decodes in the next launch."""
        row, self._regroup = self._sequences.index(None), True
        self._sequences[row], sequence.row, sequence.blocks_on_device = sequence, row, len(sequence.blocks)
        sequence.step_count, sequence.steps_read = self.step_count, self.step_count.started
        self._busy_rows = None
        self._to_write[row] = row_state(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take ``sequence`` out of its row. What it has in flight is ignored later."""
        row = sequence.row
        if row is not None:
            self._regroup = True
            self._sequences[row], sequence.row = None, None
            self._busy_rows, self._has_idle_rows = None, True
            self._to_write.pop(row, None)
            self._to_clear.append(row)

    def decoding(self) -> list[Sequence]:
        """The requests with a row, if any of them needs tokens; all that changed is sent to the rows, so that
        a packed batch can take its decodes from there."""
        if not self._any_decodes():
            return []
        self._flush()
        return list(self._busy())

    def finish_packed(self, sequences: Seq[Sequence], logits: Tensor, end: Captured | None = None) -> None:
        """Sample a token each from ``logits [len(sequences), vocab_size]`` of a packed batch: the next ones
        of `decoding`, and behind them the first ones of requests whose prompt is computed, which get
        rows. ``end``: a graph that does all of it for a request in row 0 alone; None: there is none."""
        decodes = sum(sequence.row is not None for sequence in sequences)
        for sequence in sequences[decodes:]:
            self.place(sequence)
        rows = [sequence.row for sequence in sequences if sequence.row is not None]
        begins = rows == [0] and list(self._to_write) == [0] and self._to_write[0].seen is None
        if end is not None and begins:
            self.rows.send_first(self._to_write.pop(0))
            self._flush()
            end.replay()
            self.rows.look_up_slots()
            drawn = end.output
        else:
            self._flush()
            rows = [sequence.row for sequence in sequences if sequence.row is not None]
            drawn = self.rows.finish_rows(logits, rows)
        tokens, records = CopiedTokens(drawn), None
        if any(sequence.sampling.logprobs is not None for sequence in sequences):
            records = CopiedTokens(self.rows.stage.logprobs(logits, drawn))
        self.step_count.most += 1
        for sequence in sequences:
            sequence.steps_read -= 1
        self.launches.add(Launch(-1, tokens, list(sequences), 1, decodes, records))
        for sequence in sequences[decodes:]:
            sequence.list_prompt()

    def reset(self) -> None:
        """After a call that raised: every row idle, nothing in flight, tokens that were not read lost. Waits
        for the device.

        Requests that are placed again go on from the tokens that the host has read.
        """
        self.runner.reset()
        self.launches.forget()
        for sequence in self._sequences:
            if sequence is not None:
                sequence.row = None
        self._regroup, self._sequences = True, [None] * len(self._sequences)
        self._busy_rows, self._has_idle_rows, self.blocks_added = None, False, False
        self._to_write, self._to_clear = {}, []
        self.rows.clear(range(self.rows.max_batch_size))

    # ----------------------------------------------------------------------------------------------- launches
    def launch(self) -> bool:
        """Start K steps over all rows; False, and nothing is started, if every row is idle or has all its
        tokens on their way.

        If it raises, what the rows hold is not known: `reset`, and place the requests again.
        """
        if not self._any_decodes():
            return False
        self._flush()
        busy = self._busy()  # rows may have moved
        num_rows = _row(busy[-1]) + 1
        if self._regroup:
            self._find_groups(num_rows)
        with profile_range("decode", batch=len(busy), tokens=len(busy) * self.steps_per_launch):
            self.runner.launch(num_rows)
            number = self.rows.ring.take()
        self.step_count.started += self.steps_per_launch
        self.step_count.most += self.steps_per_launch
        self.launches.add(Launch(number, None, self._sequences[:num_rows], self.steps_per_launch, num_rows))
        return True

    def _any_decodes(self) -> bool:
        """Whether a row holds a request that does not have all its tokens on their way."""
        return any(len(s.tokens) + s.in_flight < s.max_len for s in self._busy())

    def _find_groups(self, num_rows: int) -> None:
        """Which rows share blocks, for the launches until a row changes. Rows only grow meanwhile: their
        lengths as the host knows them are what they have at least."""
        tables: list[list[int]] = [[] for _ in range(num_rows)]
        lens = [0] * num_rows
        for sequence in self._busy():
            row = _row(sequence)
            tables[row], lens[row] = sequence.blocks, len(sequence.tokens)
        self.runner.find_groups(tables, lens)
        self._regroup = False

    # ------------------------------------------------------------------------------------------ to the device
    def _flush(self) -> None:
        """Send what changed since the last launch; nothing in the common case."""
        if self._to_clear:
            self.rows.clear([row for row in self._to_clear if self._sequences[row] is None])
            self._to_clear = []
        if self._to_write:
            self.rows.write(self._to_write)
            self._to_write = {}
        if self.blocks_added:
            self._send_blocks([s for s in self._busy() if len(s.blocks) > s.blocks_on_device])
            self.blocks_added = False
        if self._has_idle_rows:
            self._close_up()
            self._has_idle_rows = False

    def _send_blocks(self, grown: list[Sequence]) -> None:
        added = []
        for sequence in grown:
            row, known = _row(sequence), sequence.blocks_on_device
            added += [(row, known + i, block) for i, block in enumerate(sequence.blocks[known:])]
            sequence.blocks_on_device = len(sequence.blocks)
        self.rows.append_blocks(added)

    def _busy(self) -> list[Sequence]:
        """Requests with a row, in the rows' order; kept until one comes, goes or moves."""
        if self._busy_rows is None:
            self._busy_rows = [sequence for sequence in self._sequences if sequence is not None]
        return self._busy_rows

    def _close_up(self) -> None:
        """Move the last rows into idle ones where that makes a smaller bucket do."""
        busy = [_row(sequence) for sequence in self._busy()]
        if not busy or busy[-1] + 1 == len(busy):
            return
        buckets = self.runner.buckets
        if bucket_for(buckets, busy[-1] + 1) == bucket_for(buckets, len(busy)):
            return
        idle = [row for row in range(len(busy)) if self._sequences[row] is None]
        pairs = list(zip(busy[-len(idle) :], idle, strict=True))
        self._regroup = True
        for old, new in pairs:
            sequence = self._sequences[old]
            assert sequence is not None
            self._sequences[new], self._sequences[old], sequence.row = sequence, None, new
        self._busy_rows = None
        self.rows.move(pairs)


def row_state(sequence: Sequence) -> RowState:
    """What a request brings into its row."""
    params = sequence.sampling
    return RowState(
        input_id=sequence.tokens[-1],
        seq_len=len(sequence.tokens),
        blocks=sequence.blocks,
        seed=sequence.seed,
        counter=sequence.num_output,
        remaining=sequence.max_len - len(sequence.tokens),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        stop_token_ids=sequence.end_token_ids,
        seen=sequence.tokens if params.repetition_penalty != 1.0 else None,
        logits_words=sequence.logits_words,
    )


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None
    return sequence.row
