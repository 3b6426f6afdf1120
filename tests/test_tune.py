"""`torchpaged tune`: what the rows of a measurement say, and one measurement on a CPU from plan to choice."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from torchpaged import ArgumentError, BackendUnavailableError
from torchpaged.backends import AttentionSpec, Backend, get_backend, register_backend, select_backend
from torchpaged.backends.choose import names as names_module
from torchpaged.backends.choose.tuned import TunedFileWarning, path_for, tuned_for
from torchpaged.bench import timing
from torchpaged.bench.attention import inputs
from torchpaged.bench.attention.cases import _case
from torchpaged.bench.tune import TuneOptions, plan, run, score, tune
from torchpaged.custom_ops import BACKEND_OPS

CPU = torch.device("cpu")
CASES = [
    _case("smoke", (4, 2, 16), "two decodes", [20, 7], dtype=torch.float32),
    _case("smoke", (4, 2, 16), "decode + chunk", [20, 7], [1, 5], dtype=torch.float32),
]


def row(case: str, decode: bool, **us: float | str) -> dict[str, Any]:
    """A row as `measure_case` makes it; text = the reason of a failure."""
    entries = {
        name: {"status": "timed", "us": us, "us_with_plan": us}
        if isinstance(us, float)
        else {"status": "wrong" if us else "unsupported", "reason": us}
        for name, us in us.items()
    }
    return {"case": case, "num_tokens": 4 if decode else 9, "num_reqs": 4, "contenders": entries}


# ----------------------------------------------------------------------------------------------------- scores
def test_orders_count_each_case_alike() -> None:
    """By ratios, not by microseconds: a long case says no more than a short one."""
    rows = [row("short", True, a=10.0, b=20.0), row("long", True, a=1500.0, b=1000.0)]
    rows += [row("prompt", False, a=10.0, b=15.0)]
    assert score.order(rows, ["a", "b"]) == ["a", "b"]
    assert score.losses(rows, ["a", "b"])["b"] == {"short": 2.0, "long": 1.0, "prompt": 1.5}
    assert score.orders(rows, None, ["a", "b"]) == (["a", "b"], ["a", "b"])


def test_a_case_that_one_can_not_run_does_not_count_for_it() -> None:
    rows = [row("a", True, x=10.0, y=""), row("b", True, x=10.0, y=9.0)]
    assert score.order(rows, ["x", "y"]) == ["y", "x"]


def test_a_wrong_result_anywhere_is_told() -> None:
    rows = [row("a", True, x=10.0, y=1.0), row("b", False, x=10.0, y="error 0.5 is over 0.1")]
    assert score.unfit(rows) == {"y": "b: wrong: error 0.5 is over 0.1"}


@pytest.mark.parametrize(("of_route", "split"), [(10.0, True), (12.5, False), (None, False)])
def test_a_route_must_be_better_than_the_best_backend(of_route: float | None, split: bool) -> None:
    """And must have been timed: the cut has a price that no part alone shows."""
    rows = [row("decode", True, a=10.0, b=12.0), row("prompt", False, a=12.0, b=10.0)]
    if of_route is not None:
        rows[1]["contenders"]["route"] = {"status": "timed", "us_with_plan": of_route}
    decode, prefill = score.orders(rows, "route", ["a", "b"])
    assert (decode[0] != prefill[0]) == split and {*decode, *prefill} == {"a", "b"}
    if split:
        assert (decode, prefill) == (["a", "b"], ["b", "a"])


# -------------------------------------------------------------------------------------------- one measurement
ROUTE = "decode=for_decodes,prefill=for_prompts"
#: Microseconds of decodes and of mixed batches, in place of what a busy machine measures.
US = {"for_decodes": (1.0, 9.0), "for_prompts": (9.0, 1.0), "wrong": (0.1, 0.1), ROUTE: (1.0, 1.5)}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tiny cases, no ceilings, a cache folder of the test's own; backends that are said to be late for
    prompts or for decodes, and one that is wrong."""
    monkeypatch.setenv("TORCHPAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(run, "select_cases", lambda suites, case: [c for c in CASES if case in c.name])
    for name in ("measure_bandwidth", "measure_flop_rate"):
        monkeypatch.setattr(timing, name, lambda device: (1e12, "given"))
    monkeypatch.setattr(timing, "BURST", 2)
    for module, name in ((timing, "MAX_CALLS"), (inputs, "MAX_LAYERS"), (inputs, "MIN_LAYERS")):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(names_module, "REGISTERED", {})
    reference = get_backend("reference")

    def off_by_one(*arguments: Any, **options: Any) -> None:
        BACKEND_OPS["reference"].paged_attention(*arguments, **options)
        arguments[6].add_(1.0)

    for name, ops in (
        ("for_decodes", BACKEND_OPS["reference"]),
        ("for_prompts", BACKEND_OPS["reference"]),
        ("wrong", {"paged_attention": off_by_one}),
    ):
        register_backend(Backend(name, reference.capabilities, ops, lambda: None))
    measure = run.measure_case

    def measured(*arguments: Any, **options: Any) -> dict[str, Any]:
        row = measure(*arguments, **options)
        for name, entry in row["contenders"].items():
            if entry["status"] == "timed":
                entry["us_with_plan"] = US[name][0 if score.is_decode(row) else 1]
        return row

    monkeypatch.setattr(run, "measure_case", measured)
    return tmp_path


ASKED = TuneOptions("cpu", ("for_decodes", "for_prompts", "wrong"), repeats=1, quiet=True)
SPEC = AttentionSpec(device=CPU, dtype=torch.float32, head_dim=16, num_heads=4, num_kv_heads=2)


def test_a_dry_run_does_nothing(small: Path) -> None:
    said = plan(dataclasses.replace(ASKED, backends=()))
    assert said["file"] == str(path_for(CPU)) and not list(small.iterdir())
    assert said["backends"]["wrong"] is None and "device cpu" in said["backends"]["cuda"]
    assert "reference" not in said["backends"] and "name it" in said["backends"]["flex"]
    assert said["cases"] == [f"smoke: {case.name}" for case in CASES]


def test_from_measurement_to_choice(small: Path) -> None:
    """Two backends that are each late at something make a route; the wrong one, which is as fast as any, is
    not chosen, and the report says why."""
    before = select_backend(SPEC).name
    document = tune(dataclasses.replace(ASKED, output=str(small / "all.json")))
    assert (document["decode"][0], document["prefill"][0]) == ("for_decodes", "for_prompts")
    assert "wrong" not in document["decode"] + document["prefill"]
    assert "wrong: relative error" in document["unfit"]["wrong"]
    assert json.loads((small / "all.json").read_text())["losses"] == document["losses"]
    kept = json.loads(path_for(CPU).read_text())
    assert kept["decode"] == document["decode"] and set(kept["evidence"]["us"]) == {c.name for c in CASES}
    choice = select_backend(SPEC)
    assert choice.name == ROUTE != before
    assert list(document["losses"].values()) == [1.0, 1.5]


def test_nothing_is_kept_of_what_failed(small: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="nothing could be timed: .*relative error"):
        tune(dataclasses.replace(ASKED, backends=("wrong",)))
    assert not path_for(CPU).exists()
    with pytest.raises(BackendUnavailableError, match="'triton' cannot be measured here: device cpu"):
        tune(dataclasses.replace(ASKED, backends=("triton",)))
    with pytest.raises(ArgumentError, match="repeats: expected at least 1"):
        plan(dataclasses.replace(ASKED, repeats=0))


def test_the_command(small: Path) -> None:
    """As a user types it; a measurement that is not saved leaves the choice alone."""
    typer = pytest.importorskip("typer.testing", reason="typer is not installed")
    from torchpaged.cli.app import app

    given = ["tune", "--device", "cpu", "--backends", "for_decodes,for_prompts", "--repeats", "1"]
    done = typer.CliRunner().invoke(app, [*given, "--dry-run", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["file"] == str(path_for(CPU)), done.output
    assert tune(dataclasses.replace(ASKED, save=False))["file"] is None and not path_for(CPU).exists()
    done = typer.CliRunner().invoke(app, given, env={"COLUMNS": "300"})
    assert done.exit_code == 0 and "decode: for_decodes, for_prompts" in done.output, done.output
    assert path_for(CPU).exists()
    refused = typer.CliRunner().invoke(app, ["tune", "--backends", "nobody"])
    assert isinstance(refused.exception, BackendUnavailableError)


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPAGED_CACHE", str(tmp_path))
    path = path_for(CPU)
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.warns(TunedFileWarning, match="it is no file"):
        assert tuned_for(CPU, ()) is None
