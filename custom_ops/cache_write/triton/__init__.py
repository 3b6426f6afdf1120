"""Writes into a paged cache in Triton."""
