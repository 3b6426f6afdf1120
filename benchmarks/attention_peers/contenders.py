"""What is measured together with torchpaged's backends: plain PyTorch, and the list of all.

    for contender in contenders(device, backends=None, peers=True):
        print(contender.name, contender.unavailable())

Plain PyTorch (SDPA, FlexAttention) reads contiguous KV that is gathered before the clock starts, which is an
easier task than the paged one; FlashInfer and FlashAttention-3 are in ``libraries.py``.
"""

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_peers.cases import AttentionCase
from attention_peers.contender import Contender, Prepared, own_backends
from attention_peers.inputs import Inputs
from attention_peers.libraries import PEERS
from torchpaged.custom_ops.errors import ArgumentError


def contenders(
    device: torch.device, backends: Sequence[str] | None = None, peers: bool = True, skip: Sequence[str] = ()
) -> list[Contender]:
    """What runs on ``device``.

    Args:
        device: where.
        backends: as for `own_backends`.
        peers: whether to list the peers, absent ones included.
        skip: names to leave out.

    Raises:
        BackendUnavailableError: a backend is unknown.
        ArgumentError: a name in ``skip`` is unknown, or none is left.
    """
    listed = [*own_backends(device, backends), *((SDPA, FLEX, *PEERS) if peers else ())]
    names = [contender.name for contender in listed]
    unknown = [name for name in skip if name not in names]
    if unknown:
        raise ArgumentError("skip", f"one of {', '.join(names)}", repr(unknown[0]))
    left = [contender for contender in listed if contender.name not in skip]
    if not left:
        raise ArgumentError("skip", "at least one contender left", f"all of {', '.join(names)}")
    return left


# ------------------------------------------------------------------------------- plain PyTorch, contiguous KV
def _not_dense(case: AttentionCase) -> str | None:
    """Why a dense batch can't hold the case; None if it can."""
    if len(set(case.seq_lens)) > 1 or len(set(case.query_lens)) > 1:
        return "the lengths differ, and a dense batch has one length"
    if case.kv_dtype != case.dtype:
        return f"reads no {str(case.kv_dtype).removeprefix('torch.')} keys and values"
    return None


def _dense_layers(case: AttentionCase, inputs: Inputs) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per layer q, k, v as ``[num_reqs, heads, tokens, head_dim]``; keys and values are copies in order."""
    num_reqs, length = len(case.seq_lens), case.seq_lens[0]
    q = inputs.q.view(num_reqs, -1, case.num_heads, case.head_dim).transpose(1, 2)
    layers = []
    for layer in range(inputs.num_layers):
        pairs = [inputs.dense(layer, request, length) for request in range(num_reqs)]
        k, v = (torch.stack(tensors).transpose(1, 2) for tensors in zip(*pairs, strict=True))
        layers.append((q, k, v))
    return layers


def _sdpa_why_not(case: AttentionCase, device: torch.device) -> str | None:
    if case.block_sparse is not None:
        return "hides blocks with a mask tensor alone, with which it has no fused kernel for grouped heads"
    if not case.is_decode and set(case.query_lens) != set(case.seq_lens):
        return (
            _not_dense(case)
            or "a chunk needs a mask tensor, with which SDPA has no fused kernel for grouped heads"
        )
    return _not_dense(case)


def _sdpa_prepare(case: AttentionCase, inputs: Inputs) -> Prepared:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=not case.is_decode, scale=inputs.scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    return Prepared([partial(call, *tensors) for tensors in _dense_layers(case, inputs)])


def _flex_unavailable() -> str | None:
    return None if importlib.util.find_spec("triton") else "the triton package is not installed"


def _flex_why_not(case: AttentionCase, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"measured on CUDA devices, not on {device.type}"
    return _not_dense(case)


def _flex_prepare(case: AttentionCase, inputs: Inputs) -> Prepared:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query_len, length, mask = case.query_lens[0], case.seq_lens[0], case.mask
    heads = None if mask.block_sparse is None else case.num_heads  # which differ

    def seen(batch: Any, head: Any, q_index: Any, kv_index: Any) -> Any:
        return mask.sees(q_index + (length - query_len), kv_index, head)

    torch.compiler.reset()  # one case's graphs must not count against the next one's recompile limit
    blocks = None
    if heads or not case.is_decode:
        blocks = create_block_mask(seen, None, heads, query_len, length, device=inputs.q.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(q, k, v, block_mask=blocks, scale=inputs.scale, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return Prepared([partial(call, *tensors) for tensors in _dense_layers(case, inputs)])


SDPA = Contender("sdpa", False, lambda: None, _sdpa_why_not, _sdpa_prepare)
FLEX = Contender("flex", False, _flex_unavailable, _flex_why_not, _flex_prepare)
