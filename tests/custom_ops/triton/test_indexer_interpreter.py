"""The indexer's Triton kernels in Triton's interpreter."""

from typing import Any

import pytest
import torch
from op_inputs.indexer import exact_logits, is_top_k, make_index_batch, run_index_logits

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BATCH_SPECS

TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
E4M3 = torch.float8_e4m3fn


@pytest.mark.slow_cases(but=("mixed_*-causal", "decode_*-causal", "left_padded-bidirectional"))
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("spec", BATCH_SPECS)
def test_matches_the_oracle(spec: str, causal: bool) -> None:
    batch = make_index_batch(BATCH_SPECS[spec])
    got = run_index_logits(TRITON, batch, causal=causal)
    torch.testing.assert_close(got.double(), exact_logits(batch, causal), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.bfloat16, {"width": 128, "num_heads": 64, "block_size": 16}),
        (torch.float16, {"width": 20, "num_heads": 17, "block_size": 1}),
        (torch.float32, {"width": 200, "num_heads": 1, "block_size": 64}),
    ],
    ids=["deepseek", "odd", "wide"],
)
def test_shapes_and_dtypes(dtype: torch.dtype, sizes: dict[str, int]) -> None:
    batch = make_index_batch(BATCH_SPECS["mixed_padded"], dtype=dtype, **sizes)
    exact = exact_logits(batch)
    torch.testing.assert_close(run_index_logits(TRITON, batch).double(), exact, rtol=1e-3, atol=1e-3)


def test_fp8_keys() -> None:
    """Numbers that e4m3 holds: the interpreter rounds others otherwise."""
    batch = make_index_batch(BATCH_SPECS["mixed_padded"])
    keys = torch.randint(-8, 8, (batch.k_cache.shape[0] * 4, 24)) / 8.0
    keys[:, 0] = 448 / 256  # the scale is a power of two
    keys[7] = 0.0
    slots = torch.arange(len(keys))
    slots[5] = -1
    made: list[Any] = []
    for ops in (TRITON, REFERENCE):
        pool, scales = torch.zeros(batch.k_cache.shape).to(E4M3), torch.full(batch.k_cache.shape[:2], 3.0)
        ops.write_index_keys(keys, pool, slots, scales)
        made.append((pool, scales))
    assert torch.equal(made[0][0].float(), made[1][0].float())
    assert torch.equal(made[0][1], made[1][1])
    batch.k_cache, scales = made[0]
    got = run_index_logits(TRITON, batch, k_scale=scales)
    torch.testing.assert_close(got.double(), exact_logits(batch, True, scales), rtol=1e-5, atol=1e-5)


def test_plain_keys_are_stored() -> None:
    pool, want = (torch.zeros(5, 4, 1, 24) for _ in range(2))
    keys, slots = torch.randn(4, 24), torch.tensor([7, -1, 19, 4])
    TRITON.write_index_keys(keys, pool, slots)
    REFERENCE.write_index_keys(keys, want, slots)
    assert torch.equal(pool, want)


def test_selection() -> None:
    logits = torch.randn(3, 50)
    logits[1, 4:] = float("-inf")
    for top_k in (5, 60):
        indices = torch.full((3, top_k), 99, dtype=torch.int32)
        TRITON.top_k_indices(logits, indices)
        assert is_top_k(indices, logits)


def test_a_nan_key_shows() -> None:
    batch = make_index_batch(BATCH_SPECS["decode_one"])
    batch.k_cache[batch.block_table[0, 0].long(), 0] = float("nan")
    assert run_index_logits(TRITON, batch)[0, 0].isnan()


def test_too_wide() -> None:
    batch = make_index_batch(BATCH_SPECS["decode_one"], num_heads=129)
    with pytest.raises(ArgumentError, match="^q: expected at most 128 heads"):
        run_index_logits(TRITON, batch)
