"""few_experts.cu on the host (experts_on_host.h): the kernels' own sources, launched by their own launcher,
against the reference."""

from pathlib import Path
from typing import Any

import kernels_on_host
import pytest
import torch
from cuda_sources import needs_gxx
from kernels_on_host import HostKernel, assert_no_races
from op_inputs.experts import assert_experts_close, assert_token_is_alone, make_experts_inputs

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.experts.call import ExpertsCall
from torchpaged.custom_ops.experts.check import check_apply_experts
from torchpaged.custom_ops.experts.cuda import few_experts

pytestmark = needs_gxx
SIZES: dict[str, Any] = {"num_experts": 6, "hidden": 1024, "inner": 128, "dtype": torch.bfloat16}
CASES: dict[str, dict[str, Any]] = {
    "one token": {"num_tokens": 1, "shared": 256, "residual": True},
    "of float16": {"num_tokens": 3, "dtype": torch.float16, "activation": "gelu_tanh", "inner": 256},
    "all of eight": {"num_tokens": 8, "top_k": 5, "activation": "gelu", "residual": True},
    "twice and outside": {"num_tokens": 5, "twice": True, "shared": 128, "shared_gate": True},
    "outside": {"num_tokens": 2, "outside": True, "residual": True},
    "outside, shared": {"num_tokens": 2, "outside": True, "shared": 128},
}


def few_on_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "num_sms", lambda _: 6)
    monkeypatch.setattr(gpu, "launches_early", lambda _: True)
    made: dict[str, HostKernel] = {}

    def kernel(name: str, spec: few_experts.ExpertsSpec, *_: int) -> HostKernel:
        if name not in made:
            compiled = kernels_on_host.compiled(
                folder / name, few_experts.FILE, name, spec.config(), "experts_on_host.h", ()
            )
            made[name] = HostKernel(compiled)
        return made[name]

    monkeypatch.setattr(few_experts, "_kernel", kernel)


class Host:
    """In the place of a backend's ops."""

    @staticmethod
    def apply_experts(*args: Any, **kwargs: Any) -> None:
        call = ExpertsCall(*args, **kwargs)
        assert few_experts.why_not(call, (9, 0)) is None
        check_apply_experts(call)
        few_experts.apply_few(call)


@pytest.mark.slow_cases(but=("one token", "twice and outside"))
@pytest.mark.parametrize("name", CASES)
def test_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, in other orders of the threads: the same bits."""
    few_on_host(tmp_path, monkeypatch)
    inputs = make_experts_inputs(**SIZES | CASES[name])
    assert_experts_close(Host, inputs)  # type: ignore[arg-type]
    again = {**inputs, "out": torch.full_like(inputs["out"], float("nan"))}
    Host.apply_experts(**again)
    assert torch.equal(again["out"], inputs["out"])


@pytest.mark.slow
@pytest.mark.long
def test_a_token_does_not_depend_on_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bits of float32, which are what is left when the result, rounded, is taken away."""
    few_on_host(tmp_path, monkeypatch)
    inputs = make_experts_inputs(**SIZES | {"num_experts": 40, "num_tokens": 8, "shared": 128, "top_k": 4})
    Host.apply_experts(**inputs)
    inputs["residual"] = -inputs["out"].clone()
    assert_token_is_alone(Host, inputs)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["one token", "twice and outside"])
def test_no_races(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = "ids", "weights", "down", "shared_down", "gate_up", "shared_gate_up"
    assert_no_races(early, test_experts, name, tmp_path, monkeypatch)
