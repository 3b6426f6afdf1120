"""accept_tokens: one thread per request takes its sampled token and turns this step's buffers into the
next one's.

Dependents are not started early (docs/stream_order.md). `finish_step` has the same functions.
"""

from typing import Any, NamedTuple, Self

import triton
import triton.language as tl

from torchpaged.custom_ops.step_end.call import AcceptCall
from torchpaged.custom_ops.step_end.check import check_accept_tokens
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import early_launch, next_power_of_2, require_launchable

STOPS = tl.constexpr(16)  # that are compared at once
_MOST_ROWS = 128


def rows_per_program(num_reqs: int) -> int:
    """All of them up to 128: programs that share a ring's slot have to count themselves."""
    return min(max(next_power_of_2(num_reqs), 32), _MOST_ROWS)


class Step(NamedTuple):
    """What a kernel that ends a step is compiled for: the step's number in its launch, and whether it is the
    last one, only with a ring; ``alone``: the kernel is one program."""

    block_size: int
    number: int = 0
    last: bool = False
    alone: bool = True

    @classmethod
    def of(cls, call: AcceptCall, alone: bool) -> Self:
        """That of a call."""
        if call.ring is None:
            return cls(call.block_size)
        return cls(call.block_size, call.step, call.step == call.ring.shape[1] - 2, alone)


@triton.jit
def load_stops(stop_at, first, num_stops, active):
    """Stop tokens ``first ... first + STOPS - 1`` of each row: ``[ROWS, STOPS]``, -1 for none."""
    number = first + tl.arange(0, STOPS)
    inside = active[:, None] & (number < num_stops)[None, :]
    return tl.load(stop_at[:, None] + number[None, :], mask=inside, other=-1, cache_modifier=".cg")


@triton.jit
def is_among(token, stop):
    """Whether ``token [ROWS]`` is in its row of ``stop [ROWS, STOPS]``, as 0 or 1."""
    return tl.max(((stop == token[:, None]) & (stop >= 0)).to(tl.int32), 1)


class Rows(NamedTuple):
    """Pointers to the buffers of a batch's rows, by the names of the op's arguments; how many stop tokens,
    words of seen tokens and tokens of a block table there are, and strides."""

    block_table: Any
    stop_token_ids: Any
    input_ids: Any
    positions: Any
    seq_lens: Any
    slot_mapping: Any
    counters: Any
    remaining: Any
    seen: Any
    tokens_out: Any
    num_stops: Any
    num_words: Any
    capacity: Any
    table_row: Any
    stop_row: Any
    seen_row: Any

    @classmethod
    def of(cls, call: AcceptCall) -> Self:
        """Those of a call."""
        stop, seen = call.stop_token_ids, call.seen
        sizes = stop.shape[1], seen.shape[1], call.capacity
        strides = call.block_table.stride(0), stop.stride(0), seen.stride(0)
        buffers: tuple[Any, ...] = call[1 : call._fields.index("block_size")]
        return cls._make((*buffers, *sizes, *strides))


class Ring(NamedTuple):
    """Pointers to a ring of tokens and to the count of launches, or None; the ring's strides, and its slots
    without the last."""

    ptr: Any
    launches: Any
    slot: Any
    step: Any
    num_slots: Any

    @classmethod
    def of(cls, call: AcceptCall) -> Self:
        """That of a call."""
        if call.ring is None:
            return cls(None, None, 0, 0, 0)
        slot, step, _ = call.ring.stride()
        return cls(call.ring, call.launches, slot, step, call.ring.shape[0] - 1)


class Begun(NamedTuple):
    """What is read of rows before their tokens are there: length, counter, tokens that remain after this one,
    block of the next position, the first stop tokens."""

    old: Any
    counter: Any
    remaining: Any
    block: Any
    stop: Any


@triton.jit
def load_rows(rows, row, inside, STEP: tl.constexpr):
    """`Begun` of each ``row`` that is ``inside``.

    From L2: `finish_step` reads them before the kernels ahead have finished, and a first-level cache may hold
    an older step's.
    """
    stop_at = rows.stop_token_ids + row.to(tl.int64) * rows.stop_row
    old = tl.load(rows.seq_lens + row, mask=inside, other=0, cache_modifier=".cg")
    active = inside & (old > 0)
    counter = tl.load(rows.counters + row, mask=active, other=0, cache_modifier=".cg")
    remaining = tl.load(rows.remaining + row, mask=active, other=0, cache_modifier=".cg") - 1
    block_at = rows.block_table + row.to(tl.int64) * rows.table_row + old // STEP.block_size
    block = tl.load(block_at, mask=active & (old < rows.capacity), other=0, cache_modifier=".cg").to(tl.int64)
    return Begun(old, counter, remaining, block, load_stops(stop_at, 0, rows.num_stops, active))


