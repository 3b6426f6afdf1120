"""Gated short convolutions over the states of a paged cache: those of LFM2.

The modules' fields are not public; ``tests/engine/test_states.py`` runs every class under each supported
transformers.
"""

from typing import Any

from torch import Tensor

from torchpaged.hf.families import Family, register_family
from torchpaged.hf.packed_mixers import packed_functions, state_of, state_of_attached


def _forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    layer = state_of(self, options)
    if layer is None:
        plain: Tensor = type(self).forward(self, hidden_states, **options)
        return plain
    b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
    mixed = layer.convolve(x, self.conv, gates=(b, c))
    layer.complete()
    projected: Tensor = self.out_proj(mixed)
    return projected


_CLASSES = ("Lfm2MoeShortConv", "Lfm2ShortConv", "Lfm3ShortConv")
register_family(
    Family(
        ("lfm2", "lfm2_moe", "lfm3"),
        packed=dict.fromkeys(_CLASSES, _forward),
        functions=packed_functions,
        layer=state_of_attached,
    )
)
