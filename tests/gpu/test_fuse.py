"""Fused models of every kind on a GPU: tokens of the unfused model, error against float64, a captured step,
and real kernels counted per step."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from captured import captured
from tiny_models import SIZES
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu


class Sizes(NamedTuple):
    """``config``: its class, before "Config"; ``options``: beyond `COMMON`; ``attaches``: its caches keep
    latents or states once the model is attached."""

    config: str
    options: dict[str, Any]
    attaches: bool = True


COMMON = {**SIZES, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3}
#: Of the widths that the Hopper kernel takes.
LATENT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
HYBRID = {"num_hidden_layers": 4, "num_attention_heads": 8}
#: Of the widths that the CUDA kernels of states take.
DELTA_NET = {
    **HYBRID,
    "head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA2 = {
    **HYBRID,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
}
#: Kimi delta attention of the same widths; its latents have no rotation in Kimi Linear.
KIMI_DELTA = {**LATENT, **HYBRID, "hidden_size": 512, "mlp_layer_types": ["dense"] * 4}
_WINDOW = {"head_dim": 64, "sliding_window": 16}
FAMILIES = {
    "Llama": Sizes("Llama", {}, attaches=False),
    "Qwen2": Sizes("Qwen2", {}, attaches=False),
    "Qwen3": Sizes("Qwen3", {"head_dim": 64}, attaches=False),
    "Gemma3": Sizes(
        "Gemma3Text", {**_WINDOW, "query_pre_attn_scalar": 64, "tie_word_embeddings": False}, attaches=False
    ),
    "GptOss": Sizes("GptOss", {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}, attaches=False),
    "Qwen3Moe": Sizes(
        "Qwen3Moe",
        {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
        attaches=False,
    ),
    "DeepseekV2": Sizes("DeepseekV2", {**LATENT, "q_lora_rank": None}),
    "DeepseekV3": Sizes("DeepseekV3", LATENT),
    "Youtu": Sizes("Youtu", {**LATENT, "rope_interleave": True}),
    "Lfm2": Sizes(
        "Lfm2", {**HYBRID, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
    ),
    "Qwen3Next": Sizes("Qwen3Next", {**DELTA_NET, "num_experts": 0}),
    "Qwen3_5": Sizes("Qwen3_5Text", DELTA_NET),
    "Bamba": Sizes("Bamba", MAMBA2),
    "GraniteMoeHybrid": Sizes(
        "GraniteMoeHybrid",
        {
            **MAMBA2,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "residual_multiplier": 0.7,
        },
    ),
    "NemotronH": Sizes(
        "NemotronH",
        {
            **HYBRID,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 8,
            "n_groups": 2,
            "head_dim": 64,
        },
    ),
    "OlmoHybrid": Sizes("OlmoHybrid", {**DELTA_NET, "num_key_value_heads": 8, "linear_num_value_heads": 2}),
    "KimiLinear": Sizes(
        "KimiLinear",
        {
            **KIMI_DELTA,
            "q_lora_rank": None,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_heads": 4,
        },
    ),
    "BailingHybrid": Sizes("BailingHybrid", {**KIMI_DELTA, "head_dim": 128, "layer_group_size": 2}),
    "FalconH1": Sizes(
        "FalconH1",
        {
            **MAMBA2,
            "mamba_d_ssm": 512,
            "mamba_d_state": 256,
            "attention_in_multiplier": 1.3,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
            "ssm_out_multiplier": 0.7,
            "mlp_multipliers": [0.7, 1.3],
        },
    ),
    "Zamba2": Sizes(
        "Zamba2",
        {
            **HYBRID,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "n_mamba_heads": 8,
            "mamba_d_state": 128,
            "num_mem_blocks": 1,
            "num_key_value_heads": 8,
        },
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A small model in which every norm, bias and sink matters."""
    import torchpaged.hf as hf

    sizes = FAMILIES[name]
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"not in transformers {transformers.__version__}")
    torch.manual_seed(3)
    config = getattr(transformers, f"{sizes.config}Config")(**{**COMMON, **sizes.options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if (
        name.startswith(("Deepseek", "Qwen3Moe")) and dtype == torch.float32
    ):  # transformers' grouped product synchronises
        model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.mul_(4.0 if "embed" in key else 3.0 if sizes.attaches else 6.0)
    model.to("cuda", dtype)
    if sizes.attaches:
        return hf.attach(model)
    model.set_attn_implementation("torchpaged")
    return model


def logits(model: Any, cache: Any) -> Tensor:
    """A prefill of 70 tokens and three decode steps, teacher forced."""
    ids = torch.randint(3, 512, (2, 73), generator=torch.Generator().manual_seed(2)).cuda()
    with torch.inference_mode():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([70, 1, 1, 1], dim=1)]
        return torch.cat(parts, dim=1).double()


def unfused_logits(name: str, dtype: torch.dtype) -> Tensor:
    """As transformers computes them; where caches keep latents or states, over these."""
    import torchpaged.hf as hf

    model = build(name, dtype)
    if FAMILIES[name].attaches:
        backend = "reference" if dtype == torch.float32 else "auto"
        return logits(model, hf.PagedCache(model.config, 2, 96, backend=backend))
    if name == "GptOss" and dtype == torch.float64:
        model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    return logits(model, transformers.DynamicCache(config=model.config))


_KEYS = [name for name, sizes in FAMILIES.items() if not sizes.attaches]
_STATES = [name for name, sizes in FAMILIES.items() if sizes.attaches]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, backend) for name in _KEYS for backend in ("cuda", "triton") if name != "Qwen3Moe"),
        *((x, "auto") for x in _STATES),
    ],
)
def test_bf16_errs_no_more_than_unfused(name: str, backend: str) -> None:
    """Mean and largest error at most 1.5 times the unfused model's, in prefill and decode. Not of Qwen3-MoE,
    where a rounding changes which experts a token takes."""
    import torchpaged.hf as hf

    want = unfused_logits(name, torch.float32 if name in _STATES else torch.float64)
    unfused = (unfused_logits(name, torch.bfloat16) - want).abs()
    model = build(name, torch.bfloat16)
    hf.fuse(model)
    fused = (logits(model, hf.PagedCache(model.config, 2, 96, backend=backend)) - want).abs()
    assert float(fused.mean()) <= 1.5 * float(unfused.mean()), (float(fused.mean()), float(unfused.mean()))
    if name in _KEYS:
        assert float(fused.amax()) <= 1.5 * float(unfused.amax()), (fused.amax(), unfused.amax())


