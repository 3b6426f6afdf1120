"""Batches that no suite has, from a seed: heads, widths, blocks and lengths as models, shards and traffic
have them.

    for case in random_cases(seed=1, count=40):
        print(case.name)

Of ten cases five are decodes, three prompts or chunks of prompts, two mixed, in turns, so that a run that is
cut short is balanced.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from attention_peers.cases import AttentionCase, make_case

_TURNS = "DPDMDPDPDM"
_MOST_BYTES, _MOST_FLOPS = 2e9, 1.6e12  # of a case: about 0.5 and 2 ms on an H200
_KV_HEADS = (1, 1, 2, 2, 3, 4, 4, 4, 5, 8, 8, 8, 8, 8, 10, 16)
_GROUPS = (1, 1, 2, 3, 4, 4, 4, 4, 5, 6, 7, 8, 8, 8, 10, 12, 16)
_WIDTHS = (64,) * 4 + (128,) * 9 + (80, 96, 192, 256, 256)

_Lengths = list[tuple[int, int]]  # query tokens and all tokens of each request


def random_cases(seed: int, count: int) -> list[AttentionCase]:
    """``count`` cases; the same for the same seed, and the first ones of more."""
    source = random.Random(seed)
    makers: dict[str, Callable[[random.Random], tuple[str, _Lengths]]] = {
        "D": _decodes,
        "P": _prompts,
        "M": _mixed,
    }
    return [_case(source, *makers[_TURNS[i % len(_TURNS)]](source), i) for i in range(count)]


def _case(source: random.Random, words: str, lengths: _Lengths, number: int) -> AttentionCase:
    kv_heads, group, width = source.choice(_KV_HEADS), source.choice(_GROUPS), source.choice(_WIDTHS)
    block, fp8 = source.choice((16, 16, 32, 64)), width in (64, 128) and source.random() < 0.1
    case = make_case(
        "random",
        (kv_heads * min(group, 128 // kv_heads), kv_heads, width),
        "",
        [seq for _, seq in lengths],
        [query for query, _ in lengths],
        block,
        torch.float16 if source.random() < 0.15 else torch.bfloat16,
        torch.float8_e4m3fn if fp8 else None,
    )
    while case.useful_bytes() > _MOST_BYTES or case.flops() > _MOST_FLOPS:
        seqs = tuple(max(1, seq * 2 // 3) for seq in case.seq_lens)
        queries = tuple(query if query <= 8 else max(9, query * 2 // 3) for query in case.query_lens)
        pairs = zip(queries, seqs, strict=True)
        case = replace(case, seq_lens=seqs, query_lens=tuple(min(pair) for pair in pairs))
    shown = f"{number}: {words} {_span(case.query_lens)} of {_span(case.seq_lens)}"
    return replace(case, name=f"{case.name.replace('  ', f' {shown} ')} {str(case.dtype)[6:]}")


def _span(lengths: Sequence[int]) -> str:
    few, most = min(lengths), max(lengths)
    return str(few) if few == most else f"{few}..{most}"


def _even(source: random.Random, low: int, high: int) -> int:
    """As often from any doubling as from another."""
    return round(low * (high / low) ** source.random())


def _contexts(source: random.Random, count: int, most: int) -> list[int]:
    """Equal, even, short, as chat traffic has them, or a few long among short ones."""
    way = source.choice(("equal", "even", "short", "chat", "few long"))
    if way == "equal":
        return [_even(source, 100, most)] * count
    if way == "chat":
        return [max(16, min(most, int(source.lognormvariate(6.5, 1.2)))) for _ in range(count)]
    top = _even(source, 400, most) if way == "even" else 600
    lengths = [source.randint(16, top) for _ in range(count)]
    if way == "few long":
        for place in source.sample(range(count), max(1, count // 40)):
            lengths[place] = _even(source, 16_000, most)
    return lengths


def _decodes(source: random.Random) -> tuple[str, _Lengths]:
    """Single tokens, or 2 to 8 of speculative verification."""
    count = _even(source, 1, 300)
    query = source.randint(2, 8) if source.random() < 0.2 else 1
    return f"{count} decodes", [(query, max(query, seq)) for seq in _contexts(source, count, 130_000)]


def _prompts(source: random.Random) -> tuple[str, _Lengths]:
    """Whole prompts, or chunks behind what is cached."""
    count, top, chunks = _even(source, 1, 16), _even(source, 60, 16_000), source.random() < 0.45
    queries = [_even(source, 50, max(60, top)) for _ in range(count)]
    if not chunks:
        return f"{count} prompts", [(query, query) for query in queries]
    cut = [min(query, 2048) for query in queries]
    return f"{count} chunks", [(query, query + _even(source, 100, 60_000)) for query in cut]


def _mixed(source: random.Random) -> tuple[str, _Lengths]:
    """Decodes beside 1 to 4 chunks, half of which begin a prompt."""
    count, chunks = _even(source, 1, 250), source.choice((1, 1, 1, 2, 3, 4))
    queries = [_even(source, 16, 2048) for _ in range(chunks)]
    before = [source.choice((0, _even(source, 100, 32_000))) for _ in queries]
    decodes = [(1, seq) for seq in _contexts(source, count, 32_000)]
    return f"{count} decodes + {chunks} chunks", decodes + [
        (query, query + cached) for query, cached in zip(queries, before, strict=True)
    ]
