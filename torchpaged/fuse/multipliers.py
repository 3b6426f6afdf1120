"""The numbers by which Falcon-H1 multiplies what goes into the parts of a layer and what comes out (µP): one
vector for the product of all projections, one number for what each part adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.hf.packed_state import exact


class Multipliers:
    """Of one layer, by the names that they have there.

    Args:
        layer: the decoder layer.

    Attributes:
        outputs: of what its state gives, and its attention; None: none.
        gate, down: of the MLP's gate, and of what it gives; None: none.
    """

    def __init__(self, layer: Any) -> None:
        self.layer, mlp = layer, layer.feed_forward
        self.outputs = [_unless_one(layer.ssm_out_multiplier), _unless_one(layer.attn_out_multiplier)]
        self.gate, self.down = _unless_one(mlp.gate_multiplier), _unless_one(mlp.down_multiplier)
        self._columns: Tensor | None = None

    def columns(self) -> Tensor | None:
        """Of the projections of its state and its attention, ``[sum of columns]``; None: all are 1. The same
        tensor as long as it serves, for captured graphs."""
        mamba, attention = self.layer.mamba, self.layer.self_attn
        factor, old = self.layer.attention_in_multiplier, self._columns
        with torch.inference_mode(False), torch.no_grad():
            of_state = exact(mamba.mup_vector.flatten()) * mamba.ssm_in_multiplier
            of_attention = [
                of_state.new_full((linear.out_features,), each)
                for linear, each in (
                    (attention.q_proj, factor),
                    (attention.k_proj, factor * attention.key_multiplier),
                    (attention.v_proj, factor),
                )
            ]
            found = torch.cat([of_state, *of_attention])
        if old is None or (old.dtype, old.device) != (found.dtype, found.device) or not old.equal(found):
            torch._dynamo.mark_static_address(found, guard=False)  # else compiled CUDA graphs would copy it
            self._columns = found
        return None if bool((found == 1).all()) else self._columns


def why_not_multiplied(layer: Any) -> str | None:
    """Why one vector can't stand for a layer's multipliers."""
    inputs = (layer.mamba.in_proj, layer.mamba.ssm_in_multiplier)
    others = (layer.self_attn.q_proj, layer.attention_in_multiplier)
    if any(linear.bias is not None and factor != 1 for linear, factor in (inputs, others)):
        return "its projections have biases, which the multipliers of their inputs leave as they are"
    return None


def _unless_one(value: Any) -> float | None:
    return None if value == 1 else float(value)
