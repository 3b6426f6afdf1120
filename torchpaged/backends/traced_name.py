"""The name of the backend that was asked for, as a constant of a trace. In a file of its own: the decorator
imports torch's compiler."""

import torch

from torchpaged.backends.requested_name import requested_name


@torch.compiler.assume_constant_result
def traced_name(
    device_type: str, dtype: torch.dtype | None, kv_dtype: torch.dtype | None, features: str
) -> str:
    """`requested_name`, run at the trace."""
    return requested_name(device_type, dtype, kv_dtype, features)
