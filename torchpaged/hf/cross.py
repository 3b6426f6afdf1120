"""Cross attention over a paged cache: the encoder's keys are written once, and every query sees those of its
row that are no padding, wherever it stands itself."""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.backends import Session
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.hf.chosen_backend import LayerCall
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.mask_rows import encoder_rows
from torchpaged.hf.pinned_batch import pin_batch
from torchpaged.metadata import AttentionMetadata


def attend_across(layer: PagedLayer, call: LayerCall, mask: Tensor | None) -> Tensor:
    """Cross attention over a layer that holds the encoder's keys, ``[batch, query_len, num_heads,
    head_dim_v]``; ``mask`` of the encoder, as transformers makes it, None = no padding.

    Raises:
        ArgumentError: as `cross_batch`.
        BackendUnavailableError: the cache's backend declares not to run it.
    """
    owner = layer.owner
    batch, _, query_len, _ = call.query.shape
    metadata = owner.metadata_of(layer, batch, 1)
    require_no_plan(owner.backend.session)
    known = None if torch.compiler.is_compiling() else owner.rows.first_position(0)
    requests = cross_batch(metadata, mask, query_len, known)
    layer.hold(call)
    made = layer.op_call(call, requests, metadata.max_query_len)
    layer.run(made)
    return made.out.view(batch, query_len, *made.out.shape[1:])


def cross_batch(
    metadata: AttentionMetadata, mask: Tensor | None, query_len: int, num_keys: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Block table, lengths and query starts of cross attention.

    An op's queries are the last ones of their sequence, and those before its first key see none. A prompt may
    be longer than the encoder's row, so that each query is a request of its own; a decode step is anyway, and
    takes the cache's tensors as they are.

    Args:
        metadata: one query for each of the rows that hold the encoder's keys.
        mask: of the encoder, as transformers makes it; None = no padding.
        query_len: queries per row.
        num_keys: the encoder's tokens per row that the cache holds, padding included; None: not known.

    Raises:
        ArgumentError: the mask is of another kind, or of another source.
    """
    rows = encoder_rows(mask, metadata.num_reqs, num_keys)
    table, starts = metadata.block_table, metadata.query_start_loc
    lens = metadata.seq_lens if rows is None else rows.pinned_lens()
    if query_len == 1:
        return table, lens, starts
    table, lens = (x.repeat_interleave(query_len, 0) for x in (table, lens))
    return pin_batch(table, lens, torch.arange(lens.shape[0] + 1, dtype=torch.int32, device=lens.device))


def require_no_plan(session: Session) -> None:
    """Refuse a backend that plans: nothing tells it of the queries of cross attention.

    Raises:
        BackendUnavailableError: it plans.
    """
    if session.plans:
        raise BackendUnavailableError(
            f"backend {session.name!r} plans every batch of queries, and cross attention comes without one; "
            "give the cross-attention's PagedCache another backend"
        )
