"""What a paged cache refuses of a forward: weights; behind tokens, a prompt anew, other padding, or another
model."""

import weakref
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.hf.cache_argument import cache_of
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.row_table import ANOTHER_PROMPT


def require_new(rows: CacheRows, query_len: int, written: bool, options: Mapping[str, Any]) -> None:
    """Refuse tokens behind others that do not go on behind them. generate() begins with all of its prompt
    with ``use_cache=False`` and in assisted generation, and with a part of one that is no longer than what is
    cached; since transformers 5.24 no mask shows it, but positions do. Looks once in a forward, for eager
    code; at a single token, which may be a decode step's, where that does not synchronise.

    Args:
        rows: of the cache.
        query_len: tokens per row of the forward.
        written: whether it has moved the rows on.
        options: what the model gave along: ``use_cache``, ``position_ids``, as far as it does.

    Raises:
        ArgumentError: the rows hold other tokens.
    """
    if written and rows.looked_at == rows.num_forwards:
        return  # a layer before; later ones may have fewer queries (Gemma 4's)
    first = rows.first_position(query_len if written else 0)
    positions = options.get("position_ids")  # None: attention does not get them, as Bloom's
    if written and query_len > 1:
        rows.hands_use_cache_on |= bool(options.get("use_cache"))
    if first == 0:
        _note_first(rows, positions)
        if _can_be_read(positions):
            rows.is_padded = not _end_at(rows, positions, query_len)
        if written:
            rows.looked_at = rows.num_forwards
        return
    if first is None or (query_len == 1 and not _can_be_read(positions)):
        return
    if positions is not None and positions.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    start = None if positions is None else int(positions.flatten()[0]) - int(rows.first_place)
    if options.get("use_cache") is False and query_len > 1:
        _refuse_uncached(rows, query_len, first, start, is_told=rows.hands_use_cache_on or not written)
    if rows.expects_candidates and query_len > first and start in (None, 0):
        raise ArgumentError(
            "past_key_values",
            "a PagedCache without tokens: assisted generation runs all of a prompt",
            f"one with {first}",
            "call cache.reset() before it",
        )
    # A prompt of n tokens, no more than are cached, loses its first ones: its mask, and so its positions, end
    # at n, or without a mask of the caller's at n more than are cached. So may a turn's behind padding.
    ahead = first - query_len
    again = start == 0 if ahead <= 0 else start is not None and 2 * start in (ahead, ahead + 2 * first)
    if again and not rows.is_padded and start not in [max(first - lag, 0) for lag in _lags(rows)]:
        expected = f"tokens behind the {first} in the cache"
        raise ArgumentError("input_ids", expected, f"positions from {start} on", ANOTHER_PROMPT)
    if not rows.is_padded and _can_be_read(positions):  # a part of a prompt may have a picture
        rows.is_padded = not _end_at(rows, positions, first + query_len)
    rows.expects_candidates, rows.looked_at = False, rows.num_forwards


def _refuse_uncached(rows: CacheRows, query_len: int, first: int, start: int | None, is_told: bool) -> None:
    """Refuse ``use_cache=False`` behind ``first`` tokens if it is the caller's, as it is where attention
    ``is_told``. Models that don't hand it on (OLMo 3, Qwen3-VL) always give the layers' default, False: there
    the position ``start`` of the first row tells, if its padding is known, or without positions that
    generate()'s second step has one token more than are cached, unless generate() was looked at."""
    padding = rows.padding or rows.gathered_padding or [0]
    if start is None:
        anew = query_len == first + 1 and not rows.generates
    else:
        anew = start == 0 < first - padding[0] and (any(padding) or not rows.is_padded)
    if is_told or anew:
        raise _runs_again(first)


def _runs_again(first: int) -> ArgumentError:
    """The error of ``use_cache=False`` behind ``first`` tokens."""
    return ArgumentError("use_cache", f"True behind the {first} tokens in the cache", "False", ANOTHER_PROMPT)


