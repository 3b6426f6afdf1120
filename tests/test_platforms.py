"""The order of the automatic choice: the table of platforms, what `torchpaged tune` measured, and what a
request can ask beyond that."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchpaged import BackendUnavailableError, Limits, PagedAttention, open_session
from torchpaged.backends import (
    AttentionSpec,
    Backend,
    Route,
    TunedFileWarning,
    get_backend,
    list_backends,
    register_backend,
    select_backend,
)
from torchpaged.backends.choose import names as names_module
from torchpaged.backends.choose import select as select_module
from torchpaged.backends.choose.order import PLATFORMS, UNVERIFIED, platform_of, platform_table
from torchpaged.backends.choose.select import ranking
from torchpaged.backends.choose.tuned import Tuned, device_name, path_for, save, versions

ROOT, CPU = Path(__file__).parents[1], torch.device("cpu")
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
        assert row.order and set(row.order) <= set(list_backends())
        measured = row.evidence.startswith("measured on")
        assert measured or UNVERIFIED in row.evidence or row.device_type == "cpu", row.name
        if measured:  # and it says the order of the row
            document = json.loads((ROOT / row.evidence.split(": ")[1]).read_text())
            assert document["decode"][: len(row.order)] == list(row.order)
            assert document["prefill"][0] == row.order[0] and max(document["losses"].values()) <= 1.02


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
    """A backend that plans comes where somebody plans; elsewhere the next one, with the reason."""
    spec = replace(SPEC, device=gpu(capability), dtype=torch.bfloat16, head_dim=128)
    assert platform_of(spec.device).name == name
    choice = select_backend(spec, plans=True)
    assert choice.name == first and name in choice.reason
    if first == "flashinfer":
        choice = select_backend(spec)
        assert choice.name == "cuda" and "plans each batch" in choice.rejected["flashinfer"][0]


def test_rocm_and_what_nobody_knows(gpu: Any) -> None:
    assert platform_of(gpu((9, 4), hip="6.2")).order == ("triton",)
    unknown = platform_of(gpu((5, 2)))
    assert unknown.order == () and unknown.name == "unknown"
    assert ranking(torch.device("cuda")).decode[:2] == ("cuda", "triton")


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/backends.md").read_text()
    made = page.partition("<!-- made: torchpaged backends --platforms -->\n")[2].partition("<!-- end -->")[0]
    assert made == platform_table(), "put what `torchpaged backends --platforms` prints there"


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


# ------------------------------------------------------------------------------------- what tune has measured
@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of this test alone."""
    monkeypatch.setenv("TORCHPAGED_CACHE", str(tmp_path))
    return tmp_path


def measured(**other: Any) -> Tuned:
    values = {
        "device": device_name(CPU),
        "versions": versions(),
        "decode": ("reference", "cpu"),
        "prefill": ("torch_sdpa", "cpu"),
        "measured": "2026-01-02",
    }
    return Tuned(**values | other)


def test_what_was_measured_is_chosen(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = select_backend(SPEC)
    path = save(measured(), CPU, {})
    assert path.parent == cache / "tuned"
    choice = select_backend(SPEC)
    assert choice.route == Route("reference", "torch_sdpa") and choice.rejected == {}
    assert f"measured on this {device_name(CPU)} on 2026-01-02" in choice.reason
    assert select_backend(replace(SPEC, max_query_len=1)).name == "reference"
    assert PagedAttention(4, 16, 2).choice.route == choice.route
    save(measured(prefill=("reference",)), CPU, {})
    assert select_backend(SPEC).name == "reference"
    monkeypatch.setenv("TORCHPAGED_TUNED", "0")
    assert select_backend(SPEC) == before
    monkeypatch.setenv("TORCHPAGED_TUNED", "1")
    save(measured(prefill=("cuda", "torch_sdpa"), decode=("torch_sdpa",)), CPU, {})
    assert select_backend(SPEC).name == "torch_sdpa", "others can't run here"


def test_a_measurement_of_a_backend_that_is_not_here(cache: Path) -> None:
    """Such as one that another process registers: said once, and used as soon as it is here."""
    before = select_backend(SPEC)
    save(measured(prefill=("mine", "nobody", "torch_sdpa"), decode=("mine", "torch_sdpa")), CPU, {})
    with pytest.warns(TunedFileWarning, match="no backend here is named mine, nobody; run `torchpaged tune`"):
        assert select_backend(SPEC) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_backend(SPEC) == before


def test_a_route_that_lacks_graphs_is_left(cache: Path) -> None:
    """The prefill part alone then, which has them."""
    from torchpaged.backends import GraphSupport

    save(measured(prefill=("cpu",)), CPU, {})
    wanted = replace(SPEC, graphs=GraphSupport.ALWAYS)
    choice = select_backend(wanted)
    assert not get_backend(choice.name).reject(wanted) and choice.route.prefill == "cpu"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "no file of this format"),
        ("[]", "expected format 1"),
        ('{"format": 9}', "expected format 1"),
        ({"decode": "cpu"}, "decode: expected names"),
        ({"prefill": []}, "prefill: expected names"),
        ({"versions": None}, "versions: expected versions by package"),
        ({"versions": {**versions(), "torch": "1.0"}}, f"torch 1.0, here {torch.__version__}"),
        ({"device": "Other GPU"}, "measured on Other GPU"),
        (b"\xff\xfe", "no file of this format"),
    ],
    ids=str,
)
def test_a_file_that_can_not_be_used_is_said_and_left_aside(cache: Path, text: Any, words: str) -> None:
    """Once, and the table is used in its place."""
    before = select_backend(SPEC)
    path = save(measured(), CPU, {})
    assert select_backend(SPEC) != before
    if isinstance(text, dict):
        text = json.dumps({"format": 1, **asdict(measured()), **text})
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    from torchpaged.backends.choose import tuned

    tuned._FOUND.clear()
    with pytest.warns(TunedFileWarning, match="run `torchpaged tune` again") as said:
        assert select_backend(SPEC) == before
    assert words in str(said[0].message) and str(path) in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_backend(SPEC) == before


def test_a_folder_in_the_files_place(cache: Path) -> None:
    path_for(CPU).mkdir(parents=True)
    with pytest.warns(TunedFileWarning, match="can't be read"):
        assert select_backend(SPEC).name in ("cpu", "reference")


def test_a_cache_folder_that_can_not_be_looked_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPAGED_CACHE", str(cache / ("a" * 300)))
    with pytest.warns(TunedFileWarning, match="can't be read"):
        assert select_backend(SPEC).name in ("cpu", "reference")


def test_a_file_nested_too_deep(cache: Path) -> None:
    path_for(CPU).parent.mkdir(parents=True, exist_ok=True)
    path_for(CPU).write_text("[" * 200_000)
    with pytest.warns(TunedFileWarning, match="no file of this format"):
        assert select_backend(SPEC).name in ("cpu", "reference")


def test_the_functions_follow(cache: Path) -> None:
    """Also those that remember their choice by kind of call."""
    from torchpaged.backends.choose.for_call import choose_ops
    from torchpaged.backends.choose.kind import Kind

    kind = Kind(torch.float32, torch.float32, 4, 2, 16, 16, 16)
    before = choose_ops(CPU, kind)
    save(measured(decode=("torch_sdpa",), prefill=("torch_sdpa",)), CPU, {})
    assert choose_ops(CPU, kind) is get_backend("torch_sdpa").ops is not before


def test_nothing_fits(cache: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"(?s)no backend can run this.*cpu: .*dtype"):
        select_backend(replace(SPEC, dtype=torch.int8, kv_dtype=torch.int8))
