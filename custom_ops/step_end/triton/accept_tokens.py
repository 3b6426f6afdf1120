"""accept_tokens: one thread per request takes its sampled token and turns this step's buffers into the
next one's.

Dependents are not started early (stream_order.py). `finish_step` has the same functions.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.step_end.check import check_accept_tokens
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_launchable

STOPS = 16  # that are compared at once
_MOST_ROWS = 128


def rows_per_program(num_reqs: int) -> int:
    """All of them up to 128: programs that share a ring's slot have to count themselves."""
    return min(max(next_power_of_2(num_reqs), 32), _MOST_ROWS)


def ring_options(ring: Tensor | None, step: int, alone: bool) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """``(ring_slot, ring_step, num_slots)`` and the constexprs of a kernel that ends a step: LAST only with a
    ring; ``alone``: it is one program."""
    if ring is None:
        return (0, 0, 0), {"STEP": 0, "LAST": False, "ALONE": True}
    strides = (ring.stride(0), ring.stride(1), ring.shape[0] - 1)
    return strides, {"STEP": step, "LAST": step == ring.shape[1] - 2, "ALONE": alone}


@triton.jit
def load_stops(stop_at, first, num_stops, active, STOPS: tl.constexpr):
    """Stop tokens ``first ... first + STOPS - 1`` of each row: ``[ROWS, STOPS]``, -1 for none."""
    number = first + tl.arange(0, STOPS)
    inside = active[:, None] & (number < num_stops)[None, :]
    return tl.load(stop_at[:, None] + number[None, :], mask=inside, other=-1, cache_modifier=".cg")


@triton.jit
def is_among(token, stop):
    """Whether ``token [ROWS]`` is in its row of ``stop [ROWS, STOPS]``, as 0 or 1."""
    return tl.max(((stop == token[:, None]) & (stop >= 0)).to(tl.int32), 1)


