"""From one decode step's buffers to the next one's: `advance_step`."""

from functools import partial

from torch import Tensor

from torchpaged.backends.choose.for_call import device_ops
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.checks import check_tensors
from torchpaged.custom_ops.step_end.call import AdvanceCall
from torchpaged.custom_ops.step_end.check import check_advance_step
from torchpaged.functional.arguments import run_op


def advance_step(
    sampled_token_ids: Tensor,
    block_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    ops: BackendOps | None = None,
) -> None:
    """Turn the buffers of one decode step into those of the next, in place and on the device.

    The step that ended may have been a prefill or a mixed one: a row's next token stands behind its
    ``seq_lens`` tokens, whatever was computed of them just now.

    Rows with seq_len 0 (padding) and rows whose table is full keep their values and get slot -1.

    >>> batch = AttentionMetadata.from_lists([1], [16], [[4, 7]], block_size=16)
    >>> ids = torch.tensor([5])
    >>> step = batch.block_table, ids, batch.positions, batch.seq_lens, batch.slot_mapping
    >>> advance_step(torch.tensor([9]), *step, block_size=16)
    >>> ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist()
    ([9], [16], [112])

    Args:
        sampled_token_ids: ``[num_reqs]`` int64, the tokens just sampled.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32; the next token's block must already be there.
        input_ids, positions, slot_mapping: ``[num_reqs]`` int64, rewritten.
        seq_lens: ``[num_reqs]`` int32, one longer afterwards.
        block_size: tokens per block.
        ops: whose kernels to run; default: those of the backend that every other entry point would choose.

    Raises:
        ArgumentError: shapes, dtypes or devices don't fit.
        BackendUnavailableError: the backend that was asked for is not usable here; with all reasons.
    """
    call = AdvanceCall(
        sampled_token_ids, block_table, input_ids, positions, seq_lens, slot_mapping, block_size
    )
    check_tensors(**dict(zip(call._fields[:-1], call, strict=False)))
    run_op(
        "advance_step",
        partial(check_advance_step, call),
        call[:-1],
        {"block_size": block_size},
        lambda: device_ops(seq_lens.device) if ops is None else ops,
    )
