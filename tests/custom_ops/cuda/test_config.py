"""The constants that CUDA kernels are compiled for: typed, said, used; the examples beside the sources.

``python tests/custom_ops/cuda/test_config.py`` writes the examples anew.
"""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_sources import needs_nvcc
from specialisations import specialisation

from torchpaged.custom_ops.attention.cuda import specialise
from torchpaged.custom_ops.attention.cuda.decode_constants import DECODE
from torchpaged.custom_ops.attention.cuda.prefill_constants import PREFILL
from torchpaged.custom_ops.attention.cuda.prefill_shape import prefill_config
from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.cuda.config import Config, Constant, Table
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.experts.cuda.few_experts import FEW_EXPERTS, ExpertsSpec
from torchpaged.custom_ops.indexer.cuda.index_logits import LOGITS, LogitsSpec
from torchpaged.custom_ops.indexer.cuda.top_k_indices import TOP_K, top_k_config
from torchpaged.custom_ops.layers.cuda import linear_shape
from torchpaged.custom_ops.layers.cuda.linear_constants import LINEAR, NORM
from torchpaged.custom_ops.mla.cuda.selected import SELECTED, SelectedSpec
from torchpaged.custom_ops.mla.cuda.shape import LATENT, LatentSpec, latent_config
from torchpaged.custom_ops.state.cuda.decode import STATE_DECODE, StateSpec
from torchpaged.custom_ops.state.cuda.delta_chunks import DELTA_CHUNKS, ChunkSpec
from torchpaged.custom_ops.state.cuda.delta_pass import DELTA_PASS, PassSpec
from torchpaged.custom_ops.state.cuda.delta_step import DELTA_STEP, StepSpec
from torchpaged.custom_ops.state.cuda.key_chunks import KEY_CHUNKS, KeyChunkSpec
from torchpaged.custom_ops.state.cuda.mamba2_step import MAMBA2_STEP, Mamba2StepSpec

OF_ATTENTION = (DECODE, PREFILL, LATENT, SELECTED, LOGITS, TOP_K)
OF_STATES = (STATE_DECODE, DELTA_STEP, MAMBA2_STEP, DELTA_CHUNKS, DELTA_PASS, KEY_CHUNKS)
TABLES = {table.header: table for table in (*OF_ATTENTION, LINEAR, NORM, FEW_EXPERTS, *OF_STATES)}
KERNELS = {kernel: table for table in TABLES.values() for kernel in table.kernels}


def examples() -> dict[str, Config]:
    """Header -> what its file beside the sources is made from: layers of Llama 3 8B on an H200."""
    shape = linear_shape.linear_shape(64, 4096, 4096, 132, True, True, 228 << 10, 227 << 10)
    decode, _ = specialise.decode_config(
        specialisation(), 1, 64, early=True, sms=132, shared_per_sm=228 << 10
    )
    linear = linear_shape.LinearSpec(
        torch.bfloat16, 64, 4096, 4096, 4096, "none", False, False, False, residual=True, aligned=True
    )
    return {
        "decode_config.cuh": decode,
        "prefill_config.cuh": prefill_config(specialisation()),
        "linear_config.cuh": linear_shape.linear_config(linear, shape, early=True),
        "latent_config.cuh": latent_config(
            LatentSpec(512, 64, 16, 64, False, False, True, False, 16, 132, 1)
        ),
        "selected_config.cuh": SelectedSpec(512, 64, 16, 64, False, True, False, 1, 16, 16).config(),
        "logits_config.cuh": LogitsSpec(64, 64, False, True, True).config(),
        "top_k_config.cuh": top_k_config(4, 131072, 132),
        "state_decode_config.cuh": StateSpec(
            128, 128, 16, 2, False, False, False, 1, False, True, True
        ).config(),
        "delta_chunks_config.cuh": ChunkSpec(128, 8, 2, 16, 1).config(),
        "delta_pass_config.cuh": PassSpec(128, 16, 2, 2, 16, True).config(),
        "key_chunks_config.cuh": KeyChunkSpec(128, 32, 1, 16, 2).config(),
        "delta_step_config.cuh": StepSpec(
            128, 128, 16, 2, 1, 2, False, False, False, 4, False, True, False, False, False
        ).config(),
        "mamba2_step_config.cuh": Mamba2StepSpec(
            128, 64, 48, 48, 1, 4, False, True, False, False, False, True
        ).config(),
        "few_experts_config.cuh": ExpertsSpec(2048, 1408, 2816, 6, 1, False, True).config(),
        "norm_config.cuh": linear_shape.norm_config(torch.bfloat16, torch.bfloat16, 4096, True),
    }


