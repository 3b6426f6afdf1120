"""Random attention configurations and batches, each out of one integer seed; what runs and checks
them: case.py.

    configuration = random_configuration(seed, backends=("cuda", "triton"))
    batch = random_batch(configuration, index)

A configuration is everything that a kernel is compiled for, so each costs a compile; its batches differ in
lengths, tables and numbers.
"""

import random
from typing import Any

import torch
from op_inputs.trees import TREE_KINDS, random_parents, words_of
from pool_layouts import PoolLayout, laid_out, moved

from fuzz.aims import AIMS, hide_blocks
from fuzz.configuration import Configuration
from fuzz.shared_prefixes import share_prefixes
from torchpaged.custom_ops.pools import FP8
from torchpaged.testing.batches import Batch, BatchSpec, make_batch

WIDTHS = (
    (40, 40),
    (48, 48),
    (59, 59),
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (100, 100),
    (112, 112),
    (128, 128),
    (160, 160),
    (192, 128),
    (256, 256),
)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
KV_DTYPES = ("same", "same", "float8_e4m3fn", "float8_e5m2")
LENGTHS = ("empty", "one", "block_edge", "short", "long", "full", "left_padded")


def _query_lens(r: random.Random, kernel: str, small: bool) -> tuple[int, int]:
    """``max_query_len`` and the longest query: often the first is above the second."""
    if kernel == "decode":
        longest = r.choice((1, 1, 1, 2, 3, 4, 5, 8))
        return r.choice((longest, longest, r.randint(longest, 8))), longest
    longest = (
        r.choice((9, 16, 17, 33, 40)) if small else r.choice((9, 16, 17, 64, 65, 129, 257, 300, 513, 1100))
    )
    return r.choice((longest, longest, longest + r.randint(1, 40), longest * 4)), longest


def _paddings(r: random.Random, unit: int) -> tuple[int, int, int]:
    """Between tokens, between heads, before the first: multiples of ``unit`` numbers, each of them
    often none."""
    return (r.choice((0, 0, 1, 2, 5)) * unit, r.choice((0, 0, 0, 1, 3)) * unit, r.choice((0, 0, 1, 3)) * unit)


def _options(r: random.Random) -> dict[str, Any]:
    """Masks and score changes; combinations too."""
    options: dict[str, Any] = {}
    if r.random() < 0.25:
        options["causal"] = False
    if r.random() < 0.3:
        options["window_left"] = r.choice((0, 1, 7, 37, 200, 100_000))
    if r.random() < 0.15:
        options["window_right"] = r.choice((0, 3, 20))
    if r.random() < 0.2:
        options["logits_soft_cap"] = r.choice((0.5, 6.0, 30.0))
    if r.random() < 0.2:
        options["chunk_size"] = r.choice((1, 16, 48, 100, 1000))
    return options


def random_configuration(
    seed: int,
    *,
    backends: tuple[str, ...] = ("cuda", "triton"),
    captures: bool = True,
    small: bool = False,
    aim: str = "",
) -> Configuration:
    """The configuration of a seed.

    Two of five are for the CUDA C++ decode kernel, if ``backends`` name it. Three of five others have
    addresses and strides that are multiples of 16 bytes and widths of 16 numbers, since vectorised kernels
    decline others. A fifth of these others hide blocks of keys.

    Args:
        seed: any integer.
        backends: names in `torchpaged.custom_ops.BACKEND_OPS` to choose from.
        captures: whether a fifth is captured into CUDA graphs.
        small: lengths and heads for a CPU.
        aim: a name in `fuzz.aims.AIMS`: all are for one kernel, whatever ``backends``
            says; "" for any.
    """
    if aim:
        r = random.Random(f"{aim}/{seed}")
        return AIMS[aim](_draw(r, seed, ("cuda",), captures, False), r)
    r = random.Random(seed)
    fitting = "cuda" in backends and not small and r.random() < 0.4
    while True:
        configuration = _draw(r, seed, ("cuda",) if fitting else backends, captures, small)
        if not fitting:
            of_blocks = random.Random(f"block_sparse/{seed}")  # all else of a seed is what it was without
            return hide_blocks(configuration, of_blocks) if of_blocks.random() < 0.2 else configuration
        if _fits_cuda_decode(configuration):
            return configuration


