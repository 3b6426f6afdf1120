"""few_experts.cu without a GPU: which calls it takes; nvcc compiles its specialisations."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import compiled, needs_nvcc
from op_inputs.experts import make_experts_inputs

from torchpaged.custom_ops.experts.call import ExpertsCall
from torchpaged.custom_ops.experts.cuda.few_experts import FILE, WARPS, ExpertsSpec, why_not

V2_LITE = ExpertsSpec(2048, 1408, 2816, 6, 1, False, True)
SPECS = {
    "v2_lite": V2_LITE,
    "qwen3_next, fp16": V2_LITE._replace(inner=512, shared=512, top_k=10, half=True),
    "mixtral": V2_LITE._replace(hidden=4096, inner=14336, shared=0, top_k=2, activation=2),
}


@needs_nvcc
@pytest.mark.parametrize("name", SPECS)
def test_no_spills_and_both_fit(tmp_path: Path, name: str) -> None:
    """Both kernels' CTAs are on a multiprocessor at once, and one of a product of 512 threads with 56
    registers ahead of the first."""
    _, report = compiled(tmp_path, FILE, SPECS[name].config())
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0", "0"]
    counts = [-(-int(count) // 8) * 8 for count in re.findall(r"Used (\d+) registers", report)]
    assert len(counts) == 2
    assert sum(counts) * WARPS * 32 <= 65536
    assert max(counts) * WARPS * 32 + 512 * 56 <= 65536


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"num_tokens": 8, "top_k": 6, "shared": 256, "shared_gate": True}, None),
        ({"num_tokens": 9}, "9 tokens"),
        ({"num_experts": 513}, "513 experts"),
        ({"dtype": torch.float32}, "float32"),
        ({"hidden": 1088}, "rows of 1088"),
        ({"hidden": 5120}, "rows of 5120"),
        ({"inner": 64}, "and 64"),
        ({"shared": 64}, "rows of"),
    ],
)
def test_which_calls_it_takes(changed: dict[str, Any], words: str | None) -> None:
    sizes = {"hidden": 1024, "inner": 128, "num_tokens": 1, "dtype": torch.bfloat16, **changed}
    call = ExpertsCall(**make_experts_inputs(**sizes))
    reason = why_not(call, (9, 0))
    assert (reason is None) == (words is None), reason
    assert words is None or words in str(reason)
    assert why_not(call, (10, 0)) is not None
    if words is None:
        moved = call.down.new_zeros(call.down.numel() + 1)[1:].view(call.down.shape)
        assert "down" in str(why_not(call._replace(down=moved), (9, 0)))
