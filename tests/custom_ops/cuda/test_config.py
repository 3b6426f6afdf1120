"""The constants that CUDA kernels are compiled for: declared in headers, used, given values."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
from cuda_sources import included, kernels_of, needs_nvcc

from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.cuda.config import Table
from torchpaged.custom_ops.cuda.params import struct_of

ROOT = Path(jit.__file__).parents[1]
HEADERS = {path.name: path.relative_to(ROOT) for path in sorted(ROOT.rglob("*_config.cuh"))}
KERNELS = {kernel: header for header in HEADERS for kernel in kernels_of(header)}


def test_every_kernel_has_constants_of_one_header() -> None:
    assert {name for name in jit.files() if name.endswith(".cu")} == set(KERNELS)
    assert set(KERNELS.values()) == set(HEADERS)
    assert sum(len(kernels_of(header)) for header in HEADERS) == len(KERNELS)
    assert not set(HEADERS) & set(jit.files()), "values of an example are never compiled"


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_names_its_kernels_and_all_that_it_declares_are_constants(header: str) -> None:
    table = Table.of_file(str(HEADERS[header]))
    head, declared = table.text.split("#pragma once\n")
    assert set(re.findall(r"\w+\.cu\b", head)) == set(kernels_of(header))
    lines = [line for line in declared.splitlines() if line and not line.startswith("//")]
    assert [line.split("=")[0].split("//")[0].split()[-1 if "=" in line else 1] for line in lines] == [
        *table.kinds
    ]
    said = [line for line in declared.splitlines() if "//" in line]
    assert len(said) == len(table.kinds), "what each is"


@pytest.mark.parametrize("header", HEADERS)
def test_constants_are_used_and_none_but_macros_stand_behind_an_if(header: str) -> None:
    """To the preprocessor a constant of C++ is 0, without a word."""
    kinds = Table.of_file(str(HEADERS[header])).kinds
    names = set[str]().union(*(included(kernel) for kernel in kernels_of(header))) - {header}
    code = re.sub(r"//[^\n]*", "", "\n".join(jit.sources()[name] for name in names))
    asked = set(re.findall(r"\b[A-Z_a-z]\w+", " ".join(re.findall(r"^ *#(?:el)?if\b(.*)", code, re.M))))
    assert asked - {"__CUDA_ARCH__", "__CUDACC__", "defined"} == {name for name in kinds if not kinds[name]}
    assert not re.search(rf"#ifn?def (?:{'|'.join(kinds)})\b", code)
    assert not [name for name in kinds if not re.search(rf"\b{name}\b", code)]


def test_values_stand_in_the_place_of_the_examples() -> None:
    text = """// What x.cu is compiled for.
#pragma once

inline constexpr long long WIDE = 0;  // a stride
inline constexpr bool IS = false;     // a flag
// N = 3 of them
inline constexpr int N = 0;
#define M 0  // what an attribute needs
"""
    table = Table("x_config.cuh", text)
    config = table.config({"WIDE": 1 << 40, "IS": True, "N": -1, "M": 2})
    expected = text.replace("WIDE = 0", f"WIDE = {1 << 40}").replace("false", "true")
    assert config.text() == expected.replace("N = 0", "N = -1").replace("M 0", "M 2")
    assert config["N"] == -1
    assert config == table.config({"M": 2, "N": -1, "IS": 1, "WIDE": 1 << 40})
    for changed in ({"N": 1 << 31}, {"IS": 2}, {"IS": -1}, {"WIDE": 1 << 63}, {"M": -(1 << 31) - 1}):
        with pytest.raises(ValueError, match=f"x_config.cuh: {next(iter(changed))} is "):
            table.config({"WIDE": 0, "IS": 0, "N": 0, "M": 0, **changed})
    with pytest.raises(ValueError, match=r"without a value: \['M'\], values without a constant: \['X'\]"):
        table.config({"WIDE": 0, "IS": 0, "N": 0, "X": 0})


def test_no_line_of_c_or_cuda_is_longer_than_a_line_of_python() -> None:
    root, kinds = ROOT, {".cu", ".cuh", ".cpp", ".h"}
    paths = [path for path in root.rglob("*") if path.suffix in kinds]
    assert {path.suffix for path in paths} == kinds
    lines = [(path.name, n, line) for path in paths for n, line in enumerate(path.read_text().split("\n"), 1)]
    assert not [(name, n) for name, n, line in lines if len(line) > 110]


@needs_nvcc
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_source_compiles_as_it_lies(tmp_path: Path, kernel: str) -> None:
    """With the example beside it and no names on the command line, as an editor sees it; and each member of
    its parameters is where Python puts it."""
    (params,) = set(re.findall(r"__grid_constant__ (\w+) ", jit.sources()[kernel]))
    struct = struct_of(kernel, params)
    places = [(name, getattr(struct, name)) for name, *_ in struct._fields_ if name != "_padding"]
    whole, target = tmp_path / "whole.cu", tmp_path / "out.ptx"
    whole.write_text(
        f'#include "{jit.files()[kernel]}"\nstatic_assert(sizeof({params}) == {ctypes.sizeof(struct)});\n'
        + "".join(
            f"static_assert(__builtin_offsetof({params}, {name}) == {place.offset});\n"
            f"static_assert(sizeof({params}::{name}) == {place.size});\n"
            for name, place in places
        )
    )
    command = ["nvcc", "-ptx", "-arch=sm_90a", "-std=c++17", "-Werror", "all-warnings"]
    done = subprocess.run(
        [*command, "-o", str(target), str(whole)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
