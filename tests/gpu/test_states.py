"""The state ops on a GPU: the float64 oracle, one capture for other lengths; and hybrid models in the engine,
whose tokens are those of transformers' own states."""

from functools import partial
from typing import Any

import pytest
import torch
from captured import captured
from library_states import check_captured, on_gpu
from op_inputs.delta_step import SIZES as STEP_SIZES
from op_inputs.delta_step import assert_delta_step_close, make_delta_step_inputs
from op_inputs.mamba2_step import MAMBA2_SIZES, assert_mamba2_step_close, make_mamba2_step_inputs
from op_inputs.state import (
    LONG_BATCHES,
    STATE_BATCHES,
    Rows,
    assert_state_close,
    clone,
    exact_linear,
    make_conv_inputs,
    make_linear_inputs,
    with_odd_strides,
)
from op_inputs.state_gates import SIZES, assert_gates_close, make_gated_norm_inputs, make_gates_inputs
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.state.call import DeltaStepCall, LinearAttentionCall, Mamba2StepCall
from torchpaged.custom_ops.state.cuda import delta_step, mamba2_step
from torchpaged.custom_ops.state.cuda.linear_attention import kernels_of, route
from torchpaged.custom_ops.state.triton import chunks
from torchpaged.custom_ops.state.triton.chunks import has_long_rows

