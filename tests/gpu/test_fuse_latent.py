"""Fused layers over latents on a GPU: the op against float64, tokens of the unfused model, captured too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_inputs.latent_writes import LATENT_WRITES, assert_latent_write_close, latents_of, make_latent_writes

from torchpaged.custom_ops import BACKEND_OPS

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu
TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
SIZES: dict[str, dict[str, Any]] = {
    **LATENT_WRITES,
    "v2_lite": {"num_heads": 16, "nope": 128, "rank": 512, "rope": 64, "rotation": "pairs", "normed": True},
    "v3": {"num_heads": 128, "nope": 128, "rank": 512, "rope": 64, "normed": True, "num_tokens": 33},
    "glm_flash": {"num_heads": 20, "nope": 192, "rank": 512, "rope": 64, "rotation": "pairs_to_halves"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SIZES)
def test_rope_write_latent(case: str, dtype: torch.dtype) -> None:
    assert_latent_write_close(TRITON, make_latent_writes(**SIZES[case], dtype=dtype, device="cuda"))


@pytest.mark.parametrize("case", ["v2_lite", "minicpm3"])
def test_rows_of_fp8(case: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    inputs = make_latent_writes(**SIZES[case], fp8=True, device="cuda")
    want = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    TRITON.rope_write_latent(**inputs)
    REFERENCE.rope_write_latent(**want)
    got, expected = latents_of(inputs).cpu(), latents_of(want)
    torch.testing.assert_close(got, expected, rtol=0.13, atol=0.02, equal_nan=True)


def build(family: str, dtype: torch.dtype) -> Any:
    """Of the widths that the Hopper kernel takes."""
    import torchpaged.hf as hf

    options: dict[str, Any] = {"rope_interleave": True} if family == "Youtu" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=512,
        q_lora_rank=None if family == "DeepseekV2" else 96,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=256,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
        **options,
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if family != "Youtu" and dtype == torch.float32:  # transformers' grouped product synchronises there
        model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.mul_(4.0 if "embed" in key else 3.0)
    return hf.attach(model.to("cuda", dtype))


def tokens(model: Any, **options: Any) -> list[Any]:
    from torchpaged.engine import Generator, SamplingParams

    prompts = [list(range(5, 75)), [9, 8, 7, 100, 30], list(range(40, 20, -1))]
    generator = Generator(model, max_batch_size=3, block_size=64, compile=False, **options)
    try:
        outputs = generator.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))
    finally:
        generator.close()
    return [each.token_ids for each in outputs]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3", "Youtu"])
def test_tokens_of_the_unfused_model(family: str, graphs: bool) -> None:
    """In float32, packed prompts and decode steps, captured and not."""
    model = build(family, torch.float32)
    assert tokens(model, graphs=graphs, fuse=True) == tokens(build(family, torch.float32), graphs=False)


@pytest.mark.parametrize("family", ["DeepseekV2", "Youtu"])
def test_bf16_errs_no_more_than_unfused(family: str) -> None:
    import torchpaged.hf as hf

    ids = torch.randint(3, 512, (2, 73), generator=torch.Generator().manual_seed(2)).cuda()

    def logits(model: Any, cache: Any) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat(
                [model(part, past_key_values=cache).logits for part in ids.split([70, 1, 1, 1], 1)], 1
            )

    exact = build(family, torch.float32)
    want = logits(exact, hf.PagedCache(exact.config, 2, 96, backend="reference")).double()
    model = build(family, torch.bfloat16)
    unfused = (logits(model, hf.PagedCache(model.config, 2, 96)).double() - want).abs()
    hf.fuse(model)
    fused = (logits(model, hf.PagedCache(model.config, 2, 96)).double() - want).abs()
    assert float(fused.mean()) <= 1.5 * float(unfused.mean())
