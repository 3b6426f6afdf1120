"""What the engine keeps on the device from step to step, and runs there: requests in rows, whole steps over
them, tokens on their way to the host.

    rows = DecodeRows(max_batch_size=64, max_blocks_per_req=128, block_size=16, vocab_size=32000,
                      device="cuda", ops=session.ops)
    runner = WholeStepRunner(step, rows)
"""

from torchpaged.engine.device.logits_stage import LogitsRows, LogitsStage, TokenLogprobs
from torchpaged.engine.device.request_rows import DecodeRows
from torchpaged.engine.device.request_state import RowState
from torchpaged.engine.device.token_rings import CopiedTokens, LaunchRing, RingFullError
from torchpaged.engine.device.whole_steps import WholeStepRunner

__all__ = [
    "CopiedTokens",
    "DecodeRows",
    "LaunchRing",
    "LogitsRows",
    "LogitsStage",
    "RingFullError",
    "RowState",
    "TokenLogprobs",
    "WholeStepRunner",
]