pytestmark = pytest.mark.gpu
TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
DTYPES = (torch.float32, torch.bfloat16)
#: Gated delta net, Mamba 2, and linear attention with a decay alone, at their models' widths.
FAMILIES: dict[str, dict[str, Any]] = {
    "delta": {"key_dim": 128, "value_dim": 128},
    "ssd": {"delta": False, "key_heads": 1, "key_dim": 128, "value_dim": 64},
    "decay": {"delta": False, "beta": False, "key_heads": 4, "key_dim": 64, "value_dim": 80},
    "kda": {"by_key": True, "key_heads": 4, "key_dim": 128, "value_dim": 128},
}
#: Heads of delta nets: as many as a warp each has, more, fewer, and no multiple.
DELTA_SHAPES: dict[str, dict[str, Any]] = {
    "four heads a key head": {"key_heads": 1, "heads": 4, "state_dtype": torch.bfloat16},
    "eight": {"key_heads": 1, "heads": 8},
    "three": {"key_heads": 2, "heads": 6, "beta": False},
    "one": {"key_heads": 2, "heads": 2, "value_dim": 64},
    "decays by key": {"key_heads": 4, "heads": 4, "by_key": True},
    "by key, two heads a key head": {"key_heads": 1, "heads": 2, "by_key": True, "beta": False},
}
#: One model of each kind of layer.
MODELS = ("qwen3_next", "bamba", "lfm2", "nemotron_h", "mamba", "mamba2", "recurrent_gemma")
OF_EXPERTS = ("qwen3_next", "nemotron_h")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("batch", STATE_BATCHES)
def test_convolution_matches_the_oracle(batch: str, width: int, dtype: torch.dtype) -> None:
    inputs = make_conv_inputs(STATE_BATCHES[batch], width=width, channels=1000, dtype=dtype)
    assert_state_close(TRITON, REFERENCE, "causal_conv", on_gpu(inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", STATE_BATCHES)
def test_gated_convolution_matches_the_oracle(batch: str, dtype: torch.dtype) -> None:
    inputs = make_conv_inputs(STATE_BATCHES[batch], width=3, channels=1000, gated=True, dtype=dtype)
    assert_state_close(TRITON, REFERENCE, "causal_conv", on_gpu(inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_gates_match_the_oracle(size: str, dtype: torch.dtype) -> None:
    given = SIZES[size] | {"dtype": dtype, "weight_dtype": torch.float32, "tokens": 70}
    assert_gates_close(TRITON, REFERENCE, "delta_gates", on_gpu(make_gates_inputs(**given)))
    assert_gates_close(TRITON, REFERENCE, "gated_rms_norm", on_gpu(make_gated_norm_inputs(**given)))


def test_nan_stays_nan_in_gates() -> None:
    """On a GPU alone: the interpreter's minimum of a NaN and a number is NaN."""
    inputs = on_gpu(make_gates_inputs())
    inputs["a"][1], inputs["b"][2] = float("nan"), float("nan")
    TRITON.delta_gates(**inputs)
    assert inputs["g"].isnan().all(1).tolist() == [row == 1 for row in range(5)]
    assert inputs["beta"].isnan().all(1).tolist() == [row == 2 for row in range(5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [*STATE_BATCHES, *LONG_BATCHES])
def test_linear_attention_matches_the_oracle(batch: str, family: str, dtype: torch.dtype) -> None:
    rows = (STATE_BATCHES | LONG_BATCHES)[batch]
    inputs = on_gpu(make_linear_inputs(rows, dtype=dtype, **FAMILIES[family]))
    products = dtype if has_long_rows(LinearAttentionCall(**inputs)) else None
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs, products)


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["delta", "kda"])
@pytest.mark.parametrize("batch", ["long", "mixed_empty", *LONG_BATCHES])
def test_segments_of_rows_match_the_oracle(
    batch: str, family: str, state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one chunk or two; the last ones of rows are parts, or nothing."""
    sizes = {"dtype": torch.bfloat16, "state_dtype": state_dtype, **FAMILIES[family]}
    inputs = on_gpu(make_linear_inputs((STATE_BATCHES | LONG_BATCHES)[batch], **sizes))
    for segment in (64, 128):
        monkeypatch.setattr(chunks, "tiles", lambda *_, n=segment: chunks.Tiles(64, 64, 2, "tf32", n))
        assert_state_close(TRITON, REFERENCE, "linear_attention", clone(inputs), torch.bfloat16)


@pytest.mark.parametrize("family", ["delta", "kda"])
def test_a_long_row_of_few_heads_is_cut(family: str) -> None:
    sizes = {"dtype": torch.bfloat16, **FAMILIES[family]}
    inputs = on_gpu(make_linear_inputs(Rows(((100, 2500), (0, 40)), 70, left=(130, 0)), **sizes))
    inputs["g"] *= 0.05  # a state outlives a segment
    if torch.cuda.get_device_capability()[0] == 9:
        assert chunks.tiles(LinearAttentionCall(**inputs)).segment == 512
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs, torch.bfloat16)


@pytest.mark.parametrize("segment", [None, 64])
@pytest.mark.parametrize("shape", DELTA_SHAPES)
@pytest.mark.parametrize("batch", ["long", "mixed_empty", *LONG_BATCHES])
def test_long_rows_of_delta_nets_by_cuda_match_the_oracle(
    batch: str, shape: str, segment: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kernels are in CUDA C++."""
    sizes = {"dtype": torch.bfloat16, **FAMILIES["delta"], **DELTA_SHAPES[shape]}
    inputs = on_gpu(make_linear_inputs((STATE_BATCHES | LONG_BATCHES)[batch], **sizes))
    call = LinearAttentionCall(**inputs)
    if torch.cuda.get_device_capability() == (9, 0):
        kernels = kernels_of(call)
        assert has_long_rows(call) and kernels is not None and kernels.pass_chunks is not None
    monkeypatch.setattr(chunks, "tiles", lambda *_: chunks.Tiles(64, 64, 2, "tf32", segment))
    assert_state_close(BACKEND_OPS["cuda"], REFERENCE, "linear_attention", inputs, torch.bfloat16)


@pytest.mark.parametrize("family", ["delta", "kda"])
@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0], ids=["random", "near", "alike"])
def test_the_first_kernel_of_delta_nets_is_as_exact_as_tritons(alike: float, family: str) -> None:
    """Over the float64 recurrence; keys that are all alike, whose inverse is the worst, as well."""
    inputs = make_linear_inputs(Rows(((0, 300),)), dtype=torch.bfloat16, **FAMILIES[family])
    inputs["k"].copy_(torch.lerp(inputs["k"].float(), inputs["k"][:1].float(), alike))
    inputs["g"] *= 0.01
    errors = []
    exact, _ = exact_linear(inputs)
    for name in ("triton", "cuda"):
        given = on_gpu(inputs)
        BACKEND_OPS[name].linear_attention(**given)
        errors.append(float((given["out"].cpu().double() - exact).norm() / exact.norm()))
    assert errors[1] <= 1.2 * errors[0] + 1e-4, errors


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("factor", [3.0, 10.0, 40.0])
def test_decays_of_keys_that_are_too_far_apart_for_one_product(factor: float, backend: str) -> None:
    inputs = on_gpu(make_linear_inputs(LONG_BATCHES["borders"], dtype=torch.bfloat16, **FAMILIES["kda"]))
    inputs["g"] *= factor
    assert_state_close(BACKEND_OPS[backend], REFERENCE, "linear_attention", inputs, torch.bfloat16)


@pytest.mark.parametrize("extra", [5, 8])
@pytest.mark.parametrize("family", ["delta", "ssd"])
@pytest.mark.parametrize("batch", LONG_BATCHES)
def test_long_rows_of_odd_strides_match_the_oracle(batch: str, family: str, extra: int) -> None:
    sizes = {"dtype": torch.bfloat16, **FAMILIES[family]}
    inputs = with_odd_strides(on_gpu(make_linear_inputs(LONG_BATCHES[batch], **sizes)), extra)
    assert has_long_rows(LinearAttentionCall(**inputs)) == (torch.cuda.get_device_capability()[0] == 9)
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs, torch.bfloat16)


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", ["decode", "decode_begins", "decode_padded"])
def test_single_tokens_by_cuda_match_the_oracle(batch: str, family: str, state_dtype: torch.dtype) -> None:
    """Those of 64 keys and 80 values are Triton's there, too."""
    sizes = {"dtype": torch.bfloat16, "state_dtype": state_dtype, **FAMILIES[family]}
    inputs = on_gpu(make_linear_inputs(STATE_BATCHES[batch], **sizes))
    if torch.cuda.get_device_capability() == (9, 0):
        assert (route(LinearAttentionCall(**inputs)) is None) == (family != "decay")
    assert_state_close(BACKEND_OPS["cuda"], REFERENCE, "linear_attention", inputs)


#: Op -> its inputs, check, record and launcher; sizes of models, and of many rows; how near results are.
STEPS: dict[str, tuple[Any, Any, Any, Any, dict[str, Any], dict[str, Any], float]] = {
    "delta_step": (
        *(make_delta_step_inputs, assert_delta_step_close, DeltaStepCall, delta_step, STEP_SIZES),
        {"heads": 32, "key_heads": 8, "groups": 8, "key_dim": 64, "value_dim": 64},
        0.05,
    ),
    "mamba2_step": (
        *(make_mamba2_step_inputs, assert_mamba2_step_close, Mamba2StepCall, mamba2_step, MAMBA2_SIZES),
        {"heads": 48, "groups": 2, "key_dim": 64, "value_dim": 64},
        0.2,
    ),
}


@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, None), (torch.float16, torch.float16), (torch.float32, None)],
    ids=["bf16", "fp16", "fp32"],
)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize(("op", "size"), [(op, size) for op, step in STEPS.items() for size in step[4]])
def test_whole_steps_match_the_oracle(op: str, size: str, backend: str, dtypes: tuple[Any, Any]) -> None:
    """Sizes that the kernel does not take go through its parts."""
    make, check, record, launcher, sizes, _, _ = STEPS[op]
    for batch in ("decode", "decode_begins", "decode_padded", "no_tokens"):
        given = {"dtype": dtypes[0], "state_dtype": dtypes[1], "weight_dtype": torch.float32, **sizes[size]}
        given |= {"semaphore": batch != "decode"} if op == "mamba2_step" else {}
        inputs = on_gpu(make(STATE_BATCHES[batch], **given))
        if torch.cuda.get_device_capability() == (9, 0) and batch != "no_tokens":
            whole = "odd" not in size and dtypes[0] != torch.float32
            assert (launcher.route(record(**inputs)) is None) == whole
        check(BACKEND_OPS[backend], REFERENCE, inputs)


