"""``copy_blocks``: contract, checks, reference and kernels."""
