"""What a kernel author needs to prove a backend: named batch specs, poisoned inputs, error budgets, an
opcheck table.

    spec = BATCH_SPECS["mixed_small"]
    batch = make_batch(spec, num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    out, lse = run_paged_attention(BACKEND_OPS["triton"], batch, causal=True)
    assert_attention_close(out, lse, batch, causal=True)

Blocks are shuffled, table tails hold garbage, and every slot that was never written holds NaN, so that a
kernel which reads what it must not read cannot pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.testing.batches import BATCH_SPECS, Batch, make_batch
from torchpaged.testing.batches import GARBAGE as GARBAGE
from torchpaged.testing.batches import BatchSpec as BatchSpec
from torchpaged.testing.pools import FP8_DTYPES, on_host
from torchpaged.testing.rope import ROPE_CASES, make_rope_inputs
from torchpaged.testing.trees import TREE_SPECS, make_tree_batch


def run_paged_attention(ops: BackendOps, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    """Call one backend's op on ``batch``; outputs start as NaN. Returns ``(out, lse)``; ``out`` has the
    dtype of q, bfloat16 where that is fp8."""
    shape = (*batch.q.shape[:2], batch.v_cache.shape[-1])
    dtype = torch.bfloat16 if batch.q.dtype in FP8_DTYPES else batch.q.dtype
    out = torch.full(shape, float("nan"), dtype=dtype, device=batch.q.device)
    lse = torch.full(shape[:2], float("nan"), dtype=torch.float32, device=batch.q.device)
    ops.paged_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        out,
        lse,
        max_query_len=batch.max_query_len,
        scale=batch.scale,
        **{**batch.extras, **options},
    )
    return out, lse


def oracle(batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    """The reference op on the same inputs in float64, on the CPU. Pools of fp8 stay as they are: their scales
    belong to them."""
    cpu = batch.to("cpu")
    k_cache, v_cache = (
        cache if cache.dtype in FP8_DTYPES else cache.double() for cache in (cpu.k_cache, cpu.v_cache)
    )
    wide = replace(cpu, q=cpu.q.double(), k_cache=k_cache, v_cache=v_cache)
    return run_paged_attention(BACKEND_OPS["reference"], wide, **options)


def assert_within_budget(
    name: str, got: Tensor, same_dtype: Tensor, exact: Tensor, dtype: torch.dtype, factor: float = 2.0
) -> None:
    """``got`` errs at most ``factor`` times as much as the same-dtype reference, plus a rounding band
    of ``dtype``.

    The rule of FlashAttention's own tests, with their factor: the tolerance comes from the dtype and the
    data, not from a guess.
    """
    got, same_dtype, exact = (t.detach().double().cpu() for t in (got, same_dtype, exact))
    if not torch.equal(got.isfinite(), exact.isfinite()) or not torch.equal(got.isnan(), exact.isnan()):
        where = (got.isfinite() != exact.isfinite()).nonzero()[:4].tolist()
        raise AssertionError(f"{name}: finite where the oracle is not, or the other way round, at {where}")
    finite = exact.isfinite()
    if not bool(finite.any()):
        return
    error = (got - exact).abs().where(finite, torch.zeros_like(exact))
    budget = factor * (same_dtype - exact).abs().where(finite, torch.zeros_like(exact)).max()
    band = (
        4 * torch.finfo(dtype).eps * exact.where(finite, torch.zeros_like(exact)).abs().max().clamp_min(1.0)
    )
    limit = float(budget + band)
    if float(error.max()) > limit:
        at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
        raise AssertionError(
            f"{name}: error {float(error.max()):.3e} at {at} over the budget {limit:.3e}; "
            f"got {float(got[tuple(at)]):.6f}, exact {float(exact[tuple(at)]):.6f}"
        )


def assert_attention_close(out: Tensor, lse: Tensor | None, batch: Batch, **options: Any) -> None:
    """``out`` and ``lse`` of a kernel against the float64 oracle, within the error budget of the
    batch's dtype."""
    exact_out, exact_lse = oracle(batch, **options)
    reference_out, _ = run_paged_attention(BACKEND_OPS["reference"], batch.to("cpu"), **options)
    assert_within_budget(f"out[{batch.spec.name}]", out, reference_out, exact_out, batch.q.dtype)
    if lse is not None:
        assert_within_budget(
            f"lse[{batch.spec.name}]",
            lse,
            exact_lse,
            exact_lse,
            torch.float16 if batch.q.dtype != torch.float32 else torch.float32,
        )


def assert_rope_close(ops: BackendOps, inputs: dict[str, Any]) -> None:
    """One backend's ``rope_write_kv`` on ``inputs`` (which it writes into) against the reference in float64.

    ``inputs``: from `torchpaged.testing.rope.make_rope_inputs`.
    """
    dtype = inputs["q"].dtype
    same = {name: x.cpu().clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in same.items()
    }
    BACKEND_OPS["reference"].rope_write_kv(**same)
    BACKEND_OPS["reference"].rope_write_kv(**wide)
    ops.rope_write_kv(**inputs)
    for name in ("q_out", "k_cache", "v_cache"):
        assert_within_budget(name, inputs[name], same[name], wide[name], dtype)


