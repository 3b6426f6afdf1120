"""Mixers of hybrids with a forward over the states of a paged cache: projections and norms as they are, their
convolution and recurrence by a `torchpaged.hf.packed_state.PackedState`.

The engine gives it to the mixers of its model (`pack_mixers`), `torchpaged.hf.attach` to those of an attached
one. With any other cache they run their class's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer, StaticLayer

from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.custom_ops.state.check import ACTIVATIONS, MAX_WIDTH, MIN_WIDTH
from torchpaged.few_tokens import own_forward
from torchpaged.hf.attached import PAGED, put_in, was_given_functions
from torchpaged.hf.cache_argument import cache_of
from torchpaged.hf.families import PACKED, Function
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.packed_state import PackedState
from torchpaged.hf.row_refusals import require_same_model
from torchpaged.hf.template import PackedHybridLayer, window_and_chunk


def packed_state(cache: Any, index: int) -> PackedState | None:
    """The layer of a cache that a mixer was given; None if its tokens are not packed."""
    layers = () if cache is None else cache.layers
    layer = layers[index] if index < len(layers) else None  # some caches get their layers one by one
    layer = getattr(layer, "state", layer)
    return layer if isinstance(layer, PackedState) else None


def state_of(mixer: Any, options: Mapping[str, Any]) -> PackedState | None:
    """`packed_state` of the cache among the ``options`` of a mixer's forward.

    Raises:
        ArgumentError: a weight of the mixer is trained: the ops have no derivative, and would drop it.
    """
    layer = packed_state(cache_of(options), mixer.layer_idx)
    if layer is not None and torch.is_grad_enabled():  # what comes in may have no grad
        refuse_grad(**dict(mixer.named_parameters()))
    return layer


def over_states(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward(mixer, layer, hidden_states)`` over the states of a cache's layer, in the place of a mixer's
    own, which runs with any other cache."""

    def mixed(self: Any, hidden_states: Tensor, **options: Any) -> Any:
        layer = state_of(self, options)
        if layer is None:
            return type(self).forward(self, hidden_states, **options)
        out = forward(self, layer, hidden_states)
        if not layer.cache.paged:
            require_same_model(layer.cache.rows, self)
        return out

    return mixed


def mixers_of(model: Any) -> list[Any]:
    """The modules of a model that have a forward over packed tokens. Those that do not know their layer
    (RecurrentGemma's) get it, by their place among the model's modules."""
    named = [(name, module) for name, module in model.named_modules() if type(module).__name__ in PACKED]
    for name, module in named:
        places = [int(part) for part in name.split(".") if part.isdigit()]
        if places and not hasattr(module, "layer_idx"):
            module.layer_idx = places[-1]
    return [module for _, module in named]


def is_packed(module: Any) -> bool:
    """Whether a module is a mixer and has that forward now."""
    packed = PACKED.get(type(module).__name__)
    return packed is not None and getattr(vars(module).get("forward"), "__func__", None) is packed


def pack_mixer(mixer: Any, holder: str) -> None:
    """Give one mixer that forward, until `take_out` of the ``holder``."""
    put_in({mixer: ("forward", PACKED[type(mixer).__name__])}, holder)


def pack_mixers(model: Any, states: Sequence[PackedState]) -> None:
    """Give the mixers of a model their forward over packed tokens; with any other cache they run their
    class's own.

    Args:
        model: of transformers.
        states: the layers that keep states in a cache of its config.

    Raises:
        UnsupportedModelError: a layer's mixer is not known, has a forward of its own, as a hook makes it, or
            a convolution that the op does not take.
    """
    mixers = mixers_of(model)
    known = {getattr(mixer, "layer_idx", None) for mixer in mixers}
    for layer in states:
        if layer.index not in known:
            raise layer.unknown()
    for mixer in mixers:
        if why := _why_not(mixer):
            raise UnsupportedModelError(f"{type(model).__name__}: a {type(mixer).__name__} {why}")
        pack_mixer(mixer, PAGED)


def _why_not(mixer: Any) -> str:
    """Why a mixer can't have that forward; empty: it can."""
    if not is_served(mixer):
        return (
            f"has a convolution of another width than {MIN_WIDTH} to {MAX_WIDTH}, or another activation than "
            f"{' or '.join(ACTIVATIONS)}, which packed batches do not take; use generate() with "
            "torchpaged.hf.PagedCache"
        )
    if own_forward(mixer) is not None and not is_packed(mixer):
        return "has a forward that another one replaced, and packed batches need theirs; take the hook out"
    return ""


def is_served(mixer: Any) -> bool:
    """Whether the op takes its convolution, if it has one."""
    names = ("conv1d", "conv", "conv_1d")
    conv = next((getattr(mixer, name) for name in names if hasattr(mixer, name)), None)
    if conv is None:
        return True
    width, activation = conv.kernel_size[0], getattr(mixer, "activation", "none")
    return MIN_WIDTH <= width <= MAX_WIDTH and activation in ACTIVATIONS


def packed_functions(model: Any) -> dict[Any, Function]:
    """What attaching gives the mixers of a model, see `Family.functions`; nothing where one of them has a
    forward or a hook that another one put there, or a convolution that the op does not take: its caches keep
    states as transformers does."""
    mixers = mixers_of(model)
    hooked = any(hasattr(part, "_hf_hook") for mixer in mixers for part in mixer.modules())
    if hooked or any(map(_why_not, mixers)):
        return {}
    return {mixer: ("forward", PACKED[type(mixer).__name__]) for mixer in mixers}


def keeps_nothing(config: Any, index: int) -> bool:
    """Whether a layer is of experts or a feed-forward alone, as in Nemotron-H."""
    types = getattr(config, "layer_types", None) or ()
    return index < len(types) and types[index] in ("mlp", "moe")


def state_of_attached(
    owner: PagedOwner, index: int, config: Any, template: Any
) -> PackedState | PackedHybridLayer | None:
    """The layer of a cache for an attached model whose mixers got their functions, see `Family.layer`; none
    in a cache that gathers, which is not told where rows' padding ends."""
    if keeps_nothing(config, index) or owner.dense or not was_given_functions(config):
        return None
    if type(template) is LinearAttentionLayer:
        return PackedState(owner, index)
    if isinstance(template, LinearAttentionLayer) and isinstance(template, StaticLayer):
        return PackedHybridLayer(owner, index, *window_and_chunk(config, index, template))
    return None