@triton.jit
def load_rows(
    row,
    inside,
    table_ptr,
    stop_at,
    lens_ptr,
    counters_ptr,
    remaining_ptr,
    num_stops,
    capacity,
    table_row,
    BLOCK_SIZE: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Of each row: length, counter, tokens that remain after this one, block of the next position, the first
    stop tokens.

    From L2: `finish_step` reads them before the kernels ahead have finished, and a first-level cache may hold
    an older step's.
    """
    old = tl.load(lens_ptr + row, mask=inside, other=0, cache_modifier=".cg")
    active = inside & (old > 0)
    counter = tl.load(counters_ptr + row, mask=active, other=0, cache_modifier=".cg")
    remaining = tl.load(remaining_ptr + row, mask=active, other=0, cache_modifier=".cg") - 1
    block_at = table_ptr + row.to(tl.int64) * table_row + old // BLOCK_SIZE
    block = tl.load(block_at, mask=active & (old < capacity), other=0, cache_modifier=".cg").to(tl.int64)
    return old, counter, remaining, block, load_stops(stop_at, 0, num_stops, active, STOPS)


@triton.jit
def accept_rows(
    row,
    inside,
    token,
    old,
    counter,
    remaining,
    block,
    stop,
    stop_at,
    ids_ptr,
    positions_ptr,
    lens_ptr,
    slots_ptr,
    counters_ptr,
    remaining_ptr,
    seen_ptr,
    tokens_ptr,
    num_stops,
    num_words,
    capacity,
    seen_row,
    BLOCK_SIZE: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Take ``token [ROWS]``, int64, -1 in rows that are not active, another negative one ends the row; the
    rest of each row is as `load_rows` gave it."""
    active = inside & (old > 0)
    stops = is_among(token, stop)
    for first in range(STOPS, num_stops, STOPS):
        stops |= is_among(token, load_stops(stop_at, first, num_stops, active, STOPS))
    goes_on = active & (token >= 0) & (old < capacity) & (stops == 0) & (remaining > 0)
    tl.store(ids_ptr + row, token, mask=goes_on)
    tl.store(slots_ptr + row, tl.where(goes_on, block * BLOCK_SIZE + old % BLOCK_SIZE, -1), mask=inside)
    tl.store(positions_ptr + row, old.to(tl.int64), mask=goes_on)
    tl.store(lens_ptr + row, tl.where(goes_on, old + 1, 0), mask=active)
    tl.store(counters_ptr + row, counter + 1, mask=active)
    tl.store(remaining_ptr + row, remaining, mask=active)
    tl.store(tokens_ptr + row, token, mask=inside)

    word = token // 32
    marks = active & (token >= 0) & (word < num_words)
    word_at = seen_ptr + row.to(tl.int64) * seen_row + word
    bit = tl.full(token.shape, 1, tl.int32) << (token % 32).to(tl.int32)
    tl.store(word_at, tl.load(word_at, mask=marks, other=0) | bit, mask=marks)


@triton.jit
def find_slot(ring_ptr, launches_ptr, ring_slot, num_slots):
    """The launch's number and its slot; the last one, behind ``num_slots``, where the number is negative."""
    launch = tl.load(launches_ptr, cache_modifier=".cg")
    return launch, ring_ptr + tl.where(launch < 0, num_slots, launch % num_slots) * ring_slot


@triton.jit
def end_launch(slot_at, launch, launches_ptr, ring_step, num_steps: tl.constexpr, ALONE: tl.constexpr):
    """Behind a launch's last tokens: its number into its slot, and count it unless it is negative.

    The next one may begin once every program has read the number: the last one to come here counts. ALONE:
    there is one program.
    """
    tl.debug_barrier()  # every warp has read it
    next_launch = tl.where(launch < 0, launch, launch + 1)
    if ALONE:
        tl.store(slot_at + num_steps * ring_step, launch)
        tl.store(launches_ptr, next_launch)
    elif tl.atomic_add(launches_ptr + 1, 1) == tl.num_programs(0) - 1:
        tl.store(slot_at + num_steps * ring_step, launch)
        tl.store(launches_ptr + 1, tl.zeros([], tl.int64))
        tl.store(launches_ptr, next_launch)


@triton.jit
def accept_tokens_kernel(
    sampled_ptr,
    table_ptr,
    stop_ptr,
    ids_ptr,
    positions_ptr,
    lens_ptr,
    slots_ptr,
    counters_ptr,
    remaining_ptr,
    seen_ptr,
    tokens_ptr,
    ring_ptr,
    launches_ptr,
    num_reqs,
    num_stops,
    num_words,
    capacity,
    table_row,
    stop_row,
    seen_row,
    ring_slot,
    ring_step,
    num_slots,
    STEP: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STOPS: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (ceil(num_reqs / ROWS),). STOPS: stop tokens compared at once. ALONE: one program. num_slots: of
    the ring, without the last."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_reqs
    if PDL:
        tl.extra.cuda.gdc_wait()
    stop_at = stop_ptr + row.to(tl.int64) * stop_row
    old, counter, remaining, block, stop = load_rows(
        row=row,
        inside=inside,
        table_ptr=table_ptr,
        stop_at=stop_at,
        lens_ptr=lens_ptr,
        counters_ptr=counters_ptr,
        remaining_ptr=remaining_ptr,
        num_stops=num_stops,
        capacity=capacity,
        table_row=table_row,
        BLOCK_SIZE=BLOCK_SIZE,
        STOPS=STOPS,
    )
    if ring_ptr is not None:
        launch, slot_at = find_slot(ring_ptr, launches_ptr, ring_slot, num_slots)
    token = tl.load(sampled_ptr + row, mask=inside & (old > 0), other=-1)
    if ring_ptr is not None:
        tl.store(slot_at + STEP * ring_step + row, token, mask=inside)
    accept_rows(
        row=row,
        inside=inside,
        token=token,
        old=old,
        counter=counter,
        remaining=remaining,
        block=block,
        stop=stop,
        stop_at=stop_at,
        ids_ptr=ids_ptr,
        positions_ptr=positions_ptr,
        lens_ptr=lens_ptr,
        slots_ptr=slots_ptr,
        counters_ptr=counters_ptr,
        remaining_ptr=remaining_ptr,
        seen_ptr=seen_ptr,
        tokens_ptr=tokens_ptr,
        num_stops=num_stops,
        num_words=num_words,
        capacity=capacity,
        seen_row=seen_row,
        BLOCK_SIZE=BLOCK_SIZE,
        STOPS=STOPS,
    )
    if LAST:
        end_launch(slot_at, launch, launches_ptr, ring_step, STEP + 1, ALONE)


def accept_tokens(
    sampled_token_ids: Tensor,
    block_table: Tensor,
    stop_token_ids: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    counters: Tensor,
    remaining: Tensor,
    seen: Tensor,
    tokens_out: Tensor,
    *,
    block_size: int,
    ring: Tensor | None = None,
    launches: Tensor | None = None,
    step: int = 0,
) -> None:
    """Launch; arguments as in ``custom_ops/step_end/schema.py``."""
    require_launchable(input_ids)
    check_accept_tokens(
        sampled_token_ids,
        block_table,
        stop_token_ids,
        input_ids,
        positions,
        seq_lens,
        slot_mapping,
        counters,
        remaining,
        seen,
        tokens_out,
        block_size=block_size,
        ring=ring,
        launches=launches,
        step=step,
    )
    num_reqs = block_table.shape[0]
    if not num_reqs:
        return
    rows = rows_per_program(num_reqs)
    strides, constants = ring_options(ring, step, num_reqs <= rows)
    accept_tokens_kernel[(triton.cdiv(num_reqs, rows),)](
        sampled_token_ids,
        block_table,
        stop_token_ids,
        input_ids,
        positions,
        seq_lens,
        slot_mapping,
        counters,
        remaining,
        seen,
        tokens_out,
        ring,
        launches,
        num_reqs,
        stop_token_ids.shape[1],
        seen.shape[1],
        block_table.shape[1] * block_size,
        block_table.stride(0),
        stop_token_ids.stride(0),
        seen.stride(0),
        *strides,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        STOPS=STOPS,
        num_warps=rows // 32,
        **constants,
        **early_launch(input_ids.device),
    )
