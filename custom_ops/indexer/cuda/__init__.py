"""The indexer's kernels in CUDA C++, for Hopper, compiled at run time by `torchpaged.custom_ops.cuda.jit`."""
