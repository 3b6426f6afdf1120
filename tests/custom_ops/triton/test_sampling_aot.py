"""The kernels that end a step compile for sm_80, sm_90, sm_100 and gfx942 as they are launched; what they
spill."""

from typing import Any

import aot
import launched
import pytest
import torch
from op_inputs.sampling import make_accept_inputs, make_sampling_inputs

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VOCAB = 128256
#: By kernel, bytes outside of loops; of the others none.
SPILLED = {"sample_tiles_kernel": 8}


@pytest.mark.slow_cases(but=("sm_90-1-128256-bf16", "sm_90-64-128256-fp32"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1, VOCAB), (16, VOCAB), (32, VOCAB), (64, VOCAB), (1, 262144)]
)
@pytest.mark.parametrize("target", aot.TARGETS)
def test_sample_tokens_compiles(target: str, num_rows: int, vocab_size: int, dtype: str) -> None:
    inputs = make_sampling_inputs([{}] * num_rows, vocab_size=vocab_size, dtype=DTYPES[dtype])
    scan, _ = launched.check("sample_tokens", inputs, target, **SPILLED)
    if target != "gfx942":
        wide = "ld.global.v2" if dtype == "bf16" else "ld.global.v4"
        assert wide in scan.asm["ptx"], "four logits per load"
        assert "ld.global.v4" in scan.asm["ptx"], "of a greedy row 16 bytes per load"


@pytest.mark.slow_cases(but=("sm_90-True",))
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_finish_step_compiles(target: str, ring: bool) -> None:
    inputs: dict[str, Any] = make_sampling_inputs([{}] * 64, vocab_size=VOCAB, dtype=torch.bfloat16)
    inputs |= make_accept_inputs(64, vocab_size=VOCAB, launch=2 if ring else None, step=1)
    del inputs["out"], inputs["sampled_token_ids"]
    launched.check("finish_step", inputs, target, **SPILLED)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("num_reqs", [1, 64, 300])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_accept_tokens_compiles(target: str, num_reqs: int, ring: bool) -> None:
    inputs = make_accept_inputs(num_reqs, launch=2 if ring else None, step=1)
    launched.check("accept_tokens", inputs, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", aot.TARGETS)
def test_advance_step_compiles(target: str) -> None:
    taken = ("sampled_token_ids", "block_table", "input_ids", "positions", "seq_lens", "slot_mapping")
    given = make_accept_inputs(200)
    inputs = {name: given[name] for name in (*taken, "block_size")}
    launched.check("advance_step", inputs, target)
