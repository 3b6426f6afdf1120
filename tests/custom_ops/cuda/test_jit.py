"""The cache of machine code and what becomes of a kernel that the device refuses; the compiler and the driver
are stand-ins."""

import contextlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchpaged.custom_ops.cuda import cubins, gpu, jit
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.errors import BackendUnavailableError, CaptureError

CODE = bytes(range(256)) * 40
TABLE = Table("decode_config.cuh", "inline constexpr int DIM = 0;  // width of a key")
CONFIG = TABLE.config({"DIM": 64})
BANNER = (
    "//\n// Compiler Build ID: CL-1\n// Cuda compilation tools, release 13.0, V13.0.{}\n//\n.version 9.0\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TORCHPAGED_CACHE", str(tmp_path))
    return tmp_path / "cubin"


class Nvrtc:
    """NVRTC with a patch level; counts what it compiles."""

    def __init__(self, patch: int = 48) -> None:
        self.patch, self.compiled, self.destroyed, self.fails = patch, 0, 0, False

    def nvrtcVersion(self) -> tuple[int, ...]:
        return 0, 13, 0

    def nvrtcCreateProgram(self, source: bytes, *_: Any) -> tuple[int, bytes]:
        return 0, source

    def nvrtcCompileProgram(self, program: bytes, *_: Any) -> tuple[int]:
        self.compiled += bool(program)
        return (6 if self.fails and program else 0,)

    def nvrtcGetProgramLogSize(self, _: bytes) -> tuple[int, int]:
        return 0, 8

    def nvrtcGetProgramLog(self, _: bytes, log: bytes) -> tuple[int]:
        return (0,)

    def nvrtcDestroyProgram(self, _: bytes) -> tuple[int]:
        self.destroyed += 1
        return (0,)

    def _give(self, text: bytes, into: bytes) -> tuple[int]:
        import ctypes

        ctypes.memmove(into, text, len(text))  # as NVRTC writes into what it is given
        return (0,)

    def nvrtcGetPTXSize(self, _: bytes) -> tuple[int, int]:
        return 0, len(BANNER.format(self.patch))

    def nvrtcGetPTX(self, _: bytes, into: bytes) -> tuple[int]:
        return self._give(BANNER.format(self.patch).encode(), into)

    def nvrtcGetCUBINSize(self, _: bytes) -> tuple[int, int]:
        return 0, len(CODE)

    def nvrtcGetCUBIN(self, _: bytes, into: bytes) -> tuple[int]:
        return self._give(CODE, into)


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> Nvrtc:
    fake = Nvrtc()
    monkeypatch.setattr(jit, "_nvrtc", lambda: fake)
    monkeypatch.setattr(jit, "compiler_build", jit.compiler_build.__wrapped__)
    return fake


def test_what_was_stored_comes_back() -> None:
    assert cubins.load("a.cubin") is None
    cubins.store("a.cubin", CODE)
    assert cubins.load("a.cubin") == CODE


HEAD = len(cubins._MAGIC)


@pytest.mark.parametrize(
    "length",
    [0, 1, HEAD - 1, HEAD, HEAD + 1, HEAD + 31, HEAD + 32, HEAD + 33, HEAD + 32 + len(CODE) // 2, -1],
)
def test_a_cut_file_is_as_good_as_none(length: int, folder: Path, nvrtc: Nvrtc) -> None:
    assert jit.machine_code("decode.cu", CONFIG, (9, 0)) == CODE
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    assert cubins.load(path.name) is None
    assert jit.machine_code("decode.cu", CONFIG, (9, 0)) == CODE
    assert nvrtc.compiled == 2, "compiled anew and whole again"
    assert path.read_bytes() == whole, "compiled anew and whole again"
    assert jit.machine_code("decode.cu", CONFIG, (9, 0)) == CODE
    assert nvrtc.compiled == 2


@pytest.mark.parametrize("at", [0, HEAD, HEAD + 32, -1])
def test_a_changed_byte_is_seen(at: int, folder: Path) -> None:
    cubins.store("a.cubin", CODE)
    content = bytearray((folder / "a.cubin").read_bytes())
    content[at] ^= 1
    (folder / "a.cubin").write_bytes(content)
    assert cubins.load("a.cubin") is None
    (folder / "a.cubin").write_bytes(CODE)
    assert cubins.load("a.cubin") is None, "machine code without a checksum"


def test_on_the_disk_before_it_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("replace"), replace(*paths)))
    cubins.store("a.cubin", CODE)
    assert order == ["fsync", "replace"]
    assert [path.name for path in folder.iterdir()] == ["a.cubin"], "nothing else is left"


def test_a_folder_that_cannot_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: Nvrtc
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHPAGED_CACHE", str(tmp_path / "file"))
    assert jit.machine_code("decode.cu", CONFIG, (9, 0)) == CODE
    assert jit.machine_code("decode.cu", CONFIG, (9, 0)) == CODE
    assert nvrtc.compiled == 2


def test_two_processes_that_store_the_same(folder: Path) -> None:
    """Each loads while the other stores: whole or absent, never anything else."""
    script = """
import sys
from torchpaged.custom_ops.cuda import cubins
code = bytes(range(256)) * 4000
for _ in range(60):
    cubins.store("a.cubin", code)
    assert cubins.load("a.cubin") == code
"""
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert [path.name for path in folder.iterdir()] == ["a.cubin"]


