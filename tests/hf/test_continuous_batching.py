"""``generate_batch`` of transformers, unmodified: its tokens with torchpaged's names equal those of its own
attention; which keys are read where; what is refused."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import build
from tiny_models import tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.configuration_utils import CompileConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.hf import continuous_batching, continuous_cache
from torchpaged.hf.attention import paged_attention_forward
from torchpaged.hf.cache_argument import CACHE

SIZES = {"vocab_size": 97, "head_dim": 8, "max_position_embeddings": 128}
#: model -> more of its configuration; what its tokens are held against: transformers' own attention in
#: continuous batching, or generate() of each prompt alone, since paged|eager drops the soft cap
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": ({}, "sdpa"),
    "Mistral": ({"sliding_window": 9}, "sdpa"),
    "Gemma2": ({"sliding_window": 7, "attn_logit_softcapping": 0.3, "query_pre_attn_scalar": 1}, "generate"),
    "GptOss": ({"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager"),
}
BLOCK_NAME = (
    "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
)
IS_5_17 = BLOCK_NAME == "block_size"


def make_model(name: str) -> Any:
    model = tiny_model(name, **SIZES, **MODELS[name][0])
    for key, parameter in model.named_parameters():  # a new model's attention hardly bears on its tokens
        parameter.data.mul_(20 if "_proj.weight" in key and "self_attn" in key else 1.5)
    if name == "GptOss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.normal_()
    return model


def prompts() -> list[list[int]]:
    torch.manual_seed(1)
    made = [torch.randint(4, 97, (n,)).tolist() for n in (5, 1, 23, 12)]
    return [*made, made[2][:16] + made[3]]  # the last shares two blocks with another


def generate(model: Any, attention: str, **options: Any) -> list[list[int]]:
    model.set_attn_implementation(attention)
    config = ContinuousBatchingConfig(
        num_blocks=40, max_batch_tokens=16, max_memory_percent=0.5, **{BLOCK_NAME: 8}, **options
    )
    outputs = model.generate_batch(
        inputs=prompts(),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=5, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=config,
    )
    assert len(outputs) == len(prompts())
    assert all(output.error is None for output in outputs.values())
    ordered = sorted(outputs.values(), key=lambda output: int(re.sub(r"\D", "", output.request_id)))
    return [output.generated_tokens for output in ordered]


def expected(model: Any, name: str) -> list[list[int]]:
    """The same prompts' tokens without torchpaged."""
    attention = MODELS[name][1]
    if attention != "generate":
        return generate(model, f"paged|{attention}" if IS_5_17 or attention == "eager" else attention)
    model.set_attn_implementation("eager")
    rows = [torch.tensor([prompt]) for prompt in prompts()]
    options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": -1, "pad_token_id": 0}
    return [model.generate(row, **options)[0, row.shape[1] :].tolist() for row in rows]


@pytest.mark.slow_cases("Llama-torchpaged", "GptOss-torchpaged")
@pytest.mark.parametrize(
    ("name", "asked"), [*((name, "torchpaged") for name in MODELS), ("Llama", "paged|torchpaged")]
)
def test_tokens_equal_transformers_own(name: str, asked: str) -> None:
    """Chunked prefills, mixed batches, a shared prefix, sliding windows, soft cap and sinks."""
    model = make_model(name)
    want = expected(model, name)
    assert len({tuple(tokens) for tokens in want}) > 2
    got = generate(model, asked)
    assert got == want
    asked_for = asked if IS_5_17 else "torchpaged"  # 5.23 strips the prefix
    assert model.config._attn_implementation == asked_for  # and generate() runs as before


def test_mixed_batches_read_the_block_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full-attention layers never have their keys gathered; table and slots are made once per step, of
    mixtures of prefill and decode too."""
    model = make_model("Llama")
    want = expected(model, "Llama")
    made: list[torch.Tensor] = []
    make = continuous_cache._once_per_step

    tables = 0

    def count(cache: Any, layer: Any, kwargs: dict[str, Any], make_step: Callable[[], Any]) -> Any:
        def counted() -> Any:
            nonlocal tables
            made.append(kwargs["cu_seq_lens_q"].diff())
            tables += kwargs["block_table"] is not None
            return make_step()

        return make(cache, layer, kwargs, counted)

    def gathers(*_: Any, **__: Any) -> Any:
        raise AssertionError("the keys were gathered")

    calls = 0
    forward = model.model.layers[0].self_attn.forward

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", step)
    monkeypatch.setattr(continuous_cache, "_once_per_step", count)
    monkeypatch.setattr(continuous_batching, "gathered", gathers)
    assert generate(model, "torchpaged") == want
    assert len(made) == calls > 5
    assert tables == sum(bool((lens == 1).all()) for lens in made) > 0  # the host lists no tokens for decodes
    assert any(bool((lens == 1).any()) and bool((lens > 1).any()) for lens in made), "no batch was mixed"


@pytest.mark.slow_cases("8")
@pytest.mark.parametrize("window", [8, 24, 9], ids=str)
def test_decodes_read_the_ring(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one page or several, full or not yet; steps with prompts gather, as do all where the last of several
    pages is cut short."""
    monkeypatch.setitem(MODELS, "Mistral", ({"sliding_window": window}, "sdpa"))
    model = make_model("Mistral")
    want = expected(model, "Mistral")
    gather, ring = continuous_cache.gathered, continuous_cache._ring_step
    longest: list[int] = []
    rings: list[list[int]] = []

    def gathers(cache: Any, index: Any, layer: Any, k: Any, v: Any, kwargs: dict[str, Any]) -> Any:
        longest.append(int(kwargs["cu_seq_lens_q"].diff().max()))
        return gather(cache, index, layer, k, v, kwargs)

    def rings_of(*arguments: Any) -> Any:
        step = ring(*arguments)
        rings.append(step.seq_lens.tolist())
        return step

    monkeypatch.setattr(continuous_batching, "gathered", gathers)
    monkeypatch.setattr(continuous_cache, "_ring_step", rings_of)
    assert generate(model, "torchpaged") == want
    if window == 9:
        assert 1 in longest
        assert not rings
    else:
        assert min(longest) > 1
        assert max(map(max, rings)) == window
        assert window == 8 or min(map(min, rings)) < window


