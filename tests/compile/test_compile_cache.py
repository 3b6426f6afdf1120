"""The compile cache: what one process compiled, the next finds; another version's is refused aloud; nothing
is left half written; copies of one code object."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchpaged
from torchpaged.compile import compile_cache
from torchpaged.compile.compile_cache import (
    CompileCacheError,
    CompileCacheWarning,
    load_compile_cache,
    save_compile_cache,
    with_own_code,
)
from torchpaged.custom_ops.cuda import jit

ROOT = Path(__file__).parents[2]
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Compiles a function around one of our ops, and, with Triton, one of our kernels for a GPU that need not
# be there.
SCRIPT = """
import json, sys, torch
from torch._dynamo.utils import counters
from torchpaged.compile.compile_cache import load_compile_cache, save_compile_cache
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.cuda import jit

def triton_hit():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from torchpaged.custom_ops.block_ops.triton.pack_blocks import pack_blocks_kernel as kernel
    hits = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    constants = {"UNPACK": False, "TILE": 64}
    kinds = {name: "*i64" for name in kernel.arg_names if name.endswith("_ptr")}
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    indexed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=indexed), target=GPUTarget("cuda", 90, 32))
    return hits[0]

def step(x, weight, cache, slots):
    y = x @ weight
    BACKEND_OPS["reference"].write_kv(y.view(2, 1, 8), y.view(2, 1, 8), cache[0], cache[1], slots)
    return y @ weight

mode, path, with_triton = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
report = load_compile_cache(path) if mode == "load" else None
if mode == "save":
    jit.cache_folder().mkdir(parents=True)
    (jit.cache_folder() / "abc.cubin").write_bytes(b"machine code")
cache = torch.zeros(2, 4, 16, 1, 8)
torch.compile(step, fullgraph=True)(torch.ones(2, 8), torch.eye(8), cache, torch.tensor([17, -1]))
hit = triton_hit() if with_triton else None
if mode == "save":
    report = save_compile_cache(path)
cubins = {file.name: file.read_text() for file in jit.cache_folder().iterdir()}
print(json.dumps({
    "report": vars(report), "written": cache.sum().item(), "triton_hit": hit, "cubins": cubins,
    "counters": dict(counters["inductor"]) | dict(counters["aot_autograd"]),
}))
"""  # noqa: E501


def _process(mode: str, path: Path, folders: Path) -> dict[str, Any]:
    """Run the script with cache folders of its own."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHPAGED_CACHE")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **{name: str(folders / name) for name in names},
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::UserWarning:torchpaged",
            "-c",
            SCRIPT,
            mode,
            str(path),
            str(HAS_TRITON),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_a_second_process_compiles_nothing_anew(tmp_path: Path) -> None:
    path = tmp_path / "cache.tpc"
    first, second = _process("save", path, tmp_path / "one"), _process("load", path, tmp_path / "two")
    assert first["written"] == second["written"] == 16
    assert first["counters"]["fxgraph_cache_miss"] == 1
    assert first["counters"].get("autograd_cache_hit", 0) == 0
    assert second["counters"]["autograd_cache_hit"] == 1, second["counters"]
    assert second["counters"].get("fxgraph_cache_miss", 0) == 0, second["counters"]
    assert second["counters"].get("autograd_cache_bypass", 0) == 0
    assert second["cubins"] == {"abc.cubin": "machine code"}
    for report in (first["report"], second["report"]):
        assert report["loaded"]
        assert report["artifacts"]["inductor"] == report["artifacts"]["aot_autograd"] == 1
        assert report["cuda_kernels"] == 1
        assert report["num_bytes"] == path.stat().st_size
        assert report["triton_kernels"] == (1 if HAS_TRITON else 0)
    if HAS_TRITON:
        assert (first["triton_hit"], second["triton_hit"]) == (False, True)
        entry = next((tmp_path / "two" / "TRITON_CACHE_DIR").glob("*/__grp__*"))
        assert all(
            str(tmp_path / "two") in child for child in json.loads(entry.read_text())["child_paths"].values()
        )


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty cache folders for this process."""
    for name in ("TRITON_CACHE_DIR", "TORCHPAGED_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


@pytest.mark.parametrize("what", ["torch", "triton", "torchpaged", "python", "device", "format"])
def test_another_version_is_refused_aloud(what: str, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = folders / "cache.tpc", compile_cache._versions()
    monkeypatch.setattr(compile_cache, "_versions", lambda: {**real, what: "another"})
    save_compile_cache(path)
    monkeypatch.setattr(compile_cache, "_versions", lambda: real)
    with pytest.warns(CompileCacheWarning, match=re.escape(f"made with {what} another, here {real[what]}")):
        report = load_compile_cache(path)
    assert not report.loaded
    assert report.reason.startswith(str(path))
    assert not (folders / "TORCHPAGED_CACHE").exists()


def test_nothing_but_cache_entries_is_written(folders: Path) -> None:
    path = folders / "cache.tpc"
    save_compile_cache(path)
    with zipfile.ZipFile(path, "a") as archive:
        for name in (
            "cubin/../escaped",
            "/cubin/escaped",
            "triton/../../escaped",
            "cubin/a/escaped",
            "triton/key/../escaped",
        ):
            archive.writestr(name, "x")
    assert load_compile_cache(path).cuda_kernels == 0
    assert not list(folders.rglob("escaped"))


def test_damaged_and_absent_files(tmp_path: Path) -> None:
    path = tmp_path / "cache.tpc"
    with pytest.raises(FileNotFoundError):
        load_compile_cache(path)
    path.write_bytes(b"not an archive")
    with pytest.raises(CompileCacheError, match=r"cache\.tpc: expected a file of save_compile_cache"):
        load_compile_cache(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("versions.json", json.dumps(compile_cache._versions()))
        archive.writestr("torch", b"nonsense")
    with pytest.raises(CompileCacheError, match="torch can't read its own artifacts"):
        load_compile_cache(path)


def test_any_flipped_byte(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zipfile and zlib raise what they like over a damaged file: it is always our error, or harmless."""
    path = folders / "cache.tpc"
    jit.cache_folder().mkdir(parents=True)
    (jit.cache_folder() / "abc.cubin").write_bytes(b"machine code" * 9)
    # not what other tests of this process have compiled: that may be megabytes
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    save_compile_cache(path)
    content, refused = path.read_bytes(), 0
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        try:
            load_compile_cache(path)
        except CompileCacheError as error:
            refused += 1
            assert str(error).startswith(f"{path}: expected a file of save_compile_cache()")
    assert refused > len(content) // 2


