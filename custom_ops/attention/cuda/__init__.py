"""Attention in CUDA C++, compiled at run time by `torchpaged.custom_ops.cuda.jit`."""
