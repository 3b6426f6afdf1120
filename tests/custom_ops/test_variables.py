"""One reader for all environment variables: a value that means nothing raises wherever the variable counts,
and never passes for off."""

import ast
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torchpaged
from torchpaged import AttentionMetadata
from torchpaged.custom_ops import checks, native, variables
from torchpaged.custom_ops.cuda import cubins, jit
from torchpaged.graphs import DecodeGraphRunner, PackedGraphRunner

ROOT = Path(__file__).parents[2]


def _write() -> None:
    x, pool = torch.zeros(1, 2, 8), torch.zeros(2, 4, 2, 8)
    torchpaged.write_kv(x, x, pool, pool.clone(), torch.tensor([4]))


def _runner(kind: Any, **sizes: int) -> Any:
    return kind(lambda *_: torch.zeros(1, 4), buckets=[1], max_blocks_per_req=2, block_size=4, **sizes)


READERS = {
    "ops": _write,
    "reads_values": lambda: checks.reads_values(torch.device("meta")),
    "decode_runner": lambda: _runner(DecodeGraphRunner, max_batch_size=1),
    "packed_runner": lambda: _runner(PackedGraphRunner, max_num_reqs=1),
}


@pytest.mark.parametrize("text", ["true", "yes", "", "01"])
@pytest.mark.parametrize("reader", READERS)
def test_a_check_that_is_neither_on_nor_off(reader: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPAGED_CHECK", text)
    with pytest.raises(ValueError, match=f"TORCHPAGED_CHECK: expected 0 or 1, got '{text}'"):
        READERS[reader]()


@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False)])
def test_a_check_that_is_on_is_on_everywhere(text: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPAGED_CHECK", text)
    assert checks.reads_values(torch.device("meta")) is on
    for name in ("decode_runner", "packed_runner"):
        assert READERS[name]().debug is on
    READERS["ops"]()


def test_the_other_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHPAGED_CACHE", " ")
    for read in (jit.cache_folder, lambda: variables.get("TORCHPAGED_CACHE")):
        with pytest.raises(ValueError, match="TORCHPAGED_CACHE: expected a folder"):
            read()
    monkeypatch.setenv("TORCHPAGED_CACHE", str(tmp_path))
    assert jit.cache_folder() == tmp_path / "cubin"
    monkeypatch.setenv("TORCHPAGED_BACKEND", "")
    with pytest.raises(ValueError, match="TORCHPAGED_BACKEND: expected a name"):
        torchpaged.PagedAttention(2, 8)


def test_native_that_is_neither_on_nor_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import goes through, as with any other variable; a call of the kernels is refused, with why."""
    for name in ("_state", "wrong"):
        monkeypatch.setattr(native, name, getattr(native, name))
    monkeypatch.setenv("TORCHPAGED_NATIVE", "off")
    assert not native.load({})
    for use in (native.status, lambda: torchpaged.PagedAttention(2, 8), native.raise_absent):
        with pytest.raises(Exception, match="TORCHPAGED_NATIVE: expected 0 or 1, got 'off'"):
            use()


def test_a_library_of_other_ops_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that an editable install keeps from before the ops changed; a fitting one behind it is taken."""
    monkeypatch.setattr(native, "_state", native._state)
    monkeypatch.setattr(native, "digest", lambda root: None)
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    old.write_bytes(b"...torchpaged native ops: write_kv 7;...")
    new.write_bytes(b"...torchpaged native ops: write_kv 2;...")
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(native, "_candidates", lambda: [old])
    schemas = {"write_kv": "(Tensor k, *, bool causal=True) -> ()"}
    assert not native.load(schemas)
    assert "old.so was built from other sources" in native.status()[1]
    monkeypatch.setattr(native, "_candidates", lambda: [old, new])
    assert native.load(schemas)
    assert loaded == [str(new)]


def test_a_library_of_other_sources_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has these ops, but was built before a kernel changed; one of these sources behind it is taken."""
    monkeypatch.setattr(native, "_state", native._state)
    monkeypatch.setattr(native, "digest", lambda root: "a1")
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    old.write_bytes(b"torchpaged native ops: write_kv 2; torchpaged native sources: b2;")
    new.write_bytes(b"torchpaged native ops: write_kv 2; torchpaged native sources: a1;")
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    schemas = {"write_kv": "(Tensor k, *, bool causal=True) -> ()"}
    monkeypatch.setattr(native, "_candidates", lambda: [old])
    with pytest.warns(UserWarning, match="old.so was built from other C.. sources.*run `pip install"):
        assert native.load(schemas)
    monkeypatch.setattr(native, "_candidates", lambda: [old, new])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load(schemas)
    monkeypatch.setattr(native, "digest", lambda root: None)  # a wheel has no sources
    assert native.load(schemas)
    assert loaded == [str(old), str(new), str(old)]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_the_digest_is_the_builds(tmp_path: Path) -> None:
    """Over names and contents, of a folder of an op as of the common one."""
    for name in ("custom_ops/cpu", "custom_ops/state/cpu"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "custom_ops/cpu/sources.cmake", tmp_path / "custom_ops/cpu")
    assert native.digest(tmp_path) is None
    texts = {"CMakeLists.txt": "a", "custom_ops/state/cpu/b.h": "b", "custom_ops/cpu/b.cpp": "b"}
    seen = set()
    changes = {"custom_ops/state/cpu/b.h": "c", "custom_ops/state/cpu/d.py": "", "custom_ops/cpu/e.txt": ""}
    for name, text in (*texts.items(), *changes.items()):
        (tmp_path / name).write_text(text)
        script = ["cmake", "-P", str(tmp_path / "custom_ops/cpu/sources.cmake")]
        told = subprocess.run(script, capture_output=True, text=True, check=True).stderr.strip()
        assert told == native.digest(tmp_path)
        seen.add(told)
    assert len(seen) == 5
    (tmp_path / "custom_ops/cpu/.#b.cpp").symlink_to("someone@a-host.1")  # while an editor has changes
    assert native.digest(tmp_path) == told


@pytest.mark.parametrize("text", ["~nouser/x", None])
def test_a_home_that_is_not_known(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry: caches are left aside, with a word; nothing else fails."""
    monkeypatch.setattr(Path, "expanduser", _no_home)
    monkeypatch.setenv("TORCHPAGED_CACHE", text) if text else monkeypatch.delenv("TORCHPAGED_CACHE", False)
    with pytest.raises(FileNotFoundError, match=r"TORCHPAGED_CACHE: expected a folder, got '~.*home"):
        variables.get("TORCHPAGED_CACHE")
    assert cubins.load("a.cubin") is None
    cubins.store("a.cubin", b"code")


def _no_home(_: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_no_other_module_reads_them() -> None:
    """Every mention of a variable's name beside ``environ`` or ``getenv`` is the reader's own, or the
    report's list."""
    allowed = {ROOT / "custom_ops" / "variables.py", ROOT / "torchpaged" / "cli" / "report.py"}
    files = {
        file for part in ("custom_ops", "graphs", "torchpaged") for file in (ROOT / part).rglob("*.py")
    } - allowed
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Call, ast.Subscript)) and any(
                word in ast.unparse(node) for word in ("environ", "getenv")
            ):
                assert "TORCHPAGED_" not in ast.unparse(node), f"{file}: {ast.unparse(node)}"


def test_metadata_is_made_where_the_variables_count() -> None:
    assert AttentionMetadata.from_lists([1], [1], [[1]], block_size=4).block_size == 4