@pytest.mark.slow
def test_one_graph_for_all_steps() -> None:
    """fullgraph, where transformers' own layers break it, and traced once for all lengths and mixtures; steps
    of decodes alone, padded to powers of two, once more."""
    model = make_model("Llama")
    want = expected(model, "Llama")
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    compiled = CompileConfig(backend=count, fullgraph=True, mode=None, dynamic=True)
    both = {"varlen_compile_config": compiled, "decode_compile_config": compiled}
    assert generate(model, "torchpaged", **both) == want
    assert graphs == 3  # steps with prefills; decodes alone; one decode alone, a size that dynamo keeps apart


def test_outside_of_a_batch() -> None:
    """The function knows one cache only, and a plain forward of the dense name meets no cache of batches."""
    model = make_model("Llama")
    attention, x = model.model.layers[0].self_attn, torch.zeros(1, 4, 3, 8)
    forward = continuous_batching.continuous_attention_forward
    with pytest.raises(ArgumentError, match="cache: .*generate_batch"):
        forward(attention, x, x[:, :2], x[:, :2], None)
    with pytest.raises(UnsupportedModelError, match="continuous batching"):
        paged_attention_forward(attention, x, x[:, :2], x[:, :2], None, cache=object())


def test_refusals_in_a_batch() -> None:
    """What would be dropped: a mask, a bias, a window that the cache does not keep, a sparse choice."""
    layer = continuous_cache.BatchLayer(0, "full_attention", torch.zeros(1), torch.zeros(1), 8, None)
    module, refuse = torch.nn.Linear(1, 1).eval(), continuous_batching._refuse
    refuse(module, layer, None, None, 0.1, None, {})
    with pytest.raises(ArgumentError, match="attention_mask"):
        refuse(module, layer, torch.zeros(1, 1, 2, 2), None, 0.0, None, {})
    with pytest.raises(UnsupportedModelError, match="position bias"):
        refuse(module, layer, None, torch.zeros(1), 0.0, None, {})
    with pytest.raises(ArgumentError, match="dropout"):
        refuse(module.train(), layer, None, None, 0.1, None, {})
    for window, kept in ((5, None), (5, 7)):
        with pytest.raises(UnsupportedModelError, match="window of 5"):
            refuse(module, layer._replace(window=kept), None, None, 0.0, window, {})
    with pytest.raises(UnsupportedModelError, match="sparsely"):
        refuse(module, layer, None, None, 0.0, None, {"indices": torch.zeros(1)})


def test_a_model_that_ignores_the_interface() -> None:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="torchpaged").eval()
    with pytest.raises(UnsupportedModelError, match="attention of its own"):
        model.generate_batch(inputs=[[5, 6]])


@pytest.mark.parametrize(
    ("stem", "words"),
    [
        ("DiffLlama", "regroups its cached values"),
        ("Bart", "counts positions by itself"),
        ("DeepseekV3", "keys of 32 numbers, .* places of 16"),
    ],
)
def test_models_that_batches_would_get_wrong(stem: str, words: str) -> None:
    """transformers' own attention gives wrong tokens of these there, too."""
    with pytest.raises(UnsupportedModelError, match=words):
        build(stem, implementation="torchpaged").generate_batch(inputs=[[5, 6], [7, 8, 9]])


def test_what_is_asked_first() -> None:
    """transformers still has both, and calls them with what ours look at; ours wrap them once."""
    switch = ContinuousBatchingManager.switch_to_cb_friendly_attn
    theirs = switch.__wrapped__  # type: ignore[attr-defined]
    assert list(inspect.signature(theirs).parameters)[:2] == ["self", "model"]
    assert "switch_to_cb_friendly_attn(model" in inspect.getsource(ContinuousBatchingManager.__init__)
    assert "_original_attn_impl" in inspect.getsource(ContinuousBatchingManager.stop)
    init = ContinuousBatchingManager.__init__
    given = ["self", "model", "generation_config", "continuous_batching_config", "workload_hints"]
    assert list(inspect.signature(init.__wrapped__).parameters) == given
    update = inspect.signature(PagedAttentionCache.update.__wrapped__).parameters  # type: ignore[attr-defined]
    assert list(update)[:4] == ["self", "key_states", "value_states", "layer_idx"]
    assert ("kwargs" in update) == (CACHE == "cache")
    ensure = continuous_batching.initialization.ensure_decode_fast_path_is_available
    assert list(inspect.signature(ensure.__wrapped__).parameters)[:2] == ["config", "cb_config"]
    resolve = inspect.getsource(continuous_batching.initialization.resolve_continuous_batching_config)
    assert "ensure_decode_fast_path_is_available(config, cb_config" in resolve
    continuous_batching.register_continuous_batching(dict)
    assert continuous_batching.initialization.ensure_decode_fast_path_is_available is ensure
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is switch
    assert ContinuousBatchingManager.__init__ is init
