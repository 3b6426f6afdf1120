"""accept_tokens: one thread per request takes its sampled token and turns this step's buffers into the next one's."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops import validation_sampling as validation
from torchpaged.custom_ops.triton.config import launches_early, require_launchable

_ROWS = 32
_STOPS = 8


@triton.jit
def accept_tokens_kernel(
    sampled_ptr, table_ptr, stop_ptr, ids_ptr, positions_ptr, lens_ptr, slots_ptr, counters_ptr, remaining_ptr, seen_ptr, tokens_ptr,
    num_reqs, num_stops, num_words, capacity, table_row, stop_row, seen_row,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, STOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(num_reqs / ROWS),). STOPS: stop tokens compared at once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if PDL:  # without launch_dependents: attention reads what is written here before its own wait
        tl.extra.cuda.gdc_wait()
    inside = row < num_reqs
    old = tl.load(lens_ptr + row, mask=inside, other=0)
    active = inside & (old > 0)
    token = tl.load(sampled_ptr + row, mask=active, other=-1)
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(counters_ptr + row, tl.load(counters_ptr + row, mask=active, other=0) + 1, mask=active)
    remaining = tl.load(remaining_ptr + row, mask=active, other=0) - 1
    tl.store(remaining_ptr + row, remaining, mask=active)

    word = token // 32
    marks = active & (token >= 0) & (word < num_words)
    word_at = seen_ptr + row.to(tl.int64) * seen_row + word
    bit = tl.full([ROWS], 1, tl.int32) << (token % 32).to(tl.int32)
    tl.store(word_at, tl.load(word_at, mask=marks, other=0) | bit, mask=marks)

    stops = tl.zeros([ROWS], tl.int32)
    for first in range(0, num_stops, STOPS):
        number = first + tl.arange(0, STOPS)
        stop_at = stop_ptr + (row.to(tl.int64) * stop_row)[:, None] + number[None, :]
        stop = tl.load(stop_at, mask=active[:, None] & (number < num_stops)[None, :], other=-1)
        stops |= tl.max(((stop == token[:, None]) & (stop >= 0)).to(tl.int32), 1)

    goes_on = active & (stops == 0) & (remaining > 0) & (old < capacity)
    block = tl.load(table_ptr + row.to(tl.int64) * table_row + old // BLOCK_SIZE, mask=goes_on, other=0).to(tl.int64)
    tl.store(slots_ptr + row, tl.where(goes_on, block * BLOCK_SIZE + old % BLOCK_SIZE, -1), mask=inside)
    tl.store(ids_ptr + row, token, mask=goes_on)
    tl.store(positions_ptr + row, old.to(tl.int64), mask=goes_on)
    tl.store(lens_ptr + row, tl.where(goes_on, old + 1, 0), mask=active)


def accept_tokens(sampled_token_ids: Tensor, block_table: Tensor, stop_token_ids: Tensor, input_ids: Tensor, positions: Tensor,
                  seq_lens: Tensor, slot_mapping: Tensor, counters: Tensor, remaining: Tensor, seen: Tensor, tokens_out: Tensor,
                  *, block_size: int) -> None:  # fmt: skip
    """Launch; arguments as in ``custom_ops/ops.py``."""
    require_launchable(input_ids)
    validation.check_accept_tokens(
        sampled_token_ids, block_table, stop_token_ids, input_ids, positions, seq_lens, slot_mapping, counters, remaining, seen,
        tokens_out, block_size=block_size,
    )  # fmt: skip
    num_reqs = block_table.shape[0]
    if not num_reqs:
        return
    early = launches_early(input_ids.device)
    options: dict[str, Any] = {"PDL": early} | ({"launch_pdl": True} if early else {})
    accept_tokens_kernel[(triton.cdiv(num_reqs, _ROWS),)](
        sampled_token_ids, block_table, stop_token_ids, input_ids, positions, seq_lens, slot_mapping, counters, remaining, seen, tokens_out,
        num_reqs, stop_token_ids.shape[1], seen.shape[1], block_table.shape[1] * block_size, block_table.stride(0),
        stop_token_ids.stride(0), seen.stride(0), BLOCK_SIZE=block_size, ROWS=_ROWS, STOPS=_STOPS, num_warps=1, **options,
    )  # fmt: skip
