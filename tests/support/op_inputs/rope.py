"""Inputs of ``rope_write_kv`` for tests of a backend: named shapes and styles, strided slices, shuffled and
skipped slots, NaN pools.

    inputs = make_rope_inputs(**ROPE_CASES["qwen3"], dtype=torch.bfloat16)
    assert_rope_close(BACKEND_OPS["triton"], inputs)
"""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.testing.batches import on_host
from torchpaged.testing.oracle import assert_within_budget

#: Shapes and styles of `rope_write_kv`, named after models that have them: name -> arguments
#: of `make_rope_inputs`.
ROPE_CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "smollm2": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "qwen3": {"norms": ("q_norm", "k_norm")},
    "gemma3": {"norms": ("q_norm", "k_norm"), "norm_offset": 1.0, "num_kv_heads": 1, "head_dim": 48},
    "key_norm_only": {"norms": ("k_norm",), "interleaved": True},
    "gptj": {"interleaved": True, "rotary_dim": 16},
    "glm4": {"interleaved": True, "rotary_dim": 32, "head_dim": 64, "norms": ("q_norm", "k_norm")},
    "phi": {"rotary_dim": 32, "head_dim": 80, "num_kv_heads": 4, "norms": ("q_norm",)},
    "tiny": {"head_dim": 6, "rotary_dim": 2, "num_heads": 1, "num_kv_heads": 1},
    "value_wider": {"head_dim": 24, "head_dim_v": 40},
    "heads_first": {"heads_first": True, "block_size": 4},
}


@on_host()
def make_rope_inputs(
    *,
    num_tokens: int = 7,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    rotary_dim: int | None = None,
    norms: tuple[str, ...] = (),
    norm_offset: float = 0.0,
    interleaved: bool = False,
    block_size: int = 16,
    heads_first: bool = False,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """The arguments of ``rope_write_kv`` by name: q, k, v are slices of one tensor, slots are shuffled, every
    third is -1.

    ``q_out`` and the pools hold NaN. ``norms`` names the weights to give.
    """
    generator = torch.Generator().manual_seed(seed)
    head_dim_v, rotary_dim = (
        head_dim if head_dim_v is None else head_dim_v,
        head_dim if rotary_dim is None else rotary_dim,
    )
    widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim_v)
    q, k, v = (
        torch.randn(num_tokens, sum(widths), generator=generator, dtype=torch.float32)
        .to(device, dtype)
        .split(widths, dim=1)
    )
    max_position, num_blocks = 100, -(-num_tokens // block_size) + 3
    angles = torch.arange(max_position)[:, None] * 10000.0 ** (
        -torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    )
    slots = torch.randperm((num_blocks - 1) * block_size, generator=generator)[:num_tokens] + block_size
    slots[2::3] = -1

    def pool(width: int) -> Tensor:
        shape = (
            (num_blocks, num_kv_heads, block_size, width)
            if heads_first
            else (num_blocks, block_size, num_kv_heads, width)
        )
        cache = torch.full(shape, float("nan"), dtype=torch.float32).to(device, cache_dtype or dtype)
        return cache.transpose(1, 2) if heads_first else cache

    weights = {
        name: torch.randn(head_dim, generator=generator, dtype=torch.float32).to(device, dtype)
        for name in norms
    }
    return {
        "q": q.unflatten(1, (num_heads, head_dim)),
        "k": k.unflatten(1, (num_kv_heads, head_dim)),
        "v": v.unflatten(1, (num_kv_heads, head_dim_v)),
        "positions": torch.randint(max_position, (num_tokens,), generator=generator).to(device),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=-1).to(device),
        "slot_mapping": slots.to(device),
        "q_out": torch.full((num_tokens, num_heads, head_dim), float("nan"), dtype=dtype, device=device),
        "k_cache": pool(head_dim),
        "v_cache": pool(head_dim_v),
        **weights,
        "norm_offset": norm_offset,
        "interleaved": interleaved,
    }


def assert_rope_close(ops: BackendOps, inputs: dict[str, Any], op: str = "rope_write_kv") -> None:
    """What one backend's ``op`` writes into ``inputs``, which are from `make_rope_inputs` or
    `make_latent_writes`, against the reference in float64."""
    same = {name: x.cpu().clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in same.items()
    }
    for each, given in ((BACKEND_OPS["reference"], same), (BACKEND_OPS["reference"], wide), (ops, inputs)):
        getattr(each, op)(**given)
    for name in inputs.keys() & {"q_out", "k_cache", "v_cache", "kv_cache"}:
        assert_within_budget(name, inputs[name], same[name], wide[name], inputs["q"].dtype)
