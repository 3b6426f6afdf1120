"""The registry of benchmark cases: `SUITES` maps a suite's name to its cases.

    for case in select_cases(["decode"], "64x4k"):
        print(case.name, case.useful_bytes(), case.flops())

A case is data only; ``inputs.make_inputs`` turns it into tensors. A case's name says everything that sets it
apart: ``heads/kv_heads/head_dim lengths block``, and the KV dtype where it differs, and the mask that hides
blocks. Attention is causal throughout.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from torchpaged.custom_ops.attention.mask import BlockSparse, Mask
from torchpaged.custom_ops.errors import ArgumentError

LLAMA_8B = (32, 8, 128)  # num_heads, num_kv_heads, head_dim
SMOLLM2 = (9, 3, 64)
GPT_OSS = (64, 8, 64)
QWEN25_7B = (28, 4, 128)
K = 1024


@dataclass(frozen=True)
class AttentionCase:
    """One attention call.

    Attributes:
        name: as ``--case`` matches it and tables show it.
        num_heads, num_kv_heads, head_dim: the geometry.
        seq_lens: KV tokens of each request, this step's included.
        query_lens: new tokens of each request.
        block_size: tokens per block.
        dtype: of queries and outputs.
        kv_dtype: of the caches.
        suite: the suite it belongs to.
        shuffled: whether a request's blocks lie in random order; else in ascending order.
        block_sparse: the mask that hides blocks of keys, if there is one.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    suite: str
    shuffled: bool = True
    block_sparse: BlockSparse | None = None

    def __post_init__(self) -> None:
        if len(self.seq_lens) != len(self.query_lens):
            raise ArgumentError(
                "query_lens", f"one per request ({len(self.seq_lens)})", str(len(self.query_lens))
            )
        if any(not 0 < query <= seq for query, seq in zip(self.query_lens, self.seq_lens, strict=True)):
            raise ArgumentError("query_lens", "1 to seq_len tokens for every request", str(self.query_lens))
        if self.num_heads % self.num_kv_heads:
            raise ArgumentError(
                "num_heads", f"a multiple of num_kv_heads ({self.num_kv_heads})", str(self.num_heads)
            )

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return sum(self.query_lens)

    @property
    def num_blocks(self) -> int:
        """Blocks that the requests own, the null block not counted."""
        return sum(-(-length // self.block_size) for length in self.seq_lens)

    @property
    def mask(self) -> Mask:
        """What hides keys."""
        return Mask(block_sparse=self.block_sparse)

    @property
    def is_decode(self) -> bool:
        """Whether every request has a single query token."""
        return max(self.query_lens) == 1

    def useful_bytes(self) -> int:
        """Bytes of keys and values that one call must read once, those that some head of a kv head sees: the
        numerator of every TB/s figure."""
        return 2 * self._seen[0] * self.head_dim * self.kv_dtype.itemsize

    def flops(self) -> int:
        """Multiply-adds times two of both products over the (query, key) pairs that the mask leaves
        visible, of all query heads."""
        return 4 * self._seen[1] * self.head_dim

    @cached_property
    def _seen(self) -> tuple[int, int]:
        """Keys that are seen, of all kv heads, and pairs of a query and a key that it sees, of all query
        heads."""
        keys = pairs = 0
        for count, seq in zip(self.query_lens, self.seq_lens, strict=True):
            if self.block_sparse is None:
                keys += seq * self.num_kv_heads
                pairs += (count * (seq - count) + count * (count + 1) // 2) * self.num_heads
                continue
            size, query = self.block_sparse.block_size, torch.arange(seq - count, seq)[:, None]
            first, head = torch.arange(0, seq, size), torch.arange(self.num_heads)[:, None, None]
            visible = (query + 1 - first).clamp(0, size)  # of each block up to each query
            seen = self.block_sparse.sees(query, first, head) & (visible > 0)
            pairs += int((seen.sum(0) * visible).sum())
            of_kv_heads = seen.any(1).view(self.num_kv_heads, -1, len(first)).any(1)
            keys += int((of_kv_heads * (seq - first).clamp(max=size)).sum())
        return keys, pairs

    def ideal_us(self, bandwidth: float, flop_rate: float) -> tuple[float, str]:
        """The roofline: microseconds at ``bandwidth`` bytes/s or ``flop_rate`` FLOP/s, the longer of the two,
        and which it is."""
        memory, compute = self.useful_bytes() / bandwidth * 1e6, self.flops() / flop_rate * 1e6
        return (memory, "memory") if memory >= compute else (compute, "compute")


def short_length(tokens: int) -> str:
    """ "8k" of 8192."""
    return f"{tokens // K}k" if tokens >= K and tokens % K == 0 else str(tokens)


def make_case(
    suite: str,
    heads: tuple[int, int, int],
    lengths: str,
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | int = 1,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    shuffled: bool = True,
    block_sparse: BlockSparse | None = None,
) -> AttentionCase:
    """A case under its name; ``query_lens``: one number for all requests, or one each."""
    queries = (query_lens,) * len(seq_lens) if isinstance(query_lens, int) else tuple(query_lens)
    name = f"{heads[0]}/{heads[1]}/{heads[2]} {lengths} b{block_size}"
    if kv_dtype is not None:
        name += f" {str(kv_dtype).removeprefix('torch.')}"
    name += "" if shuffled else " sequential"
    if block_sparse is not None:
        size, local, stride, _, step, per_step = block_sparse
        name += f" sparse {size}: {local} + 1/{stride}"
        name += "" if step == 0 else " by head" if per_step == 1 else f" by {per_step} heads"
    kinds = block_size, dtype, kv_dtype or dtype
    return AttentionCase(name, *heads, tuple(seq_lens), queries, *kinds, suite, shuffled, block_sparse)


def equal_requests(
    suite: str,
    heads: tuple[int, int, int],
    shapes: Sequence[tuple[int, int]],
    whole: bool = False,
    **options: Any,
) -> list[AttentionCase]:
    """Batches of ``(requests, their tokens)``: decodes, or ``whole`` prompts."""
    words = " whole" if whole else ""
    return [
        make_case(suite, heads, f"{n}x{short_length(seq)}{words}", [seq] * n, seq if whole else 1, **options)
        for n, seq in shapes
    ]


def chunks(suite: str, shapes: Sequence[tuple[int, int]], **options: Any) -> list[AttentionCase]:
    """One request's chunk each: its tokens, and the tokens before them."""
    return [
        make_case(suite, LLAMA_8B, f"chunk {n} on {short_length(before)}", [before + n], n, **options)
        for n, before in shapes
    ]


def lognormal_lengths(num_reqs: int = 128) -> list[int]:
    """Skewed lengths as chat traffic has them: lognormal(6.5, 1.2) cut to 16 ... 16384 tokens, the same in
    every run."""
    source = random.Random(0)
    return [max(16, min(16384, int(source.lognormvariate(6.5, 1.2)))) for _ in range(num_reqs)]


def _decode() -> list[AttentionCase]:
    shapes = [(1, K), (1, 8 * K), (8, K), (8, 8 * K), (64, 4 * K), (256, K), (16, 32 * K), (1, 128 * K)]
    return [
        *equal_requests("decode", LLAMA_8B, shapes),
        make_case("decode", LLAMA_8B, "1x128k+127x512", [128 * K] + [512] * 127),
        make_case("decode", LLAMA_8B, "128-lognormal", lognormal_lengths()),
        *equal_requests("decode", LLAMA_8B, [(8, 8 * K), (64, 4 * K)], block_size=64),
        *(
            case
            for heads in (SMOLLM2, GPT_OSS, QWEN25_7B)
            for case in equal_requests("decode", heads, [(8, 8 * K), (64, 4 * K)])
        ),
    ]


def _prefill() -> list[AttentionCase]:
    """Whole prompts, other widths of heads, and chunks from those that are cut to those that fill a GPU."""
    prompts = [(1, 512), (8, 512), (6, 700), (1, 3000), (1, 4 * K), (1, 8 * K), (1, 16 * K)]
    return [
        *equal_requests("prefill", LLAMA_8B, prompts, whole=True),
        *(
            case
            for heads in ((32, 8, 64), (32, 32, 96), (16, 8, 256))
            for case in equal_requests("prefill", heads, [(1, 4 * K)], whole=True)
        ),
        *chunks("prefill", [(16, 4 * K), (64, 32 * K), (256, 8 * K), (512, 32 * K)]),
    ]


def _mixed() -> list[AttentionCase]:
    """Triples: a mixed batch, its decodes alone, its chunks alone. Shapes: decodes x their length, chunks x
    tokens on earlier tokens."""
    shapes = [
        ((32, 4 * K), (2, 512, 8 * K)),
        ((250, K), (1, 512, 8 * K)),
        ((64, 2 * K), (1, 256, 2 * K)),
        ((8, 8 * K), (1, 2 * K, 0)),
        ((63, 4 * K), (1, 128, 0)),
    ]
    cases = []
    for (num_decodes, length), (num_chunks, tokens, context) in shapes:
        decodes, chunks = [length] * num_decodes, [context + tokens] * num_chunks
        decode = f"{num_decodes}x{short_length(length)} decode"
        chunk = f"{num_chunks} chunk{'s' if num_chunks > 1 else ''} {tokens} on {short_length(context)}"
        cases += [
            make_case(
                "mixed",
                LLAMA_8B,
                f"{decode} + {chunk}",
                decodes + chunks,
                [1] * num_decodes + [tokens] * num_chunks,
            ),
            make_case("mixed", LLAMA_8B, f"{decode} alone", decodes),
            make_case("mixed", LLAMA_8B, f"{chunk} alone", chunks, tokens),
        ]
    return cases


def _smoke() -> list[AttentionCase]:
    small, float32 = (8, 2, 64), torch.float32
    return [
        make_case("smoke", small, "edges decode", [1, 15, 16, 17, 33, 200], dtype=float32),
        make_case("smoke", small, "4x512 decode", [512] * 4),
        make_case("smoke", small, "4x256 q4 speculative", [256] * 4, 4),
        make_case("smoke", small, "2x96 whole", [96] * 2, 96, dtype=float32),
        make_case("smoke", small, "3x100 decode + chunk 40 on 60", [100] * 4, [1, 1, 1, 40]),
        make_case("smoke", small, "2x200 chunk 70", [200] * 2, 70, block_sparse=BlockSparse(16, 2, 5, 1, 1)),
    ]


SUITES: dict[str, tuple[AttentionCase, ...]] = {
    "decode": tuple(_decode()),
    "prefill": tuple(_prefill()),
    "mixed": tuple(_mixed()),
    "smoke": tuple(_smoke()),
}


def select_cases(
    suites: Sequence[str],
    substring: str = "",
    dtype: torch.dtype | None = None,
    known: Mapping[str, Sequence[AttentionCase]] = SUITES,
) -> list[AttentionCase]:
    """The cases of ``suites``, in order, whose name contains ``substring``.

    Args:
        suites: names in ``known``; "all" stands for every suite but smoke.
        substring: of the case's name, in any letter case; "" keeps every case.
        dtype: run the queries, and the caches that have the queries' dtype, in this one instead of the
            case's own.
        known: the suites by name.

    Raises:
        ArgumentError: a suite is unknown, or no case is left.
    """
    names = [
        name
        for suite in suites
        for name in ([s for s in known if s != "smoke"] if suite == "all" else [suite])
    ]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ArgumentError(
            "suite", f"one of all, {', '.join(known)}", repr(unknown[0]) if unknown else "none"
        )
    chosen = [
        case
        for name in dict.fromkeys(names)
        for case in known[name]
        if substring.lower() in case.name.lower()
    ]
    if not chosen:
        listed = "; ".join(case.name for name in dict.fromkeys(names) for case in known[name])
        raise ArgumentError("case", f"part of a case's name ({listed})", repr(substring))
    if dtype is None:
        return chosen
    return [
        replace(case, dtype=dtype, kv_dtype=dtype if case.kv_dtype == case.dtype else case.kv_dtype)
        for case in chosen
    ]
