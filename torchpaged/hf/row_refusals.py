"""What a cache whose rows hold tokens refuses of a forward: a prompt that starts anew, other padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.row_errors import ANOTHER_PROMPT


def require_new(rows: CacheRows, query_len: int, written: bool, options: Mapping[str, Any]) -> None:
    """Refuse several tokens behind others that generate() begins with all of, as it does with
    ``use_cache=False`` and in assisted generation; since transformers 5.24 no mask shows it. For eager code.

    Args:
        rows: of the cache.
        query_len: tokens per row of the forward.
        written: whether it has moved the rows on.
        options: what the model gave along: ``use_cache``, ``position_ids``, as far as it does.

    Raises:
        ArgumentError: the rows hold other tokens.
    """
    first = rows.first_position(query_len if written else 0)
    if not first or query_len == 1:
        return
    if options.get("use_cache") is False:
        expected = f"True behind the {first} tokens in the cache"
        raise ArgumentError("use_cache", expected, "False", ANOTHER_PROMPT)
    if not rows.expects_candidates:
        return
    positions = options.get("position_ids")  # None: attention is not told of them, as Bloom's
    if query_len > first and (positions is None or int(positions.flatten()[0]) == 0):
        raise ArgumentError(
            "past_key_values",
            "a PagedCache without tokens: assisted generation runs all of a prompt",
            f"one with {first}",
            "call cache.reset() before it",
        )
    rows.expects_candidates = False


def assert_padding(rows: CacheRows, mask: Tensor) -> None:
    """Assert on the device that a forward's 2-D mask ``[batch, length]`` has the left padding that ``rows``
    have, and nothing else: in a trace, and where reading it would synchronise. A row of ones says nothing:
    models make them where they are given no mask, as generate() gives none to a compiled step.
    """
    fixed = torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    if not fixed and not any(rows.padding or ()):
        agrees = mask.all()  # the host knows it: one kernel and no eight, in each step of generate()
    else:  # a graph serves later batches, too
        padding = rows.total - rows.seq_lens[: mask.shape[0], None]
        mask, tokens = mask.bool(), torch.arange(mask.shape[1], device=padding.device)[None] >= padding
        agrees = ((mask == tokens) | mask.all(1, keepdim=True)).all()
    torch._assert_async(
        agrees,
        "PagedCache: an attention mask with other padding than this cache's first batch has; run the "
        "step uncompiled to see which, or call cache.reset() before another batch",
    )
