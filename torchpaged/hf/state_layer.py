"""StateLayer: a linear-attention layer in a paged cache, transformers' own but for what happens to its rows
between forwards."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from torchpaged.custom_ops.checks import refuse_grad


class StateLayer(LinearAttentionLayer):
    """Convolution and recurrent states, ``[rows, ...]`` each, that do what a `PagedCache` does to its rows:
    they are repeated and selected too, and the batch behind a `reset` may have another size.

    Args:
        number_of_states: of each sort, that the layer keeps.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        # States of a batch before `reset`, kept for compiled code that knows their addresses.
        self._left: set[tuple[str, int]] = set()

    def _kept(self) -> list[tuple[str, int]]:
        """Which states there are."""
        names = ("conv_states", "recurrent_states")
        return [(name, i) for name in names for i, there in self._there(name).items() if there]

    def _there(self, name: str) -> dict[int, bool]:
        there: dict[int, bool] = getattr(self, f"is_{name}_initialized")
        return there

    def lazy_initialization(self, **states: Any) -> None:
        """Allocate; an inference tensor could not be written under no_grad later."""
        with torch.inference_mode(False):
            LinearAttentionLayer.lazy_initialization(self, **states)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers has it, but for gradients, which are refused: the layers of attention refuse them
        as well, when these states would have moved on."""
        refuse_grad(conv_states=conv_states)
        self._fit("conv_states", state_idx, conv_states)
        full: Tensor = LinearAttentionLayer.update_conv_state(self, conv_states, state_idx, **kwargs)
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """See `update_conv_state`."""
        refuse_grad(recurrent_states=recurrent_states)
        self._fit("recurrent_states", state_idx, recurrent_states)
        kept: Tensor = LinearAttentionLayer.update_recurrent_state(
            self, recurrent_states, state_idx, **kwargs
        )
        return kept

    def _fit(self, name: str, state_idx: int, states: Tensor) -> None:
        """The first states behind a `reset` may be of another size: those that are left are dropped then."""
        if (name, state_idx) in self._left:
            self._left.discard((name, state_idx))
            kept = getattr(self, name)[state_idx]
            wanted = (states.shape[0], states.dtype, states.device)
            self._there(name)[state_idx] = (kept.shape[0], kept.dtype, kept.device) == wanted

    def reset(self) -> None:
        """Zero the states. Those of a recorded past are what a forward computed, perhaps in inference mode,
        and go."""
        for name, i in self._kept():
            if getattr(self, name)[i].is_inference():
                self._there(name)[i] = False
        LinearAttentionLayer.reset(self)
        self._left = set(self._kept())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` goes on from the states of row ``beam_idx[i]``; in place where there are as many."""
        for name, i in self._kept():
            states = getattr(self, name)
            with torch.inference_mode(False):
                chosen = states[i].index_select(0, beam_idx.to(states[i].device))
            if chosen.shape == states[i].shape and not states[i].is_inference():
                states[i].copy_(chosen)
            else:
                torch._dynamo.mark_static_address(chosen)
                states[i] = chosen
