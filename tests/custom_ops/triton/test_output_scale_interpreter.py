"""Triton's kernels with results of e4m3, against the float64 oracle."""

from typing import Any

import pytest
import torch
from op_inputs.output_scale import E4M3, assert_e4m3, run_e4m3
from op_inputs.trees import TREE_SPECS, make_tree_batch

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BATCH_SPECS, BatchSpec, make_batch

TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
#: Of batches, and of calls.
COMBINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window, sinks": ({"sinks": True}, {"window_left": 7}),
    "cap, alibi, chunks": ({"alibi": True}, {"logits_soft_cap": 5.0, "chunk_size": 12}),
    "e4m3 pools": ({"kv_dtype": E4M3, "scales": "per_head"}, {}),
    "odd widths": ({"head_dim": 20, "head_dim_v": 12, "num_heads": 7, "num_kv_heads": 1}, {}),
}


@pytest.mark.slow_cases(but_every=4)
@pytest.mark.parametrize("combined", COMBINED)
@pytest.mark.parametrize("spec", ["decode_edges", "mixed_padded", "prefill_small", "speculative"])
def test_matches_the_oracle(spec: str, combined: str) -> None:
    """By the decode kernel, by the prefill kernel, and by both; saturated in one of the calls."""
    sizes, options = COMBINED[combined]
    batch = make_batch(BATCH_SPECS[spec], **{"dtype": torch.bfloat16, "head_dim": 32, **sizes})
    for scale, padding in ((0.02, (0, 0, 0)), (1e-3, (5, 1, 3))):
        out, lse = run_e4m3(TRITON, batch, scale, padding, **options)
        assert_e4m3(out, lse, batch, scale, **options)
    assert float(out.float().abs().max()) == 448


def test_split_kv() -> None:
    """Parts meet in float32 before they are rounded."""
    batch = make_batch(
        BatchSpec("split", (1500, 1, 0, 257), (1, 1, 1, 1)), head_dim=16, num_heads=4, num_kv_heads=1
    )
    assert_e4m3(*run_e4m3(TRITON, batch, 1e-3), batch, 1e-3)


def test_trees() -> None:
    batch = make_tree_batch(TREE_SPECS["tree_mixed"], head_dim=16, dtype=torch.bfloat16)
    assert_e4m3(*run_e4m3(TRITON, batch, 0.02), batch, 0.02)


def test_merging_two_sets_of_keys() -> None:
    states = [x for _ in range(2) for x in (torch.randn(5, 3, 7), torch.randn(5, 3))]
    states[1][0], states[3][0], states[1][1] = -float("inf"), -float("inf"), float("nan")
    found = []
    for ops in (TRITON, REFERENCE):
        out, lse = torch.ones(5, 3, 9).to(E4M3)[..., 1:8], torch.empty(5, 3)
        ops.merge_attn_states(*states, out, lse, output_scale=torch.tensor(1e-3))
        found += [out.float(), lse]
    torch.testing.assert_close(found[0], found[2], rtol=1 / 7, atol=2**-9, equal_nan=True)
    torch.testing.assert_close(found[1], found[3], equal_nan=True)
    assert not found[0][0].any()
    assert found[0][1].isnan().all()
    assert float(found[0][2:].abs().max()) == 448
