"""Kernel parameters in Python, which are made from the sources: as long as their compilers say."""

import ctypes
import re
from typing import Any

import pytest
import torch
from specialisations import SHARED_MEMORY

from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.cuda.loaded_kernel import Map
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.layers.call import LinearCall
from torchpaged.custom_ops.layers.cuda import linear
from torchpaged.custom_ops.layers.cuda.linear_shape import linear_shape, token_bucket

DECLARED = {name: text for name, text in jit.sources().items() if "\nstruct Params {" in text}


@pytest.mark.parametrize("file", DECLARED)
def test_python_has_what_the_source_declares(file: str) -> None:
    # compiled with every kernel
    (maps, asserted), *_ = re.findall(r"sizeof\(Params\) == (3 \* sizeof\(Map\) \+ )?(\d+)", DECLARED[file])
    assert ctypes.sizeof(struct_of(file)) == int(asserted) + (3 * 128 if maps else 0)


def test_names_kinds_and_places_are_those_of_the_source() -> None:
    members = {name: kind for name, kind, *_ in struct_of("prefill.cu")._fields_}
    assert list(members)[:5] == ["q", "k", "v", "out", "lse"]
    assert members["q"] is Map and members["sinks"] is ctypes.c_void_p and members["scale"] is ctypes.c_float
    made = struct_of("prefill.cu")(k_at=(1, 2, 3), num_reqs=7)
    assert (made.k_at.head_group, made.v_at.head_group, made.num_reqs, made.late) == (2, 0, 7, 0)
    assert struct_of("norm.cu").offset.offset == 5 * 8 + 4


def test_a_struct_with_tensor_maps_ends_where_they_may_begin() -> None:
    assert ctypes.sizeof(struct_of("linear_wide.cu", "BulkParams")) == 2 * 128 + 96 + 32


@pytest.mark.parametrize("tokens", [4, 16])
def test_linear_packs_a_call(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 9 tokens on its parameters stand behind two tensor maps."""
    monkeypatch.setattr(linear, "_map", lambda *_, **__: Map())
    call = LinearCall(*(torch.zeros(n, 512, dtype=torch.bfloat16) for n in (tokens, 512, tokens)))
    shape = linear_shape(token_bucket(tokens), 512, 512, 132, True, True, *SHARED_MEMORY[9, 0])
    packed: Any = linear._params(call, shape)
    assert shape.wide == (tokens > 8)
    params = packed.p if shape.wide else packed
    assert (params.x, params.out) == (call.x.data_ptr(), call.out.data_ptr())
    assert (params.tokens, params.x_token) == (tokens, 512)


def test_a_member_that_the_source_does_not_have_is_refused() -> None:
    with pytest.raises(AttributeError, match="weihgt"):
        struct_of("norm.cu")(weihgt=0)


def test_what_is_no_number_or_pointer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "struct Params {\n  int several[3];\n};\n"
    monkeypatch.setitem(jit.sources(), "odd.cu", text)
    with pytest.raises(ValueError, match=r"several\[3\]"):
        struct_of("odd.cu")
    with pytest.raises(ValueError, match="no struct Nothing"):
        struct_of("odd.cu", "Nothing")
