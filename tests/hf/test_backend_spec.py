"""What a layer asks for and a backend lacks meet at every door: a backend that declares a feature away is
never called with it."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import padded_prompts, tiny

import torchpaged
from torchpaged import AttentionMetadata, BackendUnavailableError, PagedAttention
from torchpaged.backends import Backend, get_backend, register_backend
from torchpaged.backends.choose import names as names_module
from torchpaged.backends.features import FEATURES
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.engine import Generator
from torchpaged.hf import PagedCache, PagedModel

#: What a backend lacks -> (its declaration, a model that needs it, the same of PagedAttention(4, 16, 2),
#: the reason).
EVERY = frozenset(FEATURES)
LACKS: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "logits_soft_cap": (
        {"features": EVERY - {"logits_soft_cap"}},
        "Gemma2",
        {"logits_soft_cap": 50.0},
        "logits_soft_cap is not supported",
    ),
    "sinks": ({"features": EVERY - {"sinks"}}, "GptOss", {"sinks": [0.5] * 4}, "sinks is not supported"),
    "window": (
        {"features": EVERY - {"window"}},
        "Mistral",
        {"window_size": (7, -1)},
        "window is not supported",
    ),
    "head_dim": ({"head_dims": (64,)}, "Llama", {}, "head_dim 16 is not one of"),
    "block_size": ({"block_sizes": (16,)}, "Llama", {"block_size": 4}, "block_size 4 is not one of"),
    "dtype": ({"dtypes": (torch.bfloat16,)}, "Llama", {}, "dtype float32 is not one of bfloat16"),
    "kv_dtype": ({"kv_dtypes": (torch.bfloat16,)}, "Llama", {}, "kv dtype float32 is not one of bfloat16"),
}


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Backend]]:
    """``lacking(head_dims=(64,))`` registers a backend "mine" of the reference's kernels that declares so."""
    monkeypatch.setattr(names_module, "REGISTERED", {})
    monkeypatch.setattr(names_module, "AUTOMATIC", list(names_module.AUTOMATIC))

    def make(automatic: bool = False, **declared: Any) -> Backend:
        reference = get_backend("reference")
        capabilities = dataclasses.replace(reference.capabilities, **declared)
        # Handles of its own: equal ones would be the reference's, which lacks nothing.
        handles = BACKEND_OPS["reference"]
        handles = handles._replace(paged_attention=functools.partial(handles.paged_attention))
        backend = Backend("mine", capabilities, handles, lambda: None)
        register_backend(backend, automatic=automatic)
        return backend

    yield make


def _module(options: dict[str, Any]) -> None:
    PagedAttention(4, 16, 2, backend="mine", **options)


def _functional(options: dict[str, Any], ops: BackendOps) -> None:
    options = {k: torch.tensor(v) if k == "sinks" else v for k, v in options.items() if k != "block_size"}
    batch = AttentionMetadata.from_lists([1], [3], [[1]], block_size=4)
    pool = torch.zeros(4, 4, 2, 16)
    torchpaged.paged_attention(
        torch.randn(1, 4, 16),
        pool,
        pool.clone(),
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        max_query_len=1,
        ops=ops,
        **options,
    )


def _cache(name: str) -> None:
    model = tiny(name)
    model.set_attn_implementation("torchpaged")
    with torch.no_grad():
        model(
            padded_prompts()["input_ids"],
            past_key_values=PagedCache(model.config, 2, 32, block_size=4, backend="mine"),
        )


@pytest.mark.parametrize("door", ["module", "functional", "PagedCache", "PagedModel", "Generator"])
@pytest.mark.parametrize("lack", LACKS)
def test_every_door_refuses_a_backend_that_lacks_a_feature(
    lack: str, door: str, lacking: Callable[..., Backend]
) -> None:
    declared, name, options, reason = LACKS[lack]
    backend = lacking(**declared)
    doors: dict[str, Callable[[], Any]] = {
        "module": lambda: _module(options),
        "functional": lambda: _functional(options, backend.ops),
        "PagedCache": lambda: _cache(name),
        "PagedModel": lambda: PagedModel(tiny(name), num_blocks=8, block_size=4, backend="mine"),
        "Generator": lambda: Generator(
            tiny(name), max_batch_size=1, max_seq_len=32, block_size=4, backend="mine"
        ),
    }
    with pytest.raises(BackendUnavailableError, match=re.escape(reason)):
        doors[door]()


@pytest.mark.parametrize(("masks", "held_to"), [(True, [True]), (False, [True, False])])
def test_causality_is_the_one_that_attention_uses(masks: bool, held_to: list[bool]) -> None:
    """A config does not tell it and a module may tell it wrongly: the model's masks decide, and they come
    with its calls."""
    model = tiny("Llama")
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 1, 32, backend="reference")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    model.config.is_causal = masks
    with torch.no_grad():
        for tokens in (4, 1):
            model(torch.randint(3, 99, (1, tokens)), past_key_values=cache)
    assert [spec.causal for spec in cache.backend.specs] == held_to


@pytest.mark.parametrize(
    ("lack", "passed_over"), [("logits_soft_cap", "Gemma2"), ("sinks", "GptOss"), ("head_dim", "Llama")]
)
def test_the_automatic_choice_passes_over_a_backend_that_lacks_a_feature(
    lack: str, passed_over: str, lacking: Callable[..., Backend]
) -> None:
    """And tokens are those of eager attention, though the feature may be known only when the first
    layer attends."""
    lacking(automatic=True, **LACKS[lack][0])
    model, inputs = tiny(passed_over), padded_prompts()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**inputs, **options)
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 2, 32)
    assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), want)
    assert cache.choice.name != "mine"
    assert LACKS[lack][3] in "; ".join(cache.choice.rejected["mine"])
    assert PagedModel(model, num_blocks=8).choice.rejected["mine"]


def test_a_backend_that_has_it_all_is_chosen(lacking: Callable[..., Backend]) -> None:
    lacking(automatic=True)
    model = tiny("GptOss")
    assert PagedModel(model, num_blocks=8).choice.name == "mine"
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 1, 32)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, 4)), past_key_values=cache)
    assert cache.choice.name == "mine"


def test_a_traced_call_asks_too(lacking: Callable[..., Backend]) -> None:
    """Pools made ahead, first forward compiled: no eager call came before it."""
    torch._dynamo.reset()
    lacking(features=EVERY - {"sinks"})
    model = tiny("GptOss")
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 1, 32, backend="mine")
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    with torch.no_grad(), pytest.raises(Exception, match="sinks is not supported"):
        torch.compile(model, backend="eager", fullgraph=True)(
            torch.tensor([[5]]), position_ids=torch.tensor([[0]]), past_key_values=cache
        )


def test_the_module_holds_the_backend_to_the_pools_that_come(lacking: Callable[..., Backend]) -> None:
    """Block size and KV dtype may be unknown when the backend is chosen."""
    lacking(block_sizes=(16,), kv_dtypes=(torch.float32,))
    layer, k = PagedAttention(4, 16, 2, backend="mine"), torch.randn(1, 2, 16)
    for size, dtype, reason in ((4, torch.float32, "block_size 4"), (16, torch.float8_e4m3fn, "kv dtype")):
        pools = (torch.zeros(4, size, 2, 16, dtype=dtype), torch.zeros(4, size, 2, 16, dtype=dtype))
        with pytest.raises(BackendUnavailableError, match=reason):
            layer(
                torch.randn(1, 4, 16),
                k,
                k,
                pools,
                AttentionMetadata.from_lists([1], [1], [[1]], block_size=size),
            )
        assert not pools[0].float().any()
