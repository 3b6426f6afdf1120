"""finish_step: `sample_tokens` and `accept_tokens` in two launches, the second of which merges a row's tiles
and accepts its token.

A launch of its own between the merge and the next step costs about a microsecond and a half, for a few
hundred bytes. What is read before the kernels ahead have ended: stream_order.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchpaged.custom_ops.step_end.call import FinishCall
from torchpaged.custom_ops.step_end.check import check_finish_step
from torchpaged.custom_ops.step_end.triton.accept_tokens import (
    Rows,
    accept_rows,
    end_launch,
    find_slot,
    load_rows,
    ring_options,
    sizes,
)
from torchpaged.custom_ops.step_end.triton.sample_search import row_of
from torchpaged.custom_ops.step_end.triton.sample_tokens import (
    launch_tiles,
    load_parameters,
    merge_row,
    parts_of,
)
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import require_launchable


@triton.jit
def finish_step_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    penalty_ptr,
    seen_ptr,
    seeds_ptr,
    counters_ptr,
    parts_ptr,
    indices_ptr,
    table_ptr,
    stop_ptr,
    ids_ptr,
    positions_ptr,
    lens_ptr,
    slots_ptr,
    remaining_ptr,
    tokens_ptr,
    ring_ptr,
    launches_ptr,
    vocab_size,
    num_programs,
    num_tiles,
    num_groups,
    logits_row,
    seen_row,
    parts_row,
    indices_row,
    num_stops,
    num_words,
    capacity,
    table_row,
    stop_row,
    ring_slot,
    ring_step,
    num_slots,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STOPS: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (rows,). Dependents are not started early, as in `accept_tokens_kernel`; the constexprs are those
    of both kernels."""
    row = tl.program_id(0)
    lane = row + tl.arange(0, 1)
    inside = lane >= 0
    parameters = load_parameters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, penalty_ptr, seeds_ptr, counters_ptr
    )
    rows = Rows(
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
        num_stops,
        num_words,
        capacity,
        table_row,
        stop_row,
        seen_row,
    )
    begun = load_rows(rows, lane, inside, BLOCK_SIZE, STOPS)
    if ring_ptr is not None:
        launch, slot_at = find_slot(ring_ptr, launches_ptr, ring_slot, num_slots)
    logits = row_of(row, logits_ptr, seen_ptr, logits_row, seen_row, parameters.penalty, vocab_size)
    parts = parts_of(row, parts_ptr, indices_ptr, parts_row, indices_row, num_programs, num_tiles, num_groups)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sampled = merge_row(logits, parameters, parts, TILES, GROUPS, GROUP, CHUNK)
    token = tl.where(begun.old > 0, sampled.to(tl.int64), -1)
    if ring_ptr is not None:
        tl.store(slot_at + STEP * ring_step + lane, token)
    accept_rows(rows, begun, lane, inside, token, BLOCK_SIZE, STOPS)
    if LAST:
        end_launch(slot_at, launch, launches_ptr, ring_step, STEP + 1, ALONE)


def finish_step(call: FinishCall) -> None:
    """Launch; arguments as in ``custom_ops/step_end/schema.py``."""
    require_launchable(call.sample.logits)
    check_finish_step(call)
    accept, num_rows = call.accept, call.sample.logits.shape[0]
    if not num_rows:
        return
    merge = launch_tiles(call.sample, reads_early=True)
    strides, constants = ring_options(accept, num_rows == 1)
    launch_kernel(
        finish_step_kernel,
        (num_rows,),
        *merge.arguments,
        accept.block_table,
        accept.stop_token_ids,
        accept.input_ids,
        accept.positions,
        accept.seq_lens,
        accept.slot_mapping,
        accept.remaining,
        accept.tokens_out,
        accept.ring,
        accept.launches,
        *merge.sizes,
        *sizes(accept),
        *strides,
        **constants,
        **merge.options,
    )
