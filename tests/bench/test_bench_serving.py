"""The serving benchmark on a CPU: its loads, our engine's rows, and a peer that is not installed; the load
of bench_blocks.py."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import statistics

import bench_serving_peers as peers
import pytest
from bench_blocks import LOOKAHEAD, Load, hit_us, prefix_cache_us
from serving import cases, engines
from serving.loads import arrivals_of, load_of, prompts_of

SIZES = {"rows": 4, "requests": 3, "longest": 8, "prompt_tokens": 20, "prompt_counts": (2,), "span": 0.2}


def test_loads_are_the_same_for_each_engine_and_differ_by_seed() -> None:
    assert load_of("uniform", 8, 512, 1) == load_of("uniform", 8, 512, 1)
    assert load_of("uniform", 8, 512, 1) != load_of("uniform", 8, 512, 2)
    assert {len(request.prompt) for request in prompts_of(3, 20, 512, 0)} == {20}
    arrivals = arrivals_of(1000, 50.0)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(20, rel=0.2)
    assert set(arrivals_of(4, None)) == {0.0}


def test_lengths_have_the_means_that_they_are_said_to_have() -> None:
    load = load_of("sharegpt", 10_000, 512, 0)
    assert sum(len(request.prompt) for request in load) / 10_000 == pytest.approx(215, rel=0.05)
    assert sum(request.new_tokens for request in load) / 10_000 == pytest.approx(198, rel=0.05)


def test_all_parts_of_our_engine(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    cases.measure(cases.Case("ours", "tiny", cases.PARTS, str(file), 0.0, {"num_blocks": 64}, **SIZES))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    counts = {part: sum(row["part"] == part for row in rows) for part in ("start", *cases.PARTS)}
    assert counts == {"start": 1, "uniform": 2, "prompts": 2, "sharegpt": 1, "rates": 3}
    assert all(row["tok_per_s"] > 0 for row in rows[1:])
    assert all(row["first_token"]["p99"] >= row["first_token"]["p50"] > 0 for row in rows[-3:])


def test_a_process_that_fails_leaves_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "peers.json"
    monkeypatch.setattr(peers, "run", lambda args, case, seconds: f"no {case.engine}")
    command = ["peers", "--output", str(output), "--plan", "tiny:uniform;tiny:rates", "--seconds", "100"]
    monkeypatch.setattr("sys.argv", command)
    peers.main()
    document = json.loads(output.read_text())
    assert [process["failed"] for process in document["processes"]] == ["no vllm", "no ours"] * 2
    assert document["rows"] == []
    monkeypatch.setattr("sys.argv", [*command, "--require-first"])
    with pytest.raises(SystemExit, match="no vllm"):
        peers.main()
    assert capsys.readouterr().out


def test_the_same_weights_for_a_peer() -> None:
    import torch
    from decode_step.cases import SHAPES, build_model

    model = build_model(SHAPES["tiny"], torch.device("cpu"), torch.float32)
    before = {name: float(weight.std()) for name, weight in model.named_parameters() if weight.dim() > 1}
    for weight in model.parameters():
        weight.zero_()
    assert engines.fill_normal(model) == SHAPES["tiny"].weights_read()
    for name, weight in model.named_parameters():
        if name in before:
            assert float(weight.std()) == pytest.approx(before[name], rel=0.1)
        else:
            assert (weight == 1).all()


@pytest.mark.parametrize("blocks_per_row", [66, 20], ids=["room", "short"])
@pytest.mark.parametrize("cached", [True, False])
def test_nearly_all_that_is_reserved_is_useful(cached: bool, blocks_per_row: int) -> None:
    """By what an engine on a GPU gives ahead of need."""
    load = Load(64, 64 * blocks_per_row, LOOKAHEAD, cached)
    load.run(500)
    assert (load.scheduler.preemptions > 0) == (blocks_per_row == 20)
    assert load.count > 100
    assert statistics.mean(load.utilisation[20:]) >= 0.96


def test_requests_of_the_prefix_cache_find_nothing_or_all() -> None:
    assert prefix_cache_us(num_requests=3)["blocks"] == 69
    assert hit_us(256) > 0
