"""The order of the automatic choice: the table of platforms, and what a request can ask beyond
that."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_tables import platform_table

from torchpaged import BackendUnavailableError, Limits, PagedAttention, open_session
from torchpaged.backends import (
    AttentionSpec,
    Backend,
    get_backend,
    list_backends,
    register_backend,
    select_backend,
)
from torchpaged.backends.choose import names as names_module
from torchpaged.backends.choose import select as select_module
from torchpaged.backends.choose.select import PLATFORMS, UNVERIFIED, order_of, platform_of

ROOT, CPU = Path(__file__).parents[2], torch.device("cpu")
SPEC = AttentionSpec(device=CPU, dtype=torch.float32, head_dim=16, num_heads=4, num_kv_heads=2)
ALL = Limits(max_num_reqs=4, max_num_tokens=8, max_blocks_per_req=4, num_blocks=9, block_size=4)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``gpu(capability)``: one GPU of that kind, on which every backend that knows it could run."""

    def pretend(capability: tuple[int, int], hip: str | None = None) -> torch.device:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretended GPU")
        monkeypatch.setattr(torch.version, "hip", hip)
        own = select_module._reject

        def reject(backend: Backend, specs: Any) -> list[str]:
            here = "cuda" in backend.capabilities.device_types
            return backend.capabilities.reject(specs[0]) if here else own(backend, specs)

        monkeypatch.setattr(select_module, "_reject", reject)
        return torch.device("cuda")

    return pretend


# -------------------------------------------------------------------------------------------------- the table
def test_the_table_is_whole() -> None:
    for row in PLATFORMS:
        assert row.order
        assert set(row.order) <= set(list_backends())
        measured = row.evidence.startswith("measured on")
        assert measured or UNVERIFIED in row.evidence or row.device_type == "cpu", row.name
        if measured:  # and it says the order of the row
            document = json.loads((ROOT / row.evidence.split(": ")[1]).read_text())
            assert document["decode"][: len(row.order)] == list(row.order)
            assert document["prefill"][0] == row.order[0]
            assert max(document["losses"].values()) <= 1.02


@pytest.mark.parametrize(
    ("capability", "name", "first"),
    [
        ((7, 0), "Volta, Turing", "flex"),
        ((7, 5), "Volta, Turing", "flex"),
        ((8, 0), "Ampere", "cuda"),
        ((8, 6), "Ampere", "cuda"),
        ((8, 9), "Ada", "flashinfer"),
        ((9, 0), "Hopper", "cuda"),
        ((10, 0), "Blackwell", "flashinfer"),
        ((12, 0), "Blackwell", "flashinfer"),
    ],
)
def test_each_generation(gpu: Any, capability: tuple[int, int], name: str, first: str) -> None:
    """A backend that plans comes where its caller plans; elsewhere the next one, with the reason."""
    spec = replace(SPEC, device=gpu(capability), dtype=torch.bfloat16, head_dim=128)
    assert platform_of(spec.device).name == name
    choice = select_backend(spec, plans=True)
    assert choice.name == first
    assert name in choice.reason
    if first == "flashinfer":
        choice = select_backend(spec)
        assert choice.name == "cuda"
        assert "plans each batch" in choice.rejected["flashinfer"][0]


def test_rocm_and_unknown_devices(gpu: Any) -> None:
    assert platform_of(gpu((9, 4), hip="6.2")).order == ("triton",)
    unknown = platform_of(gpu((5, 2)))
    assert unknown.order == ()
    assert unknown.name == "unknown"
    assert order_of(torch.device("cuda"))[:2] == ("cuda", "triton")


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/backends.md").read_text()
    made = page.partition("<!-- made: platforms -->\n")[2].partition("<!-- end -->")[0]
    assert made == platform_table(), "python benchmarks/backend_tables.py"


# ---------------------------------------------------------------------------------------- what a request asks
def test_determinism_and_query_length() -> None:
    can = replace(get_backend("reference").capabilities, deterministic=False, max_query_len=4)
    assert can.reject(replace(SPEC, max_query_len=4)) == []
    assert can.reject(replace(SPEC, max_query_len=5, deterministic=True)) == [
        "queries of 5 tokens are over 4",
        "equal calls may give other bits, and deterministic was asked for",
    ]
    assert can.reject(SPEC) == ["queries of any length are over 4"]


def test_a_session_of_all_limits_may_get_one_that_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """`open_session` tells its caller to plan; a module alone, and limits that are not all there, don't."""
    from sessions import PLANNING

    monkeypatch.setattr(names_module, "REGISTERED", {})
    monkeypatch.setattr(names_module, "AUTOMATIC", list(names_module.AUTOMATIC))
    register_backend(PLANNING, automatic=True)
    assert open_session(SPEC, ALL).name == "planning"
    for other in (open_session(SPEC, replace(ALL, max_num_reqs=None)), PagedAttention(4, 16, 2).session):
        assert other.name in ("cpu", "reference")
    assert "plans each batch" in select_backend(SPEC).rejected["planning"][0]


def test_one_line_per_model(caplog: pytest.LogCaptureFixture) -> None:
    select_module._once.cache_clear()
    with caplog.at_level(logging.INFO, "torchpaged.backends"):
        for _ in range(4):
            PagedAttention(6, 24, 3, backend="reference")
    assert caplog.messages == [
        "backend reference for 6/3 heads of 24 in float32 on cpu: backend='reference' was given"
    ]


def test_nothing_fits() -> None:
    with pytest.raises(BackendUnavailableError, match=r"(?s)no backend can run this.*cpu: .*dtype"):
        select_backend(replace(SPEC, dtype=torch.int8, kv_dtype=torch.int8))
