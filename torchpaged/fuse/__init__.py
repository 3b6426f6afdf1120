"""Whole-model passes for decode: fewer, larger kernels. ``torchpaged.hf`` gives out the same names.

passes.py     fuse and unfuse;  held.py: for the time of an engine;  architectures.py: the families;
              fusible.py: which layers, and why not;  report.py, launch_count.py: a `FusionReport`
layers.py     the forward of a fused layer;  attention_layers.py, latent_layers.py, state_layers.py: what
              mixes its tokens;  ends.py: before and behind the layers;
              stacked.py, rotations.py, rope_table.py: their constants
"""

from torchpaged.fuse.passes import fuse, unfuse
from torchpaged.fuse.report import FusionReport

__all__ = [
    "FusionReport",
    "fuse",
    "unfuse",
]
