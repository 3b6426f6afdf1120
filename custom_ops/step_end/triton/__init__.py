"""Sampling and the next step's inputs in Triton."""
