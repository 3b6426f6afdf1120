"""Limits that several rooms keep: of kernels, and of what is prepared for them."""

#: Longest query that the decode kernels take (speculative verification); longer ones go to the prefill
#: kernels.
MAX_DECODE_QUERY_LEN = 8
