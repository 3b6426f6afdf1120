"""Triton kernels of the state ops."""
