"""Reading HuggingFace's masks on the host: what paging can express (causal, window, chunk, left padding), and refusing the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.custom_ops.reference import visible_keys
from torchpaged.hf.layer import PagedLayer

_PROBE = 96  # query and key positions looked at, at most, on each axis


def left_padding(mask: Tensor) -> list[int]:
    """Padding tokens at the start of each row of a 2-D mask ``[batch, length]`` (nonzero = token).

    Raises:
        ArgumentError: a hole after the first token: right padding, or padding in the middle.
    """
    if mask.dim() != 2:
        raise ArgumentError("attention_mask", "a 2-D mask [batch, length] with a PagedCache", f"shape {list(mask.shape)}")
    present = mask.bool().cpu()
    padding = (present.cumsum(-1) == 0).sum(-1)
    holes = ~present & (torch.arange(mask.shape[1])[None] >= padding[:, None])
    if bool(holes.any()):
        row, column = holes.nonzero()[0].tolist()
        raise ArgumentError("attention_mask", "left padding only (tokenizer.padding_side = 'left')",
                            f"a zero after row {row}'s first token, at position {column}")  # fmt: skip
    return [int(p) for p in padding]


def require_known_mask(mask_function: Any, local_size: int | None, query_length: int, layers: Sequence[PagedLayer]) -> None:
    """Refuse mask functions with an overlay (bidirectional image tokens, prefix LM, ...) that paging would drop.

    The function is opaque, so it is asked: on a grid of positions it must agree with one of the masks that the layers apply.

    Raises:
        UnsupportedModelError: it agrees with none.
    """
    if mask_function is None:
        return
    count = min(query_length, _PROBE)
    positions = torch.linspace(0, query_length - 1, count, dtype=torch.float64).long().unique()
    zero = torch.zeros((), dtype=torch.int64)
    try:
        got = mask_function(zero, zero, positions[:, None], positions[None, :])
        got = torch.as_tensor(got).expand(len(positions), len(positions)).bool()
    except Exception:
        got = torch.stack([torch.stack([torch.as_tensor(mask_function(zero, zero, q, k)).bool() for k in positions]) for q in positions])
    for layer in layers:
        for window, chunk in ((layer.window, layer.chunk), (None, None)):
            want = visible_keys(positions, query_length, True, -1 if window is None else window - 1, -1, chunk or 0)[:, positions]
            if torch.equal(got.cpu(), want):
                return
    raise UnsupportedModelError(
        "the model combines its causal mask with another one (image tokens, a prefix, packed sequences?), which paged attention "
        f"does not express (local_size={local_size}); use PagedCache(..., dense=True)"
    )
