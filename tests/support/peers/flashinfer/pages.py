"""Attention over pages given as FlashInfer takes them, by the reference."""

import math
from typing import Any

import torch
from signatures import takes
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS


def seq_lens_of(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    return (indptr.diff() - 1).clamp_min(0) * page_size + last_page_len


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    starts: Tensor,
    indptr: Tensor,
    indices: Tensor,
    lens: Tensor,
    **options,
):
    """Results and base-2 log-sum-exps of ``q``; NaN where the real library leaves what it finds."""
    assert q.is_contiguous()
    assert int(indptr[-1]) <= len(indices)
    pages, rows = indptr.diff(), len(lens)
    table = torch.zeros(rows, max(1, int(pages.max())), dtype=torch.int32)
    for row in range(rows):
        table[row, : pages[row]] = indices[indptr[row] : indptr[row + 1]]
    out, lse = torch.empty(len(q), q.shape[1], cache[1].shape[-1], dtype=q.dtype), torch.empty(q.shape[:2])
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    BACKEND_OPS["reference"].paged_attention(
        *(q, *cache, table, lens.int(), starts, out, lse),
        max_query_len=max(1, int(starts.diff().max())),
        **options | {"scale": scale},
    )
    nothing = lse == float("-inf")
    return out.masked_fill(nothing[..., None], float("nan")), (lse / math.log(2)).masked_fill(
        nothing, float("nan")
    )


class Wrapper:
    """What both wrappers run, once a plan has left ``_starts``, ``_indptr``, ``_indices``, ``_lens`` and
    ``_options``."""

    _starts: Tensor
    _indptr: Tensor
    _indices: Tensor
    _lens: Tensor
    _options: dict[str, Any]

    @takes(
        "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, "
        "return_lse=False, enable_pdl=None, window_left=None, sinks=None"
    )
    def run(self, given):
        assert len(given.q) == int(self._starts[-1])
        assert given.q_scale is given.k_scale is given.v_scale is given.sinks is None
        pages = self._starts, self._indptr, self._indices, self._lens
        y, y_lse = attend(given.q.contiguous(), given.paged_kv_cache, *pages, **self._options)
        if given.out is not None:
            y = given.out.copy_(y)
        return (y, y_lse) if given.return_lse else y
