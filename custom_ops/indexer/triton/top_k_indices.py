"""top_k_indices by ``torch.topk``: a radix selection over the whole row, exact, with a result of fixed shape,
so that a graph can hold it. It reads a row several times, and as many columns as a request can have tokens,
however many it has."""

import torch
from torch import Tensor

from torchpaged.custom_ops.indexer.check import check_top_k_indices
from torchpaged.custom_ops.triton.launching import require_launchable


def top_k_indices(logits: Tensor, indices: Tensor) -> None:
    """Launch; arguments as in ``custom_ops/indexer/schema.py``."""
    require_launchable(logits)
    check_top_k_indices(logits, indices)
    most = min(logits.shape[1], indices.shape[1])
    taken = torch.topk(logits, most, dim=1, sorted=False)
    indices[:, most:].fill_(-1)
    indices[:, :most].copy_(torch.where(taken.values == float("-inf"), -1, taken.indices))
