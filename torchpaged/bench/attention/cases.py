"""The registry of benchmark cases: `SUITES` maps a suite's name to its cases.

    for case in select_cases(["decode"], "64x4k"):
        print(case.name, case.useful_bytes(), case.flops())

A case is data only; ``inputs.make_inputs`` turns it into tensors. A case's name says everything that sets it
apart: ``heads/kv_heads/head_dim lengths block``, and the KV dtype where it differs. Attention is
causal throughout.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

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
        shuffled: whether a request's blocks lie in random order; else one behind the other.
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
    def is_decode(self) -> bool:
        """Whether every request has a single query token."""
        return max(self.query_lens) == 1

    @property
    def num_decodes(self) -> int:
        """Requests of one query token that come first, if only longer queries follow them; else, and if none
        follow, 0."""
        count = sum(query == 1 for query in self.query_lens)
        return count if 0 < count < len(self.query_lens) and max(self.query_lens[:count]) == 1 else 0

    def useful_bytes(self) -> int:
        """Bytes of keys and values that one call must read once: the numerator of every TB/s figure."""
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize

    def flops(self) -> int:
        """Multiply-adds times two of both products over the (query, key) pairs that the causal mask
        leaves visible."""
        pairs = sum(
            query * (seq - query) + query * (query + 1) // 2
            for query, seq in zip(self.query_lens, self.seq_lens, strict=True)
        )
        return 4 * self.num_heads * self.head_dim * pairs

    def ideal_us(self, bandwidth: float, flop_rate: float) -> tuple[float, str]:
        """The roofline: microseconds at ``bandwidth`` bytes/s or ``flop_rate`` FLOP/s, the longer of the two,
        and which it is."""
        memory, compute = self.useful_bytes() / bandwidth * 1e6, self.flops() / flop_rate * 1e6
        return (memory, "memory") if memory >= compute else (compute, "compute")


def _length(tokens: int) -> str:
    return f"{tokens // K}k" if tokens >= K and tokens % K == 0 else str(tokens)


def _case(
    suite: str,
    heads: tuple[int, int, int],
    lengths: str,
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | int = 1,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    shuffled: bool = True,
) -> AttentionCase:
    queries = (query_lens,) * len(seq_lens) if isinstance(query_lens, int) else tuple(query_lens)
    name = f"{heads[0]}/{heads[1]}/{heads[2]} {lengths} b{block_size}"
    if kv_dtype is not None:
        name += f" {str(kv_dtype).removeprefix('torch.')}"
    name += "" if shuffled else " sequential"
    return AttentionCase(
        name, *heads, tuple(seq_lens), queries, block_size, dtype, kv_dtype or dtype, suite, shuffled
    )


def lognormal_lengths(num_reqs: int = 128) -> list[int]:
    """Skewed lengths as chat traffic has them: lognormal(6.5, 1.2) cut to 16 ... 16384 tokens, the same in
    every run."""
    source = random.Random(0)
    return [max(16, min(16384, int(source.lognormvariate(6.5, 1.2)))) for _ in range(num_reqs)]


def _uniform(
    suite: str, heads: tuple[int, int, int], shapes: Sequence[tuple[int, int]], **options: object
) -> list[AttentionCase]:
    return [_case(suite, heads, f"{reqs}x{_length(seq)}", [seq] * reqs, **options) for reqs, seq in shapes]  # type: ignore[arg-type]


def _decode() -> list[AttentionCase]:
    shapes = [(1, K), (1, 8 * K), (8, K), (8, 8 * K), (64, 4 * K), (256, K), (16, 32 * K), (1, 128 * K)]
    return [
        *_uniform("decode", LLAMA_8B, shapes),
        _case("decode", LLAMA_8B, "1x128k+127x512", [128 * K] + [512] * 127),
        _case("decode", LLAMA_8B, "128-lognormal", lognormal_lengths()),
        *_uniform("decode", LLAMA_8B, [(8, 8 * K), (64, 4 * K)], block_size=64),
        *(
            case
            for heads in (SMOLLM2, GPT_OSS, QWEN25_7B)
            for case in _uniform("decode", heads, [(8, 8 * K), (64, 4 * K)])
        ),
    ]


def _whole(
    suite: str,
    heads: tuple[int, int, int],
    shapes: Sequence[tuple[int, int]],
    kv_dtype: torch.dtype | None = None,
) -> list[AttentionCase]:
    return [
        _case(suite, heads, f"{reqs}x{_length(seq)} whole", [seq] * reqs, seq, kv_dtype=kv_dtype)
        for reqs, seq in shapes
    ]


def _chunks(
    suite: str, shapes: Sequence[tuple[int, int]], kv_dtype: torch.dtype | None = None
) -> list[AttentionCase]:
    """One request's chunk each: its tokens, and the tokens before them."""
    return [
        _case(suite, LLAMA_8B, f"chunk {n} on {_length(before)}", [before + n], n, kv_dtype=kv_dtype)
        for n, before in shapes
    ]


