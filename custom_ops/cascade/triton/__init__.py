"""Shared prefixes in Triton: two calls of its attention, and its merge."""
