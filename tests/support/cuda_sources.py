"""CUDA sources compiled without a GPU: by nvcc for a GPU, by g++ for the host."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.cuda.config import Config

NVCC, GXX = shutil.which("nvcc"), shutil.which("g++")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
needs_gxx = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


def write_sources(folder: Path, file: str, config: Config) -> Path:
    """What NVRTC gets, as files in ``folder``, which is made if it is not there; the path of ``file``."""
    folder.mkdir(exist_ok=True)
    for name, text in {**jit.headers(config), file: jit.sources()[file]}.items():
        (folder / name).write_text(text)
    return folder / file


def compiled(
    folder: Path,
    file: str,
    config: Config,
    kind: str = "cubin",
    capability: tuple[int, int] = (9, 0),
    constants: dict[str, int] | None = None,
) -> tuple[str, str]:
    """``(PTX, ptxas report)`` of one of `jit.files`, the report of a cubin; warnings are errors. A cubin is
    left as ``out.cubin``. ``constants`` have these values in the source."""
    target, source = folder / f"out.{kind}", write_sources(folder, file, config)
    with source.open("a") as text:
        text.writelines(
            f'static_assert({name} == {value}, "{name}");\n' for name, value in (constants or {}).items()
        )
    command = [
        *("nvcc", f"-{kind}", "-Xptxas", "-v", "-Werror", "all-warnings", "-keep", "-keep-dir", str(folder)),
        *("-o", str(target), *jit.options(config, capability), str(source)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return (target if kind == "ptx" else folder / f"{source.stem}.ptx").read_text(), done.stderr


def included(kernel: str) -> set[str]:
    """The files that a kernel's source is made of, its constants among them."""
    found, new = set[str](), {kernel}
    while new:
        found |= new
        text = "\n".join(jit.sources().get(name, "") for name in new)
        new = set(re.findall(r'#include "([^"]+)"', text)) - found
    return found


def kernels_of(header: str) -> list[str]:
    """Those that are compiled with the constants of this header."""
    return [file for file in jit.files() if file.endswith(".cu") and header in included(file)]


def registers(report: str) -> int:
    """Of the first kernel in a ptxas report."""
    found = re.search(r"Used (\d+) registers", report)
    assert found, report
    return int(found[1])


def check_no_spills(report: str) -> None:
    """Of the only kernel in a ptxas report."""
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"], report


class HostProgram:
    """A C++ program built against the headers of a kernel.

    Args:
        folder: empty; of the program.
        text: its source.
        file, config: the kernel, and the constants that the headers are compiled with.
        headers: texts that stand in for headers of the kernel, by name.
        options: of g++.
    """

    def __init__(
        self,
        folder: Path,
        text: str,
        file: str = "",
        config: Config | None = None,
        headers: dict[str, str] | None = None,
        options: tuple[str, ...] = ("-Wall", "-Werror"),
    ) -> None:
        if config is not None:
            write_sources(folder, file, config)
        for name, header in (headers or {}).items():
            (folder / name).write_text(header)
        (folder / "main.cpp").write_text(text)
        command = ["g++", "-std=c++17", "-O1", *options, "main.cpp", "-o", "main"]
        subprocess.run(command, cwd=folder, check=True, timeout=300)
        self._path = folder / "main"

    def __call__(self, *arguments: int, given: str = "") -> str:
        """What it prints of these arguments and this input; it ends with 0."""
        command = [str(self._path), *map(str, arguments)]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
