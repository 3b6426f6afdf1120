"""Benchmarks of the attention kernels against their peers: ``torchpaged bench attention``.

    cases.py       what is measured: named batches, their useful bytes and FLOPs
    inputs.py      the tensors of a case: rotated, shuffled KV caches, and the float32 oracle
    contender.py   what somebody who is measured brings;  contenders.py: own backends and plain PyTorch, and the list of all
    peers.py       FlashInfer, FlashAttention-3
    timing.py      how: graph replay on a GPU, contenders in turns; ceilings of the device
    attention.py   one run, as a function;  screen.py, plot.py: what a reader sees

Nothing in the library imports this package, and this package imports typer, rich, matplotlib and the peers only when used.
"""
