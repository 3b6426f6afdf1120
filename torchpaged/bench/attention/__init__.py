"""The attention kernels against their peers: ``torchpaged bench attention`` (needs torch only).

cases.py       what is measured: named batches, their useful bytes and FLOPs;
               in_parts.py: mixed batches cut in two
inputs.py      the tensors of a case: rotated, shuffled KV caches, and the float32 oracle
contender.py   what somebody who is measured brings;
               contenders.py: own backends, plain PyTorch, and the list of all
peers.py       FlashInfer, FlashAttention-3
case.py        one case;  run.py: one run;  summary.py, plot.py: what a reader sees
"""

from torchpaged.bench.attention.run import Options, exit_code, main, run, split

__all__ = [
    "Options",
    "exit_code",
    "main",
    "run",
    "split",
]
