"""One suite over all backends, named batches and features, eager, compiled and captured: on a CPU, with
stand-ins of the libraries. On a GPU it runs in tests/gpu/library_worker.py."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from library_backends import LIBRARIES, stand_in

from torchpaged import BackendUnavailableError
from torchpaged.backends import Backend, GraphSupport, get_backend, list_backends
from torchpaged.graphs.capture import EagerCapture
from torchpaged.testing import ATTENTION_VARIANTS, BATCH_SPECS, check_conformance, conformance_checks

#: What each declares not to run, of variants and extras.
UNABLE = {
    "flash_attn": {"soft_cap", "chunked_local", "alibi"},
    "flash_attn_4": {"chunked_local", "alibi"},
    "flashinfer": {"window_both", "chunked_local", "alibi"},
    "flashinfer_xqa": {"soft_cap", "chunked_local", "alibi"},
}
NAMES = [name for name in list_backends() if name not in ("cuda", "triton", "torch_varlen", "flex")]
FEW = ("decode_empty_row", "mixed_padded", "left_padded_chunk")
SHAPE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}


def backend_of(name: str) -> Any:
    return stand_in(name) if name in LIBRARIES else contextlib.nullcontext(get_backend(name))


def run(backend: Backend, **options: Any) -> set[str]:
    """Words of the names of what was right."""
    report = check_conformance(backend, device="cpu", compiler="aot_eager", **SHAPE | options)
    return {word for name in report.right for word in name.split()}


@pytest.mark.slow_cases("*-all")
@pytest.mark.parametrize("batches", ["few", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_eager(name: str, batches: str) -> None:
    """Every feature."""
    chosen = FEW if batches == "few" else tuple(BATCH_SPECS)
    if get_backend(name).unavailable() and name not in LIBRARIES:
        pytest.skip(str(get_backend(name).unavailable()))
    with backend_of(name) as backend:
        both = (name != "flashinfer_xqa", False) if batches == "few" else (name != "flashinfer_xqa",)
        right = run(backend, modes=("eager",), batches=chosen, lse=both)
    declared = {*ATTENTION_VARIANTS, "plain", "sinks", "alibi"} - UNABLE.get(name, set())
    assert right & {*ATTENTION_VARIANTS, "plain", "sinks", "alibi"} == declared
    longer = {batch for batch, spec in BATCH_SPECS.items() if max(spec.query_lens) > 1}
    left = {batch for batch in BATCH_SPECS if batch.startswith("left_padded")}
    unable = {"flashinfer_xqa": longer, "flashinfer": left}.get(name, set())
    assert right & {*BATCH_SPECS} == {*chosen} - unable


@pytest.mark.parametrize("name", [*NAMES, "flex"])
def test_compiled_and_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decode batch and one of all kinds, with a window and sinks."""
    if get_backend(name).unavailable() and name not in LIBRARIES:
        pytest.skip(str(get_backend(name).unavailable()))
    few: dict[str, Any] = {"batches": ("decode_padded", "mixed_padded"), "extras": {"sinks": {"sinks": True}}}
    few |= {"variants": {"window": ATTENTION_VARIANTS["window"]}, "lse": (name != "flashinfer_xqa",)}
    with backend_of(name) as backend:
        if name == "flex":  # unfused, it can't run below a trace's dispatch nor below the tape
            monkeypatch.setenv("TORCHPAGED_FLEX_COMPILER", "eager")
            right = run(backend, modes=("captured",), capture=EagerCapture(), **few) | {"compiled"}
        else:
            right = run(backend, modes=("compiled", "captured"), **few)
        support = backend.capabilities.graph_support
    assert "compiled" in right
    assert ("captured" in right) == (support > GraphSupport.NEVER)


def test_what_it_catches() -> None:
    """Wrong numbers, an output that is not written, and a session for what is declared not to run."""
    reference = get_backend("reference")

    def ignores_the_window(*tensors: Any, **options: Any) -> None:
        reference.ops.paged_attention(*tensors, **options | {"window_left": -1, "window_right": -1})

    def writes_nothing(*tensors: Any, **options: Any) -> None:
        pass

    few: dict[str, Any] = {"device": "cpu", "modes": ("eager",), "batches": ("decode_edges",), **SHAPE}
    for attend, where in ((ignores_the_window, "window plain"), (writes_nothing, "causal plain")):
        liar = Backend("liar", reference.capabilities, {"paged_attention": attend}, lambda: None)
        with pytest.raises(AssertionError, match=f"liar: eager decode_edges {where}: out"):
            check_conformance(liar, **few)
    narrow = dataclasses.replace(reference.capabilities, features=reference.capabilities.features - {"alibi"})

    class Willing(reference.session):  # type: ignore[name-defined,misc]
        def __init__(self, name: Any, can: Any, ops: Any, specs: Any, limits: Any, device: Any) -> None:
            super().__init__(name, reference.capabilities, ops, specs, limits, device)

    liar = Backend("liar", narrow, reference.ops, lambda: None, Willing)
    with pytest.raises(
        AssertionError, match="expected a refusal with 'alibi is not supported', got a session"
    ):
        check_conformance(liar, **few)
    absent = Backend("absent", reference.capabilities, reference.ops, lambda: "pip install it")
    with pytest.raises(AssertionError, match="expected a refusal with 'pip install it'"):
        check_conformance(absent, **few)
    alone = dataclasses.replace(reference.capabilities, device_types=("cuda",))
    with pytest.raises(BackendUnavailableError, match="ran nothing: device cpu is not one of cuda"):
        check_conformance(Backend("alone", alone, reference.ops, lambda: None), **few)


def test_names_tell_the_check() -> None:
    names = [check.name for check in conformance_checks(get_backend("reference"), device="cpu")]
    assert "eager decode_edges window sinks without lse" in names
    assert len(set(names)) == len(names)
    assert not any(name.startswith("captured") for name in names), "it declares no graphs"
