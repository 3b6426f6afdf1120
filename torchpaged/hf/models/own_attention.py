"""What makes modules that ignore transformers' attention interface attend in a paged cache; the families of
such models are in the other files of this folder.

Each module gets a function of ours in the place of one of its own, on the instance: `_attn`, where a module
computes its scores in a method by that name, else `forward`. With a paged cache the function calls
`paged_attention_forward`; with any other cache, without one, and in cross attention it calls what it
replaced. `torchpaged.hf.attach` puts the functions in, `detach` takes them out.

The modules' names and fields are not public; ``tests/hf/test_own_attention.py`` runs every family under each
supported transformers.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpaged.hf.attached import SLOPES, plain_of
from torchpaged.hf.attention import paged_attention_forward
from torchpaged.hf.cache_argument import CACHE, CACHE_LENGTH
from torchpaged.hf.dense import require_cache
from torchpaged.hf.families import Function, Maker
from torchpaged.hf.layer import PagedLayer, layer_of

Heads = tuple[Tensor, Tensor, Tensor]  # query, key, value: [batch, heads, query_len, head_dim]


def alibi_slopes(num_heads: int) -> list[float]:
    """Slopes per head: the powers ``2 ** (-8 * i / n)`` of the largest power of two n within ``num_heads``,
    then every other one of ``2 * n``.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (2021), section 3, and its published code for
    other numbers of heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]


def _slopes(module: Any, num_heads: int, device: torch.device) -> Tensor:
    """The module's slopes ``[num_heads]`` float32 on ``device``; made once."""
    slopes: Tensor | None = getattr(module, SLOPES, None)
    if slopes is None or slopes.device != device:
        with torch.inference_mode(False):
            slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)
        torch._dynamo.mark_static_address(slopes, guard=False)
        setattr(module, SLOPES, slopes)
    return slopes


# --------------------------------------------------------------------------------------- modules with `_attn`
def in_attn(
    scaling: Callable[[Any], float], window: Callable[[Any], int | None] = lambda module: None
) -> Maker:
    """`_attn` of a module: ``(query, key, value, attention_mask) -> (out, weights)``.

    ``out [batch, heads, query_len, head_dim]``.
    """

    def make(module: Any) -> Function:
        plain, factor, size = plain_of(module, "_attn"), scaling(module), window(module)

        def attn(
            self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
        ) -> Any:
            if layer_of(key) is None:
                require_cache(self, attention_mask)
                return plain(self, query, key, value, attention_mask)
            out, weights = paged_attention_forward(
                self,
                query,
                key,
                value,
                attention_mask,
                scaling=factor,
                sliding_window=size,
                masks_itself=True,
            )
            return out.transpose(1, 2), weights

        return "_attn", attn

    return make


# ----------------------------------------------------------------------------- modules that inline everything
def split_heads(states: Tensor, head_dim: int) -> Tensor:
    """``[batch, query_len, heads * head_dim]`` as ``[batch, heads, query_len, head_dim]``."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class Inline(NamedTuple):
    """How a module of one family projects, attends and ends.

    Attributes:
        heads: ``(module, hidden_states, further arguments) -> Heads``.
        scaling: of the scores.
        end: ``(module, out, further arguments)`` -> what forward returns first; ``out`` is
            ``[batch, query_len, heads * head_dim]``.
        cache: the argument's name.
        crosses: the argument that holds an encoder's states in cross attention.
        alibi: whether the scores have linear biases.
        cross: ``(module, hidden_states, further arguments, scaling)`` -> what forward returns in cross
            attention, or None where the encoder's keys are in no pools; None: they never are.
    """

    heads: Callable[[Any, Tensor, dict[str, Any]], Heads]
    scaling: Callable[[Any], float]
    end: Callable[[Any, Tensor, dict[str, Any]], Tensor]
    cache: str = CACHE
    crosses: str = ""
    alibi: bool = False
    cross: Callable[[Any, Tensor, dict[str, Any], float], Any] | None = None


def paged_cache_of(cache: Any, index: int) -> Any:
    """The cache that holds layer ``index`` in pools, behind what a module was given; None if there is
    none."""
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    return cache if isinstance(layer, PagedLayer) and not layer.owner.dense else None


def in_forward(family: Inline) -> Maker:
    """`forward` of a module that projects, attends and ends in it."""

    def make(module: nn.Module) -> Function:
        plain, scaling = plain_of(module, "forward"), family.scaling(module)
        names = tuple(inspect.signature(module.forward).parameters)[1:]

        def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **options}
            if family.crosses and given.get(family.crosses) is not None:
                cross = None if self.training else family.cross
                crossed = None if cross is None else cross(self, hidden_states, given, scaling)
                return plain(self, hidden_states, *args, **options) if crossed is None else crossed
            cache = paged_cache_of(given.get(family.cache), self.layer_idx)
            if cache is None:
                require_cache(self, given.get("attention_mask"))
            if cache is None or self.training:
                return plain(self, hidden_states, *args, **options)
            query, key, value = family.heads(self, hidden_states, given)
            key, value = cache.update(key, value, self.layer_idx)
            slopes = _slopes(self, query.shape[1], query.device) if family.alibi else None
            out, weights = paged_attention_forward(
                self, query, key, value, None, scaling=scaling, alibi_slopes=slopes, masks_itself=True
            )
            return family.end(self, out.flatten(2), given), weights

        return "forward", forward

    return make


def root(head_dim: str) -> Callable[[Any], float]:
    """The scaling of a module whose head width has this name."""
    return lambda module: 1 / math.sqrt(getattr(module, head_dim))


def project_out(module: Any, out: Tensor, given: dict[str, Any]) -> Tensor:
    """The end of a module with an ``out_proj``."""
    result: Tensor = module.out_proj(out)
    return result


def positions_from_length(module: nn.Module) -> Function:
    """Position embeddings that count from the cache's length: as a tensor it is no bound of a range in
    compiled code."""
    plain = plain_of(module, "forward")

    def forward(
        self: Any, ids: Any, past_length: Any = 0, position_ids: Tensor | None = None, **named: Any
    ) -> Any:
        past_length = named.get(CACHE_LENGTH, past_length)
        if position_ids is None and isinstance(past_length, Tensor):
            length = (ids.shape if isinstance(ids, Tensor) else ids)[1]
            position_ids = past_length + torch.arange(length, device=past_length.device)
        return plain(self, ids, past_length, position_ids)

    return "forward", forward
