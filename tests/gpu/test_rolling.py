"""Layers with a window over rings of blocks, on a GPU: eager tokens in float32 through every door, captured
and compiled; and kernels that read nothing behind a window."""

from typing import Any

import pytest
import torch
from tiny_models import tiny_model

import torchpaged

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torchpaged.hf")  # registers the attention
pytestmark = pytest.mark.gpu

SLIDING, FULL = "sliding_attention", "full_attention"
COMMON: dict[str, Any] = {"vocab_size": 199, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
COMMON |= {"num_hidden_layers": 3, "sliding_window": 24, "max_position_embeddings": 1024}
MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Gemma2": {"layer_types": [SLIDING, FULL, SLIDING], "query_pre_attn_scalar": 32},
}


def make(name: str) -> Any:
    return tiny_model(name, **COMMON | MODELS[name]).cuda()


def call(rows: int = 3, length: int = 150) -> dict[str, Any]:
    ids = torch.randint(3, 199, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :40], ids[0, :40] = 0, 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "do_sample": False, "max_new_tokens": 80}


def eager(name: str, **options: Any) -> torch.Tensor:
    model = make(name)
    model.set_attn_implementation("eager")
    return model.generate(**call(), **options)


@pytest.mark.parametrize("backend", ["cuda", "triton", "torch_sdpa", "flex"])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, backend: str) -> None:
    """Compiled decode steps where generate() compiles; prompts in steps that are shorter than they are."""
    model = make(name)
    model.set_attn_implementation("torchpaged")
    try:
        cache = torchpaged.hf.PagedCache(model.config, 3, 256, sliding_step=32, backend=backend)
        got = model.generate(**call(), past_key_values=cache)
    except torchpaged.BackendUnavailableError as error:
        pytest.skip(str(error))
    assert torch.equal(got, eager(name))
    assert any(layer.rolls for layer in cache.paged)


@pytest.mark.parametrize("name", MODELS)
def test_beams(name: str) -> None:
    model = make(name)
    model.set_attn_implementation("torchpaged")
    cache = torchpaged.hf.PagedCache(model.config, 9, 256, sliding_step=32)
    assert torch.equal(model.generate(**call(), num_beams=3, past_key_values=cache), eager(name, num_beams=3))


@pytest.mark.parametrize(
    "options",
    [{}, {"fuse": True}, {"steps_per_launch": 4, "prefill_buckets": [32]}, {"graphs": False}],
    ids=["compiled", "fused", "launches", "no graphs"],
)
@pytest.mark.parametrize("name", MODELS)
def test_the_engine(name: str, options: dict[str, Any]) -> None:
    """More rows than run at once, so that rings change hands; captured prefills and decode steps."""
    model = make(name)
    sizes = {"max_batch_size": 2, "max_seq_len": 256, "prefill_chunk_size": 32, "fuse": False}
    torchpaged.hf.accelerate(model, **sizes | options)
    generator = model.generate.generator
    assert generator.model.rings is not None
    assert (generator.loop is None) is ("graphs" in options)
    want = eager(name)
    for _ in range(2):
        assert torch.equal(model.generate(**call()), want)


def test_adapters_of_a_captured_model_are_looked_at() -> None:
    """Weights that were replaced after the capture: refused instead of replayed."""
    model = make("Mistral")
    torchpaged.hf.accelerate(model, max_batch_size=2, max_seq_len=256, fuse=False)
    small = call(1, 50) | {"max_new_tokens": 4, "attention_mask": None}
    model.generate(**small)
    attention = model.model.layers[1].self_attn
    attention.q_proj.weight = torch.nn.Parameter(attention.q_proj.weight.detach().clone())
    with pytest.raises(torchpaged.ArgumentError, match=r"q_proj\.weight lies elsewhere"):
        model.generate(**small)


@pytest.mark.parametrize("query_len", [1, 5, 40])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "reach", [{"window_size": (30, -1)}, {"window_size": (30, 0), "chunk_size": 64}], ids=["window", "chunk"]
)
def test_nothing_behind_a_window_is_read(
    backend: str, dtype: torch.dtype, query_len: int, reach: dict[str, Any]
) -> None:
    """Columns behind the first query's window name a block of NaN; in a ring they name newer tokens."""
    choice = torchpaged.backends.get_backend(backend)
    size, lens, width = 16, [500, 333], 32
    torch.manual_seed(0)
    k, v = (torch.randn(80, size, 2, 64, device="cuda", dtype=dtype) for _ in range(2))
    k[79], v[79] = torch.nan, torch.nan
    table = torch.arange(1, 65, dtype=torch.int32, device="cuda").view(2, width)
    poisoned, ring = table.clone(), table.clone()
    for row, length in enumerate(lens):
        first = max(length - query_len - 30, 0) // size
        if "chunk_size" in reach:
            first = max(first, (length - query_len) // 64 * 64 // size)
        poisoned[row, :first] = 79
        last = -(-length // size)
        ring[row, :first] = table[row, first:last].repeat(width)[:first]
    batch = {
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.tensor([0, query_len, 2 * query_len], dtype=torch.int32, device="cuda"),
        "max_query_len": query_len,
    }
    q = torch.randn(2 * query_len, 8, 64, device="cuda", dtype=dtype)
    outs = [
        torchpaged.paged_attention(q, k, v, each, **batch, **reach, ops=choice.ops)
        for each in (table, poisoned, ring)
    ]
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