def _fits_cuda_decode(c: Configuration) -> bool:
    """Whether the CUDA C++ decode kernel takes it on a GPU of compute capability 9.0, as far as a
    configuration says: as `specialise.refuse`, and aligned. Written out, since a seed must mean the same on
    every machine."""
    group, query_len = c.num_heads // c.num_kv_heads, 1 << (c.max_query_len - 1).bit_length()
    rows = group * query_len
    layout, units = c.layout, (*c.q_padding, *c.out_padding)
    return (
        c.kernel == "decode"
        and c.dtype != "float32"
        and c.head_dim % 16 == 0
        and rows <= 32
        and -(-rows // 8) * c.head_dim_v <= 512
        and c.sinks in ("none", "same")
        and not any(
            unit % 8 for unit in (layout.slot_padding * 2, layout.head_padding, layout.offset, *units)
        )
    )


def _draw(
    r: random.Random, seed: int, backends: tuple[str, ...], captures: bool, small: bool
) -> Configuration:
    backend, kernel = r.choice(backends), r.choice(("decode", "decode", "prefill", "mixed"))
    aligned = r.random() < 0.6
    dim, dim_v = r.choice([w for w in WIDTHS if w[0] % 16 == 0] if aligned else WIDTHS)
    dtype, kv_dtype = r.choice(DTYPES), r.choice(KV_DTYPES)
    if backend == "cpu":
        kv_dtype = "same"  # it refuses pools of fp8
    if small:
        kv_heads, group = r.choice((1, 2, 3)), r.choice((1, 2, 3, 4, 7))
    else:
        kv_heads, group = r.choice((1, 2, 3, 4, 5, 8, 12)), r.choice((*range(1, 17), 1, 2, 4, 8))
        kv_heads = max(1, min(kv_heads, 64 // group))
    unit = 16 if aligned else 1  # numbers: 16 bytes of an fp8 pool
    layout = PoolLayout(r.random() < 0.35, *_paddings(r, unit))
    max_query_len, longest = _query_lens(r, kernel, small)
    block_size = r.choice(BLOCK_SIZES)
    num_reqs = r.choice(
        (1, 2, 3, 5)
        if small
        else (1, 2, 3, 5, 9, 16, 20, 40)
        if block_size > 64
        else (1, 2, 3, 5, 9, 16, 20, 40, 130, 140)
    )
    most_tokens = 200 if small else min(12_000, 2**23 // (kv_heads * max(dim, dim_v)))
    num_blocks = max(-(-most_tokens // block_size), 2) + num_reqs + 1
    least = -(-most_tokens // block_size)
    columns = r.choice((min(num_blocks - 1, least), least, -(-1025 // block_size), 1025 + r.randrange(1200)))
    most_tokens_of_q = (
        num_reqs * longest if kernel == "decode" else min(num_reqs * longest, longest * 3 + num_reqs * 8)
    )
    return Configuration(
        seed=seed,
        backend=backend,
        kernel=kernel,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim_v,
        dtype=dtype,
        kv_dtype=dtype if kv_dtype == "same" else kv_dtype,
        scales="none" if kv_dtype == "same" else r.choice(("none", "one", "per_head")),
        block_size=block_size,
        layout=layout,
        q_padding=_paddings(r, 8 if aligned else 1),
        out_padding=_paddings(r, 8 if aligned else 1),
        num_reqs=num_reqs,
        num_tokens=None if (varies := r.random() < 0.2) else most_tokens_of_q + r.choice((0, 3)),
        max_query_len=max_query_len,
        longest_query=longest,
        columns=columns,
        num_blocks=num_blocks,
        most_scores=2**18 if small else 2**24,
        options=_options(r),
        sinks=r.choice(("none", "none", "none", "same", "same", "float32")),
        alibi=r.random() < 0.25,
        lse=r.random() < 0.6,
        semaphore=r.random() < 0.7,
        scale=r.choice((None, None, None, 0.05, 0.3)),
        captured=captures and not varies and r.random() < 0.25,
    )


def _query_len(r: random.Random, c: Configuration, first: bool) -> int:
    if c.kernel == "decode":
        return r.randint(1, c.longest_query)
    if c.kernel == "mixed" and not first and r.random() < 0.7:
        return r.choice((1, 1, 1, 1, 2, 4, 8))
    return r.choice((c.longest_query, r.randint(1, c.longest_query), r.randint(1, min(c.longest_query, 20))))


def _seq_len(r: random.Random, c: Configuration, query: int, kind: str, capacity: int) -> int:
    """KV tokens of a request, this step's included: at most ``capacity``, and few enough for the oracle."""
    capacity = min(capacity, max(1, c.most_scores // max(1, query * c.num_heads)))
    if kind == "empty":
        return 0
    if kind == "left_padded":
        return min(query - r.randint(0, query + 2), capacity)
    before = {
        "one": 0,
        "short": r.randint(0, 60),
        "long": r.randint(0, capacity),
        "full": capacity,
        "block_edge": 0,
    }[kind]
    length = query + before
    if kind == "block_edge":
        length = max(
            query,
            c.block_size * r.randint(1, max(1, min(capacity // c.block_size, 6))) + r.choice((-1, 0, 1)),
        )
    return min(length, capacity)


def random_spec(c: Configuration, r: random.Random) -> BatchSpec:
    """Lengths of a batch that fits the configuration: empty rows and rows without queries in the middle,
    padded rows at the end."""
    live = c.num_reqs if r.random() < 0.6 else r.randint(1, c.num_reqs)
    uniform = r.randint(1, c.longest_query) if c.kernel == "decode" and r.random() < 0.7 else 0
    weights = r.choice(
        ((1, 1, 2, 6, 1, 0, 0), (2, 1, 4, 2, 2, 1, 1), (0, 0, 0, 1, 5, 0, 0), (1, 4, 4, 0, 1, 0, 1))
    )
    query_lens, seq_lens, tokens, blocks = [], [], c.num_tokens or 10**9, c.num_blocks - 1
    order = list(range(live))
    long_one = r.choice(order)
    for row in order:
        # the longest may stand anywhere
        reserved = 0 if row >= long_one or c.num_tokens is None else c.longest_query
        query = uniform or _query_len(r, c, row == long_one)
        query = 0 if r.random() < 0.05 else min(query, max(tokens - reserved, 0))
        if row == long_one and c.kernel != "decode":
            query = min(max(query, 9), tokens)
        kind = r.choices(LENGTHS, weights)[0]
        length = _seq_len(r, c, max(query, 1), kind, min(c.columns, blocks) * c.block_size)
        if c.tree and length > 0:  # a tree stands whole behind its context
            query = min(query, length)
        tokens, blocks = tokens - query, blocks - (-(-max(length, 0) // c.block_size))
        query_lens.append(query)
        seq_lens.append(length)
    padded = tokens if c.num_tokens is not None else r.choice((0, 0, 1, 3)) + (not sum(query_lens))
    return BatchSpec(
        "fuzz", tuple(seq_lens), tuple(query_lens), padded_tokens=padded, padded_reqs=c.num_reqs - live
    )


def random_batch(c: Configuration, index: int, device: torch.device | str = "cpu") -> Batch:
    """Batch ``index`` of a configuration."""
    r = random.Random(f"{c.seed}/{index}")
    dtype, kv_dtype = getattr(torch, c.dtype), getattr(torch, c.kv_dtype)
    spec = random_spec(c, r)
    used = [-(-n // c.block_size) for n in spec.seq_lens]
    batch = make_batch(
        spec,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        head_dim_v=c.head_dim_v,
        block_size=c.block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        scales=c.scales,
        seed=r.randrange(2**31),
        extra_columns=c.columns - max(1, *used),
        num_blocks=c.num_blocks,
        max_query_len=c.max_query_len,
        sinks=c.sinks != "none",
        alibi=c.alibi,
    )
    batch = laid_out(batch, c.layout, c.q_padding)
    batch.scale = batch.scale if c.scale is None else c.scale
    if c.sinks == "float32":
        batch.extras["sinks"] = batch.extras["sinks"].float()
    assert kv_dtype == dtype or kv_dtype in FP8
    if c.tree:
        words = [
            word
            for count in batch.spec.query_lens
            for word in words_of(random_parents(count, r.randrange(2**31), r.choice(TREE_KINDS)))
        ]
        words += [r.randrange(-(2**63), 2**63) for _ in range(batch.q.shape[0] - len(words))]
        batch.extras["tree_mask"] = torch.tensor(words, dtype=torch.int64)
    if c.semaphore:
        batch.extras["semaphore"] = torch.zeros(
            c.num_reqs * c.num_kv_heads + r.choice((0, 0, 7)) * (not c.captured), dtype=torch.int32
        )
    if c.groups:
        batch = share_prefixes(batch, c.groups, r)
    return moved(batch, device)
