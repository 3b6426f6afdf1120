"""What ops in plain torch share: the dtype of their sums, and the gate of an MLP."""

import torch
from torch import Tensor
from torch.nn import functional as F


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of ``dtype`` are computed in, and states of them may be kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(x: Tensor, like: Tensor | None = None) -> Tensor:
    """``x`` in what numbers of its dtype, or of ``like``'s, are computed in; apart from autograd: the ops are
    for inference."""
    return x.detach().to(exact_dtype((x if like is None else like).dtype))


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` of ``[tokens, 2 * width]``, gate first; SwiGLU and GeGLU of
    arXiv:2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