def _prefill() -> list[AttentionCase]:
    """Whole prompts, other widths of heads, and chunks from those that are cut to those that fill a GPU."""
    return [
        *_whole("prefill", LLAMA_8B, [(1, 512), (8, 512), (6, 700), (1, 3000)]),
        *_whole("prefill", LLAMA_8B, [(1, 4 * K), (1, 8 * K), (1, 16 * K)]),
        *_whole("prefill", (32, 8, 64), [(1, 4 * K)]),
        *_whole("prefill", (32, 32, 96), [(1, 4 * K)]),
        *_whole("prefill", (16, 8, 256), [(1, 4 * K)]),
        *_chunks("prefill", [(16, 4 * K), (64, 32 * K), (256, 8 * K), (512, 32 * K)]),
    ]


def _prefill_fp8() -> list[AttentionCase]:
    e4m3 = torch.float8_e4m3fn
    return [
        *_whole("prefill-fp8", LLAMA_8B, [(8, 512), (1, 4 * K), (1, 16 * K)], e4m3),
        *_chunks("prefill-fp8", [(64, 32 * K), (512, 32 * K)], e4m3),
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
        decode = f"{num_decodes}x{_length(length)} decode"
        chunk = f"{num_chunks} chunk{'s' if num_chunks > 1 else ''} {tokens} on {_length(context)}"
        cases += [
            _case(
                "mixed",
                LLAMA_8B,
                f"{decode} + {chunk}",
                decodes + chunks,
                [1] * num_decodes + [tokens] * num_chunks,
            ),
            _case("mixed", LLAMA_8B, f"{decode} alone", decodes),
            _case("mixed", LLAMA_8B, f"{chunk} alone", chunks, tokens),
        ]
    return cases


def _block_size() -> list[AttentionCase]:
    """What blocks cost: their size, their order, and for a prompt that there are any: its last case is one
    block, a contiguous cache."""
    return [
        *(
            case
            for size in (1, 16, 64, 256)
            for case in _uniform("block-size", LLAMA_8B, [(64, 4 * K)], block_size=size)
        ),
        *_uniform("block-size", LLAMA_8B, [(64, 4 * K), (8, 8 * K)], shuffled=False),
        *_uniform("block-size", LLAMA_8B, [(8, 8 * K)]),
        _case("block-size", LLAMA_8B, "1x16k whole", [16 * K], 16 * K),
        _case("block-size", LLAMA_8B, "1x16k whole", [16 * K], 16 * K, block_size=16 * K, shuffled=False),
    ]


def _smoke() -> list[AttentionCase]:
    small, float32 = (8, 2, 64), torch.float32
    return [
        _case("smoke", small, "edges decode", [1, 15, 16, 17, 33, 200], dtype=float32),
        _case("smoke", small, "4x512 decode", [512] * 4),
        _case("smoke", small, "4x256 q4 speculative", [256] * 4, 4),
        _case("smoke", small, "2x96 whole", [96] * 2, 96, dtype=float32),
        _case("smoke", small, "3x100 decode + chunk 40 on 60", [100] * 4, [1, 1, 1, 40]),
    ]


SUITES: dict[str, tuple[AttentionCase, ...]] = {
    "decode": tuple(_decode()),
    "decode-fp8": tuple(
        _uniform(
            "decode-fp8", LLAMA_8B, [(64, 4 * K), (8, 8 * K), (16, 32 * K)], kv_dtype=torch.float8_e4m3fn
        )
    ),
    "speculative": tuple(
        _case("speculative", LLAMA_8B, f"{n}x{_length(seq)} q4", [seq] * n, 4)
        for n, seq in ((8, 8 * K), (64, 4 * K))
    ),
    "prefill": tuple(_prefill()),
    "prefill-fp8": tuple(_prefill_fp8()),
    "mixed": tuple(_mixed()),
    "block-size": tuple(_block_size()),
    "smoke": tuple(_smoke()),
}


def select_cases(
    suites: Sequence[str], substring: str = "", dtype: torch.dtype | None = None
) -> list[AttentionCase]:
    """The cases of ``suites``, in order, whose name contains ``substring``.

    Args:
        suites: names in `SUITES`; "all" stands for every suite but smoke.
        substring: of the case's name, in any letter case; "" keeps every case.
        dtype: run the queries, and the caches that have the queries' dtype, in this one instead of the
            case's own.

    Raises:
        ArgumentError: a suite is unknown, or no case is left.
    """
    names = [
        name
        for suite in suites
        for name in ([s for s in SUITES if s != "smoke"] if suite == "all" else [suite])
    ]
    unknown = [name for name in names if name not in SUITES]
    if unknown or not names:
        raise ArgumentError(
            "suite", f"one of all, {', '.join(SUITES)}", repr(unknown[0]) if unknown else "none"
        )
    chosen = [
        case
        for name in dict.fromkeys(names)
        for case in SUITES[name]
        if substring.lower() in case.name.lower()
    ]
    if not chosen:
        listed = "; ".join(case.name for name in dict.fromkeys(names) for case in SUITES[name])
        raise ArgumentError("case", f"part of a case's name ({listed})", repr(substring))
    if dtype is None:
        return chosen
    return [
        replace(case, dtype=dtype, kv_dtype=dtype if case.kv_dtype == case.dtype else case.kv_dtype)
        for case in chosen
    ]
