"""Latents in a `PagedCache`: every family's tokens, what a token costs, and when a model does without."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from greedy import greedy
from model_coverage.architectures import model_of, model_types
from model_coverage.checks import difference, prompts
from torch import nn

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.cache import LatentLayerSpec
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, attach, detach, fuse, paged, unfuse
from torchpaged.hf.families import FAMILIES


def logits(model: Any, cache: PagedCache | None = None, **options: Any) -> torch.Tensor:
    """Of 6 new tokens behind a left-padded prompt."""
    return greedy(model, prompts(), cache, max_new_tokens=6, eos_token_id=None, **options)[0]


def cache_of(model: Any, **options: Any) -> PagedCache:
    return PagedCache(model.config, 2, 32, block_size=4, **options)


@pytest.fixture(scope="module")
def built() -> tuple[Any, torch.Tensor]:
    """The smallest of the families, and what it says by itself."""
    model = model_of("youtu", "eager")
    return model, logits(model)


@pytest.fixture
def youtu(built: tuple[Any, torch.Tensor]) -> Any:
    return copy.deepcopy(built[0])


@pytest.fixture
def want(built: tuple[Any, torch.Tensor]) -> torch.Tensor:
    return built[1]


def test_mistral4_is_one_of_them() -> None:
    """No table of transformers maps it to a CausalLM, by which one that is missing here would be found."""
    assert FAMILIES["mistral4"].caches_latents


@pytest.mark.parametrize(
    "model_type", sorted(name for name, family in FAMILIES.items() if family.caches_latents)
)
def test_every_family(model_type: str) -> None:
    """Its logits, rows of rank + rope numbers and nothing else, and its own expansion once it is detached."""
    if model_type not in model_types():
        pytest.skip(f"not in transformers {transformers.__version__}")
    model = model_of(model_type, "eager")
    by_itself = logits(model)
    config = model.config.get_text_config(decoder=True)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    with paged(model):
        cache = cache_of(model)
        assert difference(logits(model, cache), by_itself) == "right"
    assert not cache.dense
    assert all(layer.latent for layer in cache.paged)
    for layer in cache.paged:
        assert layer.keys is layer.values
        assert layer.keys.shape == (cache.num_blocks, 4, 1, width)
        assert layer.num_bytes == layer.keys.nbytes == cache.num_blocks * 4 * width * 4
    assert f"({4 * width * len(cache.paged)} bytes per token)" in cache.describe()
    assert torch.equal(logits(model), by_itself)


def test_unattached_it_gathers(youtu: Any, want: torch.Tensor) -> None:
    youtu.set_attn_implementation("torchpaged")
    cache = cache_of(youtu)
    assert cache.dense
    assert "torchpaged.hf.attach(model)" in cache.dense_reason
    assert difference(logits(youtu, cache), want) == "right"
    with pytest.raises(UnsupportedModelError, match=r"torchpaged\.hf\.attach\(model\)"):
        logits(youtu, cache_of(youtu, dense=False))


def test_attached_it_may_gather_all_the_same(youtu: Any, want: torch.Tensor) -> None:
    """In one model, in turns; so does a copy of the config, which was not attached."""
    attach(youtu)
    other = PagedCache(copy.deepcopy(youtu.config), 2, 32, block_size=4)
    assert other.dense
    for cache in (cache_of(youtu), cache_of(youtu, dense=True), other, cache_of(youtu)):
        assert difference(logits(youtu, cache), want) == "right"


def test_one_of_two_models_of_a_config_is_detached(youtu: Any) -> None:
    other = attach(type(youtu)(youtu.config))
    detach(attach(youtu))
    assert not cache_of(other).dense
    detach(other)
    assert cache_of(other).dense


def test_a_copy_attends_by_its_own_weights(youtu: Any, want: torch.Tensor) -> None:
    attach(youtu)
    twin = copy.deepcopy(youtu)
    assert not cache_of(twin).dense
    with torch.no_grad():
        for module in youtu.modules():
            if hasattr(module, "kv_b_proj"):
                module.kv_b_proj.weight.zero_()
    for dense in (None, True):
        assert difference(logits(twin, cache_of(twin, dense=dense)), want) == "right"


def test_a_cache_of_latents_is_for_attached_models(youtu: Any) -> None:
    attach(youtu)
    cache = cache_of(youtu)
    logits(youtu, cache)
    cache.reset()
    detach(youtu)
    youtu.set_attn_implementation("torchpaged")
    with pytest.raises(
        UnsupportedModelError, match=r"keeps latents.*this one is not; call .*attach\(model\)"
    ):
        logits(youtu, cache)
    assert cache_of(youtu).dense


def adapted(projection: nn.Linear) -> nn.Module:
    class Adapter(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    made = Adapter(projection.in_features, projection.out_features, bias=False)
    made.weight = projection.weight
    return made


def _adapt(module: Any) -> None:
    module.kv_b_proj = adapted(module.kv_b_proj)


def _hook(module: Any) -> None:
    module.kv_b_proj.register_forward_hook(lambda _, args, out: out * 2)


def _hook_before(module: Any) -> None:
    module.kv_b_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def _replace_forward(module: Any) -> None:
    own = module.kv_b_proj.forward
    module.kv_b_proj.forward = lambda x: own(x) * 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_adapt, "is a Adapter"),
        (_hook, "has forward hooks"),
        (_hook_before, "has forward hooks"),
        (_replace_forward, "has a forward that another one replaced"),
    ],
)
def test_projections_that_are_more_than_their_weight(
    youtu: Any, change: Callable[[Any], None], why: str
) -> None:
    """Halves of the weight would drop an adapter: before attach() it gathers, later it is refused."""
    attach(youtu)
    cache = cache_of(youtu)
    module = next(module for module in youtu.modules() if hasattr(module, "kv_b_proj"))
    change(module)
    with pytest.raises(UnsupportedModelError, match=rf"kv_b_proj.*{why}.*dense=True"):
        logits(youtu, cache)
    detach(youtu)
    by_itself = logits(youtu)
    with paged(youtu):
        cache = cache_of(youtu)
        assert cache.dense
        assert difference(logits(youtu, cache), by_itself) == "right"


def test_what_a_layer_of_latents_does_not_do(youtu: Any) -> None:
    attach(youtu)
    with pytest.raises(ArgumentError, match="key_states: expected 1 heads of"):
        cache = cache_of(youtu)
        logits(youtu, cache)
        layer = cache.paged[0]
        layer.update(torch.zeros(2, 1, 1, 3), torch.zeros(2, 1, 1, 8))


def test_pools_made_ahead(youtu: Any, want: torch.Tensor) -> None:
    """From the config's widths: made ahead, they are of one width for all layers."""
    attach(youtu)
    cache = cache_of(youtu)
    cache.early_initialization(2, 1, 24, torch.float32, torch.device("cpu"))
    assert difference(logits(youtu, cache), want) == "right"


