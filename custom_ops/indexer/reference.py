"""The specification of the indexer of sparse attention in plain torch.

Source: DeepSeek-AI, "DeepSeek-V3.2" (arXiv:2512.02556), section 2.1: the lightning indexer and the selection
of tokens.
"""

import torch
from torch import Tensor

from torchpaged.custom_ops.indexer.call import IndexCall
from torchpaged.custom_ops.indexer.check import (
    check_index_logits,
    check_top_k_indices,
    check_write_index_keys,
)
from torchpaged.custom_ops.plain_torch import exact_dtype

_LARGEST = 448.0  # of e4m3


def write_index_keys(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None = None) -> None:
    """Store each token's key in its slot, with a scale of its own in an fp8 pool; a key of zeros has 1. Slot
    -1 skips."""
    check_write_index_keys(k, k_cache, slot_mapping, k_scale)
    written = slot_mapping >= 0
    keys, slots = k[written], slot_mapping[written]
    block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    if k_scale is not None:
        keys = keys.float()
        top = keys.abs().amax(1)
        # by a tensor: on a GPU torch multiplies by the reciprocal of a number, which rounds otherwise
        scales = top / torch.full_like(top, _LARGEST)
        scales = torch.where(scales == 0, 1.0, scales)
        keys = (keys / scales[:, None]).clamp(-_LARGEST, _LARGEST)
        k_scale[block, offset] = scales
    k_cache[block, offset, 0] = keys.to(k_cache.dtype)


def index_logits(call: IndexCall) -> None:
    """Scores of every position that a query token sees, summed over the indexer's heads, in float32 (float64
    if the keys are); one request after the other."""
    check_index_logits(call)
    block_size, causal, logits = call.k_cache.shape[1], call.causal, call.logits
    starts, lengths = call.query_start_loc.tolist(), call.seq_lens.tolist()
    dtype = exact_dtype(call.q.dtype)
    logits.fill_(float("-inf"))
    for request, length in enumerate(lengths):
        start, end = starts[request], starts[request + 1]
        if length <= 0 or end == start:
            continue
        blocks = call.block_table[request, : -(-length // block_size)].long()
        keys = call.k_cache[blocks].flatten(0, 2)[:length].to(dtype)  # [L, index_dim]
        if call.k_scale is not None:
            keys = keys * call.k_scale[blocks].flatten()[:length, None]
        scores = torch.relu(torch.einsum("shd,ld->shl", call.q[start:end].to(dtype), keys))
        summed = torch.einsum("sh,shl->sl", call.weights[start:end].to(dtype), scores)
        position = torch.arange(length - (end - start), length, device=logits.device)[:, None]
        key = torch.arange(length, device=logits.device)
        sees = (position >= 0) & ((key <= position) if causal else (key >= 0))
        logits[start:end, :length] = summed.masked_fill(~sees, float("-inf")).float()


def top_k_indices(logits: Tensor, indices: Tensor) -> None:
    """Positions of the largest logits, NaN above all; of equal ones the first."""
    check_top_k_indices(logits, indices)
    most = min(logits.shape[1], indices.shape[1])
    # torch's sort of long rows on a GPU takes a NaN with a sign for the least number
    logits = logits.masked_fill(logits.isnan(), float("nan"))
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    indices.fill_(-1)
    taken = torch.where(ordered == float("-inf"), -1, order)[:, :most]
    indices[:, :most] = taken.to(torch.int32)
