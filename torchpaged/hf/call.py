"""What a module of transformers asks of attention over a paged layer, and the record that the op takes: here
transformers' words become the op's."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpaged.custom_ops.attention.call import AttentionCall

#: Devices that have autocast: asked here, since torch 2.11 can't trace the question.
_AUTOCAST = tuple(kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind))


class LayerCall(NamedTuple):
    """What a module asks of attention over one layer of a paged cache: made once, by
    `torchpaged.hf.attention.paged_attention_forward`, of what the module, its masks and its layer say.

    Attributes:
        module: the attention module.
        query: ``[batch, num_heads, query_len, head_dim]``.
        key, value: the layer's pools ``[num_blocks, block_size, num_kv_heads, head_dim(_v)]``.
        causal: whether a query sees no token behind its own.
        window: keys visible, the own one included; None: all.
        softcap, sinks, alibi_slopes: as the op has them; None: without.
        scaling: of the scores; None: ``head_dim ** -0.5``.
        indices: ``[batch, query_len, top_k]`` int32, positions that each query selects, as ``mla_attention``
            has them; None: all. Layers of latents alone take them.
        absorbed: ``query`` has the key's up-projection in it: ``rank + rope`` columns. Of layers of latents.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    scaling: float | None = None
    indices: Tensor | None = None
    absorbed: bool = False

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.query.shape[3] ** -0.5 if self.scaling is None else float(self.scaling)

    def over(self, batch: Any, own: Mapping[str, Any]) -> AttentionCall:
        """The call of the op over ``batch``, an `AttentionMetadata` or less of it, with the layer's ``own``
        options and a new ``out``, ``[num_tokens, num_heads, head_dim_v]``."""
        q = by_token(self.query)
        return AttentionCall.over(
            batch,
            q,
            self.key,
            self.value,
            q.new_empty(*q.shape[:2], self.value.shape[3]),
            scale=self.scale,
            causal=self.causal,
            window_left=-1 if self.window is None else self.window - 1,
            logits_soft_cap=0.0 if self.softcap is None else float(self.softcap),
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            **own,
        )


class Requests(NamedTuple):
    """A batch for one call of a layer's, where that is not the forward's own: what `AttentionCall.over` takes
    of an `AttentionMetadata`."""

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    tree_mask: None = None


def kind_of(made: AttentionCall) -> tuple[Any, ...]:
    """What a backend is held to for a call of one layer; from host facts alone, this runs in every layer."""
    q, options = made.q, (made.causal, made.window_left, made.logits_soft_cap, made.scale)
    return (q.dtype, q.shape[1], q.shape[2], *options, made.sinks is None, made.alibi_slopes is None)


def brings_mask(made: AttentionCall) -> bool:
    """Whether the batch, and not the layer, asks for a mask."""
    return made.tree_mask is not None


def of_layer(made: AttentionCall) -> AttentionCall:
    """What the layer asks, without what the batch brings."""
    return made._replace(tree_mask=None) if brings_mask(made) else made


def looks_alike(made: AttentionCall) -> bool:
    """Whether all queries see all keys before them alike, so that some may read them once for all."""
    plain = made.causal and made.window_left < 0 and made.alibi_slopes is None
    return plain and not brings_mask(made)


def by_token(states: Tensor) -> Tensor:
    """``[batch, heads, query_len, head_dim]`` as ``[batch * query_len, heads, head_dim]``, the last dimension
    side by side as ops want it: a convolution's output of one row is strided there, and stays so."""
    batch, heads, query_len, head_dim = states.shape
    if query_len == 1:
        flat = states.squeeze(2)
    else:
        flat = states.transpose(1, 2).reshape(batch * query_len, heads, head_dim)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def autocasts(x: Tensor) -> bool:
    """Whether ``torch.autocast`` is on for the device of ``x``."""
    return x.device.type in _AUTOCAST and torch.is_autocast_enabled(x.device.type)


def in_autocast(*states: Tensor) -> tuple[Tensor, ...]:
    """``states`` in the dtype of ``torch.autocast`` where it is on, as SDPA takes them: rotated keys come in
    float32, next to values that do not."""
    if not autocasts(states[0]):
        return states
    dtype = torch.get_autocast_dtype(states[0].device.type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in states)
