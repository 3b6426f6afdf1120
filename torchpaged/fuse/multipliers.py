"""The numbers by which a layer multiplies what goes into its parts and what comes out (µP in Falcon-H1,
scaled residuals in Granite 4 and MiniCPM3), as vectors for the columns of its products."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.plain_torch import exact
from torchpaged.fuse.architectures import Architecture


class Scales(NamedTuple):
    """``scale`` of the op ``linear`` in a layer; None: all are 1.

    Attributes:
        inputs: of the product of all projections of its input.
        outputs: of what each of its mixers gives.
        gate_up: of its MLP's gate and up side by side.
        down: of what its MLP gives.
    """

    inputs: Tensor | None
    outputs: tuple[Tensor | None, ...]
    gate_up: Tensor | None
    down: Tensor | None


class Multipliers:
    """Of one layer, by the names that they have there.

    Args:
        layer: the decoder layer.
        architecture: its own.
    """

    def __init__(self, layer: Any, architecture: Architecture) -> None:
        self.layer, self.architecture = layer, architecture
        self._kept: dict[str, Tensor] = {}

    def scales(self, num_mixers: int) -> Scales:
        """As they are now."""
        layer, architecture = self.layer, self.architecture
        if architecture.multiplied:
            return self._of_parts()
        factor = getattr(layer, architecture.residual_scale) if architecture.residual_scale else 1.0
        if factor == 1:
            return Scales(None, (None,) * num_mixers, None, None)
        norm = getattr(layer, architecture.names.norms[0])
        scale = self._vector("residual", [_filled(norm.weight, norm.weight.shape[0], factor)])
        return Scales(None, (scale,) * num_mixers, None, scale)

    def _of_parts(self) -> Scales:
        """Of a layer with a state and attention beside it."""
        layer = self.layer
        mamba, attention, mlp, factor = (
            layer.mamba,
            layer.self_attn,
            layer.feed_forward,
            layer.attention_in_multiplier,
        )
        of_state = exact(mamba.mup_vector.flatten()) * mamba.ssm_in_multiplier
        inputs = (
            (attention.q_proj, factor),
            (attention.k_proj, factor * attention.key_multiplier),
            (attention.v_proj, factor),
        )
        gates = ((mlp.gate_proj, mlp.gate_multiplier), (mlp.up_proj, 1.0))
        outputs = (
            ("state", mamba.out_proj, layer.ssm_out_multiplier),
            ("attention", attention.o_proj, layer.attn_out_multiplier),
            ("down", mlp.down_proj, mlp.down_multiplier),
        )
        *mixers, down = (self._vector(name, _columns(((linear, by),))) for name, linear, by in outputs)
        return Scales(
            self._vector("inputs", [of_state, *_columns(inputs)]),
            tuple(mixers),
            self._vector("gate_up", _columns(gates)),
            down,
        )

    def _vector(self, name: str, parts: Sequence[Tensor]) -> Tensor | None:
        """``parts`` side by side; None: all are 1. The same tensor as long as it serves, for captured
        graphs."""
        old = self._kept.get(name)
        with torch.inference_mode(False), torch.no_grad():
            found = torch.cat([exact(part.detach()) for part in parts])
        if old is None or (old.dtype, old.device) != (found.dtype, found.device) or not old.equal(found):
            torch._dynamo.mark_static_address(found, guard=False)  # else compiled CUDA graphs would copy it
            self._kept[name] = old = found
        return None if bool((old == 1).all()) else old


def _columns(linears: Sequence[tuple[Any, float]]) -> list[Tensor]:
    return [_filled(linear.weight, linear.out_features, factor) for linear, factor in linears]


def _filled(like: Tensor, count: int, factor: float) -> Tensor:
    return exact(like.new_empty(0)).new_full((count,), factor)


def why_not_multiplied(layer: Any) -> str | None:
    """Why one vector can't stand for a layer's multipliers."""
    inputs = (layer.mamba.in_proj, layer.mamba.ssm_in_multiplier)
    others = (layer.self_attn.q_proj, layer.attention_in_multiplier)
    if any(linear.bias is not None and factor != 1 for linear, factor in (inputs, others)):
        return "its projections have biases, which the multipliers of their inputs leave as they are"
    return None