def place(header: str) -> Path:
    """Of the example: beside the kernels that include it."""
    return jit.files()[TABLES[header].kernels[0]].with_name(header)


def included(kernel: str) -> set[str]:
    """The files that a kernel's source is made of, its constants left out."""
    found, new = set[str](), {kernel}
    while new:
        found |= new
        names = re.findall(r'#include "([^"]+)"', "\n".join(jit.sources()[name] for name in new))
        new = {name for name in names if name not in TABLES} - found
    return found


@pytest.mark.parametrize("header", TABLES)
def test_the_example_is_what_the_generator_makes(header: str) -> None:
    assert set(examples()) == set(TABLES)
    assert place(header).read_text() == examples()[header].text(), f"python {Path(__file__).name} writes it"


def test_every_kernel_has_constants_and_every_example_a_table() -> None:
    assert {name for name in jit.files() if name.endswith(".cu")} == set(KERNELS)
    root = Path(jit.__file__).parents[1]
    assert {path.name: path for path in root.rglob("*_config.cuh")} == {name: place(name) for name in TABLES}
    assert not set(TABLES) & set(jit.files()), "an example is never compiled"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_includes_its_constants_and_no_others(kernel: str) -> None:
    text = "\n".join(jit.sources()[name] for name in included(kernel))
    assert set(re.findall(r'#include "(\w+_config\.cuh)"', text)) == {KERNELS[kernel].header}


@pytest.mark.parametrize("header", TABLES)
def test_constants_are_used_and_none_but_macros_stand_behind_an_if(header: str) -> None:
    """To the preprocessor a constant of C++ is 0, without a word."""
    table = TABLES[header]
    names = set[str]().union(*(included(kernel) for kernel in table.kernels))
    code = re.sub(r"//[^\n]*", "", "\n".join(jit.sources()[name] for name in names))
    asked = set(re.findall(r"\b[A-Z_a-z]\w+", " ".join(re.findall(r"^ *#(?:el)?if\b(.*)", code, re.M))))
    macros = {constant.name for constant in table.constants if constant.kind == "macro"}
    assert asked - {"__CUDA_ARCH__", "__CUDACC__", "defined"} == macros
    assert not re.search(rf"#ifn?def (?:{'|'.join(table.names())})\b", code)
    unused = [name for name in table.names() if not re.search(rf"\b{name}\b", code)]
    assert not unused


def test_the_header_is_typed_and_says_what_each_constant_is() -> None:
    table = Table(
        "x_config.cuh",
        ("x.cu",),
        "an example",
        (
            Constant("WIDE", "long long", "a stride"),
            Constant("IS", "bool", "a flag"),
            Constant("N", "int", "words " * 20),
            Constant("M", "macro", "what an attribute needs"),
        ),
    )
    config = table.config({"WIDE": 1 << 40, "IS": True, "N": -1, "M": 2})
    lines = config.text().splitlines()
    for line in (
        r"inline constexpr long long WIDE = 1099511627776;\s+// a stride",
        r"inline constexpr bool IS = true;\s+// a flag",
        r"inline constexpr int N = -1;",
        r"#define M 2\s+// what an attribute needs",
    ):
        assert any(re.fullmatch(line, found) for found in lines), (line, lines)
    assert max(map(len, lines)) <= 110
    assert lines.index("#pragma once") < lines.index("inline constexpr int N = -1;")
    assert config["N"] == -1
    assert config == table.config({"M": 2, "N": -1, "IS": 1, "WIDE": 1 << 40})
    for changed in ({"N": 1 << 31}, {"IS": 2}, {"IS": -1}, {"WIDE": 1 << 63}, {"M": -(1 << 31) - 1}):
        with pytest.raises(ValueError, match=f"x_config.cuh: {next(iter(changed))} is "):
            table.config({"WIDE": 0, "IS": 0, "N": 0, "M": 0, **changed})
    with pytest.raises(ValueError, match=r"without a value: \['M'\], values without a constant: \['X'\]"):
        table.config({"WIDE": 0, "IS": 0, "N": 0, "X": 0})


def test_no_line_of_c_or_cuda_is_longer_than_a_line_of_python() -> None:
    root, kinds = Path(jit.__file__).parents[1], {".cu", ".cuh", ".cpp", ".h"}
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


if __name__ == "__main__":
    for name, config in examples().items():
        place(name).write_text(config.text())
        print(f"wrote {place(name)}", file=sys.stderr)
