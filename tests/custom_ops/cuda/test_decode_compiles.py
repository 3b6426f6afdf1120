"""The CUDA C++ decode kernel without a GPU: nvcc compiles its specialisations, and reports registers, spills
and load widths."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import compiled, needs_nvcc, registers
from specialisations import SHARED_MEMORY, specialisation

from torchpaged.custom_ops.attention.cuda import specialise
from torchpaged.custom_ops.cuda.config import Config

pytestmark = needs_nvcc


def config(capability: tuple[int, int], **spec: Any) -> tuple[Config, specialise.DecodeShape]:
    """The constants of a spec: heads (group, num_kv_heads, dim[, dim_v]), dtype, kv_dtype, query_len,
    block_size, pairs, features."""
    group, heads, dim, dim_v = (*spec["heads"], spec["heads"][2])[:4]
    features = dict(spec.get("features", {}))
    longest = features.pop("longest", 0)
    sizes = {name: spec[name] for name in ("dtype", "kv_dtype", "block_size") if name in spec}
    made = specialisation(dim=dim, dim_v=dim_v, group=group, num_kv_heads=heads, **sizes, **features)
    return specialise.decode_config(
        made,
        spec.get("query_len", 1),
        spec.get("pairs", 64),
        early=capability >= (9, 0),
        sms=132,
        shared_per_sm=SHARED_MEMORY[capability][0],
        longest=longest,
    )


FLAGS = {"soft_cap": True, "alibi": True, "sinks": True, "lse": True}
EVERYTHING = {"window_left": 100, "chunk_size": 256, **FLAGS}
TUNED: dict[str, dict[str, Any]] = {  # zero spills are asserted for these
    "llama few pairs": {"heads": (4, 8, 128), "pairs": 8},
    "llama clusters": {"heads": (4, 8, 128), "pairs": 64},
    "llama many pairs": {"heads": (4, 8, 128), "pairs": 2048},
    "llama 1b": {"heads": (4, 8, 64), "pairs": 512},
    "llama 1b few pairs": {"heads": (4, 8, 64), "pairs": 64},
    "llama 1b one request": {"heads": (4, 8, 64), "pairs": 8},
    "smollm": {"heads": (3, 3, 64), "pairs": 192},
    "smollm few pairs": {"heads": (3, 3, 64), "pairs": 24},
    "gpt-oss": {"heads": (8, 8, 64), "pairs": 64, "features": {"sinks": True, "window_left": 127}},
    "llama beside prefill": {"heads": (4, 8, 128), "query_len": 2, "pairs": 272, "features": {"longest": 2}},
    "gpt-oss beside prefill": {
        "heads": (8, 8, 64),
        "pairs": 64,
        "features": {"sinks": True, "window_left": 127, "longest": 1},
    },
    "llama, e4m3 results": {"heads": (4, 8, 128), "pairs": 64, "features": {"fp8_results": True}},
    "llama many pairs, e4m3 results": {
        "heads": (4, 8, 128),
        "pairs": 2048,
        "features": {"fp8_results": True},
    },
    "qwen fp8": {"heads": (7, 4, 128), "kv_dtype": torch.float8_e4m3fn, "features": {"scales": True}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "everything": {"heads": (4, 8, 128), "features": EVERYTHING, "query_len": 2},
    "everything, e4m3 results": {
        "heads": (5, 2, 80, 112),
        "features": {**EVERYTHING, "fp8_results": True},
        "query_len": 2,
    },
    "fp16 e5m2": {"heads": (4, 8, 64), "dtype": torch.float16, "kv_dtype": torch.float8_e5m2},
    "wide": {"heads": (2, 4, 256)},
    "odd widths": {"heads": (5, 2, 80, 112), "block_size": 4},
    "192/128": {"heads": (16, 1, 192, 128), "block_size": 1},
    "speculative": {"heads": (4, 8, 128), "query_len": 8},
    "tree": {
        "heads": (4, 8, 128),
        "query_len": 2,
        "features": {"tree": True, "window_left": 100, "chunk_size": 256, "alibi": True},
    },
    "two heads, everything": {
        "heads": (2, 2, 48, 32),
        "features": EVERYTHING,
        "query_len": 2,
        "block_size": 4,
    },
    "fp8 many rows": {"heads": (32, 1, 128), "kv_dtype": torch.float8_e4m3fn, "block_size": 2},
    "fp8 odd width": {"heads": (4, 2, 80), "kv_dtype": torch.float8_e5m2, "block_size": 4},
}


def spilled(report: str) -> int:
    """Bytes of spill stores of the kernel (not of the cold path for empty rows)."""
    found = re.search(
        r"properties for paged_decode\n\s+\d+ bytes stack frame, (\d+) bytes spill stores", report
    )
    assert found, report
    return int(found[1])


@pytest.mark.slow_cases(but=("everything", "llama many pairs", "fp8 odd width"))
@pytest.mark.parametrize("name", [*TUNED, *OTHERS])
def test_compiles_for_sm_90(tmp_path: Path, name: str) -> None:
    values, shape = config((9, 0), **{**TUNED, **OTHERS}[name])
    text, report = compiled(tmp_path, "decode.cu", values, "cubin")
    if name in TUNED:
        assert spilled(report) == 0, report
    check_metadata_comes_from_l2(text)
    used = registers(report)
    assert used * shape.warps * 32 * shape.ctas_per_sm <= 65536, (used, shape)


@pytest.mark.slow_cases(but=("odd widths-(8, 0)",))
@pytest.mark.parametrize("capability", [(8, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("name", ["llama clusters", "smollm", "odd widths"])
def test_compiles_for_others(tmp_path: Path, name: str, capability: tuple[int, int]) -> None:
    values, _ = config(capability, **{**TUNED, **OTHERS}[name])
    _, report = compiled(tmp_path, "decode.cu", values, "cubin", capability)
    if name in TUNED:
        assert spilled(report) == 0, report


@pytest.mark.parametrize(
    ("capability", "features"),
    [
        ((8, 0), {}),
        ((9, 0), {}),
        ((10, 0), {}),
        ((9, 0), {"lse": True, "sinks": True, "window_left": 127}),
        ((9, 0), {"soft_cap": True, "alibi": True}),
    ],
    ids=str,
)
def test_one_request_of_a_small_model_leaves_registers_to_the_products(
    tmp_path: Path, capability: tuple[int, int], features: dict[str, Any]
) -> None:
    values, shape = config(capability, **TUNED["llama 1b one request"], features=features)
    _, report = compiled(tmp_path, "decode.cu", values, "cubin", capability)
    used = registers(report)
    assert shape.max_registers == values["MAX_REGISTERS"] == (168 if capability >= (9, 0) else 0), (
        "only where kernels begin early"
    )
    assert used <= 168 or not shape.max_registers, report
    assert spilled(report) == 0, report


def test_keys_and_values_are_copied_16_bytes_at_a_time(tmp_path: Path) -> None:
    values, _ = config((9, 0), **TUNED["llama clusters"])
    text, _ = compiled(tmp_path, "decode.cu", values, "ptx")
    copies = re.findall(
        r"cp\.async\.\w+\.shared\.global(?:\.L2::cache_hint)? \[[^\]]+\], \[[^\]]+\], (\d+)", text
    )
    assert len(copies) >= 32, copies
    assert set(copies) == {"16"}, copies
    assert "mma.sync.aligned.m16n8k16" in text


def test_where_it_waits_for_the_launch_before(tmp_path: Path) -> None:
    """Before it reads queries, and all keys but the first; the next may start after that."""
    values, _ = config((9, 0), **TUNED["llama clusters"])
    text, _ = compiled(tmp_path, "decode.cu", values, "ptx")
    steps = re.findall(
        r"griddepcontrol\.\w+|ld\.global|cp\.async\.cg|atom\.global",
        text[text.index(".entry paged_decode") :],
    )
    waits = [i for i, step in enumerate(steps) if step == "griddepcontrol.wait"]
    # with work, and without
    assert len(waits) == 2, steps
    assert all(steps[i + 1] == "griddepcontrol.launch_dependents" for i in waits), steps
    assert steps.count("griddepcontrol.launch_dependents") == 2, steps
    copies = [i for i, step in enumerate(steps) if step == "cp.async.cg"]
    # `load` stands in the code three times: before, after, in the loop
    before = [sum(i < wait for i in copies) for wait in waits]
    assert any(0 < count <= len(copies) / 3 for count in before), steps


def test_beside_prefill_it_waits_at_its_end_alone(tmp_path: Path) -> None:
    """What it reads was complete before the prefill launch ahead began; kernels behind wait for this one,
    which must not end before that one."""
    values, _ = config((9, 0), **TUNED["llama beside prefill"])
    text, _ = compiled(tmp_path, "decode.cu", values, "ptx")
    steps = re.findall(
        r"griddepcontrol\.\w+|ld\.acquire|ld\.global|st\.global|cp\.async\.cg|atom\.global",
        text[text.index(".entry paged_decode") :],
    )
    assert steps.count("griddepcontrol.wait") == 1, steps
    assert steps[-1] == "griddepcontrol.wait", steps
    assert steps.count("ld.acquire") == 1
    assert (
        steps.index("ld.acquire")
        < steps.index("griddepcontrol.launch_dependents")
        < steps.index("cp.async.cg")
    )


# by their offset in struct Params of decode_params.cuh
METADATA = {24: "block_table", 32: "seq_lens", 40: "query_start_loc"}


def metadata_loads(ptx: str) -> list[tuple[str, str]]:
    """``(tensor, instruction)`` of every load from a metadata tensor, those of the kernel first and in the
    text's order, found by following the pointers through the registers."""
    loads = set()
    for function in re.split(r"^(?:\.visible \.entry|\.func)", ptx, flags=re.M)[1:]:
        name = re.match(r"\s*(\w+)\(", function)[1]  # type: ignore[index]
        params: Config = {}  # registers that point into Params, and where
        pointers: dict[str, str] = {}  # registers that point into a tensor
        lines = [line.strip().rstrip(";").split(None, 1) for line in function.splitlines()]
        instructions = [
            line
            for line in lines
            if len(line) == 2 and re.match(r"(?:ld|mov|add|sub|cvta|mad|selp)\.", line[0])
        ]
        known = -1
        # to a fixed point: registers of a loop are written further down
        while known != len(params) + len(pointers):
            known = len(params) + len(pointers)
            for line, (op, rest) in enumerate(instructions):
                target, *sources = re.findall(r"%\w+|\w+_param_0|(?<=[,+ ])-?\d+", rest)
                address = re.search(r"\[([%\w]+)\+?(-?\d+)?\]", rest) if op.startswith("ld.") else None
                if address:
                    place, offset = address[1], int(address[2] or 0)
                    if place in pointers:
                        loads.add((name != "paged_decode", line, pointers[place], op))
                    elif place == f"{name}_param_0" and name != "paged_decode":
                        params[target] = 0  # a function is given the address of Params
                    elif place in params or place == f"{name}_param_0":
                        tensor = METADATA.get(params.get(place, 0) + offset)
                        if tensor and op.endswith("64"):
                            pointers[target] = tensor
                elif f"{name}_param_0" in sources:
                    params[target] = 0
                elif op.startswith("add") and sources[0] in params:
                    params[target] = params[sources[0]] + int(sources[1])
                elif op.startswith(("mov", "cvta")) and sources[:1] and sources[0] in params:
                    params[target] = params[sources[0]]
                else:
                    found = [pointers[source] for source in sources if source in pointers]
                    if found:
                        pointers[target] = found[0]
    return [(tensor, op) for _, _, tensor, op in sorted(loads)]


def check_metadata_comes_from_l2(text: str) -> None:
    """It is read before the kernels ahead have ended: a line of a first-level cache may be a step old, a
    read-only one older still."""
    loads = metadata_loads(text)
    assert {tensor for tensor, _ in loads} == set(METADATA.values()), loads
    acquires = [i for i, (_, op) in enumerate(loads) if op.startswith("ld.acquire.gpu.global")]
    assert len(acquires) == 1, loads
    # behind it L1 holds nothing old
    assert all(op.startswith("ld.global.cg.") for _, op in loads[: acquires[0]]), loads
    assert ".nc" not in text
