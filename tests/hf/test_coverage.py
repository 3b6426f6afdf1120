"""tests/support/cover_models.py: 26 architectures that stand for the rest, what a row says of a fault, and
the table as file, page and command."""

import json
from pathlib import Path
from typing import Any

import model_coverage as coverage
import pytest
import torch
from cover_models import app
from model_coverage import Row, Table, examine, markdown, vision_language, vision_models
from model_coverage.architectures import LEFT_OUT, model_types
from model_coverage.hybrids import HYBRIDS, OTHER_HYBRIDS
from model_coverage.table import versions
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from torchpaged import ArgumentError
from torchpaged.hf import attention

DOCS = Path(__file__).parents[2] / "docs"
COMMITTED = sorted(DOCS.glob("architectures-*.json"), reverse=True)
#: Pages of the other kinds, by name: tables of the newest transformers first.
OTHERS = {
    name: sorted(DOCS.glob(f"{name}-[0-9]*.json"), reverse=True)
    for name in ("encoders", "encoder-decoders", "vision-language")
}
#: One of each kind: masks, widths, positions, states, and each way not to be paged.
REPRESENTATIVE = (
    *("llama", "qwen3", "qwen3_moe", "gpt2", "opt", "phi3", "olmo2", "bert", "whisper", "bloom", "falcon"),
    *("gpt_neo", "mistral", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss"),
    *("llama4_text", "qwen3_next", "jamba", "deepseek_v3", "diffllama", "mamba", "rwkv", "cpmant"),
)

#: Positions in three axes, cached states beside keys, windows, chunks, towers of each kind, spans, a refusal.
PICTURED = (
    *("gemma3", "gemma4", "hy_v4_vl", "idefics3", "internvl", "lfm2_vl", "llama4", "llava", "mistral3"),
    *("mllama", "paligemma2", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"),
)


#: What plain transformers says of a family that it can't run itself; nothing else is passed over.
OWN_FAULTS = {
    "llama4": "AttributeError: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'"  # 5.24
}


def committed_row(model_type: str, name: str = "architectures") -> Row:
    """Of this transformers; of the newest one that examined it if its table does not."""
    own = f"{name}-{versions()['transformers'].rsplit('.', 1)[0]}"
    tables = sorted(OTHERS.get(name, COMMITTED), key=lambda path: path.stem != own)  # the others as they were
    rows = (Table.load(path).rows[model_type] for path in tables)
    return next(row for row in rows if row.mode != "unexamined")


@pytest.mark.slow_cases(but=("llama", "bloom", "mamba", "cpmant"))
@pytest.mark.parametrize("model_type", REPRESENTATIVE)
def test_architecture(model_type: str) -> None:
    """As the committed table says."""
    row, want = examine(model_type), committed_row(model_type)
    assert (row.mode, row.graphs, row.kind) == (want.mode, want.graphs, want.kind), row
    assert row.checks.get("compiled", "")[:5] == want.checks.get("compiled", "")[:5]


@pytest.mark.slow_cases(but=("llava", "mllama"))
@pytest.mark.parametrize("model_type", [name for name in PICTURED if name in vision_models.model_types()])
def test_family_of_vision_language_models(model_type: str) -> None:
    """As the committed table says."""
    row, want = vision_language.examine(model_type), committed_row(model_type, "vision-language")
    if row.reason == f"transformers' own eager attention: {OWN_FAULTS.get(model_type)}":
        pytest.skip(row.reason)
    assert (row.mode, row.graphs, row.kind) == (want.mode, want.graphs, want.kind), row
    assert {name: said[:5] for name, said in row.checks.items()} == {
        name: said[:5] for name, said in want.checks.items()
    }


def test_they_stand_for_every_mode() -> None:
    """But those that are faults."""
    assert len(set(REPRESENTATIVE)) == 26
    assert set(REPRESENTATIVE) <= set(model_types())
    modes = {committed_row(model_type).mode for model_type in REPRESENTATIVE}
    assert modes == {"paged", "latent", "states", "dense", "no cache", "refused"}


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a scale": ("llama", {"scaling": 0.3}),
    "a narrow window": ("mistral", {"sliding_window": 3}),
    "no soft cap": ("gemma2", {"softcap": None}),
    "no sinks": ("gpt_oss", {"s_aux": None}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, wrong = FAULTS[fault]
    plain = attention.paged_attention_forward

    def faulty(*args: Any, **given: Any) -> Any:
        return plain(*args, **{**given, **wrong}, masks_itself=True)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, faulty)
    row = examine(model_type, compiled=False)
    assert row.mode == "wrong", row
    assert row.reason.startswith("wrong: off by"), row


def test_an_error_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            'no kernel, see File "/a/b-1/lib/site-packages/c/d.py" and /e/f.so, and/or https://g/h'
        )

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, broken)
    row = examine("llama", compiled=False)
    words = (
        'no kernel, see File "c/d.py" and f.so, and/or https://g/h'  # the same wherever Python is installed
    )
    assert (row.mode, row.reason) == ("broken", f"error: RuntimeError: {words}")


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        (lambda x: x, "right"),
        (lambda x: x + 1e-5, "right"),
        (lambda x: x + 1e-2, "wrong: off by 5.0e-03 of the logits' scale"),
        (lambda x: x * float("nan"), "wrong: off by nan of the logits' scale"),
        (lambda x: x[:1], "wrong: [1, 2] logits instead of [2, 2]"),
        (lambda x: x + torch.tensor([[0, 2e-5], [0, 0]]), "wrong: other tokens"),
    ],
)
def test_difference(changed: Any, outcome: str) -> None:
    want = torch.tensor([[1.00001, 1.0], [2.0, -1.0]])
    assert coverage.checks.difference(changed(want), want) == outcome


