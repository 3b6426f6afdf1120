"""Paged attention on this machine: ``torchpaged bench attention`` (needs torch only).

cases.py       what is measured: named batches, their useful bytes and FLOPs
inputs.py      the tensors of a case: rotated, shuffled KV caches, and the float32 oracle
contender.py   what is measured on a case, and torchpaged's backends as such
case.py        one case;  run.py: one run;  summary.py: what a reader sees

Peers are measured in a checkout: benchmarks/bench_attention.py.
"""

from torchpaged.bench.attention.run import Options, run, split
from torchpaged.bench.attention.summary import exit_code

__all__ = [
    "Options",
    "exit_code",
    "run",
    "split",
]
