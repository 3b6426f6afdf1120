"""Inputs of ``rope_write_latent`` for tests of a backend: slices of one product, shuffled and skipped slots,
NaN pools.

    inputs = make_latent_writes(**LATENT_WRITES["deepseek_v3"], dtype=torch.bfloat16)
    assert_latent_write_close(BACKEND_OPS["triton"], inputs)
"""

from typing import Any

import torch
from torch import Tensor

from op_inputs.rope import assert_rope_close
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, row_bytes, unpack
from torchpaged.testing.batches import on_host

#: Shapes and rotations, by families that have them: arguments of `make_latent_writes`.
LATENT_WRITES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"rotation": "pairs", "normed": True},
    "deepseek_v3": {"rotation": "pairs_to_halves", "normed": True, "num_heads": 5},
    "minicpm3": {"rotation": "halves", "normed": True, "nope": 24, "rank": 80},
    "without_norm": {"num_tokens": 1, "nope": 5, "rope": 2},
    "many_tokens": {"num_tokens": 70, "rotation": "pairs_to_halves", "normed": True, "num_heads": 2},
}


@on_host()
def make_latent_writes(
    *,
    num_tokens: int = 7,
    num_heads: int = 3,
    nope: int = 16,
    rank: int = 136,
    rope: int = 8,
    rotation: str = "halves",
    normed: bool = False,
    fp8: bool = False,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The arguments by name. q, kv_c and k_pe are slices of one tensor, up_keys is one of a projection; slots
    are shuffled, every third is -1. ``q_out`` and the pool hold NaN."""
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(device, dtype)

    widths = [num_heads * (nope + rope), rank, rope]
    q, kv_c, k_pe = randn(num_tokens, sum(widths)).split(widths, dim=1)
    angles = torch.randn(50, rope // 2, generator=generator, dtype=torch.float32)
    num_blocks = -(-num_tokens // block_size) + 2
    slots = torch.randperm((num_blocks - 1) * block_size, generator=generator)[:num_tokens] + block_size
    slots[2::3] = -1
    width, pool_dtype = (row_bytes(rank, rope), torch.uint8) if fp8 else (rank + rope, dtype)
    pool = torch.full((num_blocks, block_size, 1, width), 0xFF if fp8 else float("nan"), dtype=pool_dtype)
    pool = pool.to(device)
    return {
        "q": q.unflatten(1, (num_heads, nope + rope)),
        "kv_c": kv_c,
        "k_pe": k_pe,
        "positions": torch.randint(50, (num_tokens,), generator=generator).to(device),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1).to(device),
        "slot_mapping": slots.to(device),
        "up_keys": randn(num_heads, nope + 3, rank)[:, :nope],
        "q_out": torch.full((num_tokens, num_heads, rank + rope), float("nan"), dtype=dtype, device=device),
        "kv_cache": pool.view(ROW_DTYPE) if fp8 else pool,
        "kv_norm": randn(rank) if normed else None,
        "rotation": rotation,
    }


def latents_of(inputs: dict[str, Any]) -> Tensor:
    """The pool's numbers in float32 and above; bytes of a pool of fp8 that none wrote are NaN."""
    pool, rank = inputs["kv_cache"], inputs["kv_c"].shape[1]
    return unpack(pool, rank, torch.float64) if pool.dtype == ROW_DTYPE else pool


def assert_latent_write_close(ops: BackendOps, inputs: dict[str, Any]) -> None:
    """One backend's op on ``inputs``, which it writes into, against the reference in float64."""
    assert_rope_close(ops, inputs, "rope_write_latent")
