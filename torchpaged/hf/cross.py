"""Cross attention over a paged cache: the encoder's keys are written once, and every query sees those of its
row that are no padding, wherever it stands itself."""

import torch
from torch import Tensor

from torchpaged.backends import Session
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.hf.call import LayerCall, Requests
from torchpaged.hf.call_mask import CallMask, held_by
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.mask_kinds import MaskKind
from torchpaged.hf.query_starts import pin_batch
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
    assert owner.rows is not None
    known = None if torch.compiler.is_compiling() else owner.rows.first_position(0)
    requests = Requests(*cross_batch(metadata, mask, query_len, known), metadata.max_query_len)
    made = call.over(requests, layer.own)
    layer.hold(made)
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
    held = _mask_of_encoder(mask, metadata.num_reqs, num_keys)
    table, starts = metadata.block_table, metadata.query_start_loc
    lens = metadata.seq_lens if held is None else held.pinned_lens()
    if query_len == 1:
        return table, lens, starts
    table, lens = (x.repeat_interleave(query_len, 0) for x in (table, lens))
    return pin_batch(table, lens, torch.arange(lens.shape[0] + 1, dtype=torch.int32, device=lens.device))


def _mask_of_encoder(mask: Tensor | None, batch: int, num_keys: int | None) -> CallMask | None:
    """What a mask of cross attention holds; None where there is no padding. Arguments and errors as of
    `cross_batch`."""
    if mask is None:
        return None
    held = held_by(mask)
    expected = "the mask of an encoder whose rows are padded on the right, as transformers makes it"
    otherwise = "pass EncoderDecoderCache(PagedCache(...), DynamicCache(config=model.config))"
    if held is None or held.kind != MaskKind(False) or mask.shape[0] != batch or not held.are_spans():
        raise ArgumentError(
            "attention_mask", expected, f"another one of shape {list(mask.shape)}", f"or {otherwise}"
        )
    if num_keys not in (None, held.kv_len):
        raise ArgumentError(
            "attention_mask",
            f"a mask over the {num_keys} tokens of the encoder in the cache",
            f"one over {held.kv_len}",
            "call cache.reset() before another source",
        )
    if held.starts is None:
        return None
    if held.some_empty:
        raise ArgumentError(
            "attention_mask",
            "an encoder's input of at least one token in every row",
            "a row that is all padding, for which attention has nothing to average",
            "leave such rows out",
        )
    if held.all_at_zero is False:
        raise ArgumentError(
            "attention_mask",
            expected,
            "one with padding on the left",
            f"pad the encoder's input on the right, or {otherwise}",
        )
    if held.all_at_zero is None:
        assert held.lens is not None
        torch._assert_async(
            ((held.starts == 0) & (held.lens > 0)).all(),
            "attention_mask: expected an encoder's input that is padded on the right, of at least one token "
            "in every row",
        )
        held.all_at_zero = True  # asserted once for all layers
    return held


def require_no_plan(session: Session) -> None:
    """Refuse a backend that plans: nothing tells it of the queries of cross attention."""
    if session.plans:
        raise BackendUnavailableError(
            f"backend {session.name!r} plans every batch of queries, and cross attention comes without one; "
            "give the cross-attention's PagedCache another backend"
        )
