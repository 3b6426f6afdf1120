"""The oracle of attention over a `torchpaged.testing.Batch`, and error budgets."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.pools import FP8
from torchpaged.testing.batches import Batch


def run_paged_attention(ops: BackendOps, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    """Call one backend's op on ``batch``; outputs start as NaN. Returns ``(out, lse)``; ``out`` has the
    dtype of q, bfloat16 where that is fp8."""
    out, lse = batch.outputs()
    tensors, named = batch.arguments(out, lse, **options)
    ops.paged_attention(*tensors, **named)
    assert lse is not None
    return out, lse


def oracle(batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    """The reference op on the same inputs in float64, on the CPU. Pools of fp8 stay as they are: their scales
    belong to them."""
    cpu = batch.to("cpu")
    k_cache, v_cache = (
        cache if cache.dtype in FP8 else cache.double() for cache in (cpu.k_cache, cpu.v_cache)
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


#: Masks and score changes every backend that claims them is tested with: name -> options of the op.
ATTENTION_VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window_left": 7},
    "window_both": {"causal": False, "window_left": 5, "window_right": 3},
    "soft_cap": {"logits_soft_cap": 5.0},
    "chunked_local": {"chunk_size": 12},
}