def rows() -> list[Row]:
    right = {"generate": "right", "compiled": "right"}
    return [
        Row("llama", "full", "paged", right, 1, "", 1.5),
        Row("youtu", "full, latent", "latent", right, 1, "", 1.5),
        Row("zaya", "linear", "refused", {}, None, "zaya: a | b", 0.1),
        Row("jamba", "linear", "refused", {}, None, "JambaForCausalLM a | b", 0.1),
    ]


def test_the_table_as_a_file(tmp_path: Path) -> None:
    table = Table(rows={row.model_type: row for row in rows()})
    table.save(tmp_path / "x.json")
    assert Table.load(tmp_path / "x.json") == table
    counts = {"paged": 1, "latent": 1, "refused": 2, "one graph": 2}
    assert table.counts() == dict.fromkeys(coverage.checks.MODES, 0) | counts
    (tmp_path / "y.json").write_text('{"rows": []}')
    with pytest.raises(ArgumentError, match="output: expected a JSON file that cover_models.py wrote"):
        Table.load(tmp_path / "y.json")


def test_the_table_as_a_page() -> None:
    table = Table(rows={row.model_type: row for row in rows()})
    lines = markdown([table]).splitlines()
    assert "| llama | full | paged | 1 |" in lines
    assert "| zaya | linear | refused |  |" in lines
    assert lines[-1] == "- jamba, zaya: `a | b`"
    assert max(map(len, lines)) <= 110
    assert any(line.endswith("| 4 | 1 | 1 | 0 | 0 | 0 | 2 | 0 | 0 | 0 | 2 |") for line in lines)


def test_the_command_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def cover(names: list[str], **_: Any) -> Any:
        for name in names:
            asked.append(name)
            yield Row(name, "full", "wrong" if name == "opt" else "paged", {}, None, "", 0.1)

    monkeypatch.setattr(coverage, "cover", cover)
    output, page = tmp_path / "out.json", tmp_path / "page.md"
    command = ["--output", str(output), "--page", str(page), "--json"]
    first = CliRunner().invoke(app, [*command, "--arch", "llama"])
    assert first.exit_code == 0
    assert json.loads(first.stdout.splitlines()[-1])["counts"]["paged"] == 1
    second = CliRunner().invoke(app, [*command, "--arch", "llama", "--arch", "opt"])
    assert second.exit_code == 1
    assert asked == ["llama", "opt"]
    assert "| opt |" in page.read_text()
    CliRunner().invoke(app, [*command, "--arch", "llama", "--fresh"])
    assert asked == ["llama", "opt", "llama"]
    assert set(Table.load(output).rows) == {"llama", "opt"}
    document = json.loads(output.read_text())
    document["versions"]["transformers"] = "5.0.0"
    output.write_text(json.dumps(document))
    CliRunner().invoke(app, [*command, "--arch", "opt"])
    assert Table.load(output).versions == versions()
    assert set(Table.load(output).rows) == {"opt"}