#: Masks and score changes every backend that claims them is tested with: name -> options of the op.
ATTENTION_VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window_left": 7},
    "window_both": {"causal": False, "window_left": 5, "window_right": 3},
    "soft_cap": {"logits_soft_cap": 5.0},
    "chunked_local": {"chunk_size": 12},
}


@on_host
def opcheck_cases(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Case name -> (op, args, kwargs) over which ``torch.library.opcheck`` proves every overload."""
    batch = make_batch(BATCH_SPECS["mixed_padded"], dtype=dtype, device=device, sinks=True, alibi=True)
    # opcheck compares mutated pools for equality
    (
        batch.k_cache.nan_to_num_(0.5),
        batch.v_cache.nan_to_num_(0.5),
    )
    num_tokens, num_heads, head_dim = batch.q.shape
    kv = torch.randn(num_tokens, batch.k_cache.shape[2], head_dim, dtype=dtype, device=device)
    slots = torch.arange(num_tokens, device=device) + 20
    slots[-1] = -1
    state, lse = (
        torch.randn(7, 4, 64, dtype=dtype, device=device),
        torch.randn(7, 4, dtype=torch.float32, device=device),
    )
    lse[0] = float("-inf")
    attention = (
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
    )
    out = torch.zeros_like(batch.q)
    common = {"max_query_len": batch.max_query_len, "scale": batch.scale}
    trees = make_tree_batch(TREE_SPECS["tree_chain"], head_dim=16, dtype=dtype, device=device)
    trees.k_cache.nan_to_num_(0.5), trees.v_cache.nan_to_num_(0.5)
    tree = (
        trees.q,
        trees.k_cache,
        trees.v_cache,
        trees.block_table,
        trees.seq_lens,
        trees.query_start_loc,
    )
    tree_options = {"max_query_len": trees.max_query_len, "scale": trees.scale, **trees.extras}
    latents = make_batch(
        BATCH_SPECS["mixed_padded"], num_kv_heads=1, head_dim=24, head_dim_v=16, dtype=dtype, device=device
    )
    rows = latents.k_cache.nan_to_num_(0.5)
    latent = (latents.q, rows, latents.block_table, latents.seq_lens, latents.query_start_loc)
    ids = torch.arange(4, device=device)
    table = torch.tensor([[3, 1], [2, 9], [4, 5], [0, 0]], dtype=torch.int32, device=device)
    lens = torch.tensor([17, 4, 32, 0], dtype=torch.int32, device=device)
    pairs = torch.tensor([[1, 3], [-1, 2], [4, 5]], device=device)
    rope = [make_rope_inputs(**ROPE_CASES[name], dtype=dtype, device=device) for name in ("smollm2", "glm4")]
    for inputs in rope:
        inputs["k_cache"].nan_to_num_(0.5), inputs["v_cache"].nan_to_num_(0.5)
    semaphore = torch.zeros(
        batch.block_table.shape[0] * batch.k_cache.shape[2], dtype=torch.int32, device=device
    )
    no_groups = tuple(torch.zeros(size, dtype=torch.int32, device=device) for size in ((1, 2), (1,), (2,)))
    rows_in_order = torch.arange(batch.q.shape[0], device=device)
    cases: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
        "write": ("write_kv", (kv, kv.clone(), batch.k_cache, batch.v_cache, slots), {}),
        "write_query_tokens": (
            "write_kv",
            (kv, kv.clone(), batch.k_cache, batch.v_cache, slots),
            {"are_query_tokens": True},
        ),
        "rope": ("rope_write_kv", tuple(rope[0].values())[:9], {"are_query_tokens": True}),
        "rope_norm": ("rope_write_kv", tuple(rope[1].values())[:9], dict(list(rope[1].items())[9:])),
        "attention": ("paged_attention", (*attention, out), common),
        "attention_lse": (
            "paged_attention",
            (*attention, out, torch.zeros(num_tokens, num_heads, dtype=torch.float32, device=device)),
            common,
        ),
        "attention_full": (
            "paged_attention",
            (*attention, out),
            {**common, **batch.extras, "window_left": 9, "logits_soft_cap": 8.0},
        ),
        "attention_tree": ("paged_attention", (*tree, torch.zeros_like(tree[0])), tree_options),
        "attention_semaphore": ("paged_attention", (*attention, out), {**common, "semaphore": semaphore}),
        "latent": (
            "mla_attention",
            (*latent, torch.zeros_like(latents.q[..., :16])),
            {"max_query_len": latents.max_query_len, "scale": latents.scale},
        ),
        "write_latent": (
            "write_latent",
            (kv[:, 0, :16].contiguous(), kv[:, 0, :8].contiguous(), rows, slots),
            {},
        ),
        "merge": (
            "merge_attn_states",
            (state, lse, state.clone(), lse.clone(), torch.empty_like(state), torch.empty_like(lse)),
            {},
        ),
        "cascade": (
            "cascade_attention",
            (*attention, *no_groups, rows_in_order, rows_in_order.clone(), torch.zeros_like(out)),
            common,
        ),
        "copy": ("copy_blocks", (batch.k_cache, batch.v_cache, pairs), {}),
        "advance": (
            "advance_step",
            (ids + 7, table, ids.clone(), ids.clone(), lens, ids.clone()),
            {"block_size": 16},
        ),
    }
    return cases
