"""The decode-step benchmark on a CPU: rows and figures of the tiny shape, the gate's teeth, traces, peers,
what can't run."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import decode_step as step
from decode_step import gate, peers, shape
from decode_step import trace as step_trace
from decode_step.cases import SHAPES, TARGETS_MS, build_model
from decode_step.own import Variant, ours

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.hf import PagedModel

CPU = torch.device("cpu")
TINY = ["--shapes", "tiny", "--device", "cpu", "--context", "48", "--bandwidth", "0.01", "--repeats", "4"]


def test_rooflines_are_those_of_the_targets() -> None:
    """Milliseconds at 4.35 TB/s and a context of 2048, as they were computed by hand for the targets."""
    for name, batch, ms in (
        ("llama-1b", 1, 0.58),
        ("llama-1b", 64, 1.56),
        ("llama-8b", 1, 3.51),
        ("llama-8b", 64, 7.40),
    ):
        assert SHAPES[name].bytes_read(batch, 2048, 2) / 4.35e12 * 1e3 == pytest.approx(ms, abs=0.01)
        assert TARGETS_MS[name, batch] > ms


def test_weights_are_counted_as_the_model_has_them() -> None:
    model = build_model(SHAPES["tiny"], CPU, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == SHAPES["tiny"].weights_read()


# ---------------------------------------------------------------------------------------------------- the run
@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    assert step.main([*TINY, "--batches", "1,3", "--only", "logits,k1,k2", "--output", str(file)]) == 0
    seen = capsys.readouterr()
    document = json.loads(seen.out)
    assert json.loads(file.read_text()) == document
    assert len(seen.out.splitlines()) == 1
    assert [(row["contender"], row["batch"]) for row in document["rows"]] == [
        (n, b) for n in ("logits", "k1", "k2") for b in (1, 3)
    ]
    for row in document["rows"]:
        assert row["status"] == "timed"
        assert row["p20_ms"] <= row["ms"] <= row["p80_ms"]
        assert row["error"] <= row["error_limit"]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["ms"] * 1e3)
        assert row["of_roofline"] == pytest.approx(row["roofline_ms"] / row["ms"])
        assert row["host_replay_us"] > 0
        assert row["host_launch_us"] > 0
        assert row["ready_s"] > 0
        assert row["host_after_trace"] is False
        # nothing is invented on a CPU
        assert "kernels_per_step" not in row
        assert "idle_between_launches" not in row
    assert document["conditions"]["torch"] == torch.__version__
    assert "ms/step" in seen.err
    assert "tiny b3 k2" in seen.err


@pytest.mark.slow
def test_no_trace_means_no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, the same run fails: a trace is asked for on a CPU, too."""
    monkeypatch.setattr(shape.step_trace, "record", lambda *_: 1 / 0)
    assert step.main([*TINY, "--batches", "1", "--only", "k1", "--no-trace"]) == 0
    assert step.main([*TINY, "--batches", "1", "--only", "k1"]) == 1


