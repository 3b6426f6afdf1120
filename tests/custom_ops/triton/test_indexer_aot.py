"""The indexer's Triton kernels compile at DeepSeek's sizes for GPUs that are not here."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import aot
import launched

from torchpaged.custom_ops import BACKEND_OPS

#: e4m3fn is no type of theirs.
NO_E4M3 = ("sm_80", "gfx942")


@pytest.mark.slow_cases(but=("sm_90-fp8", "sm_80-bf16"))
@pytest.mark.parametrize("keys", ["bf16", "fp8", "fp32"])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_compiles(target: str, keys: str) -> None:
    if keys == "fp8" and target in NO_E4M3:
        pytest.skip("no e4m3")
    dtype = torch.float32 if keys == "fp32" else torch.bfloat16
    pool, scales = torch.zeros(9, 64, 1, 128, dtype=dtype), None
    if keys == "fp8":
        pool, scales = pool.to(torch.float8_e4m3fn), torch.ones(9, 64)
    table, lens = torch.arange(1, 9, dtype=torch.int32)[None], torch.tensor([400], dtype=torch.int32)
    starts, logits = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 512)
    ops = BACKEND_OPS["triton"]
    with launched.recorded(target) as launches:
        ops.write_index_keys(torch.zeros(1, 128, dtype=dtype), pool, torch.tensor([70]), scales)
        q, weights = torch.zeros(1, 64, 128, dtype=dtype), torch.zeros(1, 64)
        ops.index_logits(q, weights, pool, table, lens, starts, logits, max_query_len=1, k_scale=scales)
    assert len(launches) == 2
    for launch in launches:
        found = aot.resources(launched.compile_launch(launch, target))
        assert found["spilled"] == 0, found
        assert found["shared"] <= aot.SHARED_LIMIT[target], found
