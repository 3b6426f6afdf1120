"""Attached models and fp8 caches on a GPU: logits of eager attention, one compiled graph, no skipped CUDA
graphs; images whose tokens see each other."""

import logging
from typing import Any

import pytest
import torch
from greedy import greedy

pytest.importorskip("transformers", reason="transformers is not installed; pip install 'torchpaged[hf]'")

from model_coverage.vision_models import batch_of, config_of, model_class_of, tokens_per_picture

from torchpaged.hf import PagedCache, paged

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu


def logits(model: Any, cache: Any = None, **options: Any) -> torch.Tensor:
    """Of 12 new tokens ``[tokens, rows, vocab]`` behind a left-padded prompt."""
    from model_coverage.checks import prompts

    inputs = {key: value.to("cuda") for key, value in prompts().items()}
    given = {"max_new_tokens": 12, "eos_token_id": None, "disable_compile": False, **options}
    return greedy(model, inputs, cache, **given)[0]


def once_compiled(model: Any, make_cache: Any, caplog: pytest.LogCaptureFixture) -> torch.Tensor:
    """The second of two automatically compiled runs, each with a cache of its own; both are alike.

    One graph, but for bloom of transformers 5.17, whose own forward counts the tokens on the host.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with caplog.at_level(logging.WARNING):
        first, second = (logits(model, make_cache()) for _ in range(2))
    assert torch.equal(first, second)
    assert "skipping cudagraphs" not in caplog.text
    breaks_by_itself = model.config.model_type == "bloom" and transformers.__version__.startswith("5.17")
    if not breaks_by_itself:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    return second


@pytest.mark.parametrize(
    "name",
    [
        *("bloom", "falcon", "gpt_neo", "gptj", "mpt"),
        *("ctrl", "dbrx", "deepseek_v32", "gemma3n_text", "longcat_flash", "recurrent_gemma", "xglm"),
    ],
)
def test_attached(name: str, caplog: pytest.LogCaptureFixture) -> None:
    from model_coverage.architectures import model_of

    import torchpaged.hf as hf

    model = model_of(name, "eager").to("cuda")
    want = logits(model, disable_compile=True)
    with hf.paged(model):

        def make_cache() -> Any:
            return hf.PagedCache(model.config, 2, 64)

        eager = logits(model, make_cache(), disable_compile=True)
        compiled = once_compiled(model, make_cache, caplog)
    for got in (eager, compiled):
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", ["head", "tensor"])
def test_fp8_cache(kv_dtype: str, scales: str, caplog: pytest.LogCaptureFixture) -> None:
    """Against the reference backend over the same scales; rounding is the same, sums are in another order."""
    from model_coverage.architectures import model_of

    import torchpaged.hf as hf

    model = model_of("llama", "torchpaged").to("cuda", torch.bfloat16)
    first = hf.PagedCache(model.config, 2, 64, kv_dtype=kv_dtype, kv_scales=scales)
    logits(model, first, disable_compile=True)

    def make_cache(backend: str = "auto") -> Any:
        return hf.PagedCache(
            model.config, 2, 64, backend=backend, kv_dtype=kv_dtype, kv_scales=first.kv_scales
        )

    want = logits(model, make_cache("reference"), disable_compile=True).float()
    compiled = once_compiled(model, make_cache, caplog).float()
    assert float((compiled[0] - want[0]).abs().max()) <= 0.05 * float(want.abs().max())
    assert first.choice.name in ("cuda", "triton")
    assert first.paged[0].keys.dtype.itemsize == 1


ROWS = ("tttitttttit", "tittittttttttt", "tttttt")


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("name", ["gemma3", "paligemma2"])
def test_prompts_with_images(name: str, backend: str) -> None:
    """Five prompts through one cache, in bfloat16, against eager attention in float32."""
    config = config_of(name)
    config.text_config.head_dim = 64
    torch.manual_seed(0)
    made = model_class_of(config)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    model = made.eval()
    tokens = tokens_per_picture(model, name)
    calls = [batch_of(model, name, ROWS, tokens, seed=seed) for seed in range(5)]
    calls = [{key: x.cuda() for key, x in call.items()} for call in calls]
    model = model.cuda()
    with torch.no_grad():
        wants = [model(**call).logits for call in calls]
        model = model.to(torch.bfloat16)
        rounded = [model(**call).logits.float() for call in calls]
        cache = PagedCache(model.config, 3, 96, backend=backend)
        with paged(model):
            for call, want, eager in zip(calls, wants, rounded, strict=True):
                got, seen = model(**call, past_key_values=cache).logits.float(), call["attention_mask"].bool()
                scale = float(want.abs().max())
                rounding = float((eager - want)[seen].abs().max()) / scale
                assert float((got - want)[seen].abs().max()) / scale <= 2 * rounding + 1e-2
                cache.reset()