def test_what_fails_becomes_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such\nthing")

    monkeypatch.setattr(shape, "ours", broken)
    assert step.main([*TINY, "--batches", "1,2", "--only", "k1"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["status"] for row in rows] == ["failed"] * 2
    assert rows[0]["reason"].startswith("RuntimeError: no such thing (broken:")


@pytest.mark.slow
def test_changed_models(capsys: pytest.CaptureFixture[str]) -> None:
    """Contenders whose model is changed get one of their own; the plain one's figures must not depend
    on them."""
    assert step.main([*TINY, "--batches", "2", "--only", "k1+fuse,k1", "--json-only"]) == 0
    seen = capsys.readouterr()
    rows = json.loads(seen.out)["rows"]
    assert [(row["contender"], row["status"]) for row in rows] == [("k1+fuse", "timed"), ("k1", "timed")]
    assert seen.err == ""
    assert rows[0]["error"] != rows[1]["error"]


@pytest.mark.slow
def test_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main([*TINY, "--batches", "1,2", "--only", "k1", "--time-limit", "0"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["status"] for row in rows] == ["skipped"] * 2
    assert "time limit of 0.0 s" in rows[0]["reason"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--shapes", "llama-9b"], "shapes: expected some of"),
        (["--only", "k0"], "only: expected names such as"),
        (["--peers", "vllm"], "peers: expected some of hf_static"),
        (["--batches", "0"], "batches: expected"),
        (["--dtype", "int8"], "dtype: expected one of"),
    ],
)
def test_refusals(wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main([*TINY, *wrong]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_peers_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    step.main([*TINY, "--batches", "2", "--only", "k1", "--peers", "hf_static,hf_cb", "--new-tokens", "12"])
    own, static, batching = json.loads(capsys.readouterr().out)["rows"]
    assert [row["contender"] for row in (own, static, batching)] == ["k1", "hf_static", "hf_cb"]
    assert static["compiled_by"] == "no compiler"
    assert static["samples"] == 11
    for row in (static, batching):
        assert not row["own"]
        assert row["status"] == "timed"
        assert row["attention"] == "sdpa"
        assert 0 < row["p20_ms"] <= row["ms"] <= row["p80_ms"]


def test_steps_of_a_peer_are_those_of_all_requests() -> None:
    """The last to begin counts, from its first token to the first end of any."""
    early, late = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.5, 2.5, 3.0, 4.0, 5.5, 6.5, 7.5]
    assert peers.common_steps_ms([early, late]) == [1000.0, 500.0, 1000.0, 1500.0]
    with pytest.raises(RuntimeError, match="3 steps with all requests"):
        peers.common_steps_ms([early[:-1], late])


# --------------------------------------------------------------------------------------------------- the gate
@pytest.mark.parametrize(
    ("kind", "fault"), [*itertools.product(["logits", "k1"], ["none", "weights", "keys"]), ("k1", "tokens")]
)
def test_the_gate_has_teeth(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is off by little is refused: a weight, the prompt's keys, or (of whole steps) the token
    the graph gives."""
    model = build_model(SHAPES["tiny"], CPU, torch.bfloat16)
    reference = gate.make_reference(model, 3)
    paged = PagedModel(model, num_blocks=40, block_size=16)
    own = ours(paged, Variant.parse(kind), [4], 8)
    own.capture(4)
    if fault == "weights":
        model.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    elif fault == "keys":
        load = own.load
        monkeypatch.setattr(
            own, "load", lambda *args: (load(*args), paged.kv_cache[0].k_cache[own.tables[0][0]].zero_())
        )
    elif fault == "tokens":
        replay = own.replay
        monkeypatch.setattr(own, "replay", lambda batch: (replay(batch) + 1) % 512)
    entry = own.check(reference, 4)
    assert ("reason" in entry) == (fault != "none"), entry
    if fault == "none":
        assert entry["same_tokens"] > 0.5
        assert entry["error"] > 0


def test_variant_names() -> None:
    assert Variant.parse("k4+fuse+compile") == Variant("k4+fuse+compile", 4, True, "compile")
    assert Variant.parse("logits+layers") == Variant("logits+layers", 0, False, "layers")
    with pytest.raises(ArgumentError, match="only: expected names"):
        Variant.parse("k1+compile+fuse")


# ----------------------------------------------------------------------------------------------------- traces
def _event(name: str, start: float, length: float, launch: int, cat: str = "kernel") -> dict[str, Any]:
    return {"name": name, "cat": cat, "ts": start, "dur": length, "args": {"correlation": launch}}


def test_traces() -> None:
    """Two launches of a model of two layers: norm, 2 x (linear, attention overlapping its copy), and a gap of
    1 in 20 between launches."""
    events = [
        {"name": "cudaGraphLaunch", "cat": "cuda_runtime", "ts": 0, "dur": 5, "args": {"correlation": 1}},
        {"ph": "M", "name": "process"},
    ]
    for launch, start in ((1, 100.0), (2, 110.5)):
        events.append(_event("norm", start, 1.5, launch))
        for layer in range(2):
            at = start + 1.5 + 4 * layer
            events += [
                _event("linear", at, 2, launch),
                _event("attention", at + 2, 2, launch),
                _event("copy", at + 2.5, 1, launch, "gpu_memcpy"),
            ]
    trace = step_trace.parse(events)
    counted = step_trace.kernels_per_step(trace, num_layers=2, steps=2)
    assert (counted["kernels_per_step"], counted["kernels_per_layer"]) == (7, 3)
    assert [kernel["name"] for kernel in counted["kernels"]] == ["linear", "attention", "copy", "norm"]
    assert counted["kernels"][0] == {"name": "linear", "per_step": 2, "us_per_step": 4}
    idle = step_trace.idle(trace)
    assert idle == {
        "idle_between_launches": pytest.approx(1 / 20),
        "idle_between_kernels": pytest.approx(1 / 20),
        "traced_ms": pytest.approx(0.02),
    }
    inside = step_trace.idle(step_trace.parse([_event("a", 0, 2, 7), _event("b", 3, 1, 7)]))
    assert (inside["idle_between_launches"], inside["idle_between_kernels"]) == (0, 0.25)
    assert step_trace.idle([]) == step_trace.kernels_per_step([], 2, 1) == {}


# ------------------------------------------------------------------------------------------------- cold start
@pytest.mark.slow
def test_cold_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench_cold_start as cold

    arguments = ["--shape", "tiny", "--device", "cpu", "--contender", "k1+fuse", "--batch", "2"]
    file = str(tmp_path / "code.tpc")
    assert cold.main([*arguments, "--save", file]) == 0
    assert cold.main([*arguments, "--load", file]) == 0
    saved, loaded = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert saved["compile_cache"]["saved"]["num_bytes"] == Path(file).stat().st_size
    assert loaded["compile_cache"]["loaded"]["loaded"]
    assert list(loaded["parts"]) == ["load", "change", "generator", "first_token", "second_token"]
    assert loaded["seconds"] == pytest.approx(sum(loaded["parts"].values()) - loaded["parts"]["second_token"])
    assert cold.main([*arguments, "--contender", "logits"]) == 2