def test_an_architecture_that_is_not_there(tmp_path: Path) -> None:
    for name, why in (("lama", "no decoder of this transformers"), ("llama4", LEFT_OUT["llama4"])):
        done = CliRunner().invoke(app, ["--arch", name, "--output", str(tmp_path / "x.json")])
        assert isinstance(done.exception, ArgumentError)
        assert why in str(done.exception)


@pytest.mark.slow
def test_workers_give_rows() -> None:
    """In processes of their own, one of which gets a case that can't be run."""
    found = {row.model_type: row for row in coverage.cover(["llama", "nothing"], compiled=False)}
    assert found["llama"].mode == "paged"
    assert found["llama"].checks["window"] == "right"
    assert found["nothing"].mode == "unexamined"  # nor does transformers run it
    assert "KeyError: 'nothing'" in found["nothing"].reason


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_committed_table(path: Path) -> None:
    """Nothing wrong, nothing broken, and no fewer than there were: paged, latents, gathered, in one graph."""
    least = {"architectures-5.24": (139, 14, 3, 6, 162), "architectures-5.17": (130, 12, 3, 4, 149)}[
        path.stem
    ]
    text = path.read_text()
    assert "-packages/" not in text
    assert "/lib/" not in text
    counts = Table.load(path).counts()
    assert counts["wrong"] == counts["broken"] == counts["unexamined"] == 0
    assert all(
        counts[name] >= n
        for name, n in zip(("paged", "latent", "states", "dense", "one graph"), least, strict=True)
    )


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_architecture_with_states_is_tested_or_has_a_reason(path: Path) -> None:
    """In the engine, in `generate_batch` and in a `PagedCache`, by the tests over `HYBRIDS`."""
    states = {
        name
        for name, row in Table.load(path).rows.items()
        if name in CONFIG_MAPPING and {"linear", "conv", "hybrid"} & {*row.kind.replace(",", "").split()}
    }
    assert "qwen3_next" in states
    assert not set(HYBRIDS) & set(OTHER_HYBRIDS)
    assert states <= {*HYBRIDS, *OTHER_HYBRIDS}


@pytest.mark.parametrize("name", OTHERS)
def test_the_committed_tables_of_other_kinds(name: str) -> None:
    """Nothing wrong, nothing broken; the right ones and the graphs are no fewer than there were."""
    least = {
        "encoders-5.24": {"varlen": 38, "dense": 6, "own attention": 7, "one graph": 51},
        "encoders-5.17": {"varlen": 37, "dense": 6, "own attention": 7, "one graph": 50},
        "encoder-decoders-5.24": {"paged": 17, "dense": 5, "one graph": 20},
        "encoder-decoders-5.17": {"paged": 17, "dense": 5, "one graph": 20},
        "vision-language-5.24": {"paged": 30, "latent": 1, "refused": 3, "one graph": 31},
        "vision-language-5.17": {"paged": 30, "refused": 1, "one graph": 30},
    }
    for path in OTHERS[name]:
        table, text = Table.load(path), path.read_text()
        counts = table.counts()
        assert {name for name, row in table.rows.items() if row.mode == "unexamined"} <= set(OWN_FAULTS)
        assert counts["wrong"] == counts["broken"] == 0
        assert all(counts[mode] >= n for mode, n in least[path.stem].items()), counts
        assert "-packages/" not in text
        assert "/lib/" not in text
    assert OTHERS[name]
    assert (DOCS / f"{name}.md").read_text() == markdown([Table.load(path) for path in OTHERS[name]])


def test_tables_of_kinds_are_not_mixed(tmp_path: Path) -> None:
    output = tmp_path / "x.json"
    Table(kind="encoder", rows={"bert": Row("bert", "text", "varlen")}).save(output)
    assert Table.load(output).kind == "encoder"
    assert Table.load(output).counts()["varlen"] == 1
    for options, words in (((), "of kind encoder"), (("--kind", "coder"), "one of decoder, encoder")):
        done = CliRunner().invoke(app, [*options, "--output", str(output)])
        assert isinstance(done.exception, ArgumentError)
        assert words in str(done.exception)


def test_the_committed_page() -> None:
    assert COMMITTED
    assert (DOCS / "architectures.md").read_text() == markdown([Table.load(p) for p in COMMITTED])
