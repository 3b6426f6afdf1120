"""The attention benchmark: its registry, its oracle, its gate, what it reports about peers, and the whole
command on a CPU."""

import dataclasses
import datetime
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bench_attention
import pytest
import torch
from attention_peers import case as attention_case
from attention_peers import cases as package_cases
from attention_peers import inputs
from attention_peers.case import measure_case
from attention_peers.cases import LLAMA_8B, AttentionCase, make_case, select_cases
from attention_peers.contender import Contender, Prepared, own_backend
from attention_peers.contenders import contenders
from attention_peers.in_parts import in_parts, num_decodes
from attention_peers.inputs import Inputs
from attention_peers.options import Options
from attention_peers.random_cases import random_cases
from attention_peers.run import cases_of, exit_code
from attention_peers.suites import SUITES
from attention_peers.summary import compare, summarise
from command import python
from measuring import timing
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.mask import BlockSparse
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CEILINGS = {"bytes_per_s": 1e10, "flop_per_s": 1e11}
RAGGED = make_case("smoke", (4, 2, 64), "ragged", [40, 17, 90], [1, 5, 60], dtype=torch.float32)
SPARSE = replace(RAGGED, block_sparse=BlockSparse(7, 2, 3, head_step=1))
DECODE_IDEALS = [
    *(1.0, 7.7, 7.7, 61.7, 246.8, 246.8, 493.7, 123.4, 184.6, 147.8),
    *(61.7, 246.8, 11.6, 46.3, 30.9, 123.4, 30.9, 123.4),
]


# --------------------------------------------------------------------------------------------------- registry
def test_decode_has_the_published_cases() -> None:
    """Ideal microseconds at 4.35 TB/s as the published table of peers has them, case by case."""
    ideals = [case.ideal_us(4.35e12, 7e14) for case in SUITES["decode"]]
    assert [round(us, 1) for us, _ in ideals] == DECODE_IDEALS
    assert {bound for _, bound in ideals} == {"memory"}


def test_names_are_unique_and_suites_named() -> None:
    names = [case.name for suite, cases in SUITES.items() for case in cases if case.suite == suite]
    assert (
        len(names)
        == sum(map(len, SUITES.values()))
        == len({(c.name, c.suite) for cases in SUITES.values() for c in cases})
    )
    assert {case.block_size for case in SUITES["block-size"]} == {1, 16, 64, 256, 16384}
    assert {case.kv_dtype for case in SUITES["decode-fp8"]} == {torch.float8_e4m3fn}


def test_blocks_lie_as_the_case_says() -> None:
    for shuffled in (True, False):
        table = inputs.make_inputs(replace(RAGGED, shuffled=shuffled), CPU).block_table
        blocks = [int(block) for row in table for block in row if block]
        assert sorted(blocks) == list(range(1, RAGGED.num_blocks + 1))
        assert (blocks == sorted(blocks)) == (not shuffled)


def test_flops_count_the_visible_pairs() -> None:
    pairs = sum(
        seq - query + i + 1
        for seq, query in zip(RAGGED.seq_lens, RAGGED.query_lens, strict=True)
        for i in range(query)
    )
    assert RAGGED.flops() == 4 * 4 * 64 * pairs
    chunk = SUITES["prefill"][-1]
    assert chunk.ideal_us(4.35e12, 7e14)[1] == "compute"
    assert chunk.seq_lens == (33280,)


def test_hidden_blocks_count_nowhere() -> None:
    keys = pairs = 0
    for seq, query in zip(SPARSE.seq_lens, SPARSE.query_lens, strict=True):
        key = torch.arange(seq)
        seen = SPARSE.mask.sees(key[seq - query :, None], key, torch.arange(4)[:, None, None])
        pairs += int(seen.sum())
        keys += int(seen.any(1).view(2, 2, seq).any(1).sum())
    assert SPARSE.flops() == 4 * 64 * pairs < RAGGED.flops()
    assert SPARSE.useful_bytes() == 2 * 64 * 4 * keys < RAGGED.useful_bytes()
    dense, by_head, by_kv_head, rare = (case.useful_bytes() for case in SUITES["block-sparse"][:4])
    assert dense > 1.9 * by_head > 6 * by_kv_head > 18 * rare


def test_fp8_halves_the_bytes() -> None:
    assert 2 * SUITES["decode-fp8"][0].useful_bytes() == SUITES["decode"][4].useful_bytes()


