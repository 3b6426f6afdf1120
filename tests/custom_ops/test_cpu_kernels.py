"""Attention kernels and the native CPU kernels against the float64 oracle, over every batch spec, dtype, mask
and layout."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from as_oracle import assert_as_oracle
from kernels import Kernels, Values, over
from op_inputs.opcheck import assert_as_reference, opcheck_cases

import torchpaged
from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS, native_status
from torchpaged.custom_ops.families import FAMILIES
from torchpaged.testing import (
    ATTENTION_VARIANTS,
    BATCH_SPECS,
    BatchSpec,
    assert_attention_close,
    make_batch,
    run_paged_attention,
)

CPU, REFERENCE = BACKEND_OPS["cpu"], BACKEND_OPS["reference"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPU = ("triton", "cuda")


#: In the interpreter every mask over one batch of each kind; of the others the plain mask and one more, in
#: turn. The fuzz mixes them all.
VARIANTS = list(ATTENTION_VARIANTS)
ALL = [(spec, variant) for spec in BATCH_SPECS for variant in VARIANTS]
CASES = [
    (spec, variant)
    for i, spec in enumerate(BATCH_SPECS)
    for variant in VARIANTS
    if spec in ("decode_edges", "mixed_padded", "prefill_small")
    or variant in (VARIANTS[0], VARIANTS[1 + i % (len(VARIANTS) - 1)])
]
HEADS: dict[str, dict[str, Any]] = {
    "cpu": {"num_heads": 6, "num_kv_heads": 2},
    "triton": {"head_dim": 32},
    "cuda": {"device": "cuda"},
}


@pytest.mark.slow_cases("triton-cpu-('prefill_long',*")
@pytest.mark.slow_cases("triton-cpu-*", but=("triton-cpu-*'causal')-*", "triton-cpu-('mixed_padded',*"))
@over(
    "cpu",
    "triton",
    gpu=("triton", "cuda"),
    case=Values(ALL, CASES, ALL),
    dtype=Values(DTYPES, DTYPES[:1], DTYPES),
)
def test_attention_matches_the_oracle(on: Kernels, case: tuple[str, str], dtype: torch.dtype) -> None:
    (spec, variant), shape = case, HEADS[on.backend if on.device == "cpu" else "cuda"]
    if on.backend != "cpu":
        shape = {**shape, "sinks": variant == "window", "alibi": variant == "soft_cap"}
    batch = make_batch(BATCH_SPECS[spec], dtype=dtype, **shape)
    assert_as_oracle(on.ops, batch, **ATTENTION_VARIANTS[variant])


SHAPES: dict[str, dict[str, Any]] = {
    "block_1": {"block_size": 1},
    "block_8": {"block_size": 8},
    "block_64": {"block_size": 64},
    "block_17": {"block_size": 17},
    "heads_first": {"heads_first": True},
    "mha": {"num_heads": 3, "num_kv_heads": 3},
    "mqa_7": {"num_heads": 7, "num_kv_heads": 1},
    "group_16": {"num_heads": 16, "num_kv_heads": 1},
    "group_64": {"num_heads": 64, "num_kv_heads": 1, "head_dim": 32},
    "group_65": {"num_heads": 65, "num_kv_heads": 1, "head_dim": 16, "alibi": True},
    "groups_of_150": {"num_heads": 300, "num_kv_heads": 2, "head_dim": 16, "sinks": True},
    "dim_80": {"head_dim": 80},
    "dim_36": {"head_dim": 36},
    "dim_12": {"head_dim": 12},
    "dim_5": {"head_dim": 5},
    "dim_256": {"head_dim": 256},
    "value_wider": {"head_dim": 24, "head_dim_v": 72},
    "value_narrower": {"head_dim": 96, "head_dim_v": 20},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "sinks_alibi": {"sinks": True, "alibi": True, "num_heads": 8},
}
FEW = ("block_1", "block_8", "block_64", "heads_first", "mqa_7", "mha", "group_16", "dim_80", "dim_12")
SHAPE = Values(SHAPES, (*FEW, "value_wider", "sinks_alibi"), ())
SPEC = Values(
    ("decode_edges", "mixed_padded", "left_padded", "chunked"), ("decode_edges", "mixed_padded"), ()
)


OFTEN = [f"mixed_padded-{shape}-torch.float32" for shape in SHAPES if shape not in ("block_8", "group_16")]


@pytest.mark.slow_cases(
    "triton-cpu-*", but=("triton-cpu-mixed_padded-dim_80-*", *(f"triton-cpu-{case}" for case in OFTEN))
)
@over("cpu", "triton", gpu=(), spec=SPEC, shape=SHAPE, dtype=DTYPES)
def test_attention_shapes_and_layouts(on: Kernels, spec: str, shape: str, dtype: torch.dtype) -> None:
    narrow = {"head_dim": 32} if on.backend == "triton" else {}
    assert_as_oracle(on.ops, make_batch(BATCH_SPECS[spec], dtype=dtype, **{**narrow, **SHAPES[shape]}))


@pytest.mark.usefixtures("native")
def test_every_option_at_once() -> None:
    options = {"window_left": 20, "logits_soft_cap": 4.0, "chunk_size": 30}
    batch = make_batch(BATCH_SPECS["mixed_padded"], sinks=True, alibi=True)
    assert_as_oracle(CPU, batch, **options)


@pytest.mark.usefixtures("native")
def test_a_dominant_sink_takes_the_weight() -> None:
    batch = make_batch(BATCH_SPECS["decode_edges"])
    batch.extras["sinks"] = torch.full((4,), 300.0)
    out, lse = run_paged_attention(CPU, batch)
    assert torch.all(out.abs() < 1e-30)
    assert torch.allclose(lse, torch.tensor(300.0))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window_left": 300, "logits_soft_cap": 4.0}], ids=str)
def test_many_rows_over_many_keys(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Rows enough for products of matrices in every dtype, an odd number of sixteens, over several steps of
    keys, the last of which is short."""
    heads = {"num_heads": 80, "num_kv_heads": 1, "head_dim": 72, "head_dim_v": 40}
    spec = BatchSpec("many", (700, 33, 290), (1, 1, 3))
    assert_as_oracle(CPU, make_batch(spec, dtype=dtype, sinks=True, alibi=True, **heads), **options)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    "spec",
    [BatchSpec("long_decode", (3000, 5), (1, 1)), BatchSpec("long_prefill", (700,), (700,))],
    ids=lambda s: s.name,
)
def test_threads_do_not_change_the_answer(spec: BatchSpec, threads: Any) -> None:
    """More threads split the keys; the result stays within rounding, and within the oracle's budget."""
    # a decode's groups are cut in two, beside its keys
    heads = {"num_heads": 96, "num_kv_heads": 1} if spec.name == "long_decode" else {}
    batch = make_batch(spec, sinks=True, **heads)
    threads(1)
    single, _ = run_paged_attention(CPU, batch)
    threads(4)
    out, lse = run_paged_attention(CPU, batch)
    torch.testing.assert_close(out, single, rtol=1e-5, atol=1e-6)
    assert_attention_close(out, lse, batch)


