"""Stacked: several linear layers over one input as one product, without another copy of their weights.

    qkv = Stacked([attn.q_proj, attn.k_proj, attn.v_proj])
    qkv.weight  # [sum of out_features, in_features]; the layers' own parameters are its rows

The layers keep working, one by one, and so do ``state_dict`` and in-place updates of the parameters.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Stacked:
    """Several linear layers as one: their weights become rows of one tensor, so that no memory is added.

    Attributes:
        weight: ``[sum of out_features, in_features]``.
        bias: ``[sum of out_features]`` or None.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = list(linears)
        self.weight = self._stack([m.weight for m in linears])
        self.bias = None if linears[0].bias is None else self._stack([m.bias for m in linears])
        self._stacked_at = self._addresses()

    @staticmethod
    def _stack(parameters: Sequence[Tensor]) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.cat([p.data for p in parameters])
            for parameter, rows in zip(
                parameters, whole.split([p.shape[0] for p in parameters]), strict=True
            ):
                parameter.data = rows
        # else compiled CUDA graphs would copy it in every replay
        torch._dynamo.mark_static_address(whole, guard=False)
        return whole

    def holds(self) -> bool:
        """Whether the linear layers still use this memory: their weights were not replaced. Runs in every
        eager step."""
        return self._addresses() == self._stacked_at

    def _addresses(self) -> list[int]:
        return [p.data_ptr() for m in self.linears for p in m._parameters.values() if p is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stacked":
        return Stacked(copy.deepcopy(self.linears, memo))  # a parameter's copy has memory of its own

    def restack(self) -> None:
        """Stack again after weights were replaced or moved."""
        if not self.holds():
            self.__init__(self.linears)  # type: ignore[misc]

    def separate(self) -> None:
        """Give every linear layer memory of its own again."""
        for m in self.linears:
            for parameter in m.parameters(recurse=False):
                parameter.data = parameter.data.clone()
