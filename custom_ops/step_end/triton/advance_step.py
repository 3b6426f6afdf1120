"""advance_step: one thread per request turns this step's buffers into the next one's."""

import triton
import triton.language as tl

from torchpaged.custom_ops.step_end.call import AdvanceCall
from torchpaged.custom_ops.step_end.check import check_advance_step
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import require_launchable

_ROWS = 128


@triton.jit
def advance_step_kernel(
    sampled_ptr,
    table_ptr,
    ids_ptr,
    positions_ptr,
    lens_ptr,
    slots_ptr,
    num_reqs,
    capacity,
    table_row,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid: (ceil(num_reqs / ROWS),)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_reqs
    old = tl.load(lens_ptr + row, mask=inside, other=0)
    moves = inside & (old > 0) & (old < capacity)
    block = tl.load(table_ptr + row.to(tl.int64) * table_row + old // BLOCK_SIZE, mask=moves, other=0).to(
        tl.int64
    )
    tl.store(slots_ptr + row, tl.where(moves, block * BLOCK_SIZE + old % BLOCK_SIZE, -1), mask=inside)
    token = tl.load(sampled_ptr + row, mask=moves, other=0)
    tl.store(ids_ptr + row, token, mask=moves)
    tl.store(positions_ptr + row, old.to(tl.int64), mask=moves)
    tl.store(lens_ptr + row, old + 1, mask=moves)


def advance_step(call: AdvanceCall) -> None:
    """Launch; arguments as in ``custom_ops/step_end/schema.py``."""
    require_launchable(call.input_ids)
    check_advance_step(call)
    table, block_size = call.block_table, call.block_size
    num_reqs = table.shape[0]
    if num_reqs:
        launch_kernel(
            advance_step_kernel,
            (triton.cdiv(num_reqs, _ROWS),),
            *(*call[:6], num_reqs, table.shape[1] * block_size, table.stride(0)),
            BLOCK_SIZE=block_size,
            ROWS=_ROWS,
        )