def test_torchs_own_error_is_ours(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folders / "cache.tpc"
    save_compile_cache(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("torch", b"x")

    def unreadable(_: bytes) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", unreadable)
    with pytest.raises(
        CompileCacheError, match=r"can't read its own artifacts in it \(RecursionError: too deep"
    ):
        load_compile_cache(path)


def test_a_folder_that_can_not_be_written(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled, then, as they are without the file; those behind it are loaded."""
    path, triton = folders / "cache.tpc", folders / "triton"
    jit.cache_folder().mkdir(parents=True)
    (jit.cache_folder() / "abc.cubin").write_bytes(b"machine code")
    save_compile_cache(path)
    with zipfile.ZipFile(path, "a") as archive:
        for name in ("triton/first/kernel.json", "triton/second/kernel.json"):
            archive.writestr(name, "{}")
    (folders / "file").touch()
    monkeypatch.setenv("TORCHPAGED_CACHE", str(folders / "file" / "below"))
    monkeypatch.setattr(compile_cache, "_triton_folders", lambda: [triton])
    triton.mkdir()
    (triton / "first").touch()
    with pytest.warns(CompileCacheWarning, match="not loaded as a whole.*Not a directory"):
        report = load_compile_cache(path)
    assert report.loaded
    assert (report.cuda_kernels, report.triton_kernels) == (0, 1)
    assert "Not a directory" in report.reason
    assert (triton / "second" / "kernel.json").is_file()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cache.tpc")
    with pytest.raises(CompileCacheError, match="got a folder, a pipe or a device"):
        load_compile_cache(tmp_path / "cache.tpc")


def test_a_failed_save_leaves_the_old_file(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folders / "cache.tpc"
    path.write_bytes(b"old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(OSError, match="no space"):
        save_compile_cache(path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in folders.iterdir()] == ["cache.tpc"]


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_which_triton_entries_are_ours(folders: Path) -> None:
    import torchpaged.custom_ops.cache_write.triton.write_kv  # noqa: F401 - its kernels count as imported now

    def entry(key: str, name: str, arch: int) -> Path:
        folder = folders / "TRITON_CACHE_DIR" / key
        folder.mkdir(parents=True)
        (folder / f"{name}.json").write_text(json.dumps({"target": {"backend": "cuda", "arch": arch}}))
        return folder

    ours, other = entry("A", "write_kv_kernel", 90), entry("B", "somebodys_kernel", 90)
    assert list(compile_cache._triton_entries()) == [ours]
    assert compile_cache._is_wanted(ours, {"write_kv_kernel"}, "90")
    assert not compile_cache._is_wanted(ours, {"write_kv_kernel"}, "100")
    (other / "__triton_launcher.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    assert set(compile_cache._triton_entries()) == {ours, other}


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_inductors_triton_folder(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The private function that names it must still exist; both folders are looked at where TRITON_CACHE_DIR
    is not set."""
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(folders / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folders / "inductor"))
    assert compile_cache._triton_folders() == [
        folders / "home" / ".triton" / "cache",
        folders / "inductor" / "triton" / "0",
    ]


def test_the_public_door() -> None:
    assert torchpaged.save_compile_cache is save_compile_cache
    assert torchpaged.load_compile_cache is load_compile_cache
    assert compile_cache._versions()["torch"] == torch.__version__


@pytest.mark.slow
def test_more_copies_than_the_recompile_limit() -> None:
    """fullgraph, and sizes as constants: with one shared code object the compile past the limit
    is refused."""

    def scaled(x: Tensor) -> Tensor:
        return x * factor

    factor, limit = 3, torch._dynamo.config.recompile_limit
    copies = [with_own_code(scaled, f"scaled_{n}") for n in range(limit + 2)]
    assert len({copy.__code__ for copy in copies}) == len(copies)
    assert copies[1].__name__ == "scaled_1"
    torch._dynamo.reset()
    for n, copy in enumerate(copies, 2):
        compiled = torch.compile(copy, fullgraph=True, dynamic=False, backend="eager")
        assert torch.equal(compiled(torch.ones(n)), torch.full((n,), 3.0))
