"""The main doors under another default dtype than float32: what a library makes for itself has the dtype
it means."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchpaged
from torchpaged import AttentionMetadata, PagedAttention, PagedKVCache
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import (
    BATCH_SPECS,
    assert_attention_close,
    make_batch,
    opcheck_cases,
    run_paged_attention,
)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.fixture
def model(make_llama: Callable[..., Any]) -> Any:
    """In float32, whatever the default is later."""
    assert torch.get_default_dtype() == torch.float32
    return make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=2048)


def test_long_prompts_through_the_huggingface_door(model: Any, default_dtype: torch.dtype) -> None:
    """1024 tokens: positions that bfloat16 can't count."""
    from torchpaged.hf import PagedCache

    ids, options = (
        torch.randint(8, 99, (1, 1024)),
        {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None},
    )
    want = model.generate(ids, **options)
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 1, 1040)
    assert torch.equal(model.generate(ids, **options, past_key_values=cache), want)
    assert cache.paged[0].keys.dtype == torch.float32


@pytest.mark.parametrize("how", ["plain", "fused", "fp8"])
def test_engine(model: Any, default_dtype: torch.dtype, how: str) -> None:
    from torchpaged.engine import Generator, SamplingParams

    torch.set_default_dtype(torch.float32)
    prompts = [[8, 9, 10, 11, 12], [20] * 30]
    sampling = [
        SamplingParams(max_new_tokens=8),
        SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.8, seed=3, repetition_penalty=1.2),
    ]

    def tokens() -> list[list[list[int]]]:
        kv_dtype = "fp8_e4m3" if how == "fp8" else None
        generator = Generator(model, max_batch_size=2, max_seq_len=64, steps_per_launch=2, kv_dtype=kv_dtype)
        return [[output.token_ids for output in generator.generate(prompts, params)] for params in sampling]

    want = tokens()
    torch.set_default_dtype(default_dtype)
    if how == "fused":
        torchpaged.hf.fuse(model, count=False)
    assert tokens() == want


def test_every_tensor_of_the_library_says_its_dtype() -> None:
    """Where it is made and holds no integers. Benchmarks and tests may follow the default."""
    root, unsaid = Path(torchpaged.__file__).parent, []
    for path in (*root.rglob("*.py"), *(root / "custom_ops").rglob("*.py"), *(root / "graphs").rglob("*.py")):
        if path.relative_to(root).parts[0] in ("bench", "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            makes = ast.unparse(node.func) in {
                f"torch.{name}" for name in ("zeros", "ones", "empty", "rand", "randn")
            }
            if makes and not {"dtype", None} & {keyword.arg for keyword in node.keywords}:
                unsaid.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert not unsaid, unsaid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_module_and_functions(
    backend: str, dtype: torch.dtype, default_dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if backend == "cpu":
        request.getfixturevalue("native")
    layer = PagedAttention(
        4, 32, 2, sinks=[0.1] * 4, alibi_slopes=[0.5] * 4, logits_soft_cap=30.0, backend=backend, dtype=dtype
    )
    pools = PagedKVCache.uniform(1, 2, 32, block_size=4, num_blocks=9, dtype=dtype)[0]
    batch = AttentionMetadata.from_lists([5, 1], [9, 6], [[1, 2, 3], [4, 5]], block_size=4)
    q, k, v = (torch.randn(6, heads, 32, dtype=dtype) for heads in (4, 2, 2))
    out = layer(q, k, v, pools, batch)
    same, lse = torchpaged.paged_attention(
        q,
        *pools[:2],
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        max_query_len=5,
        logits_soft_cap=30.0,
        alibi_slopes=layer.alibi_slopes,
        sinks=layer.sinks,
        return_lse=True,
        ops=BACKEND_OPS[backend],
    )
    assert torch.equal(out, same) and lse.dtype == torch.float32 and bool(lse.isfinite().all())
    attention = make_batch(BATCH_SPECS["mixed_padded"], dtype=dtype, alibi=True, sinks=True)
    assert_attention_close(*run_paged_attention(BACKEND_OPS[backend], attention), attention)


def test_fp8_pools(default_dtype: torch.dtype) -> None:
    """Their scales are float32, and take part in a write and a read."""
    pools = PagedKVCache.uniform(1, 2, 32, block_size=4, num_blocks=3, dtype=torch.float8_e4m3fn)[0]
    assert pools.k_scale is not None and pools.k_scale.dtype == torch.float32
    layer, k = (
        PagedAttention(4, 32, 2, kv_dtype=torch.float8_e4m3fn, dtype=torch.float32),
        torch.ones(2, 2, 32, dtype=torch.float32),
    )
    out = layer(
        torch.randn(2, 4, 32, dtype=torch.float32),
        k,
        k,
        pools,
        AttentionMetadata.from_lists([2], [2], [[1]], block_size=4),
    )
    torch.testing.assert_close(out, torch.ones_like(out))


def test_cases_for_other_backends(default_dtype: torch.dtype) -> None:
    for op, args, kwargs in opcheck_cases().values():
        for tensor in (*args, *kwargs.values()):
            assert (
                not isinstance(tensor, torch.Tensor)
                or not tensor.is_floating_point()
                or tensor.dtype == torch.float32
            )
        torch.library.opcheck(getattr(BACKEND_OPS["reference"], op), args, kwargs, test_utils="test_schema")
