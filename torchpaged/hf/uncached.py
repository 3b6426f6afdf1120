"""Attention without a cache on our kernels: encoders, vision towers, decoders that keep nothing.

Keys and values are read where the model left them, as pools of blocks. Padding is no key, and no query
either, but in front of the tokens: some heads read the state of the first position, whatever it is. A row is
a request of its first positions, one of the other padding before the tokens, one of the tokens, and one of
what is behind them. Nothing has a shape that depends on the lengths, so that one graph serves all of them.
"""

from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from torchpaged.compat.packed import packed_pools, rows_as_pools
from torchpaged.custom_ops.memory import is_latent, pools_meet
from torchpaged.functional import paged_attention
from torchpaged.hf.call import LayerCall
from torchpaged.hf.call_mask import CallMask, held_by
from torchpaged.hf.families import family_of
from torchpaged.hf.mask_kinds import MaskKind
from torchpaged.hf.query_starts import pin_batch

_LEAST_BLOCK_SIZE = 16  # `rows_as_pools` cuts rows into blocks of this size at least


class Way(Enum):
    """How a batch becomes requests of the op.

    ``ROWS``: a request for each row, which has no padding. ``TOKENS``: of each row its tokens, and its
    padding in front, and that behind, which has no keys; for queries that are the rows' own tokens.
    ``QUERIES``: a request for each query, over all of its row's keys.
    """

    ROWS = 1
    TOKENS = 2
    QUERIES = 3


def type_of_encoder(config: Any) -> str:
    """The model type of a config, if it is no decoder's: those attend to an encoder too, perhaps in modules
    that don't tell."""
    flags = ("is_decoder", "add_cross_attention")
    return "" if any(getattr(config, flag, False) for flag in flags) else getattr(config, "model_type", "")


def attends_itself(module: nn.Module, mask: CallMask) -> bool:
    """Whether the queries of ``module`` are the rows' own tokens, so that padding queries may be left out.

    Cross attention to as many keys as there are queries looks the same by its shapes: known are only models
    whose attention modules tell.
    """
    otherwise = family_of(mask.model_type).attends_to_others
    return False if otherwise is None else not getattr(module, "is_decoder", otherwise)


def way_of(call: LayerCall, mask: Tensor | None, dropout: float) -> Way | None:
    """In which way `attend` gives what SDPA gives for this call; None: in none, or in none that is worth it.
    Host facts only, but for a padded mask, which is looked at once.

    Args:
        call: with dense keys and values ``[batch, num_kv_heads, kv_len, head_dim(_v)]``; ``causal``: without
            a mask, whether keys behind a query are hidden.
        mask: as transformers' mask function made it, or None.
        dropout: of the weights.
    """
    module, query, key, value = call[:4]
    needs_kernel = call.softcap is not None or call.sinks is not None  # SDPA can't: a slow way is worth it
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if needs_grad or (dropout and module.training) or query.dim() != 4 or key.shape[0] != query.shape[0]:
        return None
    if not query.is_floating_point() or query.dtype != key.dtype or key.dtype != value.dtype:
        return None
    query_len, kv_len = query.shape[2], key.shape[2]
    if mask is None:
        fits = query_len == kv_len if call.causal else query_len <= kv_len
        return Way.ROWS if fits else Way.QUERIES if needs_kernel and not call.causal else None
    held = held_by(mask)
    if held is None or (held.prompt.length, held.kv_len) != (query_len, kv_len):
        return None
    if held.kind is None or mask.shape[0] != query.shape[0]:
        return None
    is_full = held.kind == MaskKind(False)
    if not held.is_padded and (query_len == kv_len or (is_full and query_len < kv_len)):
        return Way.ROWS
    if query_len == kv_len and attends_itself(module, held):
        # Padding in front sees what its window reaches, which no request of the tokens' keys says. In a trace
        # no window is known.
        fits = held.are_spans() and (held.kind.window is None or bool(held.all_at_zero))
        return Way.TOKENS if fits else None
    return Way.QUERIES if needs_kernel and is_full and held.are_spans() else None


