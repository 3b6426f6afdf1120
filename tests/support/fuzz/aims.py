"""Fuzzed configurations drawn for one kernel: random ones are seldom what a kernel with many
conditions takes.

``AIMS`` maps a name that ``tests/gpu/fuzz_attention.py --aim`` takes to what makes of a drawn configuration
one for that kernel. What a kernel takes is written out here, since a seed must mean the same on every
machine; tests/testing/test_fuzz_harness.py asks the kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pool_layouts import PoolLayout

from torchpaged.custom_ops.attention.mask import BlockSparse

if TYPE_CHECKING:
    from fuzz.configuration import Configuration

PREFILL_WIDTHS = (
    (32, 32),
    (64, 64),
    (64, 64),
    (96, 96),
    (128, 128),
    (128, 128),
    (128, 128),
    (192, 192),
    (256, 256),
    (192, 128),
    (128, 64),
    (64, 128),
    (96, 32),
    (64, 256),
    (256, 64),
    *((80, 80), (80, 80), (112, 112), (48, 48), (160, 160), (224, 224), (80, 128), (96, 80)),
)
CASCADE_WIDTHS = tuple(itertools.product((32, 64, 80, 96, 128, 192, 256), repeat=2))
_GROUPS = (1, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 8, 11, 12, 16, 16, 32, 64, 128)
_LONGEST = (9, 17, 64, 65, 129, 257, 300, 513, 1100)


def _of_cuda(c: Configuration, sizes: tuple[int, int, int, int], dtype: str) -> dict[str, Any]:
    """What the CUDA kernels take in common; ``sizes``: kv heads, group, head_dim and head_dim_v."""
    kv_heads, group, dim, dim_v = sizes
    return {
        "backend": "cuda",
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "head_dim_v": dim_v,
        "dtype": dtype,
        "kv_dtype": dtype,
        "scales": "none",
        "q_padding": _eights(c.q_padding),
        "out_padding": _eights(c.out_padding),
    }


def for_cuda_prefill(c: Configuration, r: random.Random) -> Configuration:
    """For prefill.cu: 16-bit numbers, widths in squares of 16, 32 or 64 columns, blocks of 8 to the keys of a
    step, aligned rows.

    A third may hold short queries next to long ones, which decode.cu takes: those have few enough rows for
    it.
    """
    dim, dim_v = r.choice(PREFILL_WIDTHS)
    mixed = r.random() < 0.35
    group = r.choice([n for n in _GROUPS if not mixed or (n <= 32 and -(-n // 8) * dim_v <= 512)])
    kv_heads = max(1, min(r.choice((1, 2, 3, 4, 5, 8)), 32 // group))
    dtype = r.choice(("bfloat16", "float16"))
    block_size = r.choice((8, 16, 16, 16, 32, 64, 64 if dim > 192 or dim_v > 128 else 128))
    heads_first = r.random() < 0.35
    layout = PoolLayout(
        heads_first,
        8 * r.choice((0, 0, 1, 5)),
        0 if heads_first else 64 * r.choice((0, 0, 1)),
        8 * r.choice((0, 0, 1, 3)),
    )
    longest = r.choice(_LONGEST)
    max_query_len = r.choice((longest, longest, longest + r.randint(1, 40)))
    most_rows = min(8192, 2**24 // (kv_heads * group * max(dim, dim_v)))  # of q and out, which padding fills
    num_reqs = max(1, min(r.choice((1, 1, 2, 3, 5, 9, 20, 40)), most_rows // max_query_len))
    if mixed:
        num_reqs = r.choice((2, 3, 5, 9, 20, 40, 130))
    most_tokens = min(12_000, 2**23 // (kv_heads * max(dim, dim_v)))
    least = -(-most_tokens // block_size)
    varies = num_reqs == 1 and not c.captured and r.random() < 0.5
    rows = num_reqs * max_query_len + r.choice((0, 0, 3))  # no room for more than ``num_reqs`` long queries
    if mixed:
        rows = min(longest * r.choice((1, 2, 3)) + num_reqs * 2, num_reqs * max_query_len - 1)
    return dataclasses.replace(
        c,
        **_of_cuda(c, (kv_heads, group, dim, dim_v), dtype),
        kernel="mixed" if mixed else "prefill",
        block_size=block_size,
        layout=layout,
        num_reqs=num_reqs,
        num_tokens=None if varies else rows,
        max_query_len=max_query_len,
        longest_query=longest,
        columns=r.choice((least, -(-1025 // block_size), 1025 + r.randrange(1200))),
        num_blocks=least + num_reqs + 1,
        most_scores=2**26,
        sinks=r.choice(("none", "none", "same")),
    )


def for_cuda_prefill_fp8(c: Configuration, r: random.Random) -> Configuration:
    """The same over caches of either fp8 format, with and without scales; slots that begin at multiples of 16
    numbers; blocks of at most 64 where a step has 64 keys."""
    c = for_cuda_prefill(c, r)
    layout = dataclasses.replace(c.layout, slot_padding=2 * c.layout.slot_padding, offset=2 * c.layout.offset)
    narrow = c.head_dim == 192 and c.block_size == 128
    return dataclasses.replace(
        c,
        head_dim=128 if narrow else c.head_dim,
        layout=layout,
        kv_dtype=r.choice(("float8_e4m3fn", "float8_e5m2")),
        scales=r.choice(("none", "one", "per_head")),
    )


def for_cuda_decode(c: Configuration, r: random.Random) -> Configuration:
    """For decode.cu, with so many requests that a CTA goes through several of them, or a third with so few
    that a pair has many parts; most heads are 96 numbers wide or more."""
    dim, dim_v = r.choice(((128, 128), (128, 128), (128, 128), (96, 96), (192, 128), (256, 256), (64, 64)))
    longest = r.choice((1, 1, 1, 1, 2, 4))
    few = r.random() < 0.35
    groups = [
        n for n in (1, 2, 3, 4, 4, 5, 7, 8) if n * longest <= 16 and -(-n * longest // 8) * dim_v <= 512
    ]
    if few:  # parts so large that they are merged in two steps
        groups = [n for n in groups if n * longest * max(dim, dim_v) >= 1024] or groups
    group = r.choice(groups)
    kv_heads = r.choice((1, 1, 2, 3) if few else (2, 3, 4, 5, 8))
    num_reqs = r.choice((1, 1, 2, 3) if few else [n for n in (40, 70, 130, 200, 300) if n * kv_heads > 132])
    dtype = r.choice(("bfloat16", "float16"))
    block_size = r.choice((8, 16, 16, 32, 64))
    heads_first = r.random() < 0.35
    layout = PoolLayout(heads_first, 16 * r.choice((0, 0, 1)), 0, 16 * r.choice((0, 0, 1)))
    least = -(-min(12_000, 2**23 // (kv_heads * max(dim, dim_v))) // block_size)
    return dataclasses.replace(
        c,
        **_of_cuda(c, (kv_heads, group, dim, dim_v), dtype),
        kernel="decode",
        block_size=block_size,
        layout=layout,
        num_reqs=num_reqs,
        num_tokens=num_reqs * longest + r.choice((0, 3)),
        max_query_len=longest,
        longest_query=longest,
        columns=r.choice((least, -(-1025 // block_size))),
        num_blocks=least + num_reqs + 1,
        sinks=r.choice(("none", "none", "same")),
    )


def for_trees(c: Configuration, r: random.Random) -> Configuration:
    """For trees of up to 64 query tokens: half of them as drawn, where those are decodes, half for prefill.cu
    with either kind of cache; a quarter on Triton's kernels."""
    if c.kernel != "decode" or r.random() < 0.5:
        c = r.choice((for_cuda_prefill, for_cuda_prefill, for_cuda_prefill_fp8))(c, r)
    longest = min(c.longest_query, 64)
    options = {name: value for name, value in c.options.items() if name != "causal"}
    return dataclasses.replace(
        c,
        backend=r.choice(("cuda", "cuda", "cuda", "triton")),
        max_query_len=min(c.max_query_len, 64),
        longest_query=longest,
        options=options,
        tree=True,
    )