def test_the_engine_keeps_latents_too(youtu: Any) -> None:
    prompt = prompts()["input_ids"][1:]
    want = youtu.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "prefill_chunk_size": 8}
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    for fuses in (False, True):
        if fuses:
            fuse(youtu, count=False)
        with pytest.raises(UnsupportedModelError, match=r"call torchpaged\.hf\.attach\(model\) first"):
            Generator(youtu, **sizes)
    unfuse(youtu)
    attach(youtu)
    generator = Generator(youtu, **sizes)
    assert all(isinstance(spec, LatentLayerSpec) for spec in generator.model.kv_cache.layers)
    results = generator.generate([prompt[0].tolist(), prompt[0, :5].tolist()], params)
    assert results[0].token_ids == want.tolist()


def test_beams_and_taking_back(youtu: Any) -> None:
    """Rows are forked, and their last blocks copied; assisted decoding takes tokens back."""
    even = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    beams = youtu.generate(**prompts(), **even, num_beams=3)
    lookup = youtu.generate(prompts()["input_ids"][1:], **even)
    attach(youtu)
    cache = PagedCache(youtu.config, 6, 32, block_size=4)
    assert torch.equal(youtu.generate(**prompts(), **even, num_beams=3, past_key_values=cache), beams)
    cache = PagedCache(youtu.config, 1, 64, block_size=4)
    given = {"prompt_lookup_num_tokens": 3, "past_key_values": cache}
    assert torch.equal(youtu.generate(prompts()["input_ids"][1:], **even, **given), lookup)


def test_the_kind() -> None:
    spec = LatentLayerSpec(16, 8)
    pools = spec.make_pools(5, 4, torch.bfloat16, torch.device("cpu"))
    assert spec.bytes_per_block(4, torch.bfloat16) * 5 == pools.kv_cache.nbytes == 5 * 4 * 24 * 2
    with pytest.raises(ArgumentError, match="qk_rope_head_dim"):
        LatentLayerSpec(16, 0)