@pytest.mark.parametrize("op", STEPS)
def test_whole_steps_of_many_rows_again_and_again(op: str) -> None:
    """Heads that share a key, or a group's window, meet: a window moved on too soon would be read by another
    one. As many rows as take several rounds of CTAs, a launch right behind another, for which a semaphore is
    zeros again."""
    rows = Rows(tuple((n % 3, 1) for n in range(60)), void=(7, 40))
    make, *_, sizes, near = STEPS[op]
    given = make(rows, dtype=torch.bfloat16, num_slots=70, **sizes)
    inputs = on_gpu(given)
    for _ in range(20):
        getattr(BACKEND_OPS["cuda"], op)(**inputs)
        inputs["seq_lens"] += 1  # all go on
        parts = clone(given)
        getattr(REFERENCE, op)(**parts)
        given = parts | {"seq_lens": parts["seq_lens"] + 1}
    assert torch.equal(inputs["conv_state"].cpu().nan_to_num(), given["conv_state"].nan_to_num())
    assert op == "delta_step" or not inputs["semaphore"].any()
    torch.testing.assert_close(inputs["state"].cpu(), given["state"], rtol=0.02, atol=0.02, equal_nan=True)
    torch.testing.assert_close(inputs["out"].cpu(), given["out"], rtol=0.05, atol=near)


