"""The CUDA C++ kernel of Mamba 2's single tokens on the host (state_on_host.h): its own sources, launched by
its own launcher, against the oracle; and which calls it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import check_no_spills, compiled, needs_gxx, needs_nvcc, registers
from kernels_on_host import launched_on_host
from op_inputs.mamba2_step import MAMBA2_SIZES, assert_mamba2_step_close, make_mamba2_step_inputs
from op_inputs.state import STATE_BATCHES, clone

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.state.call import Mamba2StepCall
from torchpaged.custom_ops.state.cuda import mamba2_step as step
from torchpaged.custom_ops.state.cuda import whole_step
from torchpaged.custom_ops.state.cuda.mamba2_step import Mamba2StepSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES: dict[str, dict[str, Any]] = {
    **{name: size for name, size in MAMBA2_SIZES.items() if "odd" not in name},
    "weights of float32": {**MAMBA2_SIZES["granite"], "weight_dtype": FP32},
    "fp16, states too": {**MAMBA2_SIZES["nemotron"], "dtype": FP16, "state_dtype": FP16},
}
BATCHES = ("decode", "decode_padded", "decode_begins", "no_tokens")


def on_host(folder: Path, monkeypatch: pytest.MonkeyPatch, together: bool = True) -> BackendOps:
    """Op handles whose ``mamba2_step`` is the kernel, the CTAs of a group together or one by one."""

    def run(*args: Any, **kwargs: Any) -> None:
        call = Mamba2StepCall(*args, **kwargs)
        assert step.why_not(call, (9, 0)) is None
        step.launch(call, Mamba2StepSpec.of(call))

    kernel = "mamba2_step.cu", "mamba2_step", "state_on_host.h", ("bulk.cuh",)
    launched_on_host(monkeypatch, step, folder, kernel, cluster=lambda spec: spec.group if together else 1)
    return BACKEND_OPS["reference"]._replace(mamba2_step=run)


@needs_gxx
@pytest.mark.slow_cases(but=("granite", "falcon"))
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in slots that no row goes on from, and in shared memory; with a semaphore and without; of one
    batch a CTA has a head's columns alone, as of many rows."""
    ops = on_host(tmp_path / "host", monkeypatch)
    for batch in BATCHES:
        monkeypatch.setattr(whole_step, "MAX_SPLIT_CTAS", 0 if batch == "decode_padded" else 264)
        given = {"dtype": BF16, "semaphore": batch != "decode", **CASES[name]}
        inputs = make_mamba2_step_inputs(STATE_BATCHES[batch], **given)
        assert_mamba2_step_close(ops, BACKEND_OPS["reference"], inputs)


@needs_gxx
def test_a_window_that_moves_before_all_have_read_it_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first CTA of a group at the semaphore in the place of the last one; CTAs come one by one."""
    inputs = make_mamba2_step_inputs(STATE_BATCHES["decode"], dtype=BF16, **MAMBA2_SIZES["granite"])
    ops = on_host(tmp_path / "right", monkeypatch, together=False)
    assert_mamba2_step_close(ops, BACKEND_OPS["reference"], clone(inputs))
    source = jit.sources()["mamba2_step.cu"]
    early = source.replace("count_arrival(semaphore) == SHARERS - 1", "count_arrival(semaphore) == 0")
    assert early != source
    monkeypatch.setitem(jit.sources(), "mamba2_step.cu", early)
    ops = on_host(tmp_path / "wrong", monkeypatch, together=False)
    with pytest.raises(AssertionError):
        assert_mamba2_step_close(ops, BACKEND_OPS["reference"], inputs)


@needs_nvcc
@pytest.mark.slow_cases(but=("granite", "falcon"))
@pytest.mark.parametrize("name", CASES)
def test_no_spills_and_shared_memory_is_what_the_sources_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_mamba2_step_inputs(STATE_BATCHES["decode"], **{"dtype": BF16, **CASES[name]})
    for most in (0, 264):  # a CTA has a head's columns alone; a part of them
        monkeypatch.setattr(whole_step, "MAX_SPLIT_CTAS", most)
        spec, folder = Mamba2StepSpec.of(Mamba2StepCall(**inputs)), tmp_path / str(most)
        shared = {"IS_LAST_AT + 4": spec.shared_bytes}
        _, report = compiled(folder, "mamba2_step.cu", spec.config(), constants=shared)
        check_no_spills(report)
        assert registers(report) * spec.threads * spec.min_ctas <= 1 << 16


def call_of(**changed: Any) -> Mamba2StepCall:
    given = {"dtype": BF16, **MAMBA2_SIZES["granite"], **changed}
    return Mamba2StepCall(**make_mamba2_step_inputs(STATE_BATCHES["decode"], **given))


def test_what_goes_through_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of()
    odd = torch.zeros(3, call.x.shape[1] + 1, dtype=BF16)
    refused = {
        "torch.float32, not bfloat16": call_of(dtype=FP32),
        "states of 128 x 80": call_of(value_dim=80),
        "states of 256 x 128, 131072 bytes": call_of(key_dim=256, value_dim=128),
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
    assert step.route(call) is None
    assert step.route(call._replace(state_slots=call.state_slots[:0])) == "no requests or no tokens"
