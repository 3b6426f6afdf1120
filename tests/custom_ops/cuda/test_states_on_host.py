"""The CUDA C++ kernels of single tokens of states on the host (state_on_host.h): their own sources, launched
by their own launchers, against the oracle; and which calls they take."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from cuda_sources import check_no_spills, compiled, needs_gxx, needs_nvcc, registers
from kernels_on_host import assert_no_races, launched_on_host
from op_inputs.delta_step import SIZES, assert_delta_step_close, make_delta_step_inputs
from op_inputs.mamba2_step import MAMBA2_SIZES, assert_mamba2_step_close, make_mamba2_step_inputs
from op_inputs.state import STATE_BATCHES, assert_state_close, clone, make_linear_inputs

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.state.call import DeltaStepCall, LinearAttentionCall, Mamba2StepCall
from torchpaged.custom_ops.state.cuda import decode, delta_step, linear_attention, mamba2_step, whole_step
from torchpaged.custom_ops.state.cuda.decode import StateSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BATCHES = ("decode", "decode_padded", "decode_begins", "no_tokens")


def assert_linear_close(ops: BackendOps, reference: BackendOps, inputs: dict[str, Any]) -> None:
    assert_state_close(ops, reference, "linear_attention", inputs)


class Op(NamedTuple):
    """An op, its launcher and what is compiled; ``alike``: CTAs of a cluster; ``shared``: in the source, its
    shared memory; ``sizes``: of `call_of`."""

    launcher: ModuleType
    call: type[Any]
    spec: type[Any]
    inputs: Callable[..., dict[str, Any]]
    check: Callable[[BackendOps, BackendOps, dict[str, Any]], None]
    alike: Callable[[Any], int]
    shared: str
    sizes: dict[str, Any]


OPS = {
    "linear_attention": Op(
        decode,
        LinearAttentionCall,
        StateSpec,
        make_linear_inputs,
        assert_linear_close,
        lambda spec: 1,
        "SHARED_BYTES",
        {"key_dim": 128, "value_dim": 64},
    ),
    "delta_step": Op(
        delta_step,
        DeltaStepCall,
        delta_step.StepSpec,
        make_delta_step_inputs,
        assert_delta_step_close,
        lambda spec: spec.group * spec.split,
        "SQUARES_AT + COLUMNS / 32 * 4",
        SIZES["qwen3_next"],
    ),
    "mamba2_step": Op(
        mamba2_step,
        Mamba2StepCall,
        mamba2_step.Mamba2StepSpec,
        make_mamba2_step_inputs,
        assert_mamba2_step_close,
        lambda spec: spec.group,
        "IS_LAST_AT + 4",
        MAMBA2_SIZES["granite"],
    ),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "delta": {"key_dim": 128, "value_dim": 128, "state_dtype": BF16},
    "delta, float32": {"key_dim": 128, "value_dim": 128},
    "ssd": {"delta": False, "key_heads": 1, "key_dim": 128, "value_dim": 64, "state_dtype": BF16},
    "ssd of 256": {"delta": False, "key_heads": 1, "key_dim": 256, "value_dim": 64, "out_dtype": FP32},
    "decay, fp16": {
        "delta": False,
        "beta": False,
        "key_heads": 4,
        "key_dim": 64,
        "value_dim": 64,
        "dtype": FP16,
        "state_dtype": FP16,
    },
    "kda": {"by_key": True, "key_heads": 4, "key_dim": 128, "value_dim": 128},
}
CASES: dict[str, dict[str, Any]] = {
    **{f"linear_attention-{name}": sizes for name, sizes in FAMILIES.items()},
    **{f"delta_step-{name}": sizes for name, sizes in SIZES.items() if "odd" not in name},
    "delta_step-weights of float32": {**SIZES["qwen3_next"], "weight_dtype": FP32},
    "delta_step-new step": {**SIZES["qwen3_next"], "new_step": True},
    "delta_step-new step, kimi": {**SIZES["kimi"], "new_step": True},
    "delta_step-fp16, states too": {**SIZES["three"], "dtype": FP16, "state_dtype": FP16},
    **{f"mamba2_step-{name}": sizes for name, sizes in MAMBA2_SIZES.items() if "odd" not in name},
    "mamba2_step-beside attention": {**MAMBA2_SIZES["falcon"], "beside": True},
    "mamba2_step-weights of float32": {**MAMBA2_SIZES["granite"], "weight_dtype": FP32},
    "mamba2_step-new step": {**MAMBA2_SIZES["falcon"], "new_step": True},
    "mamba2_step-fp16, states too": {**MAMBA2_SIZES["nemotron"], "dtype": FP16, "state_dtype": FP16},
}


def on_host(
    op: str, folder: Path, monkeypatch: pytest.MonkeyPatch, alike: Callable[[Any], int] | None = None
) -> BackendOps:
    """Op handles of which ``op`` is the kernel."""
    launcher, record, spec, *_ = OPS[op]

    def run(*args: Any, **kwargs: Any) -> None:
        call = record(*args, **kwargs)
        assert launcher.why_not(call, (9, 0)) is None
        launcher.launch(call, spec.of(call))

    launched_on_host(monkeypatch, folder, alike or OPS[op].alike)
    return BACKEND_OPS["reference"]._replace(**{op: run})


@needs_gxx
@pytest.mark.slow_cases(
    but=(
        *("linear_attention-delta", "linear_attention-kda", "delta_step-qwen3_next", "delta_step-kimi"),
        *("mamba2_step-granite", "mamba2_step-falcon", "delta_step-new step", "mamba2_step-new step"),
    )
)
@pytest.mark.parametrize("case", CASES)
def test_matches_the_oracle(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in slots that no row goes on from, and in shared memory; with a semaphore and without; of one
    batch a CTA has a head's columns alone, as of many rows."""
    op = case.partition("-")[0]
    ops = on_host(op, tmp_path / "host", monkeypatch)
    for batch in BATCHES:
        monkeypatch.setattr(whole_step, "MAX_SPLIT_CTAS", 0 if batch == "decode_padded" else 264)
        given = {"dtype": BF16, **CASES[case]}
        if op == "mamba2_step":
            given["semaphore"] = batch != "decode"
        OPS[op].check(ops, BACKEND_OPS["reference"], OPS[op].inputs(STATE_BATCHES[batch], **given))


