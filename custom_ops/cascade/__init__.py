"""``cascade_attention``: contract, checks, fakes, reference and kernels."""
