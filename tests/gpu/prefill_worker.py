"""Random batches with queries of e4m3 for the CUDA C++ prefill kernel, for processes that may be killed:
tests/gpu/test_prefill_kernel.py. Other queries: fuzz_attention.py."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention import reference as reference_ops
from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.cuda import prefill
from torchpaged.testing import Batch, BatchSpec, assert_within_budget, make_batch, run_paged_attention

_SIZES: dict[str, Any] = {
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
    "kv_dtype": torch.float8_e4m3fn,
    "scales": "per_head",
    "dtype": torch.bfloat16,
}
#: Sizes of the model and the pools that differ from these, and options of the op.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"num_heads": 32, "num_kv_heads": 8}, {}),
    "no_mask_blocks_of_128": ({"block_size": 128, "scales": "none"}, {"causal": False}),
    "blocks_of_8": ({"num_kv_heads": 8, "block_size": 8, "dtype": torch.float16}, {}),
    "group_of_7": ({"num_heads": 14, "block_size": 32, "scales": "one"}, {}),
    "window": ({"heads_first": True}, {"window_left": 200}),
    "windows": ({"sinks": True}, {"causal": False, "window_left": 40, "window_right": 130}),
    "chunks": ({"alibi": True}, {"chunk_size": 200}),
    "width_64": ({"head_dim": 64, "sinks": True}, {"window_left": 300}),
    "width_256": ({"head_dim": 256}, {"logits_soft_cap": 4.0}),
}


def draw(rng: random.Random) -> BatchSpec:
    """A few or many requests; long, short and empty ones, some with a context, some with left padding; rows
    behind the last."""
    query_lens, seq_lens = [], []
    for _ in range(rng.choice([1, 2, 3, 9, 40])):
        query_len = rng.choice(
            [0, 1, 2, 31, 32, 33, 64, 127, 128, 129, rng.randrange(1, 400), rng.randrange(1, 1200)]
        )
        context = rng.choice([0, 0, 1, 95, 96, 128, rng.randrange(1, 3000), -rng.randrange(1, 50)])
        query_lens.append(query_len)
        seq_lens.append(query_len + context if query_len or rng.random() < 0.5 else 0)
    return BatchSpec("drawn", tuple(seq_lens), tuple(query_lens), padded_tokens=rng.choice([0, 1, 200]))


def launch(
    batch: Batch, longest: int, tickets: Tensor, options: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The kernel itself, whichever backend would serve the call. ``longest``: of the queries, read before a
    capture."""
    shape = (*batch.q.shape[:2], batch.v_cache.shape[-1])
    out = torch.full(shape, float("nan"), dtype=dtype, device=batch.q.device)
    lse = torch.full(shape[:2], float("nan"), dtype=torch.float32, device=batch.q.device)
    lengths = (batch.block_table, batch.seq_lens, batch.query_start_loc)
    arguments = {"max_query_len": max(longest, 1), "scale": batch.scale, **batch.extras, **options}
    call = AttentionCall.of(
        batch.q, batch.k_cache, batch.v_cache, *lengths, out, lse, semaphore=tickets, **arguments
    ).for_launch()
    spec = Specialisation.of(call)
    reason = prefill.why_not(call, spec)
    assert reason is None, reason
    prefill.prefill(call, spec)
    return out, lse


def run(case: dict[str, Any], beat: Callable[..., None]) -> dict[str, Any]:
    """Results against the reference in float64, the same bits twice and from a graph, tickets given back."""
    beat("launching")
    (sizes, options), seed = CONFIGURATIONS[case["name"]], case["seed"]
    batch = make_batch(draw(random.Random(seed)), seed=seed, **{**_SIZES, **sizes}).to("cuda")
    dtype = batch.q.dtype
    batch = replace(batch, q=batch.q.to(torch.float8_e4m3fn))
    tickets = torch.zeros(2, dtype=torch.int32, device="cuda")
    longest = int(batch.query_start_loc.diff().max())
    out, lse = launch(batch, longest, tickets, options, dtype)
    beat("running")
    torch.cuda.synchronize()
    assert not tickets.any(), "tickets are not given back"
    again, _ = launch(batch, longest, tickets, options, dtype)
    assert torch.equal(out, again), "other bits the second time"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = launch(batch, longest, tickets, options, dtype)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, captured), "other bits from a graph"
    extras = {key: x.double() if key == "sinks" else x for key, x in batch.extras.items()}
    wide = replace(batch, q=batch.q.double(), extras=extras)  # the pools stay of fp8, for their scales
    exact, exact_lse = run_paged_attention(BACKEND_OPS["reference"], wide, **options)
    check_fp8_queries(out, lse, exact, exact_lse, with_rounded_weights(wide, options))
    return {}


def with_rounded_weights(wide: Batch, options: dict[str, Any]) -> Tensor:
    """Results in float64, but for weights of 8 bits: a row's largest is 256, the others are rounded to e4m3,
    and all are divided by the sum of those that were not rounded. So does FlashAttention-3."""
    weigh = reference_ops._weigh

    def rounded(weights: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        top = weights.amax(-1, keepdim=True).clamp(min=1e-300) / 256
        return weigh((weights / top).to(torch.float8_e4m3fn).to(weights.dtype) * top, values, mask)

    reference_ops._weigh = rounded
    try:
        return run_paged_attention(BACKEND_OPS["reference"], wide, **options)[0]
    finally:
        reference_ops._weigh = weigh


def check_fp8_queries(out: Tensor, lse: Tensor, exact: Tensor, exact_lse: Tensor, nearly: Tensor) -> None:
    """No more than 1.3 times the error of rounded weights, all rows together, and what rounding the result
    adds; twice in any number. The LSE errs as scores do, whose products have 13 bits."""
    assert not out[exact_lse == float("-inf")].any(), "rows without keys are zeros"
    size = exact.norm().clamp(min=1e-30)
    error, fair = (out.double() - exact).norm() / size, (nearly - exact).norm() / size
    assert error <= 1.3 * fair + 4e-3, f"relative error {error:.4f}, of rounded weights alone {fair:.4f}"
    assert_within_budget("out", out, nearly, exact, torch.bfloat16)
    seen = exact_lse > float("-inf")
    assert torch.equal(seen, lse > float("-inf"))
    assert not ((lse - exact_lse)[seen].abs() > 1e-2).any()