def test_the_patch_level_belongs_to_the_key(nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "V13.0.48" in jit.compiler_build()
    assert "CL-1" in jit.compiler_build()
    assert ".version" not in jit.compiler_build()
    names = [jit.cache_name("decode.cu", CONFIG, (9, 0))]
    nvrtc.patch = 88
    names += [
        jit.cache_name("decode.cu", CONFIG, (9, 0)),
        jit.cache_name("linear.cu", CONFIG, (9, 0)),
        jit.cache_name("decode.cu", CONFIG, (8, 0)),
        jit.cache_name("decode.cu", TABLE.config({"DIM": 128}), (9, 0)),
        jit.cache_name("decode.cu", TABLE.config({"DIM": 64}, exact=True), (9, 0)),
    ]
    changed = {**jit.sources(), "machine.cuh": "// changed"}
    monkeypatch.setattr(jit, "sources", lambda: changed)
    assert len({*names, jit.cache_name("decode.cu", CONFIG, (9, 0))}) == 7


def test_sources_are_read_once(nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: (read.append(path.name), read_text(path, *a, **k))[1]
    )
    jit.sources.cache_clear()
    for dim in (64, 128):
        jit.machine_code("decode.cu", TABLE.config({"DIM": dim}), (9, 0))
    assert nvrtc.compiled == 2
    assert len(read) == len(set(read))
    assert {"decode.cu", "decode_mainloop.cuh"} <= set(read)


def test_a_failed_compile_is_told_and_leaves_nothing(nvrtc: Nvrtc, folder: Path) -> None:
    nvrtc.fails = True
    said = "backend 'cuda': NVRTC does not compile a kernel: 6 for -arch=sm_90.*backend='triton'"
    with pytest.raises(BackendUnavailableError, match=said):
        jit.machine_code("decode.cu", CONFIG, (9, 0))
    assert not folder.exists(), "the build's and this one's"
    assert nvrtc.destroyed == 2, "the build's and this one's"


def test_a_terminal_is_told_what_is_compiled(nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, said in ((Terminal(), True), (io.StringIO(), False), (Terminal(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        # the third finds what the second compiled
        jit.machine_code("decode.cu", TABLE.config({"DIM": 64 + said}), (9, 0))
        assert ("compiling decode.cu for sm_90" in stream.getvalue()) == said


def test_a_refused_kernel_is_no_damaged_file(nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as what it is, and not compiled a second time."""
    names = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    driver = SimpleNamespace(
        CUfunction_attribute=names,
        cuModuleLoadData=lambda code: (0, "module"),
        cuModuleGetFunction=lambda module, name: (0, "function"),
        cuFuncSetAttribute=lambda function, attribute, value: (1 if value > 101376 else 0,),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=sys.modules["cuda.bindings"]))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    for name, value in (
        ("is_current_stream_capturing", lambda: False),
        ("device", lambda index: contextlib.nullcontext()),
        ("get_device_capability", lambda index: (8, 9)),
        ("current_device", lambda: 0),
        ("get_device_properties", lambda index: SimpleNamespace(shared_memory_per_block_optin=101376)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    # nothing of this device is remembered
    monkeypatch.setattr(gpu, "shared_per_cta", gpu.shared_per_cta.__wrapped__)
    said = "linear asks for 112128 bytes of dynamic shared memory.*may have 101376.*backend='triton'"
    with pytest.raises(BackendUnavailableError, match=said):
        jit._kernel.__wrapped__("decode.cu", "linear", CONFIG, 0, 112128)
    assert nvrtc.compiled == 1


def test_a_capture_compiles_nothing(nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="decode.cu is not compiled.*run the same call once before"):
        jit._kernel.__wrapped__("decode.cu", "paged_decode", CONFIG, 0, 1024)
    assert not nvrtc.compiled


def test_the_real_compiler_names_its_build() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    try:
        build = jit.compiler_build()
    except Exception as error:
        pytest.skip(f"NVRTC can't be used: {error}")
    assert len(build.splitlines()) >= 3, build
    assert " V" in build, build


def test_what_began_ahead_is_compiled_once_and_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    good, bad = CONFIG, TABLE.config({"DIM": 0})

    def machine_code(file: str, config: Config, capability: tuple[int, int]) -> bytes:
        compiled.append(threading.current_thread().name)
        if config is bad:
            raise RuntimeError("NVRTC: no")
        return f"{file} {config['DIM']} {capability}".encode()

    monkeypatch.setattr(jit, "machine_code", machine_code)
    for _ in range(2):  # the second one finds the first
        jit.compile_ahead("a.cu", good, (9, 0))
    assert jit._code("a.cu", TABLE.config({"DIM": 64}), (9, 0)) == b"a.cu 64 (9, 0)"
    assert compiled == ["torchpaged compiles a.cu"]
    jit._code("a.cu", good, (9, 0))  # nothing began
    assert compiled[1:] == [threading.current_thread().name]
    jit.compile_ahead("a.cu", bad, (9, 0))
    with pytest.raises(RuntimeError, match="NVRTC: no"):
        jit._code("a.cu", bad, (9, 0))
    assert not jit._ahead
