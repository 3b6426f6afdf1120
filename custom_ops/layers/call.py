"""Calls of the ops around attention with many arguments, as records: made once where torch's flat arguments
end (registry.py). Shapes, dtypes and meanings: schema.py."""

from typing import NamedTuple

from torch import Tensor


class NormCall(NamedTuple):
    """The arguments of ``rms_norm``, with the schema's defaults."""

    x: Tensor
    weight: Tensor
    out: Tensor
    eps: float = 1e-6
    offset: float = 0.0
    residual: Tensor | None = None
    post_residual: Tensor | None = None


class LinearCall(NamedTuple):
    """The arguments of ``linear``, with the schema's defaults."""

    x: Tensor
    weight: Tensor
    out: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    activation: str = "none"
