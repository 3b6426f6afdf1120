"""Backends whose library runs prompts of delta nets: what they refuse, which calls the library gets, and that
all others are the device's own. With the library's stand-in behind them: tests/custom_ops/triton/
test_state_interpreter.py; with the library itself: tests/gpu/test_library_backends.py."""

import importlib
import importlib.metadata
import importlib.util
from typing import Any

import pytest
import torch
from library_backends import stand_in
from op_inputs.state import STATE_BATCHES, Rows, clone, make_linear_inputs
from torch import Tensor

from torchpaged import BackendUnavailableError, Limits, PagedAttention
from torchpaged.backends import flashinfer_gdn, get_backend, use_backend
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.state.call import LinearAttentionCall

BF16 = torch.bfloat16
LONG = STATE_BATCHES["long"]
WIDE: dict[str, Any] = {"key_dim": 128, "value_dim": 128, "dtype": BF16}
#: Backend -> sizes of a call that its library runs.
TAKEN: dict[str, dict[str, Any]] = {"flashinfer_gdn": WIDE}
#: What makes such a call the device's own, and the reason's words.
BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, "float32"),
    "narrow keys": ({"key_dim": 64}, "keys of 64"),
    "wide values": ({"value_dim": 256}, "values of 256"),
    "no delta rule": ({"delta": False}, "no delta rule"),
}
OTHERS: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "flashinfer_gdn": {
        **BOTH,
        "by key": ({"by_key": True}, "decay for each"),
        "wide results": ({"out_dtype": torch.float32}, "results of torch.float32"),
    }
}


def why_own(name: str, inputs: dict[str, Any]) -> str | None:
    module = importlib.import_module(f"torchpaged.backends.{name}")
    reason: str | None = module.why_own(LinearAttentionCall(**inputs))
    return reason


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in OTHERS for case in OTHERS[name]])
def test_other_calls_are_the_devices_own(name: str, case: str) -> None:
    change, words = OTHERS[name][case]
    assert why_own(name, make_linear_inputs(LONG, **TAKEN[name])) is None
    inputs = make_linear_inputs(LONG, **TAKEN[name] | change)
    assert words in str(why_own(name, inputs))
    assert_own(name, inputs)


@pytest.mark.parametrize("batch", ["decode", "verify", "no_tokens"])
@pytest.mark.parametrize("name", TAKEN)
def test_short_rows_are_the_devices_own(name: str, batch: str) -> None:
    inputs = make_linear_inputs(STATE_BATCHES[batch], **TAKEN[name])
    assert "fewer than" in str(why_own(name, inputs))
    assert_own(name, inputs)


def test_flashinfer_gets_no_scale_of_zero_and_no_states_with_gaps() -> None:
    """It takes 0 for its default, which the op's check refuses."""
    inputs = make_linear_inputs(LONG, **WIDE)
    with (
        stand_in("flashinfer_gdn") as backend,
        pytest.raises(ValueError, match="^scale: expected a positive"),
    ):
        backend.ops.linear_attention(**inputs | {"scale": 0.0})
    whole = torch.zeros(9, 5, 128, 128)
    apart = inputs | {"state": whole[:, :4].copy_(inputs["state"])}
    assert "not contiguous" in str(why_own("flashinfer_gdn", apart))
    assert_own("flashinfer_gdn", apart)


@pytest.mark.parametrize(
    ("rows", "heads", "tokens", "way"),
    [
        (1, 8, 32768, "split"),
        (1, 44, 2048, "split"),
        (1, 48, 8192, "whole"),
        (4, 16, 8192, "whole"),
        (1, 8, 2047, "own"),
        (2, 8, 1024, "own"),
        (1, 8, 512, "whole"),
        (1, 24, 1024, "whole"),
        (8, 16, 100, "whole"),
    ],
)
def test_flashinfers_way_follows_from_shapes(
    rows: int, heads: int, tokens: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of 132 multiprocessors; a prompt of any lengths in a bucket of so many rows and tokens."""
    monkeypatch.setattr(
        flashinfer_gdn,
        "_programs",
        lambda call, times: times * call.state_slots.shape[0] * call.v.shape[1] <= 132,
    )
    batch = Rows(((0, 64), *((0, 0),) * (rows - 1)), padded_tokens=0)
    call = LinearAttentionCall(**make_linear_inputs(batch, **WIDE, heads=heads, num_slots=rows + 1))
    whole = call.v.new_empty(1, 1, 1).expand(rows * tokens, heads, 128)
    call = call._replace(v=whole, max_query_len=tokens)
    own = flashinfer_gdn.why_own(call)
    assert (own is not None) == (way == "own"), own
    assert flashinfer_gdn.splits_rows(call) == (way == "split")


def assert_own(name: str, inputs: dict[str, Any]) -> None:
    want = clone(inputs)
    BACKEND_OPS["default"].linear_attention(**want)
    with stand_in(name) as backend:
        backend.ops.linear_attention(**inputs)
    for result in ("out", "state"):
        torch.testing.assert_close(inputs[result], want[result], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", TAKEN)
def test_bad_arguments_are_refused_before_anything_is_written(name: str) -> None:
    inputs = make_linear_inputs(LONG, **TAKEN[name])
    inputs["state_slots"] = inputs["state_slots"].long()
    kept = {key: x.clone() for key, x in inputs.items() if isinstance(x, Tensor)}
    with stand_in(name) as backend, pytest.raises(ValueError, match="state_slots: expected torch.int32"):
        backend.ops.linear_attention(**inputs)
    for key, x in kept.items():
        torch.testing.assert_close(inputs[key], x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "install"), [("flashinfer_gdn", "flashinfer-python>=0.7.4,<0.8")])
def test_a_missing_library_is_refused(name: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    backend = get_backend(name)
    assert f"is not installed; pip install '{install}'" in str(backend.unavailable())
    with pytest.raises(BackendUnavailableError, match=f"'{name}' .*is not installed; pip install"):
        backend.open([], Limits(max_num_reqs=1), "cuda")
    with use_backend(name), pytest.raises(BackendUnavailableError, match="is not installed"):
        PagedAttention(4, 128, 2)


def test_flashinfer_without_slots_of_its_results_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = get_backend("flashinfer_gdn")
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    for version, refused in (
        ("0.7.2.post1", True),
        ("0.7.4", False),
        ("0.7.9+cu130", False),
        ("0.8.0", True),
    ):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        assert ("0.7.4 to 0.7 are supported" in str(backend.unavailable())) == refused, version


@pytest.mark.parametrize("name", TAKEN)
def test_a_library_of_another_interface_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(name) as backend:
        module = importlib.import_module(f"torchpaged.backends.{name}")
        monkeypatch.setattr(module.PACKAGE.load(), "chunk_gated_delta_rule", lambda q, k, v: None)
        with pytest.raises(BackendUnavailableError, match="chunk_gated_delta_rule of flashinfer lacks "):
            backend.open([], Limits(max_num_reqs=1), "cpu")
