"""What fake kernels state of their arguments.

All ops return ``()``, so that a fake has nothing to compute. Sizes may be symbols without values:
``torch._check`` states a fact about them, an ``if`` would need to decide it.
"""

from typing import Any

import torch
from torch import Tensor


def expect(fits: Any, text: str) -> None:
    """``fits`` holds, a bool of Python or of symbols; ``text`` says what was expected, and what came."""
    torch._check(fits, lambda: text)


def expect_dims(count: int, **tensors: Tensor) -> None:
    """Each has ``count`` dimensions."""
    for name, tensor in tensors.items():
        word = "dimension" if count == 1 else "dimensions"
        expect(tensor.dim() == count, f"{name}: expected {count} {word}, got {tensor.dim()}")


def expect_dtype(dtype: torch.dtype, **tensors: Tensor) -> None:
    """Each is of ``dtype``."""
    for name, tensor in tensors.items():
        expect(tensor.dtype == dtype, f"{name}: expected {dtype}, got {tensor.dtype}")
