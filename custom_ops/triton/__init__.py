"""Triton kernels, one family per file; each module is imported at its op's first launch. Needs torch and triton only."""