@pytest.mark.usefixtures("native")
def test_strided_queries_and_outputs() -> None:
    """Slices of a fused qkv projection go in as they are."""
    batch = make_batch(BATCH_SPECS["mixed_small"])
    fused = torch.full((batch.q.shape[0], 12, 64), float("nan"))
    fused[:, 2:6] = batch.q
    batch.q = fused[:, 2:6]
    assert_as_oracle(CPU, batch)


#: On a CPU all overloads of the other ops run one function.
SEVERAL = {op for family in FAMILIES for op in (*family.native, *family.on_native)}


@pytest.mark.slow_cases(
    *(f"triton-cpu-attention_{name}" for name in ("lse", "tree", "block_sparse", "semaphore")),
    *(
        f"triton-cpu-{name}"
        for name in ("attention", "delta", "selective_scan", "rg_lru", "delta_step_prompts")
    ),
)
@over("default", "cpu", "reference", "triton", gpu=("triton", "cuda", "default"), case=opcheck_cases())
def test_opcheck(on: Kernels, case: str) -> None:
    """On a CPU, of all but the default: what the kernels write is what the schema says, and in C++ has the
    shapes of the fakes; how a trace carries the op does not depend on its kernel."""
    op, args, kwargs = opcheck_cases(device=on.device)[case]
    if on.backend in ("cpu", "reference") and op not in SEVERAL:
        pytest.skip("is the default")
    few = on.device == "cpu" and on.backend != "default"
    # each runs the kernel; the interpreter's get all their outputs from the caller
    utils = {"test_utils": ("test_schema", "test_faketensor")[: 1 if on.backend == "triton" else 2]}
    torch.library.opcheck(getattr(on.ops, op), args, kwargs, **utils if few else {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["write", "merge", "copy", "advance", "rope", "rope_norm"])
@over("cpu", "triton", gpu=GPU)
def test_other_ops_match_the_reference(on: Kernels, case: str, dtype: torch.dtype) -> None:
    if case.startswith("rope") and on.device == "cuda":
        pytest.skip("to within more: test_rope_write_kv.py")
    assert_as_reference(on.ops, case, device=on.device, dtype=dtype)


@pytest.mark.usefixtures("native")
def test_a_pool_of_strides_is_written_in_place() -> None:
    """Pools that are views of one larger tensor (heads first, keys beside values)."""
    big = torch.full((2, 9, 2, 16, 8), float("nan"))
    k_cache, v_cache = big[0].transpose(1, 2), big[1].transpose(1, 2)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    CPU.write_kv(k, v, k_cache, v_cache, torch.tensor([17, -1, 143]))
    assert torch.equal(k_cache[1, 1], k[0])
    assert torch.equal(v_cache[8, 15], v[2])
    assert int(big.isfinite().sum()) == 2 * 2 * 16


BAD: dict[str, tuple[str, Any]] = {
    "slot_mapping": ("slot_mapping", lambda a: {"slot_mapping": a["slot_mapping"] + 10**6}),
    "slot_below": ("slot_mapping", lambda a: {"slot_mapping": a["slot_mapping"] - 100}),
    "heads": ("k:", lambda a: {"k": a["k"][:, :1]}),
    "tokens": ("v:", lambda a: {"v": a["v"][:2]}),
    "slots_dtype": ("slot_mapping", lambda a: {"slot_mapping": a["slot_mapping"].int()}),
    "dtype": ("k, v", lambda a: {"v": a["v"].half()}),
    "stride": ("k:", lambda a: {"k": a["k"].transpose(1, 2).contiguous().transpose(1, 2)}),
    "pools": ("v_cache", lambda a: {"v_cache": a["v_cache"][:3]}),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", BAD)
def test_bad_writes_are_refused_before_anything_is_written(name: str) -> None:
    _, args, _ = opcheck_cases()["write"]
    named = dict(zip(("k", "v", "k_cache", "v_cache", "slot_mapping"), args, strict=True))
    before = named["k_cache"].clone(), named["v_cache"].clone()
    argument, change = BAD[name]
    with pytest.raises(RuntimeError, match=argument):
        CPU.write_kv(*(named | change(named)).values())
    assert torch.equal(named["k_cache"], before[0])
    assert torch.equal(named["v_cache"], before[1])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("block_table", {"block_table": torch.full((6, 8), 99, dtype=torch.int32)}),
        ("seq_lens", {"seq_lens": torch.full((6,), 10_000, dtype=torch.int32)}),
        ("query_start_loc", {"query_start_loc": torch.tensor([0, 9, 3, 3, 3, 3, 3], dtype=torch.int32)}),
        ("max_query_len", {"max_query_len": 2}),
        ("q:", {"q": torch.zeros(28, 3, 64)}),
    ],
)
def test_bad_batches_are_refused_before_anything_is_written(argument: str, change: dict[str, Any]) -> None:
    batch = make_batch(BATCH_SPECS["mixed_padded"])
    for key, value in change.items():
        setattr(batch, key, value)
    out = torch.full((*batch.q.shape[:2], 64), 7.0)
    with pytest.raises(RuntimeError, match=argument):
        CPU.paged_attention(*batch.tensors, out, max_query_len=batch.max_query_len, scale=1.0)
    assert torch.all(out == 7.0)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
@pytest.mark.parametrize("kind", ["strided", "expanded"])
def test_numbers_per_head_must_be_contiguous(name: str, kind: str) -> None:
    """The kernels read them with stride 1; any other stride would be another head's number."""
    batch = make_batch(BATCH_SPECS["decode_edges"])
    values = torch.arange(8.0)[::2] if kind == "strided" else torch.ones(1).expand(4)
    with pytest.raises(ArgumentError, match=name):
        torchpaged.paged_attention(*batch.tensors, max_query_len=1, **{name: values})


@pytest.mark.usefixtures("native")
def test_no_path_of_the_machine_that_built_it() -> None:
    """Errors name the source file that raised them, and not where it lay."""
    paths = re.findall(rb"(?<![\w./-])/[\w./+-]+\.(?:cpp|cc|h|hpp)\b", Path(native_status()[1]).read_bytes())
    assert not paths, paths
    with pytest.raises(RuntimeError, match="expected shape") as raised:
        q = torch.zeros(1, 2, 8)
        CPU.merge_attn_states(q, torch.zeros(3, 2), q.clone(), torch.zeros(1, 2), q.clone())
    assert "custom_ops/cpu/" in str(raised.value)
    assert "/custom_ops" not in str(raised.value)
