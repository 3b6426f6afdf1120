"""The rotation of a model as one table, computed by the model's own ``rotary_emb``: whatever scaling it has,
the table has.

    table = RopeTable(model.model.rotary_emb, None, head_dim, rows=max_position_embeddings)
    table.cos_sin  # [rows, head_dim] float32: cosines in the first half, sines in the second

Rotations whose angles depend on the length of the text (dynamic NTK, longrope) have no table.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpaged.custom_ops.errors import UnsupportedModelError


class LazyRotary(NamedTuple):
    """What ``rotary_emb`` would be asked for: fused layers don't need it, and a layer that falls back
    calls `compute`."""

    rotary: nn.Module
    x: Tensor
    position_ids: Tensor
    arguments: tuple[Any, ...]

    def compute(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines, as ``rotary_emb`` gives them."""
        result: tuple[Tensor, Tensor] = type(self.rotary).forward(
            self.rotary, self.x, self.position_ids, *self.arguments
        )
        return result


def lazy_forward(
    self: nn.Module, x: Tensor, position_ids: Tensor, *arguments: Any, **named: Any
) -> LazyRotary:
    """``rotary_emb.forward`` while every layer is fused; ``layer_type`` is the one argument that any
    family adds."""
    return LazyRotary(self, x, position_ids, (*arguments, *named.values()))


def computed(position_embeddings: Any) -> Any:
    """The cosines and sines themselves."""
    return (
        position_embeddings.compute() if isinstance(position_embeddings, LazyRotary) else position_embeddings
    )


class RopeTable:
    """``cos_sin [rows, head_dim]`` float32 of one ``rotary_emb`` and layer type.

    Args:
        rotary: the module.
        layer_type: what it is asked for as its third argument; None = it takes two.
        head_dim: numbers per head, all of them rotated.
        half: it gives each cosine once instead of twice.
        rows: positions.

    Raises:
        UnsupportedModelError: what the module gives is no rotation of two halves.
    """

    def __init__(
        self, rotary: nn.Module, layer_type: str | None, head_dim: int, half: bool, rows: int
    ) -> None:
        self.rotary, self.layer_type, self.head_dim, self.half = rotary, layer_type, head_dim, half
        self.cos_sin = torch.empty(0, head_dim, dtype=torch.float32, device="cpu")
        self._old: list[Tensor] = []  # captured graphs may still read them
        self.ensure(rows, next(rotary.buffers()).device)

    def ensure(self, rows: int, device: torch.device) -> None:
        """At least ``rows`` rows on ``device``."""
        if self.cos_sin.device == device and self.cos_sin.shape[0] >= rows:
            return
        if torch.compiler.is_compiling():
            raise UnsupportedModelError(
                f"fused model: a compiled step needs {rows} positions, the table has "
                f"{self.cos_sin.shape[0]}; run one step eagerly before"
            )
        self._take(self._computed(rows, device))

    def refresh(self, device: torch.device) -> None:
        """After the model was moved to ``device``, or cast: to the angles that its module gives now, whose
        frequencies ``model.to(torch.bfloat16)`` has rounded."""
        new = self._computed(self.cos_sin.shape[0], device)
        if new.device != self.cos_sin.device or new.is_meta or not torch.equal(new, self.cos_sin):
            self._take(new)

    def _computed(self, rows: int, device: torch.device) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self._compute(rows, device)

    def _take(self, cos_sin: Tensor) -> None:
        self._old.append(self.cos_sin)
        self.cos_sin = cos_sin
        # else compiled CUDA graphs would copy it in every replay
        torch._dynamo.mark_static_address(self.cos_sin, guard=False)

    def _compute(self, rows: int, device: torch.device) -> Tensor:
        ones = torch.ones(1, dtype=torch.float32, device=device)
        positions = torch.arange(rows, device=device)[None]
        if hasattr(self.rotary, "mrope_section"):  # rotated by three places at once, which are one in texts
            positions = positions.expand(3, 1, rows)
        arguments = () if self.layer_type is None else (self.layer_type,)
        angles = type(self.rotary).forward(self.rotary, ones, positions, *arguments)
        if isinstance(angles, Tensor) and angles.is_complex():  # DeepSeek-V2's
            angles = angles.real, angles.imag
        cos, sin = (x[0] for x in angles)
        middle = self.head_dim // 2
        if cos.shape[-1] != (middle if self.half else self.head_dim) or cos.dtype != torch.float32:
            raise UnsupportedModelError(
                f"{type(self.rotary).__name__} gives {cos.dtype} [{', '.join(map(str, cos.shape))}], "
                f"expected float32 for {self.head_dim}"
            )
        if not self.half and not (
            torch.equal(cos[:, :middle], cos[:, middle:]) and torch.equal(sin[:, :middle], sin[:, middle:])
        ):
            raise UnsupportedModelError(f"{type(self.rotary).__name__} does not rotate two equal halves")
        return torch.cat([cos[:, :middle], sin[:, :middle]], dim=-1).contiguous()


class Unrotated(RopeTable):
    """A table for kernels that always rotate, of layers without a rotation: by no angle, one row for all
    positions.

    Args:
        head_dim: as `RopeTable`'s.
        rows: positions.
        device: where the layers are.
    """

    def __init__(self, head_dim: int, rows: int, device: torch.device) -> None:
        self.head_dim, self._old = head_dim, []
        self.cos_sin = torch.empty(0, head_dim, dtype=torch.float32, device="cpu")
        self.ensure(rows, device)

    def _compute(self, rows: int, device: torch.device) -> Tensor:
        row = torch.ones(self.head_dim, dtype=torch.float32, device=device)
        row[self.head_dim // 2 :] = 0
        return row.expand(rows, self.head_dim)