def test_selection() -> None:
    assert [case.block_size for case in select_cases(["decode"], "32/8/128 64X4K")] == [16, 64]
    assert {case.suite for case in select_cases(["all"])} == {"decode", "prefill", "mixed"}
    assert {case.suite for case in select_cases(["all"], known=SUITES)} == set(SUITES) - {"smoke"}
    assert package_cases.SUITES.items() <= SUITES.items()
    changed = select_cases(["decode-fp8"], "8x8k", torch.float16, SUITES)[0]
    assert changed.dtype == torch.float16
    assert changed.kv_dtype == torch.float8_e4m3fn
    with pytest.raises(ArgumentError, match="suite: expected one of all, decode"):
        select_cases(["nope"])
    with pytest.raises(ArgumentError, match="case: expected part of a case's name"):
        select_cases(["decode"], "no such case")


def test_random_cases_are_those_of_their_seed_and_kinds_come_in_turns() -> None:
    cases = cases_of(Options(random=100, seed=3))
    assert cases[:20] == random_cases(3, 20) and cases[:20] != random_cases(4, 20)
    assert len({case.name for case in cases}) == 100
    assert (
        max(case.useful_bytes() for case in cases) <= 2e9 and max(map(AttentionCase.flops, cases)) <= 1.6e12
    )
    short = [max(case.query_lens) <= 8 for case in cases]
    mixed = [not few and 1 in case.query_lens for few, case in zip(short, cases, strict=True)]
    for begin in range(0, 100, 20):
        assert (sum(short[begin : begin + 20]), sum(mixed[begin : begin + 20])) == (10, 4)
    assert all(case.num_heads <= 128 and min(case.query_lens) > 0 for case in cases)


@pytest.mark.parametrize(
    "case",
    [case for cases in SUITES.values() for case in cases],
    ids=lambda case: f"{case.suite}-{case.name}",
)
def test_caches_rotate_beyond_l2(case: AttentionCase) -> None:
    layers = inputs.num_layers(case)
    assert 2 <= layers <= 24
    assert layers == 24 or layers * case.useful_bytes() > 3.5 * 60e6
    assert timing.calls_per_round(layers, case.ideal_us(4.35e12, 7e14)[0]) % layers == 0


# ------------------------------------------------------------------------------------------ inputs and oracle
@pytest.mark.parametrize("elements", [1 << 26, 1 << 8])
@pytest.mark.parametrize("case", [RAGGED, SPARSE], ids=["dense", "sparse"])
def test_the_oracle_is_the_reference(
    monkeypatch: pytest.MonkeyPatch, case: AttentionCase, elements: int
) -> None:
    monkeypatch.setattr(inputs, "_ORACLE_ELEMENTS", elements)
    made = inputs.make_inputs(case, CPU)
    q, k, v = (t.double() for t in (made.q, made.k_caches[1], made.v_caches[1]))
    out = torch.empty_like(q)
    BACKEND_OPS["reference"].paged_attention(
        q,
        k,
        v,
        made.block_table,
        made.seq_lens,
        made.query_start_loc,
        out,
        None,
        max_query_len=60,
        scale=made.scale,
        block_sparse=case.block_sparse,
    )
    exact = inputs.exact_outputs(case, made, 1)
    assert set(exact) == {0, 2}
    assert len(exact[2][0]) == 60
    assert inputs.relative_error(case, out, exact) < 1e-6
    assert inputs.relative_error(case, out, inputs.exact_outputs(case, made, 0)) > 0.1
    other = SPARSE if case is RAGGED else RAGGED
    assert inputs.relative_error(case, out, inputs.exact_outputs(other, made, 1)) > 0.1


def test_of_long_queries_the_ends_are_checked() -> None:
    case = make_case("smoke", (2, 1, 16), "long", [700], 600, dtype=torch.float32)
    rows, reference = inputs.exact_outputs(case, inputs.make_inputs(case, CPU), 0)[0]
    assert len(rows) == 256
    assert rows[0] == 0
    assert rows[-1] == 599
    assert len(rows.unique()) == 256
    assert reference.shape == (256, 2, 16)


# ------------------------------------------------------------------------------------------------------- gate
def planted(name: str, spoil: Any) -> Contender:
    """The reference with a fault: ``spoil(out, layer, inputs, case)`` after each call."""

    def prepare(case: AttentionCase, made: Inputs) -> Prepared:
        right = own_backend("reference").prepare(case, made)

        def call(layer: int) -> Tensor:
            out = right.calls[layer]()
            spoil(out, layer, made, case)
            return out

        return Prepared([partial(call, layer) for layer in range(made.num_layers)])

    return Contender(name, False, lambda: None, lambda case, device: None, prepare)


