"""Attention in Triton: decode, prefill, and the merge of two results."""