@triton.jit
def accept_rows(rows, begun, row, inside, token, STEP: tl.constexpr):
    """Take ``token [ROWS]``, int64, -1 in rows that are not active, another negative one ends the row."""
    old = begun.old
    active = inside & (old > 0)
    stop_at = rows.stop_token_ids + row.to(tl.int64) * rows.stop_row
    stops = is_among(token, begun.stop)
    for first in range(STOPS, rows.num_stops, STOPS):
        stops |= is_among(token, load_stops(stop_at, first, rows.num_stops, active))
    goes_on = active & (token >= 0) & (old < rows.capacity) & (stops == 0) & (begun.remaining > 0)
    tl.store(rows.input_ids + row, token, mask=goes_on)
    slot = tl.where(goes_on, begun.block * STEP.block_size + old % STEP.block_size, -1)
    tl.store(rows.slot_mapping + row, slot, mask=inside)
    tl.store(rows.positions + row, old.to(tl.int64), mask=goes_on)
    tl.store(rows.seq_lens + row, tl.where(goes_on, old + 1, 0), mask=active)
    tl.store(rows.counters + row, begun.counter + 1, mask=active)
    tl.store(rows.remaining + row, begun.remaining, mask=active)
    tl.store(rows.tokens_out + row, token, mask=inside)

    word = token // 32
    marks = active & (token >= 0) & (word < rows.num_words)
    word_at = rows.seen + row.to(tl.int64) * rows.seen_row + word
    bit = tl.full(token.shape, 1, tl.int32) << (token % 32).to(tl.int32)
    tl.store(word_at, tl.load(word_at, mask=marks, other=0) | bit, mask=marks)


@triton.jit
def find_slot(ring):
    """The launch's number and its slot; the last one, behind ``num_slots``, where the number is negative."""
    launch = tl.load(ring.launches, cache_modifier=".cg")
    return launch, ring.ptr + tl.where(launch < 0, ring.num_slots, launch % ring.num_slots) * ring.slot


@triton.jit
def end_launch(slot_at, launch, ring, STEP: tl.constexpr):
    """Behind a launch's last tokens: its number into its slot, and count it unless it is negative.

    The next one may begin once every program has read the number: the last one to come here counts.
    """
    tl.debug_barrier()  # every warp has read it
    next_launch = tl.where(launch < 0, launch, launch + 1)
    number_at = slot_at + (STEP.number + 1) * ring.step
    if STEP.alone:
        tl.store(number_at, launch)
        tl.store(ring.launches, next_launch)
    elif tl.atomic_add(ring.launches + 1, 1) == tl.num_programs(0) - 1:
        tl.store(number_at, launch)
        tl.store(ring.launches + 1, tl.zeros([], tl.int64))
        tl.store(ring.launches, next_launch)


@triton.jit
def accept_tokens_kernel(
    sampled_ptr, rows, ring, num_reqs, STEP: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """Records: `Rows`, `Ring`, `Step`. Grid: (ceil(num_reqs / ROWS),)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_reqs
    if PDL:
        tl.extra.cuda.gdc_wait()
    begun = load_rows(rows, row, inside, STEP)
    if ring.ptr is not None:
        launch, slot_at = find_slot(ring)
    token = tl.load(sampled_ptr + row, mask=inside & (begun.old > 0), other=-1)
    if ring.ptr is not None:
        tl.store(slot_at + STEP.number * ring.step + row, token, mask=inside)
    accept_rows(rows, begun, row, inside, token, STEP)
    if STEP.last:
        end_launch(slot_at, launch, ring, STEP)


def accept_tokens(call: AcceptCall) -> None:
    """Launch; arguments as in ``custom_ops/step_end/schema.py``."""
    require_launchable(call.input_ids)
    check_accept_tokens(call)
    num_reqs = call.block_table.shape[0]
    if not num_reqs:
        return
    rows = rows_per_program(num_reqs)
    launch_kernel(
        accept_tokens_kernel,
        (triton.cdiv(num_reqs, rows),),
        *(call.sampled_token_ids, Rows.of(call), Ring.of(call), num_reqs),
        STEP=Step.of(call, num_reqs <= rows),
        ROWS=rows,
        num_warps=rows // 32,
        **early_launch(call.input_ids.device),
    )