def _can_be_read(positions: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a look at them in every decode step costs nothing, and no `make_fx` forbids it."""
    # `get_proxy_mode` is no stable API; tests/hf/test_growing_rows.py notices if it goes
    return positions is not None and positions.device.type == "cpu" and get_proxy_mode() is None


def require_same_model(rows: CacheRows | None, module: nn.Module) -> None:
    """Refuse another model over one's keys of the same shape: its tokens would be wrong. Looks once in an
    eager forward, at its first attention, or at the first mixer of a model without any; another module with
    the same weights is a copy, and of other names, shapes, dtypes or kinds, or without the one before,
    nothing is known.

    Args:
        rows: of the cache; None: they are another object's.
        module: that attends, or mixes, behind its write.

    Raises:
        ArgumentError: the weights are others than those of the module that attended before, since the reset.
    """
    if rows is None or torch.compiler.is_compiling() or rows.attended == rows.num_forwards:
        return  # or a later module of this forward
    rows.attended = rows.num_forwards
    first = None if rows.attended_by is None else rows.attended_by()
    if first is module:
        return
    before = {} if first is None else dict(first.named_parameters())  # a copy with an adapter has more
    if any(name in before and _differ(before[name], own) for name, own in module.named_parameters()):
        here, there = (
            getattr(getattr(each, "config", None), "num_hidden_layers", None) for each in (module, first)
        )
        if here != there:  # a reset would not help
            todo = "make a new PagedCache of the model's config"
            expected = f"a PagedCache of this model's {here} layers"
            raise ArgumentError("past_key_values", expected, f"one of another's {there}", todo)
        todo = "give each model a cache of its own, or call cache.reset() before another one"
        expected = "a cache with tokens of this model"
        raise ArgumentError("past_key_values", expected, "one with another's of the same shape", todo)
    rows.attended_by = weakref.ref(module)


def _differ(x: Tensor, y: Tensor) -> bool:
    """Whether two weights can be compared, and differ; waits for a GPU."""
    if any(type(each.data) is not Tensor or each.is_meta for each in (x, y)) or get_proxy_mode() is not None:
        return False
    alike = (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
    return alike and not (x.is_cuda and torch.cuda.is_current_stream_capturing()) and not torch.equal(x, y)


def require_no_weights(options: Mapping[str, Any]) -> None:
    """Refuse a forward that is to return the weights of its attention.

    Args:
        options: what the model gave along, as far as it does.
    """
    if options.get("output_attentions"):
        expected = "False: paged attention keeps no weights"
        todo = "call torchpaged.hf.detach(model), and model.set_attn_implementation('eager') for weights"
        raise ArgumentError("output_attentions", expected, "True", todo)


def _note_first(rows: CacheRows, positions: Tensor | None) -> None:
    """Keep where the positions of a batch begin, on their device: nothing waits for it."""
    if positions is None or get_proxy_mode() is not None:
        return
    if not (positions.is_cuda and torch.cuda.is_current_stream_capturing()):
        rows.first_place = positions.amin()


def _end_at(rows: CacheRows, positions: Tensor, length: int) -> bool:
    """Whether the last tokens of all rows stand where those of rows of ``length`` tokens do whose padding is
    known, and which have no pictures, whose tokens share places. Positions may count padding, too."""
    ends = positions[..., -1:] + positions.new_tensor(_lags(rows))
    return bool((ends == int(rows.first_place) + length - 1).any(-1).all())


def _lags(rows: CacheRows) -> list[int]:
    """How many places tokens of a row may be behind its length: none, or its padding."""
    return [0, *(rows.padding or rows.gathered_padding or ())]


def require_left(options: Mapping[str, Any], input_ids: Tensor) -> None:
    """Refuse a prompt of generate() of which nothing is left behind the cached tokens: transformers would run
    some of it again. And one of which it runs all: with ``use_cache=False``, or of a decoder behind an
    encoder without a mask over all of its tokens.

    Args:
        options: of `prepare_inputs_for_generation`. ``next_sequence_length``: tokens that transformers takes
            to be new; None: all of them, or those of a decode step.
        input_ids: ``[batch, length]``, all of the prompt.

    Raises:
        ArgumentError: the cache is paged, and does not go on with these tokens.
    """
    cache, left = cache_of(options), options.get("next_sequence_length")
    of_decoder = getattr(cache, "self_attention_cache", None)  # behind an encoder
    cache = cache if of_decoder is None else of_decoder
    if not isinstance(cache, PagedOwner):
        return
    if left is not None and int(left) <= 0:
        embeds = options.get("inputs_embeds")
        length = input_ids.shape[1] + (0 if embeds is None else embeds.shape[1])
        expected = f"more tokens than the {length - int(left)} in the cache"
        raise ArgumentError("input_ids", expected, str(length), ANOTHER_PROMPT)
    begins = of_decoder is not None and left is None and options.get("is_first_iteration")
    if options.get("use_cache") is False and (first := int(cache.get_seq_length())):
        raise _runs_again(first)
    if begins and (first := int(cache.get_seq_length())):
        expected = f"one over all tokens, the {first} in the cache and more, and no prefill_chunk_size"
        raise ArgumentError("decoder_attention_mask", expected, "none, or a shorter one", ANOTHER_PROMPT)
    if cache.rows is not None:
        cache.rows.generates = True


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