#: What whole steps read ahead of their wait (tests/support/stream_order.py).
EARLY = ("weight", "bias", "a_log", "dt_bias", "norm_weight", "skip_weight", "lens", "slots", "starts")


@needs_gxx
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("case", ["linear_attention-kda", "delta_step-qwen3_next", "mamba2_step-granite"])
def test_no_races(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = EARLY if "step" in case else ()
    assert_no_races(early, test_matches_the_oracle, case, tmp_path, monkeypatch)


@needs_gxx
def test_pools_with_gaps_between_heads_and_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between is not touched."""
    ops = on_host("linear_attention", tmp_path / "host", monkeypatch)
    inputs = make_linear_inputs(STATE_BATCHES["decode"], dtype=BF16, key_dim=64, value_dim=64)
    state = inputs["state"]
    whole = torch.full((state.shape[0], 5, 64 * 64 + 4), 7.0)
    inputs["state"] = whole[:, :4, : 64 * 64].unflatten(-1, (64, 64))
    inputs["state"].copy_(state)
    assert_linear_close(ops, BACKEND_OPS["reference"], inputs)
    assert (whole[:, 4] == 7).all() and (whole[:, :, 64 * 64 :] == 7).all()


@needs_gxx
def test_a_window_that_moves_before_all_have_read_it_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first CTA of a group at the semaphore in the place of the last one; CTAs come one by one."""
    inputs = make_mamba2_step_inputs(STATE_BATCHES["decode"], dtype=BF16, **MAMBA2_SIZES["granite"])
    ops = on_host("mamba2_step", tmp_path / "right", monkeypatch, lambda spec: 1)
    assert_mamba2_step_close(ops, BACKEND_OPS["reference"], clone(inputs))
    source = jit.sources()["mamba2_step.cu"]
    early = source.replace("arrived == SHARERS - 1", "arrived == 0")
    assert early != source
    monkeypatch.setitem(jit.sources(), "mamba2_step.cu", early)
    ops = on_host("mamba2_step", tmp_path / "wrong", monkeypatch, lambda spec: 1)
    with pytest.raises(AssertionError):
        assert_mamba2_step_close(ops, BACKEND_OPS["reference"], inputs)


def check_compiled(op: str, spec: Any, folder: Path) -> None:
    file = "state_decode.cu" if op == "linear_attention" else f"{op}.cu"
    shared = {OPS[op].shared: spec.shared_bytes}
    _, report = compiled(folder, file, spec.config(), constants=shared)
    check_no_spills(report)
    assert registers(report) * spec.threads * spec.min_ctas <= 1 << 16


SPECS = {
    "gated delta net": StateSpec(128, 128, 16, 2, False, False, False, 1, False, True, True),
    "many rows": StateSpec(128, 128, 16, 2, False, False, False, 1, False, True, True, once=False),
    "float32": StateSpec(128, 128, 16, 2, False, True, False, 1, False, True, True, min_ctas=3),
    "mamba 2, fp16": StateSpec(128, 64, 80, 80, True, False, True, 2, False, False, False),
    "kimi linear": StateSpec(128, 128, 16, 1, False, True, False, 1, True, True, True, min_ctas=3),
    "256 keys": StateSpec(256, 64, 16, 16, False, True, False, 0, False, False, False),
}


@needs_nvcc
@pytest.mark.slow_cases(but=("gated delta net", "many rows"))
@pytest.mark.parametrize("name", SPECS)
def test_no_spills_and_shared_memory_is_what_the_sources_say(name: str, tmp_path: Path) -> None:
    check_compiled("linear_attention", SPECS[name], tmp_path)


@needs_nvcc
@pytest.mark.slow_cases(but=("delta_step-new step", "mamba2_step-granite", "mamba2_step-new step"))
@pytest.mark.parametrize("case", [case for case in CASES if "step-" in case])
def test_whole_steps_have_no_spills_and_the_shared_memory_of_their_sources(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = case.partition("-")[0]
    inputs = OPS[op].inputs(STATE_BATCHES["decode"], **{"dtype": BF16, **CASES[case]})
    call = OPS[op].call(**inputs)
    for most in (0, 264):  # a CTA has a head's columns alone; a part of them
        monkeypatch.setattr(whole_step, "MAX_SPLIT_CTAS", most)
        check_compiled(op, OPS[op].spec.of(call), tmp_path / str(most))


def call_of(op: str, **changed: Any) -> Any:
    given = {"dtype": BF16, **OPS[op].sizes, **changed}
    return OPS[op].call(**OPS[op].inputs(STATE_BATCHES["decode"], **given))


def misaligned(state: torch.Tensor) -> torch.Tensor:
    return torch.zeros(state.numel() + 1)[1:].view(state.shape)


def refused_linear_attention() -> dict[str, Any]:
    of = partial(call_of, "linear_attention")
    call, wide = of(), torch.zeros(9, 4, 128, 72)
    gaps = torch.zeros(9, 32770)[:, :32768].unflatten(1, (4, 128, 64))
    odd = torch.zeros(3, 257, dtype=BF16)[:, :256].unflatten(1, (2, 128))
    return {
        "states of 96 x 64": of(key_dim=96),
        "states of 256 x 128, 131072 bytes": of(key_dim=256, value_dim=128),
        "2 tokens of a row": of()._replace(max_query_len=2),
        "state with strides (36864, 9216, 72, 1)": call._replace(state=wide[..., :64]),
        "state with strides (32770, 8192, 64, 1)": call._replace(state=gaps),
        "k with strides (257, 128, 1)": call._replace(k=odd),
    }


def refused_delta_step() -> dict[str, Any]:
    of = partial(call_of, "delta_step")
    call = of()
    return {
        "states of 256 x 128": of(key_dim=256),
        "9 heads that share a key": of(heads=9, key_heads=1, groups=1),
        "2 groups of a, 1 of gate": call._replace(gate=call.gate.flatten(1)[:, None]),
    }


def refused_mamba2_step() -> dict[str, Any]:
    return {"states of 256 x 128, 131072 bytes": call_of("mamba2_step", key_dim=256, value_dim=128)}


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "linear_attention": refused_linear_attention,
    "delta_step": refused_delta_step,
    "mamba2_step": refused_mamba2_step,
}


@pytest.mark.parametrize("op", REFUSED)
def test_which_calls_are_taken(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, call = OPS[op].launcher, call_of(op)
    assert launcher.why_not(call, (9, 0)) is None
    refused = {
        "torch.float32, not bfloat16": call_of(op, dtype=FP32),
        "states of 128 x 80": call_of(op, value_dim=80),
        "state does not begin": call._replace(state=misaligned(call.state)),
        **REFUSED[op](),
    }
    if op != "linear_attention":
        odd = torch.zeros(3, call.x.shape[1] + 1, dtype=BF16)
        refused[f"x with strides ({odd.shape[1]}, 1)"] = call._replace(x=odd[:, :-1])
    for said, changed in refused.items():
        assert (launcher.why_not(changed, (9, 0)) or "").startswith(said), said
    for major in (8, 10):
        assert launcher.why_not(call, (major, 0)) == f"compute capability {major}.0, not 9.0"
    monkeypatch.setattr(gpu, "capability", lambda _: (9, 0))
    route = linear_attention.route if op == "linear_attention" else launcher.route
    assert route(call) is None
    assert (route(refused["states of 128 x 80"]) or "").startswith("states of 128 x 80")
    assert route(call._replace(state_slots=call.state_slots[:0])) == "no requests or no tokens"
