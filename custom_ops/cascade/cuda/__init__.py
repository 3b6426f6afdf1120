"""Shared prefixes in CUDA C++, by the kernels of ``paged_attention``."""
