"""Structs that Python packs by hand for the CUDA C++ kernels: field by field what the sources declare, and as
long as their compilers say."""

from __future__ import annotations

import re
import struct

import pytest

from torchpaged.custom_ops.attention.cuda import paged_attention, prefill
from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.layers.cuda import linear

MEMBERS = {"i64": "q", "float": "f", "int": "i", "Where": "iii"}
PACKED = {
    "shapes.cuh": paged_attention._PARAMS,
    "linear_params.cuh": linear._PARAMS,
    "norm.cu": linear._NORM_PARAMS,
    "prefill_shapes.cuh": prefill.PARAMS,
}


def declared(source: str) -> str:
    """The members of ``struct Params`` in letters of `struct`; tensor maps, which are packed apart, are
    left out."""
    (body,) = re.findall(r"^struct Params \{.*?\n(.*?)^\};", source, re.MULTILINE | re.DOTALL)
    letters = ""
    for line in re.sub(r"//.*", "", body).split(";"):
        words = line.split()
        if words and words[0] != "Map":
            kind = words[1] if words[0] == "const" else words[0]
            members = line.split(",")
            letters += "".join("Q" if "*" in member else MEMBERS[kind] for member in members)
    return letters


@pytest.mark.parametrize("file", PACKED)
def test_python_packs_what_the_source_declares(file: str) -> None:
    source, packed = jit.files()[file].read_text(), PACKED[file]
    letters = re.sub(r"(\d+)(\w)", lambda m: "" if m[2] == "x" else int(m[1]) * m[2], packed.format)
    assert declared(source) == letters
    # compiled with every kernel
    (asserted,) = re.findall(r"static_assert\(sizeof\(Params\) == (?:3 \* sizeof\(Map\) \+ )?(\d+),", source)
    assert packed.size == int(asserted) and packed.size == struct.calcsize("@" + packed.format)


def test_a_member_that_was_forgotten_is_noticed() -> None:
    source = jit.files()["norm.cu"].read_text()
    assert declared(source.replace("float eps, offset;", "float eps;")) != declared(source) == "QQQqqff"
