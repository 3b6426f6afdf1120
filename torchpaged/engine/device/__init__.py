"""What the engine keeps on the device from step to step, and runs there: requests in rows, whole steps over
them, tokens on their way to the host.

    rows = DecodeRows(max_batch_size=64, max_blocks_per_req=128, block_size=16, vocab_size=32000,
                      device="cuda", ops=session.ops)
    runner = WholeStepRunner(step, rows)
"""

from torchpaged.engine.device.request_rows import DecodeRows, StepOps
from torchpaged.engine.device.request_state import MAX_STOP_TOKEN_IDS, RowState, token_bits
from torchpaged.engine.device.token_rings import LaunchRing, RingFullError, TokenRing
from torchpaged.engine.device.whole_steps import WholeStepRunner

__all__ = [
    "MAX_STOP_TOKEN_IDS",
    "DecodeRows",
    "LaunchRing",
    "RingFullError",
    "RowState",
    "StepOps",
    "TokenRing",
    "WholeStepRunner",
    "token_bits",
]