@pytest.mark.parametrize("op", ["causal_conv", "delta_step", "mamba2_step"])
def test_few_rows_launch_right_behind_launch(op: str) -> None:
    """What a kernel asks for ahead of its wait is what the kernel ahead of it is about to write."""
    rows = Rows(((5, 1), (9, 1)))
    given: dict[str, Any] = {
        "causal_conv": partial(make_conv_inputs, channels=2048),
        "delta_step": partial(make_delta_step_inputs, **STEP_SIZES["qwen3_next"]),
        "mamba2_step": partial(make_mamba2_step_inputs, **MAMBA2_SIZES["granite"]),
    }[op](rows, dtype=torch.bfloat16)
    runs = [on_gpu(given) for _ in range(10)]
    for inputs in runs:
        for _ in range(3):  # with one token's inputs states soon stay as they are
            getattr(BACKEND_OPS["cuda"], op)(**inputs)
    for _ in range(3):
        getattr(REFERENCE, op)(**given)
    pools = {name: given[name] for name in ("conv_state", "state") if name in given}
    for inputs in runs:
        for name, pool in pools.items():
            torch.testing.assert_close(inputs[name].cpu(), pool, rtol=0.02, atol=0.02, equal_nan=True)
        torch.testing.assert_close(inputs["out"].cpu(), given["out"], rtol=0.05, atol=0.2)


