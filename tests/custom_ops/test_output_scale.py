"""Attention that writes e4m3 over an ``output_scale``: the reference and the CPU's kernels, what is refused,
who takes it, and the module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import INTERPRETED, Kernels, Values, over
from op_inputs.output_scale import CHUNKS, E4M3, LONG, ONE_PROMPT, assert_e4m3, opcheck_e4m3, run_e4m3
from op_inputs.trees import TREE_SPECS, make_tree_batch
from specialisations import specialisation
from torch import nn

import torchpaged
from torchpaged import ArgumentError, PagedAttention
from torchpaged.backends import attention_spec, get_backend, list_backends
from torchpaged.cache import PagedKVCache
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.cascade_call import CascadeCall
from torchpaged.custom_ops.attention.cuda import cascade_attention as cuda_cascade
from torchpaged.custom_ops.attention.cuda import prefill_shape, specialise
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.testing import BATCH_SPECS, BatchSpec, make_batch

CPU, REFERENCE = BACKEND_OPS["cpu"], BACKEND_OPS["reference"]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_left": 7},
    "cap": {"logits_soft_cap": 5.0},
    "chunked": {"chunk_size": 12, "causal": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spec", ["decode_edges", "mixed_padded", "left_padded"])
@over("cpu", "reference", gpu=())
def test_the_result_over_the_scale(on: Kernels, spec: str, options: str, dtype: torch.dtype) -> None:
    """Rounded once, saturated where the scale is too small; rows that see nothing are zeros."""
    batch = make_batch(BATCH_SPECS[spec], dtype=dtype, sinks=True, head_dim=24, head_dim_v=20)
    for scale in (0.03, 1e-3, 1e-40):
        assert_e4m3(*run_e4m3(on.ops, batch, scale, **OPTIONS[options]), batch, scale, **OPTIONS[options])


#: Of batches, and of calls.
COMBINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window, sinks": ({"sinks": True}, {"window_left": 7}),
    "cap, alibi, chunks": ({"alibi": True}, {"logits_soft_cap": 5.0, "chunk_size": 12}),
    "bidirectional": ({}, {"causal": False}),
    "e4m3 pools": ({"kv_dtype": E4M3, "scales": "per_head"}, {}),
    "e5m2 pools": ({"kv_dtype": torch.float8_e5m2, "scales": "one"}, {}),
    "odd widths": ({"head_dim": 20, "head_dim_v": 12, "num_heads": 7, "num_kv_heads": 1}, {}),
}
FEW = ("decode_edges", "mixed_padded", "prefill_small", "speculative")
SPECS = {spec.name: spec for spec in (LONG, CHUNKS, ONE_PROMPT, *BATCH_SPECS.values())}
SPEC = Values((), FEW, (*FEW, "left_padded", "long", "chunks", "one_prompt"))
ON_GPU: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "device": "cuda"}


@pytest.mark.slow_cases("triton-cpu-*", but_every=4)
@over("triton", gpu=("triton", "cuda"), spec=SPEC, combined=COMBINED)
def test_kernels_of_a_gpu(on: Kernels, spec: str, combined: str) -> None:
    """By the decode kernel, by the prefill kernel, and by both; saturated in one of the calls, which is the
    only one in the interpreter."""
    (sizes, options), shape = COMBINED[combined], {"head_dim": 32} if on.device == "cpu" else ON_GPU
    batch = make_batch(SPECS[spec], **{"dtype": torch.bfloat16, **shape, **sizes})
    small = 1e-4 if spec == "one_prompt" else 1e-3  # thousands of values average out
    for scale, padding in ((0.02, (0, 0, 0)), (small, (5, 1, 3)))[on.device == "cpu" :]:
        out, lse = run_e4m3(on.ops, batch, scale, padding, **options)
        assert_e4m3(out, lse, batch, scale, **options)
    assert float(out.float().abs().max()) == 448


@over("triton", gpu=())
def test_split_kv(on: Kernels) -> None:
    """Parts meet in float32 before they are rounded."""
    spec = BatchSpec("split", (1500, 1, 0, 257), (1, 1, 1, 1))
    batch = make_batch(spec, head_dim=16, num_heads=4, num_kv_heads=1)
    assert_e4m3(*run_e4m3(on.ops, batch, 1e-3), batch, 1e-3)


@over("triton", gpu=("triton", "cuda"))
def test_trees(on: Kernels) -> None:
    for spec in ("tree_mixed",) if on.device == "cpu" else ("tree_mixed", "tree_small"):
        options: dict[str, Any] = {"head_dim": 16} if on.device == "cpu" else {"device": "cuda"}
        batch = make_tree_batch(TREE_SPECS[spec], dtype=torch.bfloat16, **options)
        assert_e4m3(*run_e4m3(on.ops, batch, 0.02), batch, 0.02)


def test_pools_of_fp8_and_queries_of_it() -> None:
    sizes: dict[str, Any] = {"kv_dtype": E4M3, "scales": "per_head", "dtype": torch.bfloat16}
    batch = make_batch(BATCH_SPECS["mixed_padded"], **sizes)
    assert_e4m3(*run_e4m3(REFERENCE, batch, 0.02), batch, 0.02)
    batch.q = batch.q.to(E4M3)
    assert_e4m3(*run_e4m3(REFERENCE, batch, 0.02), batch, 0.02)


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_numbers_that_are_not_finite(ops: Any) -> None:
    """NaN stays NaN for the head and the queries that see it; inf is the largest number."""
    batch = make_batch(BATCH_SPECS["decode_edges"], head_dim=16)
    row = next(r for r, n in enumerate(batch.seq_lens.tolist()) if n > 1)
    block = int(batch.block_table[row, 0])
    batch.v_cache[block, 0, 0, :2] = torch.tensor([float("nan"), float("inf")])
    out, _ = run_e4m3(ops, batch, 0.02)
    numbers, token = out.float(), int(batch.query_start_loc[row])
    assert numbers[token, :2, 0].isnan().all()
    assert (numbers[token, :2, 1] == 448).all()
    numbers[token, :2, 0] = 0
    assert numbers.isfinite().all()


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_any_strides(ops: Any) -> None:
    """Numbers of one byte at odd addresses; what lies between them is left alone."""
    batch = make_batch(BATCH_SPECS["mixed_padded"], head_dim=12)
    plain, _ = run_e4m3(ops, batch, 0.02)
    out, _ = run_e4m3(ops, batch, 0.02, padding=(5, 1, 3))
    assert out.data_ptr() % 2 == 1
    assert torch.equal(out.float(), plain.float())
    assert (out.untyped_storage().tolist().count(0x7F)) == out.untyped_storage().nbytes() - out.numel()


REFUSED: dict[str, tuple[str, torch.dtype, torch.Tensor | None]] = {
    "no scale": ("out", E4M3, None),
    "another dtype": ("out", torch.float32, torch.ones(1)),
    "e5m2": ("out", torch.float8_e5m2, torch.ones(1)),
    "one per head": ("output_scale", E4M3, torch.ones(2)),
    "float64": ("output_scale", E4M3, torch.ones(1, dtype=torch.float64)),
    "zero": ("output_scale", E4M3, torch.zeros(1)),
    "inf": ("output_scale", E4M3, torch.tensor([float("inf")])),
    "NaN": ("output_scale", E4M3, torch.tensor(float("nan"))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    """Of attention and of merging, before anything is written; the native kernel has words of its own."""
    name, dtype, scale = REFUSED[case]
    batch = make_batch(BATCH_SPECS["mixed_small"])
    state, lse = torch.randn(3, 2, 8), torch.zeros(3, 2)
    for ops, error in ((REFERENCE, ArgumentError), (CPU, RuntimeError)):
        out, merged = (torch.zeros(shape).to(dtype) for shape in (batch.q.shape, state.shape))
        with pytest.raises(error, match=f"{name}: expected"):
            ops.paged_attention(*batch.tensors, out, max_query_len=99, scale=0.1, output_scale=scale)
        with pytest.raises(error, match=f"{name}: expected"):
            ops.merge_attn_states(state, lse, state, lse, merged, output_scale=scale)
        assert not out.float().any()
        assert not merged.float().any()


def test_the_scale_lies_apart_from_what_is_written() -> None:
    batch = make_batch(BATCH_SPECS["mixed_small"])
    memory = torch.zeros(batch.q.numel() + 4, dtype=torch.uint8)
    out = memory[: batch.q.numel()].view(batch.q.shape).view(E4M3)
    scale = memory[batch.q.numel() - 4 : batch.q.numel()].view(torch.float32).fill_(1.0)
    for ops in (REFERENCE, CPU):
        with pytest.raises((ArgumentError, RuntimeError), match="output_scale"):
            ops.paged_attention(*batch.tensors, out, max_query_len=99, scale=0.1, output_scale=scale)
        lse, apart = torch.full(batch.q.shape[:2], 0.5), torch.zeros(batch.q.shape).to(E4M3)
        with pytest.raises((ArgumentError, RuntimeError), match="output_scale"):
            ops.paged_attention(
                *batch.tensors, apart, lse, max_query_len=99, scale=0.1, output_scale=lse[0, :1]
            )
        assert bool((lse == 0.5).all()) and not apart.float().any()


def test_merging_reads_the_scale_apart_from_what_it_writes() -> None:
    """A kernel's later rows would divide by what its earlier ones wrote."""
    state, lse = torch.randn(5, 2, 8), torch.randn(5, 2)
    memory = torch.zeros(state.numel(), dtype=torch.uint8)
    out, memory = memory.view(state.shape).view(E4M3), memory[:4].view(torch.float32)
    for written, scale in ((None, memory), (lse, lse[0, :1])):
        scale.fill_(0.5)
        before = out.float(), lse.clone()
        for ops in (REFERENCE, CPU):
            with pytest.raises((ArgumentError, RuntimeError), match="output_scale"):
                ops.merge_attn_states(
                    state, torch.zeros(5, 2), state, torch.zeros(5, 2), out, written, output_scale=scale
                )
            assert torch.equal(out.float(), before[0])
            assert torch.equal(lse, before[1])


