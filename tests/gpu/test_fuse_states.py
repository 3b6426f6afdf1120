"""Fused hybrids on a GPU: tokens of the unfused model, captured too, and their error in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
#: Of the widths that the CUDA kernels take.
DELTA_NET = {
    "head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    ),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DELTA_NET, "num_experts": 0}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA_NET),
}


def build(name: str, dtype: torch.dtype) -> Any:
    import torchpaged.hf as hf

    config, model_class, options = MODELS[name]
    torch.manual_seed(3)
    model = getattr(transformers, model_class)(getattr(transformers, config)(**COMMON, **options)).eval()
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
    sizes = {"max_batch_size": 3, "block_size": 64, "prefill_chunk_size": 48, "compile": False}
    generator = Generator(model, **sizes, **options)
    try:
        outputs = generator.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))
    finally:
        generator.close()
    return [each.token_ids for each in outputs]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_the_unfused_model(name: str, graphs: bool) -> None:
    """In float32, packed prompts in chunks and decode steps, captured and not."""
    model = build(name, torch.float32)
    assert tokens(model, graphs=graphs, fuse=True) == tokens(build(name, torch.float32), graphs=False)


@pytest.mark.parametrize("name", MODELS)
def test_bf16_errs_no_more_than_unfused(name: str) -> None:
    import torchpaged.hf as hf

    ids = torch.randint(3, 512, (2, 73), generator=torch.Generator().manual_seed(2)).cuda()

    def logits(model: Any, **options: Any) -> torch.Tensor:
        cache = hf.PagedCache(model.config, 2, 96, **options)
        with torch.inference_mode():
            parts = ids.split([70, 1, 1, 1], 1)
            return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1).double()

    want = logits(build(name, torch.float32), backend="reference")
    model = build(name, torch.bfloat16)
    unfused = (logits(model) - want).abs()
    report = hf.fuse(model)
    assert report.complete
    fused = (logits(model) - want).abs()
    assert float(fused.mean()) <= 1.5 * float(unfused.mean())


def test_long_prompts_and_left_padding() -> None:
    """generate() over a `PagedCache`: rows of prompts in chunks of Triton, and then single tokens."""
    import torchpaged.hf as hf

    model = build("qwen3_5", torch.float32)
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