def _drop_last_head(out: Tensor, layer: int, made: Inputs, case: AttentionCase) -> None:
    out[-1, -1] = 0


def _leave_a_row(out: Tensor, layer: int, made: Inputs, case: AttentionCase) -> None:
    out[2] = float("nan")


def _wrong_in_other_layers(out: Tensor, layer: int, made: Inputs, case: AttentionCase) -> None:
    if layer:
        out.mul_(1.01)


def _raise(out: Tensor, layer: int, made: Inputs, case: AttentionCase) -> None:
    raise RuntimeError("out of registers")


def _nothing(out: Tensor, layer: int, made: Inputs, case: AttentionCase) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "status", "words"),
    [
        (_nothing, "timed", ""),
        (_drop_last_head, "wrong", "relative error"),
        (_leave_a_row, "wrong", "not finite"),
        (_wrong_in_other_layers, "wrong", "relative error"),
        (_raise, "failed", "RuntimeError: out of registers"),
    ],
)
def test_the_gate(spoil: Any, status: str, words: str) -> None:
    with torch.inference_mode():
        row = measure_case(
            RAGGED, [planted("right", _nothing), planted("it", spoil)], CPU, CEILINGS, repeats=1
        )
    entry = row["contenders"]["it"]
    assert entry["status"] == status
    assert words in entry.get("reason", "")
    assert ("us" in entry) == (status == "timed")
    assert row["contenders"]["right"]["status"] == "timed"
    assert row["contenders"]["right"]["us"] > 0
    if status != "timed":
        assert compare(row["contenders"])["best_peer"] == "right"


def test_a_dropped_fp8_scale_is_found() -> None:
    case = replace(
        make_case("smoke", (4, 2, 64), "fp8", [300, 90], kv_dtype=torch.float8_e4m3fn), dtype=torch.float32
    )

    def forgetful(case: AttentionCase, made: Inputs) -> Prepared:
        spoilt = made.scales._replace(k_scale=torch.ones(1))
        return own_backend("reference").prepare(case, replace(made, scales=spoilt))

    liar = Contender("liar", False, lambda: None, lambda case, device: None, forgetful)
    row = measure_case(case, [own_backend("reference"), liar], CPU, CEILINGS, repeats=1)
    assert row["contenders"]["reference"]["status"] == "timed", row
    assert row["contenders"]["liar"]["status"] == "wrong"


def test_too_little_memory_skips_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_case, "free_bytes", lambda device: 1000)
    row = measure_case(SUITES["decode"][6], [own_backend("reference")], CPU, CEILINGS, repeats=1)
    assert "GiB are free" in row["skipped"]
    assert not row["contenders"]
    assert summarise([row])["skipped"] == {row["case"]: row["skipped"]}


# -------------------------------------------------------------------------------------------- timing, summary
def test_contenders_take_turns() -> None:
    order: list[str] = []

    class Fake:
        def __init__(self, name: str, us: float) -> None:
            self.name, self.us = name, us

        def burst(self, count: int) -> list[float]:
            order.append(self.name)
            return [self.us] * (count - 1) + [1000.0]

    result = timing.interleave({"a": Fake("a", 2.0), "b": Fake("b", 3.0)}, repeats=10)
    assert order == ["a", "b"] * 3
    assert result["a"].samples == 12
    assert (result["a"].median_us, result["a"].p20_us, result["b"].median_us) == (2.0, 2.0, 3.0)
    assert result["b"].p80_us > 3.0


def _row(case: str, own: float, peer: float | None) -> dict[str, Any]:
    entries: dict[str, Any] = {"triton": {"own": True, "status": "timed", "us": own}}
    entries["fa3"] = {
        "own": False,
        **({"status": "timed", "us": peer} if peer else {"status": "absent", "reason": "not installed"}),
    }
    return {"case": case, "suite": "decode", "contenders": entries, "ratio": peer and peer / own}


def test_summary() -> None:
    rows = [_row("a", 10.0, 20.0), _row("b", 10.0, 5.0), _row("c", 10.0, None)]
    summary = summarise(rows)
    assert summary["geomean"] == pytest.approx(1.0)
    assert (summary["worst"], summary["worst_case"], summary["compared"]) == (0.5, "b", 2)
    assert exit_code({"rows": rows}) == 0
    rows[0]["contenders"]["fa3"] |= {"status": "wrong", "reason": "relative error"}
    assert exit_code({"rows": rows}) == 0
    assert summarise(rows)["wrong_or_failed"] == ["a: fa3 wrong: relative error"]
    rows[0]["contenders"]["triton"] |= {"status": "failed", "reason": "no registers"}
    assert exit_code({"rows": rows}) == 1
    assert exit_code({"rows": []}) == 1


