"""rg_lru: linear_attention's kernels, the rest by torch."""

from torchpaged.custom_ops.state.channels import RgLruCall
from torchpaged.custom_ops.state.check_steps import check_rg_lru
from torchpaged.custom_ops.state.triton.linear_attention import linear_attention
from torchpaged.custom_ops.triton.launching import require_launchable


def rg_lru(call: RgLruCall) -> None:
    """Arguments as in ``custom_ops/state/schema.py``, in float32, bfloat16 or float16."""
    require_launchable(call.x)
    check_rg_lru(call)
    attention = call.attention()
    linear_attention(attention)
    call.end(attention)
