"""Kernel parameters in Python: field by field what the CUDA C++ sources declare, by name and type, and as
long as their compilers say."""

import ctypes
import re

import pytest

from torchpaged.custom_ops.attention.cuda.decode import DecodeParams
from torchpaged.custom_ops.attention.cuda.prefill import PrefillParams, Where
from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.cuda.loaded_kernel import Map
from torchpaged.custom_ops.indexer.cuda.index_logits import LogitsParams
from torchpaged.custom_ops.indexer.cuda.top_k_indices import TopKParams
from torchpaged.custom_ops.layers.cuda.linear import LinearParams, NormParams
from torchpaged.custom_ops.mla.cuda.latent import LatentParams
from torchpaged.custom_ops.mla.cuda.selected import SelectedParams
from torchpaged.custom_ops.state.cuda.decode import StateParams
from torchpaged.custom_ops.state.cuda.delta_chunks import ChunkParams
from torchpaged.custom_ops.state.cuda.delta_pass import PassParams
from torchpaged.custom_ops.state.cuda.mamba2_step import Mamba2StepParams
from torchpaged.custom_ops.state.cuda.step import StepParams

KINDS = {"i64": ctypes.c_int64, "float": ctypes.c_float, "int": ctypes.c_int, "Where": Where, "Map": Map}
STRUCTS = {
    "decode_params.cuh": DecodeParams,
    "delta_chunks_params.cuh": ChunkParams,
    "delta_pass_params.cuh": PassParams,
    "delta_step_params.cuh": StepParams,
    "latent_params.cuh": LatentParams,
    "linear_params.cuh": LinearParams,
    "logits_params.cuh": LogitsParams,
    "mamba2_step_params.cuh": Mamba2StepParams,
    "norm.cu": NormParams,
    "prefill_params.cuh": PrefillParams,
    "selected_params.cuh": SelectedParams,
    "state_decode_params.cuh": StateParams,
    "top_k_indices.cu": TopKParams,
}


def declared(source: str) -> list[tuple[str, object]]:
    """Name and type of each member of ``struct Params``."""
    (body,) = re.findall(r"^struct Params \{.*?\n(.*?)^\};", source, re.MULTILINE | re.DOTALL)
    members: list[tuple[str, object]] = []
    for line in re.sub(r"//.*", "", body).split(";"):
        kind, _, names = line.strip().removeprefix("const ").partition(" ")
        for name in filter(None, map(str.strip, names.split(","))):
            members.append((name.removeprefix("*"), ctypes.c_void_p if "*" in name else KINDS[kind]))
    return members


@pytest.mark.parametrize("file", STRUCTS)
def test_python_fills_in_what_the_source_declares(file: str) -> None:
    source, params = jit.files()[file].read_text(), STRUCTS[file]
    assert declared(source) == [tuple(field) for field in params._fields_ if field[0] != "_padding"]
    # compiled with every kernel
    (maps, asserted), *_ = re.findall(r"sizeof\(Params\) == (3 \* sizeof\(Map\) \+ )?(\d+)", source)
    assert ctypes.sizeof(params) == int(asserted) + (3 * 128 if maps else 0)


def test_a_member_that_was_forgotten_is_noticed() -> None:
    source = jit.files()["norm.cu"].read_text()
    assert declared(source.replace("float eps, offset;", "float eps;")) != declared(source)
