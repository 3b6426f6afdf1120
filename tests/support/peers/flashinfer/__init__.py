"""A stand-in for FlashInfer: the same signatures, the reference's numbers, log-sum-exps in base 2."""

from .decode import BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper
from .gated_delta import chunk_gated_delta_rule as chunk_gated_delta_rule
from .prefill import BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper
