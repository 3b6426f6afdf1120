"""What `traced_choice` says, as constants of a trace. In a file of its own: the decorator imports torch's
compiler. An attention comes as a plain tuple: not every Dynamo gives a named one back."""

from typing import Any

import torch

from torchpaged.backends.traced_choice import TracedAttention, choose_name, refuse_unable
from torchpaged.custom_ops import BackendOps


@torch.compiler.assume_constant_result
def traced_name(device: torch.device, attention: tuple[Any, ...] | None, planned: bool) -> str:
    """`choose_name`, run at the trace."""
    return choose_name(device, None if attention is None else TracedAttention(*attention), planned)


@torch.compiler.assume_constant_result
def refuse_traced(ops: BackendOps, device: torch.device, attention: tuple[Any, ...], planned: bool) -> bool:
    """`refuse_unable`, run at the trace."""
    refuse_unable(ops, device, TracedAttention(*attention), planned)
    return True
