"""Paged attention on this machine: ``torchpaged bench attention`` (needs torch only).

cases.py       what is measured: named batches, their useful bytes and FLOPs
inputs.py      the tensors of a case: rotated, shuffled KV caches, and the float32 oracle
contender.py   what is measured on a case, and torchpaged's backends as such
case.py        one case;  run.py: one run

`run` returns a document, of which `exit_code` says whether an own backend failed.
Peers are measured in a checkout: benchmarks/bench_attention.py.
"""

from torchpaged.bench.attention.run import exit_code, run

__all__ = ["exit_code", "run"]