def test_mixed_against_its_parts() -> None:
    cases = SUITES["mixed"]
    rows = [
        _row(case.name, us, None)
        for case, us in zip(cases, (9.0, 4.0, 6.0, 5.0, 2.0, 2.0, 1.0), strict=False)
    ]
    assert summarise(rows)["mixed_over_parts"] == {
        cases[0].name: {"triton": pytest.approx(0.9)},
        cases[3].name: {"triton": pytest.approx(1.25)},
    }
    for whole, decodes, chunks in (cases[first : first + 3] for first in range(0, len(cases), 3)):
        assert whole.seq_lens == decodes.seq_lens + chunks.seq_lens
        assert whole.query_lens == decodes.query_lens + chunks.query_lens
        assert decodes.is_decode
        assert min(chunks.query_lens) > 8


@pytest.mark.slow
def test_mixed_in_two_calls() -> None:
    """The decodes and then the rest, checked like any contender, and no part of the comparison with peers."""
    assert [num_decodes(case) for case in SUITES["mixed"][:3]] == [32, 0, 0]
    assert num_decodes(RAGGED) == 1
    assert num_decodes(replace(RAGGED, query_lens=(5, 1, 60))) == 0, "the decodes must come first"
    with torch.inference_mode():
        row = measure_case(
            RAGGED, [own_backend("reference"), in_parts("reference")], CPU, CEILINGS, repeats=1
        )
        other = measure_case(SUITES["smoke"][1], [in_parts("reference")], CPU, CEILINGS, repeats=1)
    entry = row["contenders"]["reference-in-parts"]
    assert entry["status"] == "timed"
    assert entry["error"] < 1e-5
    assert compare(row["contenders"])["best_own"] == "reference"
    assert summarise([row])["mixed_over_sequence"] == {
        "4/2/64 ragged b16": {"reference": row["contenders"]["reference"]["us"] / entry["us"]}
    }
    assert other["contenders"]["reference-in-parts"]["status"] == "unsupported"
    options = Options(
        ["smoke"], "chunk 40", "reference", device="cpu", repeats=1, bandwidth=1.0, flop_rate=1.0
    )
    document = bench_attention.run_with_peers(options, peers=False)
    assert list(document["rows"][0]["contenders"]) == ["reference", "reference-in-parts"]
    assert document["summary"]["mixed_over_sequence"]


# ------------------------------------------------------------------------------------------------- contenders
def test_absent_peers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    listed = contenders(CPU, ["reference"])
    row = measure_case(RAGGED, listed, CPU, CEILINGS, repeats=1)
    entries = row["contenders"]
    paged = ["flashinfer", "flashinfer-no-graph", "flashinfer-fa3", "fa3"]
    assert list(entries) == ["reference", "sdpa", "flex", *paged]
    assert all(entries[name]["status"] == "absent" for name in paged)
    assert "pip install tokenspeed-fa3" in entries["fa3"]["reason"]
    assert "lengths differ" in entries["sdpa"]["reason"]


def test_who_runs() -> None:
    assert [c.name for c in contenders(CPU, peers=False)][:1] != ["reference"]
    assert [c.name for c in contenders(torch.device("cuda"), peers=False)] == ["cuda", "triton"]
    with pytest.raises(BackendUnavailableError, match="got 'nope'"):
        contenders(CPU, ["nope"])
    with pytest.raises(ArgumentError, match="skip: expected one of reference"):
        contenders(CPU, ["reference"], skip=["nope"])


@pytest.mark.parametrize("name", ["1x512 whole", "64x4k b16", "chunk 512"])
def test_why_peers_refuse(name: str) -> None:
    case = select_cases(["prefill", "block-size"], name, known=SUITES)[0]
    peers = {c.name: c for c in contenders(CPU, ["reference"])}
    gpu = torch.device("cuda")
    assert (peers["flashinfer-fa3"].why_not(case, gpu) is None) == (not case.is_decode)
    assert peers["flashinfer"].why_not(case, gpu) is None
    assert peers["flashinfer"].why_not(case, CPU)
    assert (peers["sdpa"].why_not(case, gpu) is None) == ("chunk" not in name)
    assert peers["fa3"].why_not(replace(case, kv_dtype=torch.float8_e4m3fn), CPU)


