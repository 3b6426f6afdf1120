"""RowTensors: the static tensors of a decode batch's requests, a row each."""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.device.request_state import MAX_STOP_TOKEN_IDS, NUM_FLOATS, NUM_INTS, NUM_LONGS
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.fields import FIELDS, METADATA_FIELDS, BatchSizes

#: What makes a row idle: its length and slot are a padding row's.
IDLE = {name: FIELDS[name].padding for name in ("seq_lens", "slot_mapping")}


class RowTensors:
    """Static tensors of up to ``max_batch_size`` requests, all idle.

    Args:
        max_batch_size: rows.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        vocab_size: of the logits.
        device: where the tensors live.
        steps_per_launch: rows of ``tokens_out``.

    Attributes:
        input_ids, positions, slot_mapping, seeds, counters: ``[max_batch_size]`` int64.
        seq_lens, remaining, top_k: ``[max_batch_size]`` int32.
        temperature, top_p, min_p, repetition_penalty: ``[max_batch_size]`` float32.
        stop_token_ids: ``[max_batch_size, 16]`` int64, -1 = none.
        block_table: ``[max_batch_size, max_blocks_per_req]`` int32.
        seen: ``[max_batch_size, ceil(vocab_size / 32)]`` int32, a bit per token.
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
        steps_per_launch: int,
    ) -> None:
        sizes = {
            "max_batch_size": max_batch_size,
            "max_blocks_per_req": max_blocks_per_req,
            "block_size": block_size,
            "vocab_size": vocab_size,
            "steps_per_launch": steps_per_launch,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        self.max_batch_size, self.max_blocks_per_req = max_batch_size, max_blocks_per_req
        self.block_size, self.vocab_size, self.device = block_size, vocab_size, torch.device(device)
        self.steps_per_launch = steps_per_launch
        rows = max_batch_size
        padded = -(-rows // 16) * 16  # each field starts at a multiple of 64 bytes
        with torch.inference_mode(False):
            self._longs = torch.zeros(NUM_LONGS, padded, dtype=torch.int64, device=device)
            self._ints = torch.zeros(NUM_INTS, padded, dtype=torch.int32, device=device)
            self._floats = torch.zeros(NUM_FLOATS, padded, dtype=torch.float32, device=device)
            self.stop_token_ids = torch.full((rows, MAX_STOP_TOKEN_IDS), -1, dtype=torch.int64, device=device)
            self.block_table = FIELDS["block_table"].make(BatchSizes(rows, rows, max_blocks_per_req), device)
            self.seen = torch.zeros(rows, -(-vocab_size // 32), dtype=torch.int32, device=device)
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

    def tensors(self) -> dict[str, Tensor]:
        """Everything a captured step reads or writes, by name."""
        names = (
            "input_ids",
            "positions",
            "slot_mapping",
            "seeds",
            "counters",
            "seq_lens",
            "remaining",
            "top_k",
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "stop_token_ids",
            "block_table",
            "seen",
            "query_start_loc",
            "tokens_out",
        )
        return {name: getattr(self, name) for name in names}

    def view(self, num_rows: int) -> tuple[Tensor, AttentionMetadata]:
        """The first ``num_rows`` rows as ``(input_ids, metadata)``; slices, no copies."""
        tensors = {name: getattr(self, name) for name in METADATA_FIELDS}
        sizes = BatchSizes(num_rows, num_rows, self.max_blocks_per_req)
        return self.input_ids[:num_rows], AttentionMetadata.view(
            tensors, sizes, max_query_len=1, block_size=self.block_size
        )
