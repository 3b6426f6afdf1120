"""The kind ``state``: what a layer keeps of a request as a whole, however long it is: the last inputs of a
convolution, and a matrix per head."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchpaged.cache.kinds import BlockShapes, LayerKind, LayerSpec, register_layer_kind
from torchpaged.custom_ops.checks import check_is_dtype, check_sizes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import repr_of_fields


class LayerStates(NamedTuple):
    """The pools of one layer, as the ops ``causal_conv`` and ``linear_attention`` take them. Slot 0 belongs
    to no request.

    Attributes:
        conv_state: ``[num_slots, width - 1, channels]``; empty in a layer without a convolution.
        state: ``[num_slots, num_heads, key_dim, value_dim]``; None in a layer that has a convolution alone.
    """

    conv_state: Tensor
    state: Tensor | None = None

    def __repr__(self) -> str:
        return repr_of_fields(self)


@dataclass(frozen=True)
class StateLayerSpec(LayerSpec):
    """What one layer keeps of a request.

    Attributes:
        width, channels: of its convolution; 2 and 0 where it has none.
        num_heads, key_dim, value_dim: of its linear attention; all 0 where it has none.
        state_dtype: of the matrices, which are read and written whole at each step.
        input_dtype: of a convolution's inputs; None: the cache's.

    Raises:
        ArgumentError: a convolution of no width, neither channels nor heads, or some of a matrix's sizes
            alone.
    """

    width: int
    channels: int
    num_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    state_dtype: torch.dtype = torch.float32
    input_dtype: torch.dtype | None = None

    POOLS = LayerStates
    per_request: ClassVar[bool] = True

    __repr__ = repr_of_fields

    def __post_init__(self) -> None:
        check_sizes(2, width=self.width)
        check_sizes(0 if self.num_heads else 1, channels=self.channels)
        check_is_dtype(state_dtype=self.state_dtype)
        if self.input_dtype is not None:
            check_is_dtype(input_dtype=self.input_dtype)
        sizes = self._matrix
        check_sizes(0, num_heads=sizes[0], key_dim=sizes[1], value_dim=sizes[2])
        if any(sizes) and not all(sizes):
            raise ArgumentError("num_heads, key_dim, value_dim", "all of them, or none", str(sizes))

    @property
    def _matrix(self) -> tuple[int, int, int]:
        return self.num_heads, self.key_dim, self.value_dim

    def block_shapes(self, block_size: int, dtype: torch.dtype) -> BlockShapes:
        """See `LayerSpec`: of one request, whatever ``block_size`` is."""
        shapes: BlockShapes = {"conv_state": ((self.width - 1, self.channels), self.input_dtype or dtype)}
        return shapes | ({"state": (self._matrix, self.state_dtype)} if self.num_heads else {})


register_layer_kind(LayerKind("state", StateLayerSpec))
