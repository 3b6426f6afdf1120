"""The CUDA C++ kernel of a gated delta net's single tokens on the host (state_on_host.h): its own sources,
launched by its own launcher, against the oracle; and which calls it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import check_no_spills, compiled, needs_gxx, needs_nvcc, registers
from kernels_on_host import launched_on_host
from op_inputs.delta_step import SIZES, assert_delta_step_close, make_delta_step_inputs
from op_inputs.state import STATE_BATCHES

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.state.call import DeltaStepCall
from torchpaged.custom_ops.state.cuda import delta_step, step, whole_step
from torchpaged.custom_ops.state.cuda.step import StepSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES: dict[str, dict[str, Any]] = {
    **{name: size for name, size in SIZES.items() if "odd" not in name},
    "weights of float32": {**SIZES["qwen3_next"], "weight_dtype": FP32},
    "fp16, states too": {**SIZES["three"], "dtype": FP16, "state_dtype": FP16},
}
BATCHES = ("decode", "decode_padded", "decode_begins", "no_tokens")


def on_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> BackendOps:
    """Op handles whose ``delta_step`` is the kernel."""

    def run(*args: Any, **kwargs: Any) -> None:
        call = DeltaStepCall(*args, **kwargs)
        assert step.why_not(call, (9, 0)) is None
        step.launch(call, StepSpec.of(call))

    kernel = "delta_step.cu", "delta_step", "state_on_host.h", ("bulk.cuh",)
    launched_on_host(monkeypatch, step, folder, kernel, cluster=lambda spec: spec.group * spec.split)
    return BACKEND_OPS["reference"]._replace(delta_step=run)


@needs_gxx
@pytest.mark.slow_cases(but=("qwen3_next", "kimi"))
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in slots that no row goes on from, and in shared memory; of one batch a CTA has a head's columns
    alone, as of many rows."""
    ops = on_host(tmp_path / "host", monkeypatch)
    for batch in BATCHES:
        monkeypatch.setattr(whole_step, "MAX_SPLIT_CTAS", 0 if batch == "decode_padded" else 264)
        inputs = make_delta_step_inputs(STATE_BATCHES[batch], **{"dtype": BF16, **CASES[name]})
        assert_delta_step_close(ops, BACKEND_OPS["reference"], inputs)


@needs_nvcc
@pytest.mark.slow_cases(but=("qwen3_next",))
@pytest.mark.parametrize("name", CASES)
def test_no_spills_and_shared_memory_is_what_the_sources_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_delta_step_inputs(STATE_BATCHES["decode"], **{"dtype": BF16, **CASES[name]})
    for most in (0, 264):  # a CTA has a head's columns alone; a part of them
        monkeypatch.setattr(whole_step, "MAX_SPLIT_CTAS", most)
        spec, folder = StepSpec.of(DeltaStepCall(**inputs)), tmp_path / str(most)
        shared = {"SQUARES_AT + COLUMNS / 32 * 4": spec.shared_bytes}
        _, report = compiled(folder, "delta_step.cu", spec.config(), constants=shared)
        check_no_spills(report)
        assert registers(report) * spec.threads * spec.min_ctas <= 1 << 16


def call_of(**changed: Any) -> DeltaStepCall:
    given = {"dtype": BF16, **SIZES["qwen3_next"], **changed}
    return DeltaStepCall(**make_delta_step_inputs(STATE_BATCHES["decode"], **given))


def test_what_goes_through_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of()
    odd = torch.zeros(3, call.x.shape[1] + 1, dtype=BF16)
    refused = {
        "torch.float32, not bfloat16": call_of(dtype=FP32),
        "states of 128 x 80": call_of(value_dim=80),
        "states of 256 x 128": call_of(key_dim=256),
        "9 heads that share a key": call_of(heads=9, key_heads=1, groups=1),
        "2 groups of a, 1 of gate": call._replace(gate=call.gate.flatten(1)[:, None]),
        "state does not begin": call._replace(
            state=torch.zeros(call.state.numel() + 1)[1:].view(call.state.shape)
        ),
        f"x with strides ({odd.shape[1]}, 1)": call._replace(x=odd[:, :-1]),
    }
    for said, changed in refused.items():
        assert (step.why_not(changed, (9, 0)) or "").startswith(said), said
    assert step.why_not(call, (9, 0)) is None
    assert step.why_not(call, (10, 0)) == "compute capability 10.0, not 9.0"
    monkeypatch.setattr(gpu, "capability", lambda _: (9, 0))
    assert delta_step.route(call) is None
    assert delta_step.route(call._replace(state_slots=call.state_slots[:0])) == "no requests or no tokens"
