"""Mixtures of experts in CUDA C++, for Hopper."""
