"""The suites: those of cases.py and further ones."""

import torch

from attention_peers import cases
from attention_peers.cases import LLAMA_8B, AttentionCase, K, chunks, equal_requests, make_case, short_length
from torchpaged.custom_ops.attention.mask import BlockSparse

_E4M3 = torch.float8_e4m3fn


def _block_size() -> list[AttentionCase]:
    """What blocks cost: their size, their order, and for a prompt that there are any: its last case is one
    block, a contiguous cache."""
    return [
        *(
            case
            for size in (1, 16, 64, 256)
            for case in equal_requests("block-size", LLAMA_8B, [(64, 4 * K)], block_size=size)
        ),
        *equal_requests("block-size", LLAMA_8B, [(64, 4 * K), (8, 8 * K)], shuffled=False),
        *equal_requests("block-size", LLAMA_8B, [(8, 8 * K)]),
        *equal_requests("block-size", LLAMA_8B, [(1, 16 * K)], whole=True),
        *equal_requests("block-size", LLAMA_8B, [(1, 16 * K)], whole=True, block_size=16 * K, shuffled=False),
    ]


def _prefill_fp8() -> list[AttentionCase]:
    prompts = [(8, 512), (1, 4 * K), (1, 16 * K)]
    return [
        *equal_requests("prefill-fp8", LLAMA_8B, prompts, whole=True, kv_dtype=_E4M3),
        *chunks("prefill-fp8", [(64, 32 * K), (512, 32 * K)], kv_dtype=_E4M3),
    ]


def _block_sparse() -> list[AttentionCase]:
    """Dense, Phi-3-small's mask (a shift per query head), and one shift per kv head, whose verticals are ever
    fewer: each with decodes and a prompt."""
    patterns = (
        None,
        BlockSparse(64, 16, 8, head_step=1),
        *(BlockSparse(64, 16, stride, head_step=1, heads_per_step=4) for stride in (8, 64)),
    )
    return [
        case
        for shapes, whole in (([(8, 32 * K)], False), ([(1, 8 * K)], True), ([(1, 32 * K)], False))
        for pattern in patterns
        for case in equal_requests("block-sparse", LLAMA_8B, shapes, whole, block_sparse=pattern)
    ]


SUITES: dict[str, tuple[AttentionCase, ...]] = {
    "decode": cases.SUITES["decode"],
    "decode-fp8": tuple(
        equal_requests("decode-fp8", LLAMA_8B, [(64, 4 * K), (8, 8 * K), (16, 32 * K)], kv_dtype=_E4M3)
    ),
    "speculative": tuple(
        make_case("speculative", LLAMA_8B, f"{n}x{short_length(seq)} q4", [seq] * n, 4)
        for n, seq in ((8, 8 * K), (64, 4 * K))
    ),
    "prefill": cases.SUITES["prefill"],
    "prefill-fp8": tuple(_prefill_fp8()),
    "mixed": cases.SUITES["mixed"],
    "block-size": tuple(_block_size()),
    "block-sparse": tuple(_block_sparse()),
    "smoke": cases.SUITES["smoke"],
}
