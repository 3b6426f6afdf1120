"""StepRows: the requests of a decode batch as tensors that whole steps read and write, captured or not.

    input_ids, metadata = rows.view(8)
    rows.finish_step(model(input_ids, metadata), 8, step=0)          # inside the graph: sample, move on
    rows.tokens_out[0]                                               # [max_batch_size] int64, -1 in idle rows

What puts requests into them is `DecodeRows`'s.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.engine.device.logits_stage import LogitsStage
from torchpaged.engine.device.request_state import FLOATS, INTS, LONGS, MAX_STOP_TOKEN_IDS
from torchpaged.engine.device.token_rings import LaunchRing
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.fields import FIELDS, METADATA_FIELDS, BatchSizes
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


class StepRows:
    """Static tensors of up to ``max_batch_size`` requests, all idle, and what steps do to them.

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
        check_sizes(max_batch_size=max_batch_size, max_blocks_per_req=max_blocks_per_req)
        check_sizes(block_size=block_size, vocab_size=vocab_size, steps_per_launch=steps_per_launch)
        check_sizes(launches_in_flight=launches_in_flight)
        self.max_batch_size, self.max_blocks_per_req = max_batch_size, max_blocks_per_req
        self.block_size, self.vocab_size, self.device = block_size, vocab_size, torch.device(device)
        self.steps_per_launch, self._ops, self._in_flight = steps_per_launch, ops, launches_in_flight
        self.stage = LogitsStage() if stage is None else stage
        self._find_slots = find_slots
        self._first_rows: dict[int, dict[str, Tensor]] = {}  # by number, their fields
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

    @functools.cached_property
    def ring(self) -> LaunchRing:
        """The launches' tokens on the host; made for the first that asks: rows without launches need none."""
        sizes = self._in_flight, self.steps_per_launch, self.max_batch_size
        return LaunchRing(*sizes, self.device, self.stage.record_words)

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
        tokens, records = self.tokens_out[step, :num_rows], self.ring.records
        slot = None if records is None else self.ring.slot()
        launch = {"ring": self.ring.slots, "launches": self.ring.launches, "step": step}
        self._finish(logits, self._first(num_rows), tokens, **launch)
        if records is not None and slot is not None:
            told = self.stage.logprobs(logits, tokens)
            records[:, step, :num_rows].index_copy_(0, slot, told[None])

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
            return self._finish(logits, self._first(count))
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

    def _first(self, count: int) -> dict[str, Tensor]:
        """What ``finish_step`` takes of the first ``count`` rows, in place."""
        if count not in self._first_rows:
            names = *_FINISHED, "logits_words"
            self._first_rows[count] = {name: getattr(self, name)[:count] for name in names}
        return self._first_rows[count]

    def _finish(
        self, logits: Tensor, fields: Mapping[str, Tensor], tokens: Tensor | None = None, **launch: Any
    ) -> Tensor:
        """``finish_step`` of rows with these fields; their ``tokens``, new ones outside a launch."""
        described = (fields[name] for name in ("logits_words", "counters", "input_ids", "seq_lens"))
        logits = self.stage.process(logits, *described)
        if tokens is None:
            # Filled, right in front of the op: a kernel that writes nothing of what the op reads early comes
            # between those that wrote the fields and the op.
            tokens = torch.full_like(fields["input_ids"], -1)
        arguments = [fields[name] for name in _FINISHED]
        self._ops.finish_step(logits, *arguments, tokens, block_size=self.block_size, **launch)
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