def for_block_sparse(c: Configuration, r: random.Random) -> Configuration:
    """For masks that hide blocks, on Triton's kernels, half of them where the `cuda` backend leaves them the
    call."""
    return hide_blocks(dataclasses.replace(c, backend=r.choice(("cuda", "triton"))), r)


def hide_blocks(c: Configuration, r: random.Random) -> Configuration:
    """The same with a `BlockSparse`: blocks that tiles of keys divide and others, verticals at even distances
    (where kernels leave tiles out) and at others."""
    stride = r.choice((1, 2, 3, 4, 8, 8, 16, 40))
    pattern = BlockSparse(
        block_size=r.choice((1, 7, 16, 16, 32, 64, 64, 128)),
        local_blocks=r.choice((1, 1, 1, 2, 3, 16)),
        vertical_stride=stride,
        offset=r.choice((0, 1, 1, r.randrange(50))),
        head_step=r.choice((0, 1, 1, max(1, stride // c.num_heads), r.randint(1, stride))),
        heads_per_step=r.choice((1, 1, c.num_heads // c.num_kv_heads, r.randint(1, c.num_heads))),
    )
    others = {name: value for name, value in c.options.items() if name != "causal"}
    return dataclasses.replace(c, options=others | {"block_sparse": pattern})


def for_cascade(c: Configuration, r: random.Random) -> Configuration:
    """For cascade_attention, in its own launches or in two calls: every pair of `CASCADE_WIDTHS`, one seed
    after the other, then over fp8, then the same captured, then all again; every fourth round on Triton's."""
    turn, pair = divmod(c.seed, len(CASCADE_WIDTHS))
    dim, dim_v = CASCADE_WIDTHS[pair]
    group, kv_heads = r.choice(
        ((1, 8), (2, 3), (3, 1), (4, 2), (4, 8), (5, 1), (5, 3), (7, 1), (8, 1), (16, 1))
    )
    longest = r.choice((1, 1, 1, 2, 4, 5, 8, 8, 17))
    num_reqs = r.choice((1, 3, 3, 6, 20, 40, 130))
    dtype = r.choice(("bfloat16", "bfloat16", "float16"))
    kv_dtype = r.choice(("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2")) if turn % 2 else dtype
    block_size = r.choice((8, 16, 16, 16, 32, 64))
    layout = PoolLayout(r.random() < 0.25, 16 * r.choice((0, 0, 1)), 0, 16 * r.choice((0, 0, 1)))
    least = -(-min(12_000, 2**22 // (kv_heads * max(dim, dim_v))) // block_size)
    return dataclasses.replace(
        c,
        backend="triton" if turn // 4 % 4 == 3 else "cuda",
        kernel="decode" if longest <= 8 else "prefill",
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim_v,
        dtype=dtype,
        kv_dtype=kv_dtype,
        scales="none" if kv_dtype == dtype else r.choice(("none", "one", "per_head", "per_head")),
        block_size=block_size,
        layout=layout,
        q_padding=_eights(c.q_padding),
        out_padding=_eights(c.out_padding),
        num_reqs=num_reqs,
        num_tokens=num_reqs * longest + r.choice((0, 3)),
        max_query_len=r.choice((longest, longest, max(longest, 8))),
        longest_query=longest,
        columns=r.choice((least, -(-1025 // block_size))),
        num_blocks=least + num_reqs + 1,
        options={name: value for name, value in c.options.items() if name == "logits_soft_cap"},
        sinks=r.choice(("none", "none", "same")),
        alibi=False,
        captured=turn // 2 % 2 == 1,
        groups=r.choice((1, 2, 2, 3, 8)),
    )


def _eights(paddings: tuple[int, int, int]) -> tuple[int, int, int]:
    between_tokens, between_heads, before = paddings
    return between_tokens // 8 * 8, between_heads // 8 * 8, before // 8 * 8


AIMS: dict[str, Callable[[Configuration, random.Random], Configuration]] = {
    "cuda-prefill": for_cuda_prefill,
    "cuda-prefill-fp8": for_cuda_prefill_fp8,
    "cuda-decode": for_cuda_decode,
    "tree": for_trees,
    "block-sparse": for_block_sparse,
    "cascade": for_cascade,
}
