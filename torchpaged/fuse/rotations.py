"""Which rotation each layer of a model has: one `RopeTable` per type of layer."""

from typing import Any

import torch
from torch import nn

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.few_tokens import own_forward
from torchpaged.fuse.families import ARCHITECTURES
from torchpaged.fuse.fusible import rotary_dim, why_no_table
from torchpaged.fuse.mixers import NO_ROTATION
from torchpaged.fuse.rope_table import RopeTable, Unrotated
from torchpaged.model_state import hooks_of


class Rotations:
    """Those of a model.

    Args:
        base: its decoder.
        config: of its text.
        sees_images: whether it is more than a model of texts, and its positions may be places in images.

    Attributes:
        tables: type of layer, None where all are alike -> its table, once a layer asked for it.
        unrotated: of latents that are not rotated, once such a layer asked for it.
    """

    def __init__(self, base: nn.Module, config: Any, sees_images: bool) -> None:
        self.base, self.config, self.sees_images = base, config, sees_images
        self.tables: dict[str | None, RopeTable] = {}
        self.unrotated: Unrotated | None = None

    def of(self, layer: Any) -> tuple[RopeTable | str | None, str | None]:
        """The table of a layer with attention, or NO_ROTATION; or None, and why there is none."""
        architecture = ARCHITECTURES[type(layer).__name__]
        name, rows = architecture.names.rotary, getattr(self.config, "max_position_embeddings", None)
        attention = getattr(layer, architecture.names.attention)
        rotary: Any = getattr(self.base, name, None)
        if (
            not getattr(attention, "use_rope", True)
            or not name
            or (rotary is None and hasattr(self.base, name))
        ):
            return self._unrotated(attention, rows) if architecture.rotation else (NO_ROTATION, None)
        if rotary is None or rows is None:
            return None, f"the model has no {name} or its config no max_position_embeddings"
        if not architecture.has_positions:
            return None, "its layers are not told the positions of their tokens, so no table serves them"
        if hasattr(rotary, "mrope_section") and self.sees_images:
            return None, "its positions may be places in images, so no table holds its rotation"
        if own_forward(rotary) is not None or hooks_of(rotary):
            return None, f"{name} has a forward of its own or forward hooks, which no table calls"
        layer_type = attention.layer_type if isinstance(rotary.rope_type, dict) else None
        reason = why_no_table(rotary, layer_type)
        if reason is not None:
            return None, reason
        if layer_type not in self.tables:
            half, width = architecture.half_table, rotary_dim(attention)
            try:
                self.tables[layer_type] = RopeTable(rotary, layer_type, width, half, rows)
            except UnsupportedModelError as error:
                return None, str(error)
        return self.tables[layer_type], None

    def _unrotated(self, attention: Any, rows: int | None) -> tuple[RopeTable | None, str | None]:
        """The table of latents, whose op rotates."""
        if rows is None:
            return None, "its config has no max_position_embeddings"
        if self.unrotated is None:
            self.unrotated = Unrotated(rotary_dim(attention), rows, self._device)
        return self.unrotated, None

    @property
    def _device(self) -> torch.device:
        return next(self.base.parameters()).device

    def refresh(self) -> None:
        """After the model was moved or cast."""
        if self.unrotated is not None:
            self.unrotated.refresh(self._device)
        for table in self.tables.values():
            table.refresh(next(table.rotary.buffers()).device)