def served(model: Any, prompts: list[list[int]], graphs: bool) -> list[Any]:
    """20 tokens of each prompt by the engine."""
    from torchpaged.engine import Generator, SamplingParams

    sizes = {"max_batch_size": 3, "block_size": 64, "prefill_chunk_size": 48, "compile": False}
    generator = Generator(model, graphs=graphs, **sizes)
    try:
        outputs = generator.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))
    finally:
        generator.close()
    return [each.token_ids for each in outputs]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "GptOss"])
def test_fp32_tokens_equal_unfused(name: str) -> None:
    """generate() as it is, over keys and values its compiled decode with CUDA graphs, too, and the
    engine over packed prompts in chunks, captured and not."""
    from torchpaged.hf import PagedCache, fuse

    torch._dynamo.reset()
    model, unfused = build(name), build(name)
    ids = torch.randint(3, 512, (3, 70), device="cuda")
    prompts = [ids[0].tolist(), ids[1, :5].tolist(), ids[2, :20].tolist()]
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def generated(model: Any, paged: bool = True, **given: Any) -> Tensor:
        cache = {"past_key_values": PagedCache(model.config, 3, 96)} if paged else {}
        tokens: Tensor = model.generate(ids, **options, **cache, **given)
        return tokens

    fuse(model)
    if name in _STATES:
        want = generated(unfused, disable_compile=True)
    else:
        unfused.set_attn_implementation("eager")
        want = generated(unfused, paged=False)
        unfused.set_attn_implementation("torchpaged")
        assert torch.equal(generated(model, disable_compile=False), want)
    assert torch.equal(generated(model, disable_compile=True), want)
    tokens = served(unfused, prompts, graphs=False)
    assert served(model, prompts, graphs=True) == tokens
    assert served(model, prompts, graphs=False) == tokens


@pytest.mark.parametrize(
    "name", ["Qwen3_5", "Qwen3Next", "KimiLinear", "Bamba", "GraniteMoeHybrid", "FalconH1", "NemotronH"]
)
def test_bf16_tokens_with_graphs_are_those_without(name: str) -> None:
    """Where single tokens take the CUDA kernels of states, which float32 does not."""
    from torchpaged.hf import fuse

    model = build(name, torch.bfloat16)
    fuse(model)
    prompts = torch.randint(3, 512, (3, 30), generator=torch.Generator().manual_seed(2)).tolist()
    prompts = [prompts[0], prompts[1][:5], prompts[2][:1]]
    tokens = served(model, prompts, graphs=False)
    assert served(model, prompts, graphs=True) == tokens
    assert min(len(set(each)) for each in tokens) > 8


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
def test_a_step_is_captured_and_launches_little(name: str) -> None:
    """No synchronisation, one capture for all lengths, and as many kernels as the report says where every op
    is one kernel."""
    from torchpaged.hf import PagedModel, fuse
    from torchpaged.metadata import AttentionMetadata

    model = build(name, torch.bfloat16)
    unfused = PagedModel(copy.deepcopy(model), num_blocks=20, block_size=16)
    report = fuse(model)
    paged = PagedModel(model, num_blocks=20, block_size=16)
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
        graph, out = captured(lambda: paged(ids, static))
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


def test_long_prompts_and_left_padding() -> None:
    """generate() over a `PagedCache`: rows of prompts in chunks of Triton, and then single tokens."""
    import torchpaged.hf as hf

    model = build("Qwen3_5")
    ids = torch.randint(3, 512, (2, 150), generator=torch.Generator().manual_seed(2)).cuda()
    mask = torch.ones_like(ids)
    ids[0, :70], mask[0, :70] = 0, 0

    def run() -> torch.Tensor:
        cache = hf.PagedCache(model.config, 2, 192)
        options = {"max_new_tokens": 16, "do_sample": False, "disable_compile": True}
        return model.generate(ids, attention_mask=mask, past_key_values=cache, **options)

    want = run()
    hf.fuse(model)
    assert torch.equal(run(), want)