def test_a_scale_to_be_trained_is_refused() -> None:
    """By every door: its gradient would be dropped."""
    batch = make_batch(BATCH_SPECS["decode_one"])
    scale = nn.Parameter(torch.tensor([0.05]))
    lse = batch.q[..., 0].contiguous()
    layer = PagedAttention(4, 16, 2, output_scale=scale)
    cache = PagedKVCache.uniform(1, 2, 16, num_blocks=8, dtype=torch.float32)
    step, kv = cache.allocate(1).append([5]), torch.randn(5, 2, 16)
    calls: list[Callable[[], Any]] = [
        lambda: torchpaged.paged_attention(*batch.tensors, max_query_len=1, output_scale=scale),
        lambda: torchpaged.merge_attn_states(batch.q, lse, batch.q, lse, output_scale=scale),
        lambda: layer(torch.randn(5, 4, 16), kv, kv, cache[0], step),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="output_scale: expected a tensor without grad"):
            call()
        with torch.no_grad():
            out = call()
        assert (out[0] if isinstance(out, tuple) else out).dtype == E4M3


def test_the_function() -> None:
    """The dtype of its result, an ``out`` of the caller's, and in a trace what the op would refuse."""
    batch = make_batch(BATCH_SPECS["mixed_padded"], num_heads=4)
    scale = torch.tensor(0.03)

    def step(scale: torch.Tensor | None, out: torch.Tensor | None = None) -> Any:
        options = {"max_query_len": batch.max_query_len, "output_scale": scale, "out": out}
        return torchpaged.paged_attention(*batch.tensors, return_lse=True, **options)

    want = run_e4m3(REFERENCE, batch, 0.03)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for call in (step, compiled):
        out, lse = call(scale)
        assert out.dtype == E4M3
        assert_e4m3(out, lse, batch, 0.03)
        own = torch.zeros(batch.q.shape).to(E4M3)
        assert call(scale, own)[0] is own
        assert torch.equal(own.float(), out.float())
    torch.testing.assert_close(lse, want[1])
    with pytest.raises(Exception, match="out: expected torch.float8_e4m3fn"):
        compiled(scale, torch.zeros_like(batch.q))
    with pytest.raises(Exception, match="dtype float8_e4m3fn is not one of"):
        compiled(None, own)


