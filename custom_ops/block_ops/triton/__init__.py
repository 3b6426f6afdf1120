"""Whole blocks of a paged cache in Triton."""
