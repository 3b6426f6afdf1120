"""finish_step: `sample_tokens` and `accept_tokens` in two launches, the second of which merges a row's tiles
and accepts its token.

A launch of its own between the merge and the next step costs about a microsecond and a half, for a few
hundred bytes. What is read before the kernels ahead have ended: docs/stream_order.md.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.step_end.call import FinishCall
from torchpaged.custom_ops.step_end.check import check_finish_step
from torchpaged.custom_ops.step_end.triton.accept_tokens import (
    Ring,
    Rows,
    Step,
    accept_rows,
    end_launch,
    find_slot,
    load_rows,
)
from torchpaged.custom_ops.step_end.triton.sample_rows import load_parameters
from torchpaged.custom_ops.step_end.triton.sample_search import row_of
from torchpaged.custom_ops.step_end.triton.sample_tokens import launch_tiles, merge_row, parts_of
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import require_launchable


@triton.jit
def finish_step_kernel(
    logit_rows, tiles, rows, ring, SIZES: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr
):
    """``logit_rows``, ``tiles``, SIZES: the records of `merge_tiles_kernel`; the others are those of
    `accept_tokens_kernel`. Grid: (rows,). Dependents are not started early,
    as in `accept_tokens_kernel`."""
    row = tl.program_id(0)
    lane = row + tl.arange(0, 1)
    inside = lane >= 0
    parameters = load_parameters(row, logit_rows)
    begun = load_rows(rows, lane, inside, STEP)
    if ring.ptr is not None:
        launch, slot_at = find_slot(ring)
    logits = row_of(row, logit_rows, parameters.penalty)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sampled = merge_row(logits, parameters, parts_of(row, tiles), SIZES)
    token = tl.where(begun.old > 0, sampled.to(tl.int64), -1)
    if ring.ptr is not None:
        tl.store(slot_at + STEP.number * ring.step + lane, token)
    accept_rows(rows, begun, lane, inside, token, STEP)
    if STEP.last:
        end_launch(slot_at, launch, ring, STEP)


def finish_step(call: FinishCall) -> None:
    """Launch; arguments as in ``custom_ops/step_end/schema.py``."""
    require_launchable(call.sample.logits)
    check_finish_step(call)
    accept, num_rows = call.accept, call.sample.logits.shape[0]
    if num_rows:
        merge = launch_tiles(call.sample, reads_early=True)
        launch_kernel(
            finish_step_kernel,
            (num_rows,),
            *(merge.rows, merge.tiles, Rows.of(accept), Ring.of(accept)),
            STEP=Step.of(accept, num_rows == 1),
            **merge.options,
        )
