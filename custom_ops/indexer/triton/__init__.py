"""The indexer's kernels in Triton; the selection by torch's own kernels."""