@pytest.mark.parametrize("queries", [1, 96])
def test_sdpa_gathers_in_order(queries: int) -> None:
    case = make_case("smoke", (8, 2, 64), "dense", [96] * 3, queries, dtype=torch.float32)
    sdpa = next(c for c in contenders(CPU, ["reference"]) if c.name == "sdpa")
    row = measure_case(case, [own_backend("reference"), sdpa], CPU, CEILINGS, repeats=1)
    assert row["contenders"]["sdpa"]["status"] == "timed"
    assert row["contenders"]["sdpa"]["error"] < 1e-5
    best = compare(row["contenders"])
    assert best["best_own"] == "reference"
    assert best["ratio"] > 0


# ----------------------------------------------------------------------------------------------- the commands
ARGUMENTS = [
    *("--suite", "smoke", "--device", "cpu", "--repeats", "4"),
    *("--bandwidth", "0.01", "--flop-rate", "0.1"),
]


def test_the_script_alone(native: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert bench_attention.main([*ARGUMENTS, "--no-peers", "--output", str(file)]) == 0
    seen = capsys.readouterr()
    document = json.loads(seen.out)
    assert len(seen.out.splitlines()) == 1
    assert json.loads(file.read_text()) == document
    assert [row["case"] for row in document["rows"]] == [case.name for case in SUITES["smoke"]]
    for row in document["rows"]:
        entry = row["contenders"]["cpu"]
        assert entry["status"] == "timed"
        assert entry["p20_us"] <= entry["us"] <= entry["p80_us"]
        assert entry["samples"] >= 4
        assert {entry["status"] for entry in row["contenders"].values()} <= {"timed", "absent", "unsupported"}
        assert all("reason" in entry for entry in row["contenders"].values() if entry["status"] != "timed")
    assert document["ceilings"]["bytes_per_s"] == 1e10
    assert document["summary"]["skipped"] == {}
    assert document["summary"]["wrong_or_failed"] == []
    assert document["conditions"]["torch"] == torch.__version__
    assert "command" in document["conditions"]
    assert datetime.date.fromisoformat(document["conditions"]["date"]).year >= 2026
    assert "cpu" in seen.err
    assert "peer" not in seen.err


def test_the_script_compares_with_peers(native: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_attention.main(ARGUMENTS) == 0
    seen = capsys.readouterr()
    assert json.loads(seen.out)["summary"]["compared"] >= 2
    assert "peer/own" in seen.err
    assert "fa3" in seen.err
    assert "geomean" in seen.err


def test_the_script_has_the_options_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_attention.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{field.name.replace('_', '-')}" in text for field in dataclasses.fields(Options))


@pytest.mark.slow
def test_without_typer_and_rich() -> None:
    """The bench needs torch only; the table comes in plain text, the JSON alone on stdout."""
    code = (
        "import sys; sys.modules['typer'] = sys.modules['rich'] = None; from bench_attention import main; "
        "raise "
        f"SystemExit(main({[*ARGUMENTS, '--case', 'edges', '--backends', 'reference', '--skip', 'sdpa']!r}))"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    done = python("-c", code, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["contenders"]["reference"]["status"] == "timed"
    assert "peer/own" in done.stderr
    assert "no case with both" in done.stderr


def test_json_only_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        bench_attention.main(
            [*ARGUMENTS, "--case", "edges", "--backends", "reference", "--no-peers", "--json-only"]
        )
        == 0
    )
    seen = capsys.readouterr()
    assert seen.err == ""
    assert json.loads(seen.out)
    assert bench_attention.main(["--dtype", "int8"]) == 2
    assert "dtype: expected one of fp32" in capsys.readouterr().err
    assert bench_attention.main(["--repeats", "0"]) == 2


@pytest.mark.slow
def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = Options(
        ["smoke"],
        "edges",
        "reference",
        device="cpu",
        repeats=1,
        bandwidth=0.01,
        flop_rate=0.1,
        json_only=True,
    )
    bench_attention.run_with_peers(options, peers=False, plot_file=str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_no_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ArgumentError, match=r"plot: expected matplotlib .* pip install 'torchpaged\[bench\]'"
    ):
        bench_attention.run_with_peers(Options(["smoke"]), plot_file="x.png")


def test_the_geometry_is_refused_when_it_is_nonsense() -> None:
    with pytest.raises(ArgumentError, match="query_lens: expected 1 to seq_len"):
        make_case("smoke", LLAMA_8B, "bad", [4], 5)
    with pytest.raises(ArgumentError, match="num_heads: expected a multiple"):
        make_case("smoke", (9, 2, 64), "bad", [4])
