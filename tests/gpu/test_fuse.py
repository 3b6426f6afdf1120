"""Fused models on a GPU: tokens of the unfused model, error against float64, a captured step, and real
kernels counted per step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from op_inputs.layers import (
    LINEAR_CASES,
    NORM_CASES,
    assert_layer_close,
    make_embedding_inputs,
    make_gate_inputs,
    make_linear_inputs,
    make_norm_inputs,
)
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 64},
    "Gemma3": {
        "head_dim": 64,
        "sliding_window": 16,
        "query_pre_attn_scalar": 64,
        "tie_word_embeddings": False,
    },
    "GptOss": {"head_dim": 64, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A small model in which every norm, bias and sink matters."""
    torch.manual_seed(3)
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, name)(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
        **FAMILIES[family],
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(
                torch.randn_like(parameter), alpha=0.1
            ) if parameter.dim() == 1 else parameter.mul_(4.0 if "embed" in key else 6.0)
    return model.to("cuda", dtype)


def logits(model: Any, cache: Any) -> Tensor:
    """A prefill of 70 tokens and three decode steps, teacher forced."""
    ids = torch.randint(3, 512, (2, 73), generator=torch.Generator().manual_seed(2)).cuda()
    with torch.inference_mode():
        return torch.cat(
            [model(part, past_key_values=cache).logits for part in ids.split([70, 1, 1, 1], dim=1)], dim=1
        )


def paged_logits(model: Any, backend: str = "auto") -> Tensor:
    import torchpaged.hf as hf

    model.set_attn_implementation("torchpaged")
    return logits(model, hf.PagedCache(model.config, 2, 96, backend=backend))


def dense_logits(model: Any) -> Tensor:
    model.set_attn_implementation("eager")
    return logits(model, transformers.DynamicCache(config=model.config))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("width", [40, 960, 16384])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_embedding(dtype: torch.dtype, width: int, scaled: bool) -> None:
    """Bit for bit; an id outside the table gives NaN, and no other row does."""
    inputs = make_embedding_inputs(tokens=7, width=width, scaled=scaled, dtype=dtype, device="cuda")
    want = torch.nn.functional.embedding(inputs["input_ids"], inputs["weight"])
    BACKEND_OPS["triton"].embedding(**inputs)
    assert torch.equal(inputs["out"], want * inputs["scale"].to(dtype) if scaled else want)
    inputs["input_ids"][[2, 5]] = torch.tensor([-1, 30], device="cuda")
    BACKEND_OPS["triton"].embedding(**inputs)
    assert inputs["out"].isnan().all(1).tolist() == [False, False, True, False, False, True, False]
    assert int(inputs["out"].isnan().sum()) == 2 * width


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LINEAR_CASES)
def test_triton_linear(case: str, dtype: torch.dtype) -> None:
    assert_layer_close(
        BACKEND_OPS["triton"], "linear", make_linear_inputs(**LINEAR_CASES[case], dtype=dtype, device="cuda")
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", NORM_CASES)
def test_triton_rms_norm(case: str, dtype: torch.dtype) -> None:
    assert_layer_close(
        BACKEND_OPS["triton"], "rms_norm", make_norm_inputs(**NORM_CASES[case], dtype=dtype, device="cuda")
    )


@pytest.mark.parametrize("width", [40, 1500, 14336])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_triton_act_and_mul(activation: str, dtype: torch.dtype, width: int) -> None:
    inputs = make_gate_inputs(activation=activation, dtype=dtype, width=width, device="cuda")
    assert_layer_close(BACKEND_OPS["triton"], "act_and_mul", inputs)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_errs_no_more_than_unfused(family: str, backend: str) -> None:
    """Mean and largest error against float64 at most 1.5 times the unfused model's, in prefill and decode."""
    import torchpaged.hf as hf

    exact = build(family, torch.float64)
    if family == "GptOss":
        exact.set_experts_implementation("eager")
    want = dense_logits(exact)
    model = build(family, torch.bfloat16)
    unfused = (dense_logits(model).double() - want).abs()
    hf.fuse(model)
    fused = (paged_logits(model, backend).double() - want).abs()
    assert float(fused.mean()) <= 1.5 * float(unfused.mean()), (float(fused.mean()), float(unfused.mean()))
    assert float(fused.amax()) <= 1.5 * float(unfused.amax()), (float(fused.amax()), float(unfused.amax()))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma3"])
def test_fp32_tokens_equal_unfused(family: str) -> None:
    """generate() as it is, its compiled decode with CUDA graphs, and the engine."""
    import torchpaged.hf as hf
    from torchpaged.engine import Generator, SamplingParams

    torch._dynamo.reset()
    model = build(family)
    ids = torch.randint(3, 512, (3, 21), device="cuda")
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.set_attn_implementation("eager")
    want = model.generate(ids, **options)
    model.set_attn_implementation("torchpaged")
    hf.fuse(model)
    for disable_compile in (True, False):
        cache = hf.PagedCache(model.config, 3, 64)
        assert torch.equal(
            model.generate(ids, **options, past_key_values=cache, disable_compile=disable_compile), want
        )
    outputs = Generator(model, max_batch_size=2, block_size=16, compile=False).generate(
        ids.tolist(), SamplingParams(max_new_tokens=20)
    )
    assert [o.token_ids for o in outputs] == want[:, 21:].tolist()


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_a_step_is_captured_and_launches_little(family: str) -> None:
    """No synchronisation, one capture for all lengths, and as many kernels as the report says where every op
    is one kernel."""
    import torchpaged.hf as hf
    from torchpaged.metadata import AttentionMetadata

    model = build(family, torch.bfloat16)
    unfused = hf.PagedModel(copy.deepcopy(model), num_blocks=20, block_size=16)
    report = hf.fuse(model)
    paged = hf.PagedModel(model, num_blocks=20, block_size=16)
    tables = [[1, 2, 3, 4], [5, 6, 7, 8]]

    def batch(lengths: list[int]) -> AttentionMetadata:
        return AttentionMetadata.from_lists([1, 1], lengths, tables, block_size=16, device="cuda")

    static, ids = batch([3, 1]), torch.tensor([7, 9], device="cuda")
    with torch.inference_mode():
        paged(ids, static)
        torch.cuda.set_sync_debug_mode("error")
        try:
            paged(ids, static)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = paged(ids, static)
        for lengths in ([4, 2], [5, 33], [50, 34]):
            now = batch(lengths)
            for name in ("seq_lens", "slot_mapping", "positions"):
                getattr(static, name).copy_(getattr(now, name))
            graph.replay()
            assert torch.equal(out, paged(ids, now)), lengths
            assert out.isfinite().all()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        counts = []
        for model_call in (unfused, paged):
            model_call(ids, batch([6, 6]))
            metadata = batch([7, 7])
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=activities) as profile:
                model_call(ids, metadata)
                torch.cuda.synchronize()
            counts.append(
                sum(1 for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
            )
    assert report.after is not None
    if paged.choice.name == "cuda":
        assert counts[1] <= sum(report.after.layers) + report.after.rest + 3, counts
    assert counts[1] < counts[0] / 2, counts
