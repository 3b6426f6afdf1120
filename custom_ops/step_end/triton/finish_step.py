"""finish_step: `sample_tokens` and `accept_tokens` in two launches, the second of which merges a row's tiles
and accepts its token.

A launch of its own between the merge and the next step costs about a microsecond and a half, for a few
hundred bytes. What is read before the kernels ahead have ended: stream_order.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops.step_end.check import check_finish_step
from torchpaged.custom_ops.step_end.triton.accept_tokens import (
    STOPS,
    accept_rows,
    end_launch,
    find_slot,
    load_rows,
    ring_options,
)
from torchpaged.custom_ops.step_end.triton.sample_tokens import launch_tiles, load_parameters, merge_row
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
    rows = row + tl.arange(0, 1)
    inside = rows >= 0
    temperature, top_k, top_p, min_p, penalty, seed, counter = load_parameters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, penalty_ptr, seeds_ptr, counters_ptr
    )
    stop_at = stop_ptr + rows.to(tl.int64) * stop_row
    old, count, remaining, block, stop = load_rows(
        row=rows,
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
    if PDL:
        tl.extra.cuda.gdc_wait()
    sampled = merge_row(
        row=row,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        penalty=penalty,
        seed=seed,
        counter=counter,
        logits_ptr=logits_ptr,
        seen_ptr=seen_ptr,
        parts_ptr=parts_ptr,
        indices_ptr=indices_ptr,
        vocab_size=vocab_size,
        num_programs=num_programs,
        num_tiles=num_tiles,
        num_groups=num_groups,
        logits_row=logits_row,
        seen_row=seen_row,
        parts_row=parts_row,
        indices_row=indices_row,
        TILES=TILES,
        GROUPS=GROUPS,
        GROUP=GROUP,
        CHUNK=CHUNK,
    )
    token = tl.where(old > 0, sampled.to(tl.int64), -1)
    if ring_ptr is not None:
        tl.store(slot_at + STEP * ring_step + rows, token)
    accept_rows(
        row=rows,
        inside=inside,
        token=token,
        old=old,
        counter=count,
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


def finish_step(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    seeds: Tensor,
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
    require_launchable(logits)
    check_finish_step(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        seeds,
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
    num_rows = logits.shape[0]
    if not num_rows:
        return
    merge = launch_tiles(
        logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seeds, counters, reads_early=True
    )
    strides, constants = ring_options(ring, step, num_rows == 1)
    finish_step_kernel[(num_rows,)](
        *merge.arguments,
        block_table,
        stop_token_ids,
        input_ids,
        positions,
        seq_lens,
        slot_mapping,
        remaining,
        tokens_out,
        ring,
        launches,
        *merge.sizes,
        stop_token_ids.shape[1],
        seen.shape[1],
        block_table.shape[1] * block_size,
        block_table.stride(0),
        stop_token_ids.stride(0),
        *strides,
        BLOCK_SIZE=block_size,
        STOPS=STOPS,
        **constants,
        **merge.options,
    )
