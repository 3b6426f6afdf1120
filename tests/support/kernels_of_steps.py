"""Which kernels a step takes on an H200, by the functions that choose them: from shapes, on any machine."""

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

from torchpaged.custom_ops.attention.call import Specialisation
from torchpaged.custom_ops.attention.cuda import prefill_shape, specialise
from torchpaged.custom_ops.attention.cuda.paged_attention import is_mostly_prompts
from torchpaged.custom_ops.attention.limits import MAX_DECODE_QUERY_LEN
from torchpaged.custom_ops.attention.triton.config import SCANS, decode_len_in_mixed, prefill_tiles
from torchpaged.custom_ops.cache_write.triton.rope_write_kv import head_tiles
from torchpaged.custom_ops.layers.cuda.linear_shape import MAX_TOKENS, token_bucket
from torchpaged.custom_ops.step_end.triton.sample_tokens import sample_tiles

SMS, SHARED_PER_SM, VOCABULARY = 132, 228 << 10, 128_256


def attention_kernels(
    spec: Specialisation, num_reqs: int, num_tokens: int, max_query_len: int, columns: int
) -> set[Hashable]:
    """Of the ``cuda`` backend, and of the ``triton`` one where that would run them."""
    call: Any = SimpleNamespace(
        q=SimpleNamespace(shape=(num_tokens, spec.group * spec.num_kv_heads)),
        num_reqs=num_reqs,
        max_query_len=max_query_len,
        capacity=columns * spec.block_size,
    )

    def decode(query_len: int, longest: int) -> Hashable:
        pairs = num_reqs * spec.num_kv_heads
        sizes = {"sms": SMS, "shared_per_sm": SHARED_PER_SM, "longest": longest}
        return specialise.decode_config(spec, query_len, pairs, early=True, **sizes)

    even = prefill_shape.is_even(call, spec, SMS)
    if max_query_len <= MAX_DECODE_QUERY_LEN:
        if not (specialise.many_rows(spec, max_query_len) and even):
            return {decode(max_query_len, 0)}
        split = prefill_shape.may_split(call, spec, 0, SMS)
        return {prefill_shape.prefill_config(spec, prefill_shape.Mode(0, split))}
    short = decode_len_in_mixed(spec.group, num_reqs, num_tokens, max_query_len)
    if prefill_shape.is_slower(call, spec, SMS) is not None:
        tiles = prefill_tiles(spec.dim, spec.group, 2, max_query_len, call.capacity, True)
        divisible = {columns == 1: "one", columns % 16 == 0: "sixteen"}.get(True)
        scan = next((size for size in SCANS if num_reqs <= size), SCANS[-1])
        return {("triton", tiles, short, divisible), ("triton decode", short, scan, num_reqs <= scan)}
    short = 0 if even and is_mostly_prompts(call) else short
    split = prefill_shape.may_split(call, spec, short, SMS)
    prefill = prefill_shape.prefill_config(spec, prefill_shape.Mode(short, split))
    return {prefill, decode(short, short)} if short else {prefill}


def step_kernels(
    spec: Specialisation, num_reqs: int, num_tokens: int, max_query_len: int, columns: int, num_logits: int
) -> set[Hashable]:
    """Of a whole step, with first tokens of ``num_logits`` requests."""
    found = attention_kernels(spec, num_reqs, num_tokens, max_query_len, columns)
    heads = spec.group * spec.num_kv_heads
    found |= {("write", head_tiles(num_tokens, heads, spec.num_kv_heads, spec.dim // 2, 2))}
    for count in (num_tokens, num_logits):
        found |= {("linear", token_bucket(count))} if 1 <= count <= MAX_TOKENS else set()
    if num_logits:
        found |= {("sample", sample_tiles(num_logits, VOCABULARY), num_logits == 1)}
    return found
