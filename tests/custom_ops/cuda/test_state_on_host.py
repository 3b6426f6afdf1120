"""The CUDA C++ kernel of states on the host (state_on_host.h): its own sources, launched by its own launcher,
against the oracle; and which calls it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import check_no_spills, compiled, needs_gxx, needs_nvcc, registers
from kernels_on_host import launched_on_host
from op_inputs.state import STATE_BATCHES, assert_state_close, make_linear_inputs

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.cuda import decode, linear_attention
from torchpaged.custom_ops.state.cuda.decode import StateSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
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
BATCHES = ("decode", "decode_padded", "decode_begins", "no_tokens")


def on_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> BackendOps:
    """Op handles whose ``linear_attention`` is the kernel."""

    def run(*args: Any, **kwargs: Any) -> None:
        call = LinearAttentionCall(*args, **kwargs)
        assert decode.why_not(call, (9, 0)) is None
        decode.launch(call, StateSpec.of(call))

    kernel = "state_decode.cu", "update_states", "state_on_host.h", ("bulk.cuh",)
    launched_on_host(monkeypatch, decode, folder, kernel)
    return BACKEND_OPS["reference"]._replace(linear_attention=run)


@needs_gxx
@pytest.mark.slow_cases(but=("delta", "kda"))
@pytest.mark.parametrize("family", FAMILIES)
def test_matches_the_oracle(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in slots that no row goes on from, and in shared memory."""
    ops = on_host(tmp_path / "host", monkeypatch)
    for batch in BATCHES:
        inputs = make_linear_inputs(STATE_BATCHES[batch], **{"dtype": BF16, **FAMILIES[family]})
        assert_state_close(ops, BACKEND_OPS["reference"], "linear_attention", inputs)


@needs_gxx
def test_pools_with_gaps_between_heads_and_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between is not touched."""
    ops = on_host(tmp_path / "host", monkeypatch)
    inputs = make_linear_inputs(STATE_BATCHES["decode"], dtype=BF16, key_dim=64, value_dim=64)
    state = inputs["state"]
    whole = torch.full((state.shape[0], 5, 64 * 64 + 4), 7.0)
    inputs["state"] = whole[:, :4, : 64 * 64].unflatten(-1, (64, 64))
    inputs["state"].copy_(state)
    assert_state_close(ops, BACKEND_OPS["reference"], "linear_attention", inputs)
    assert (whole[:, 4] == 7).all() and (whole[:, :, 64 * 64 :] == 7).all()


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
    spec, text = SPECS[name], jit.sources()["state_decode.cu"]
    said = f'static_assert(SHARED_BYTES == {spec.shared_bytes}, "");\n'
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(jit.sources(), "state_decode.cu", text + said)
        _, report = compiled(tmp_path, "state_decode.cu", spec.config())
    check_no_spills(report)
    assert registers(report) * spec.threads * spec.min_ctas <= 1 << 16


def call_of(**changed: Any) -> LinearAttentionCall:
    inputs = make_linear_inputs(
        STATE_BATCHES["decode"], **{"dtype": BF16, "key_dim": 128, "value_dim": 64, **changed}
    )
    return LinearAttentionCall(**inputs)


def test_what_is_left_to_triton() -> None:
    assert decode.why_not(call_of(), (9, 0)) is None
    refused = {
        "torch.float32, not bfloat16": call_of(dtype=FP32),
        "states of 128 x 80": call_of(value_dim=80),
        "states of 96 x 64": call_of(key_dim=96),
        "states of 256 x 128, 131072 bytes": call_of(key_dim=256, value_dim=128),
        "2 tokens of a row": call_of()._replace(max_query_len=2),
    }
    call = call_of()
    wide = torch.zeros(9, 4, 128, 72)
    refused["state with strides (36864, 9216, 72, 1)"] = call._replace(state=wide[..., :64])
    refused["state with strides (32770, 8192, 64, 1)"] = call._replace(
        state=torch.zeros(9, 32770)[:, :32768].unflatten(1, (4, 128, 64))
    )
    refused["state does not begin"] = call._replace(state=torch.zeros(9 * 32768 + 1)[1:].view(9, 4, 128, 64))
    refused["k with strides (257, 128, 1)"] = call._replace(
        k=torch.zeros(3, 257, dtype=BF16)[:, :256].unflatten(1, (2, 128))
    )
    for said, changed in refused.items():
        assert (decode.why_not(changed, (9, 0)) or "").startswith(said), said
    assert decode.why_not(call, (8, 0)) == "compute capability 8.0, not 9.0"
    assert decode.why_not(call, (10, 0)) == "compute capability 10.0, not 9.0"


def test_what_a_gpu_of_hopper_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "capability", lambda _: (9, 0))
    assert linear_attention.route(call_of()) is None
    assert linear_attention.route(call_of(value_dim=80)) == "states of 128 x 80, 40960 bytes"
