"""A call of ``index_logits`` as one record; shapes, dtypes and meanings: schema.py."""

from typing import NamedTuple

from torch import Tensor


class IndexCall(NamedTuple):
    """The arguments of ``index_logits``, with the schema's defaults."""

    q: Tensor
    weights: Tensor
    k_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    logits: Tensor
    max_query_len: int
    causal: bool = True
    k_scale: Tensor | None = None
