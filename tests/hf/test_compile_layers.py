"""Regional compilation: one compilation per kind of layer and batch size, the same logits, only decode steps,
and back again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import tiny
from sessions import KEPT, PLANNING

from torchpaged import Limits
from torchpaged.backends import Backend
from torchpaged.backends.choose import names as names_module
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, PagedModel, compile_layers, fuse, uncompile_layers, unfuse
from torchpaged.metadata import AttentionMetadata


class Counter:
    """A torch.compile backend that runs the graph as it is and counts how often it is asked for one."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def _steps(paged: PagedModel, batch: int, steps: int = 3) -> torch.Tensor:
    """Logits of decode steps of ``batch`` requests, from their first token on."""
    outputs = []
    with torch.inference_mode():
        for step in range(steps):
            metadata = AttentionMetadata.from_lists(
                [1] * batch, [step + 1] * batch, [[1 + row] for row in range(batch)], block_size=16
            )
            outputs.append(paged(torch.arange(batch) + 5 * step, metadata))
    return torch.stack(outputs)


@pytest.mark.slow_cases(but=("Llama-1-plain",))
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(("name", "kinds"), [("Llama", 1), ("Qwen3", 1), ("Mistral", 1), ("Gemma2", 2)])
def test_one_compilation_serves_all_layers(name: str, kinds: int, fused: bool) -> None:
    """Gemma2 has sliding and full layers, hence two."""
    model = tiny(name, num_hidden_layers=4)
    if fused:
        fuse(model, count=False)
    paged, counter = PagedModel(model, num_blocks=16), Counter()
    expected = _steps(paged, 2)
    assert compile_layers(model, backend=counter) == 4
    assert counter.count == 0
    torch.testing.assert_close(_steps(paged, 2), expected)
    assert counter.count == kinds
    _steps(paged, 3)
    assert counter.count == 2 * kinds
    uncompile_layers(model)
    torch.testing.assert_close(_steps(paged, 2), expected, rtol=0, atol=0)
    _steps(paged, 4)
    assert counter.count == 2 * kinds
    if fused:
        unfuse(model)
    assert all("forward" not in vars(layer) for layer in model.model.layers)


@pytest.mark.parametrize("backend", [KEPT, PLANNING], ids=["semaphore", "plan"])
def test_what_the_session_keeps_does_not_tell_layers_apart(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compilation for all layers, and none for another session."""
    monkeypatch.setattr(names_module, "REGISTERED", {backend.name: backend})
    model, counter = tiny("Llama", num_hidden_layers=4), Counter()
    expected = _steps(PagedModel(model, num_blocks=16), 2)
    compile_layers(model, backend=counter)
    for _ in range(2):
        limits = Limits(max_num_reqs=4, max_blocks_per_req=4)
        torch.testing.assert_close(
            _steps(PagedModel(model, num_blocks=16, backend=backend.name, limits=limits), 2), expected
        )
        assert counter.count == 1


@pytest.mark.slow
def test_more_batch_sizes_than_dynamo_lets_one_function_have() -> None:
    model, counter = tiny("Llama"), Counter()
    paged = PagedModel(model, num_blocks=16)
    compile_layers(model, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=4):  # generate() raises it for the whole process
        for batch in range(1, 7):
            _steps(paged, batch, steps=1)
    assert counter.count == 6


def test_the_layers_keep_their_own_weights_and_pools() -> None:
    """Code is shared, weights and pools are not: each layer's count after the code was compiled for
    the first."""
    model, counter = tiny("Llama"), Counter()
    paged = PagedModel(model, num_blocks=16)
    compile_layers(model, backend=counter)
    before = _steps(paged, 2)
    pools = [pools.k_cache[1:3].clone() for pools in paged.kv_cache]
    assert not any(torch.equal(pools[0], other) for other in pools[1:])
    for layer in model.model.layers[1:]:
        saved = layer.mlp.down_proj.weight.clone()
        layer.mlp.down_proj.weight.data.mul_(2)
        assert not torch.allclose(_steps(paged, 2), before)
        layer.mlp.down_proj.weight.data.copy_(saved)
    torch.testing.assert_close(_steps(paged, 2), before)
    assert counter.count == 1


def test_through_the_engine_with_prefill() -> None:
    """Prefills of any length are not compiled; tokens are those of the uncompiled engine, fused and
    compiled too."""
    prompts, sampling = [[5, 9, 2, 7, 7], [3] * 20, [8]], SamplingParams(max_new_tokens=8, ignore_eos=True)

    def tokens(model: Any) -> list[list[int]]:
        generator = Generator(model, max_batch_size=4, max_seq_len=64, compile=False, buckets=[4])
        return [output.token_ids for output in generator.generate(prompts, sampling)]

    expected, counter = tokens(tiny("Llama")), Counter()
    model = tiny("Llama")
    fuse(model, count=False)
    compile_layers(model, backend=counter)
    assert tokens(model) == expected
    assert counter.count == 1


def test_other_caches_run_as_before() -> None:
    model, counter = tiny("Llama"), Counter()
    ids = torch.tensor([[5, 9, 2, 7]])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    compile_layers(model, backend=counter)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert counter.count == 0
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, max_batch_size=1, max_seq_len=32)
    assert torch.equal(
        model.generate(ids, max_new_tokens=6, do_sample=False, past_key_values=cache), expected
    )
    assert counter.count <= 2  # the first layer of a PagedCache moves the lengths on: it is a kind of its own


def test_refusals() -> None:
    model = tiny("Llama")
    with pytest.raises(ArgumentError, match="expected a model whose layers are compiled"):
        uncompile_layers(model)
    compile_layers(model)
    with pytest.raises(ArgumentError, match="call torchpaged.hf.uncompile_layers"):
        compile_layers(model)
    uncompile_layers(model)
    model.model.layers[1].mlp.layer_idx = 7
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.1 \(LlamaDecoderLayer\) names 2 layers of the cache"
    ):
        compile_layers(model)
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_fused_behind_it_layers_stay_as_they_are() -> None:
    """The launches of a step are counted all the same: compiled code runs in no dispatch mode."""
    model, sampling = tiny("Llama"), SamplingParams(max_new_tokens=4, ignore_eos=True)
    with Generator(model, max_batch_size=2, graphs=False) as generator:
        [want] = generator.generate([[5, 9, 2]], sampling)
    compile_layers(model, backend="eager")
    with Generator(model, max_batch_size=2, graphs=False, fuse=True) as generator:
        assert "qkv" not in generator.fusion_report.replaced
        assert generator.fusion_report.before is not None
        assert generator.generate([[5, 9, 2]], sampling)[0].token_ids == want.token_ids
    uncompile_layers(model)
