"""Whole-model passes for decode: fewer, larger kernels. ``torchpaged.hf`` gives out the same names.

passes.py     fuse and unfuse;  held.py: for the time of an engine;  families.py: the families, in the terms
              of architectures.py;  fusible.py: which layers, and why not;  report.py: a `FusionReport`
layers.py     the forward of a fused layer;  ends.py: before and behind the layers;  mixers.py: what mixes a
              layer's tokens, of the kinds in attention_layers.py, latent_layers.py and state_layers.py;
              experts.py: mixtures of experts;  multipliers.py: Falcon-H1's;
              stacked.py, rotations.py, rope_table.py: their constants
"""

from torchpaged.fuse.passes import fuse, unfuse
from torchpaged.fuse.report import FusionReport

__all__ = ["FusionReport", "fuse", "unfuse"]