def attend(call: LayerCall, mask: Tensor | None, way: Way) -> Tensor:
    """Attention of every row over its own keys, ``[batch, query_len, num_heads, head_dim_v]``; `Way.TOKENS`
    gives zeros where a query is padding behind the tokens, or sees nothing. Arguments as of `way_of`, which
    gave ``way``."""
    batch, num_heads, query_len, head_dim = call.query.shape
    held = held_by(mask)
    q = call.query.transpose(1, 2).reshape(batch * query_len, num_heads, head_dim)
    k, v, table = _pools(call.key.transpose(1, 2), call.value.transpose(1, 2), held)
    # values in the memory of the keys, of which a trace knows only whether they are the keys
    meet = not torch.compiler.is_compiling() and pools_meet(k, v) and not is_latent(k, v)
    if call.value is call.key or meet:
        v = v.clone(memory_format=torch.contiguous_format)
    made = {} if held is None else held.made
    requests = made.get((way, k.shape[1]))
    if requests is None:
        requests = pin_batch(*_requests(table, query_len, call.key.shape[2], held, way))
        made[way, k.shape[1]] = requests
    kind = MaskKind(call.causal) if held is None or held.kind is None else held.kind
    out = paged_attention(
        q,
        k,
        v,
        *requests,
        max_query_len=1 if way is Way.QUERIES else query_len,
        causal=kind.causal,
        window_size=kind.sides,
        scale=call.scaling,
        logits_soft_cap=call.softcap,
        sinks=call.sinks,
    )
    result: Tensor = out.view(batch, query_len, num_heads, call.value.shape[-1])
    return result


def _pools(k: Tensor, v: Tensor, held: CallMask | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values ``[batch, kv_len, num_kv_heads, head_dim(_v)]`` as pools, and each row's blocks.

    Blocks are of one token where a row's keys may begin anywhere, and where no usual size divides the length:
    kernels are compiled for each size of blocks. In a trace too, which a size would hold to one length.
    """
    at_zero = held is None or held.starts is None or bool(held.all_at_zero)
    if at_zero and not torch.compiler.is_compiling() and k.shape[1] % _LEAST_BLOCK_SIZE == 0:
        return rows_as_pools(k, v, None, k.shape[0])
    begin = torch.arange(k.shape[0], dtype=torch.int32, device=k.device) * k.shape[1]
    if not at_zero and held is not None and held.starts is not None:
        begin = begin + held.starts
    return packed_pools(k.flatten(0, 1), v.flatten(0, 1), begin, k.shape[1])


def _requests(
    table: Tensor, query_len: int, kv_len: int, held: CallMask | None, way: Way
) -> tuple[Tensor, Tensor, Tensor]:
    """Block table, lengths and query starts of the requests that the rows are."""
    batch, device = table.shape[0], table.device
    first = torch.arange(batch + 1, dtype=torch.int32, device=device) * query_len
    lens = None if held is None else held.lens
    if lens is None:
        lens = torch.full((batch,), kv_len, dtype=torch.int32, device=device)
    if way is Way.ROWS:
        return table, lens, first
    if way is Way.QUERIES:
        starts = torch.arange(batch * query_len + 1, dtype=torch.int32, device=device)
        return table.repeat_interleave(query_len, 0), lens.repeat_interleave(query_len), starts
    assert held is not None and held.starts is not None
    none, begin = torch.zeros_like(lens), first[:-1] + held.starts
    ends, own = [begin + lens, first[1:]], [lens, none]
    if held.all_at_zero is not True:
        # Of the padding in front, as many positions as there are keys see them; queries must not be more.
        ends = [first[:-1] + torch.minimum(held.starts, lens), begin, *ends]
        own = [none if held.kind == MaskKind() else lens, none, *own]
    ends_of_all = torch.stack(ends, 1).flatten()
    return (
        table.repeat_interleave(len(own), 0),
        torch.stack(own, 1).flatten(),
        torch.cat((first[:1], ends_of_all)),
    )