@pytest.mark.parametrize("op", ["causal_conv", "delta_step", "mamba2_step"])
def test_slots_and_lengths_written_right_in_front(op: str) -> None:
    """Ops read both ahead of their wait. In a compiled step the kernel in front, which triggers nothing, may
    be the one that writes them: each op of a graph finds other slots and lengths than the op before."""
    given: dict[str, Any] = {
        "causal_conv": partial(make_conv_inputs, channels=2048),
        "delta_step": partial(make_delta_step_inputs, **STEP_SIZES["qwen3_next"]),
        "mamba2_step": partial(make_mamba2_step_inputs, **MAMBA2_SIZES["granite"]),
    }[op](Rows(((5, 1), (9, 1))), dtype=torch.bfloat16, num_slots=101)
    inputs = on_gpu(given)
    pools = [name for name in ("conv_state", "state") if name in inputs]
    for name in pools:
        inputs[name].normal_()
    before = {name: inputs[name].clone() for name in pools}
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(100, generator=generator).add(1).view(50, 2)  # no two ops of a graph share one
    lengths = torch.randint(1, 3, (50, 2), generator=generator)
    metadata = torch.cat([slots, lengths], 1).to(torch.int32).cuda()
    run = getattr(BACKEND_OPS["cuda"], op)

    def step(inputs: dict[str, Any], row: Tensor, out: Tensor) -> None:
        torch._foreach_copy_([inputs["state_slots"], inputs["seq_lens"]], [row[:2], row[2:]])
        run(**inputs | {"out": out})

    want, want_outs = clone(inputs), []
    for row in metadata:
        step(want, row, want["out"])
        torch.cuda.synchronize()
        want_outs.append(want["out"].clone())
    assert len({tuple(out[:, ..., :8].flatten().tolist()) for out in want_outs}) > 30
    outs = [torch.empty_like(out) for out in want_outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for row, out in zip(metadata, outs, strict=True):
            step(inputs, row, out)
    for _ in range(200):
        for name in pools:
            inputs[name].copy_(before[name])
        graph.replay()
        for got, out in zip(outs, want_outs, strict=True):
            assert torch.equal(got, out)
        for name in pools:
            assert torch.equal(inputs[name], want[name])


@pytest.mark.parametrize("op", ["causal_conv", "linear_attention", "delta_step", "mamba2_step"])
def test_one_capture_for_other_batches(op: str) -> None:
    """Slots, lengths and rows without tokens are read by the kernel when it runs."""
    make: Any = {"causal_conv": make_conv_inputs, "linear_attention": make_linear_inputs}.get(op)
    if op == "delta_step":
        make = partial(make_delta_step_inputs, dtype=torch.bfloat16, **STEP_SIZES["qwen3_next"])
    if op == "mamba2_step":
        make = partial(make_mamba2_step_inputs, dtype=torch.bfloat16, **MAMBA2_SIZES["granite"])
    pool = "conv_state" if op == "causal_conv" else "state"
    static = on_gpu(make(STATE_BATCHES["decode"]))
    run = getattr(BACKEND_OPS["cuda"], op)
    graph, _ = captured(lambda: run(**static))
    for seed, slots in ((1, [2, 0, 5]), (2, [7, 3, 1])):
        given = on_gpu(make(STATE_BATCHES["decode"], seed=seed))
        given["state_slots"].copy_(torch.tensor(slots))
        for name in {pool, "conv_state"} & given.keys():
            given[name].copy_(torch.randn(given[name].shape))
        for name, x in given.items():
            if isinstance(x, Tensor):
                static[name].copy_(x)
        graph.replay()
        want = clone(given)
        run(**want)
        for name in {"out", pool, "conv_state"} & given.keys():
            assert torch.equal(static[name], want[name])


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize(("family", "segment"), [("delta", None), ("delta", 64), ("kda", 64)])
def test_one_capture_for_prompts_of_other_lengths(
    family: str, segment: int | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the captured tokens some are behind the last row; rows are longer or shorter than they were."""
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, **FAMILIES[family]}
    monkeypatch.setattr(chunks, "tiles", lambda *_: chunks.Tiles(64, 64, 2, "tf32", segment))
    check_captured(BACKEND_OPS[backend].linear_attention, sizes)


@pytest.mark.parametrize(
    "way",
    [{}, {"steps_per_launch": 3}, {"fuse": True}, {"mixed_steps": False, "prefill_chunk_size": 12}],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_gives_eager_tokens(name: str, way: dict[str, Any]) -> None:
    """More requests than rows, twice, so that slots are used again, over NaN."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from model_coverage.architectures import model_of

    from torchpaged.engine import Generator, SamplingParams

    prompts = [[(7 * i + 3 * j) % 90 + 5 for j in range(n)] for i, n in enumerate((5, 23, 1, 40, 12))]
    model = model_of(name).eval().cuda()
    model.generation_config.eos_token_id = None
    if name in OF_EXPERTS:  # in float32 transformers' grouped product synchronises
        model.set_experts_implementation("batched_mm")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    want = []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt], device="cuda"), **options)[0]
        want.append(out[len(prompt) :].tolist())
    generator = Generator(model, max_batch_size=3, max_seq_len=64, block_size=4, **way)
    cache = generator.model.kv_cache
    for _ in range(2):
        for layer in cache.per_request:
            for tensor in cache._blocks(layer).values():
                tensor.fill_(float("nan"))
        outputs = generator.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
        assert [output.token_ids for output in outputs] == want


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_prefix_hits_of_hybrids_give_the_same_tokens(name: str, kv_dtype: str | None) -> None:
    """From copies of states, behind texts that part anywhere; with graphs, and keys of fp8 by the same scales
    in both engines."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from model_coverage.architectures import model_of

    from torchpaged.engine import Generator, SamplingParams

    system = [(7 * i) % 90 + 5 for i in range(50)]
    prompts = [[*system[:at], 90, 91, at] for at in (33, 33, 33, 21, 50, 50)]
    model = model_of(name).eval().cuda()
    model.generation_config.eos_token_id = None
    if name in OF_EXPERTS:  # in float32 transformers' grouped product synchronises
        model.set_experts_implementation("batched_mm")
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 96, "block_size": 4, "kv_dtype": kv_dtype}
    greedy = SamplingParams(max_new_tokens=8, ignore_eos=True)
    found = []
    for shares in (False, True):
        with Generator(model, **sizes, share_prefixes=shares, prefill_chunk_size=32) as generator:
            found.append([generator.generate([prompt], greedy)[0].token_ids for prompt in prompts])
            hits = generator.stats.prefix_cache.hit_tokens if shares else 0
    assert found[0] == found[1]
    assert hits > 64
