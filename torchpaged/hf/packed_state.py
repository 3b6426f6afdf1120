"""PackedState: a layer of a packed step that keeps a state per request, in pools with a slot for each.

transformers' mixers are written for rows of one length, and keep their states as tensors of a whole batch. A
mixer that `torchpaged.hf.models` knows gets a forward over packed tokens instead (`pack_mixers`): projections
and norms as they are, its convolution and recurrence by this layer's `convolve` and `attend`.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.cache import LayerStates, StateLayerSpec
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.families import PACKED
from torchpaged.hf.state_layer import StateLayer


class PackedState(StateLayer):
    """Pools of one layer.

    Args:
        cache: the `torchpaged.hf.step_cache.StepCache` whose layer it is.
        index: position among the cache's layers.

    Attributes:
        pools: the `LayerStates`; made here by the first forward, until `adopt_as` gives the layer others.
    """

    pools: LayerStates
    rolls = latent = False
    window: int | None = None

    def __init__(self, cache: Any, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = False

    @property
    def stored(self) -> StateLayerSpec:
        """What the pools hold."""
        inputs, state = self.pools
        sizes = (inputs.shape[1] + 1, inputs.shape[2])
        return StateLayerSpec(*sizes) if state is None else StateLayerSpec(*sizes, *state.shape[1:])

    def adopt_as(self, probed: PackedState, pools: LayerStates) -> None:
        """Take pools that were made by what ``probed`` stores."""
        self.pools, self.is_initialized = pools, True

    def convolve(self, x: Tensor, conv: Any, activation: str = "none") -> Tensor:
        """``[num_tokens, channels]`` of packed tokens through ``conv``, a depthwise ``nn.Conv1d``; a new
        tensor."""
        refuse_grad(x=x)
        weight = conv.weight[:, 0]
        if not self.is_initialized:
            inputs = x.new_zeros(2, weight.shape[1] - 1, weight.shape[0])
            self.pools, self.is_initialized = LayerStates(inputs, None), True
        slots, batch = self._step()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._ops.causal_conv(
            x,
            weight,
            self.pools.conv_state,
            slots,
            batch.seq_lens,
            batch.query_start_loc,
            out,
            conv.bias,
            max_query_len=batch.max_query_len,
            activation=activation,
        )
        return out

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, delta_rule: bool
    ) -> Tensor:
        """The op ``linear_attention`` over packed tokens, keys normalised with the delta rule; ``[num_tokens,
        num_heads, value_dim]`` in v's dtype."""
        if self.pools.state is None:
            sizes = (2, v.shape[1], q.shape[2], v.shape[2])
            state = torch.zeros(sizes, dtype=torch.float32, device=v.device)
            self.pools = self.pools._replace(state=state)
        slots, batch = self._step()
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        self._ops.linear_attention(
            q,
            k,
            v,
            g,
            self.pools.state,
            slots,
            batch.seq_lens,
            batch.query_start_loc,
            out,
            beta,
            max_query_len=batch.max_query_len,
            scale=scale,
            delta_rule=delta_rule,
            normalize=delta_rule,
        )
        return out

    @property
    def _ops(self) -> BackendOps:
        """The session's; before there is one, as while a model is looked at, the reference."""
        return self.cache.backend.ops if self.cache.ready else BACKEND_OPS["reference"]

    def _step(self) -> tuple[Tensor, Any]:
        """Slots and batch of the step that runs."""
        batch, slots = self.cache.metadata, self.cache.state_slots
        assert batch is not None and slots is not None
        if batch.features:
            raise UnsupportedModelError(
                f"{self.cache.name}: layer {self.index} keeps a state, which goes from token to token, and "
                f"the batch has a {batch.features[0]}; run its branches as requests of their own"
            )
        return slots, batch

    def unknown(self) -> UnsupportedModelError:
        """Of a layer whose mixer does not call this one."""
        return UnsupportedModelError(
            f"{self.cache.name}: layer {self.index} keeps a recurrent state of a kind that packed batches do "
            "not carry yet; use generate() with torchpaged.hf.PagedCache"
        )

    def update_conv_state(self, *_: Any, **__: Any) -> Tensor:
        """Refuse: a mixer that runs as transformers has it would take all tokens for one request's.

        Raises:
            UnsupportedModelError: always.
        """
        raise self.unknown()

    update_recurrent_state = update_conv_state


def packed_state(cache: Any, index: int) -> PackedState | None:
    """The layer of a cache that a mixer was given; None if its tokens are not packed."""
    layer = None if cache is None else cache.layers[index]
    return layer if isinstance(layer, PackedState) else None


def mixers_of(model: Any) -> list[Any]:
    """The modules of a model that have a forward over packed tokens."""
    return [module for module in model.modules() if type(module).__name__ in PACKED]


def is_packed(mixer: Any) -> bool:
    """Whether a mixer has that forward now."""
    return getattr(vars(mixer).get("forward"), "__func__", None) is PACKED[type(mixer).__name__]


def pack_mixers(model: Any, states: Sequence[PackedState]) -> None:
    """Give the mixers of a model their forward over packed tokens; with any other cache they run their
    class's own.

    Args:
        model: of transformers.
        states: the layers that keep states in a cache of its config.

    Raises:
        UnsupportedModelError: a layer's mixer is not known, or has a forward of its own, as a hook makes it.
    """
    mixers = mixers_of(model)
    known = {mixer.layer_idx for mixer in mixers}
    for layer in states:
        if layer.index not in known:
            raise layer.unknown()
    for mixer in mixers:
        if is_packed(mixer):  # what graphs were made with stays the same object
            continue
        if "forward" in vars(mixer):
            raise UnsupportedModelError(
                f"{type(model).__name__}: a {type(mixer).__name__} has a forward that another one replaced, "
                "and packed batches need one of theirs; take the hook out"
            )
        mixer.forward = types.MethodType(PACKED[type(mixer).__name__], mixer)