def test_who_takes_it() -> None:
    asked = {"device": "cpu", "dtype": torch.bfloat16, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    spec = attention_spec(**asked, output_scale=True)  # type: ignore[arg-type]
    declare = {name for name in list_backends() if "output_scale" in get_backend(name).capabilities.features}
    assert declare == {
        "reference",
        "cpu",
        "triton",
        "cuda",
        "flashinfer_gdn",
    }  # the last one by the device's own
    for name in set(list_backends()) - declare:
        assert "output_scale is not supported" in get_backend(name).capabilities.reject(spec), name
    with pytest.raises(BackendUnavailableError, match="output_scale is not supported"):
        PagedAttention(8, 64, 2, backend="torch_sdpa", output_scale=0.5)
    batch = make_batch(BATCH_SPECS["decode_one"])
    with pytest.raises(BackendUnavailableError, match="output_scale is not supported"):
        torchpaged.paged_attention(
            *batch.tensors, max_query_len=1, output_scale=torch.ones(1), ops=get_backend("torch_sdpa").ops
        )


def test_older_gpus_have_no_instruction_for_it() -> None:
    spec = specialisation(fp8_results=True)
    assert specialise.refuse(spec, 4, (8, 9)) is None
    assert "fp8 results" in (specialise.refuse(spec, 4, (8, 0)) or "")
    assert prefill_shape.refuse(spec, (9, 0)) is None


def test_the_cuda_kernels_store_four_numbers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go to Triton; and what two launches merge must not be rounded before."""
    batch = make_batch(BATCH_SPECS["decode_one"], dtype=torch.bfloat16)
    shape = batch.q.shape
    monkeypatch.setattr(specialise, "_refused", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    for padding, aligned in (((0, 0, 0), True), ((4, 0, 4), True), ((0, 2, 0), False), ((0, 0, 2), False)):
        heads = shape[2] + padding[1]
        memory = torch.empty(4096, dtype=torch.uint8).view(E4M3)[padding[2] :]
        out = memory.as_strided(shape, (shape[1] * heads + padding[0], heads, 1))
        call = AttentionCall(*batch.tensors, out, None, 1, 0.1, output_scale=torch.ones(1))
        assert (specialise.unsupported(call, call_spec(call), 1, 1) is None) == aligned, padding


def call_spec(call: AttentionCall) -> Any:
    spec = Specialisation.of(call)
    assert (spec.dtype, spec.fp8_results) == (torch.bfloat16, True)
    return spec


@over("default", "reference", "triton")
def test_merging_two_sets_of_keys(on: Kernels) -> None:
    with torch.device(on.device):
        states = [x for _ in range(2) for x in (torch.randn(5, 3, 7), torch.randn(5, 3))]
        states[1][0], states[3][0], states[1][1] = -float("inf"), -float("inf"), float("nan")
        scale = torch.tensor([0.01])
    want, want_lse = torchpaged.merge_attn_states(*states, ops=on.ops)
    out, lse = torchpaged.merge_attn_states(*states, output_scale=scale, ops=on.ops)
    torch.testing.assert_close(lse, want_lse, equal_nan=True)
    exact = (want / 0.01).clamp(-448, 448)
    assert out.dtype == E4M3
    torch.testing.assert_close(
        out.float(), exact, rtol=1 / 7 if INTERPRETED else 1 / 15, atol=2**-9, equal_nan=True
    )
    assert not out[0].float().any()
    assert out[1].isnan().all()
    gaps = torch.ones(5, 3, 9, device=on.device).to(E4M3)
    on.ops.merge_attn_states(*states, gaps[..., 1:8], lse, output_scale=scale / 10)
    assert float(gaps[2:, :, 1:8].float().abs().max()) == 448
    assert (gaps[..., ::8].float() == 1).all(), "what lies between rows is left alone"


def test_the_cascade_kernels_leave_it_to_two_passes() -> None:
    """They would merge what is rounded already."""
    batch = make_batch(BATCH_SPECS["decode_edges"], dtype=torch.bfloat16)
    none = torch.zeros(1, 2, dtype=torch.int32)
    groups = none, none[0, :1], none[0], torch.arange(len(batch.q)), torch.arange(len(batch.q))
    own = AttentionCall(*batch.tensors, batch.q.to(E4M3), None, 1, 0.1, output_scale=torch.ones(1))
    assert (cuda_cascade.refuse(CascadeCall(own, *groups)) or "").startswith("output_scale")


def test_a_module() -> None:
    """A float32 buffer, of any module's dtype; on the meta device and in a copy, too."""
    cache = PagedKVCache.uniform(1, 2, 16, num_blocks=8, dtype=torch.bfloat16)
    layer = PagedAttention(4, 16, 2, output_scale=0.05).to(torch.bfloat16)
    plain = PagedAttention(4, 16, 2).to(torch.bfloat16)
    assert layer.output_scale is not None
    assert layer.output_scale.dtype == torch.float32
    assert "output_scale" in layer.state_dict()
    table = cache.allocate(1)
    query, key, value = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    given = [x.bfloat16() for x in (query, key, value)]
    batch = table.append([5])
    with torch.inference_mode():
        want, out = plain(*given, cache[0], batch), layer(*given, cache[0], batch)
        assert out.dtype == E4M3
        assert out.shape == want.shape
        torch.testing.assert_close(out.float() * 0.05, want.float(), rtol=1 / 14, atol=0.05 * 2**-8)
        traced = torch.compile(layer, backend="aot_eager", fullgraph=True)(*given, cache[0], batch)
        assert torch.equal(traced.float(), out.float())
    for dtype in (torch.bfloat16, torch.float16):
        tiny = PagedAttention(4, 16, 2, output_scale=1e-9, alibi_slopes=[0.1] * 4).to(dtype)
        assert torch.equal(tiny.output_scale, torch.tensor([1e-9]))  # type: ignore[arg-type]
        assert torch.equal(tiny.alibi_slopes, torch.full((4,), 0.1))  # type: ignore[arg-type]
    for one in (torch.tensor(0.05), torch.tensor([0.05])):
        assert torch.equal(PagedAttention(4, 16, 2, output_scale=one).output_scale, layer.output_scale)  # type: ignore[arg-type]
    on_meta = PagedAttention(4, 16, 2, output_scale=0.05, device="meta").to_empty(device="cpu")
    assert torch.equal(on_meta.output_scale, torch.tensor([0.05]))  # type: ignore[arg-type]
    for wrong in (0.0, float("nan"), [1.0, 2.0], "much"):
        with pytest.raises(ArgumentError, match="output_scale: expected"):
            PagedAttention(4, 16, 2, output_scale=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("overload", ["default", "reference"])
def test_opcheck(overload: str) -> None:
    opcheck_e4m3(BACKEND_OPS[overload])
