"""Tree attention on a GPU: against the oracle, each branch alone, and out of one graph for all trees."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from as_oracle import assert_as_oracle
from captured import captured
from gpus import HOPPER
from op_inputs.trees import TREE_SPECS, TreeSpec, branches_of, make_tree_batch, tree_spec
from test_conformance import no_triton  # noqa: F401

from torchpaged import AttentionMetadata, PagedAttention
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import Batch, assert_attention_close, run_paged_attention

pytestmark = pytest.mark.gpu
HEADS = {"32/8/128": (32, 8, 128), "9/3/64": (9, 3, 64), "16/1/96": (16, 1, 96)}
#: Contexts of many tiles, beside those of `TREE_SPECS`.
LONG = tree_spec(
    "tree_behind_much",
    (1500, 3000, 700),
    ((8, 0, "random"), (40, 1, "random"), (64, 2, "deep")),
    padded_tokens=3,
)
SPECS = {**TREE_SPECS, LONG.name: LONG}


def _beyond(spec: TreeSpec, columns: int) -> int:
    """What a table of so many ``columns`` has beyond the blocks of the longest request."""
    return columns - -(-max(spec.seq_lens) // 16)


def _batch(spec: str, heads: str, **options: Any) -> Batch:
    names = ("num_heads", "num_kv_heads", "head_dim")
    shape = dict(zip(names, HEADS[heads], strict=True))
    return make_tree_batch(SPECS[spec], dtype=torch.bfloat16, device="cuda", **{**shape, **options})


@pytest.mark.parametrize(("heads", "variant"), [("9/3/64", {}), ("16/1/96", {"window_left": 9})], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_other_heads(backend: str, spec: str, heads: str, variant: dict[str, int]) -> None:
    """tests/custom_ops/test_tree.py has Llama's. Slopes and sinks go with the window."""
    batch = _batch(spec, heads, alibi=bool(variant), sinks=bool(variant))
    assert_as_oracle(BACKEND_OPS[backend], batch, **variant)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("spec", ["tree_mixed", "tree_full"])
def test_over_an_fp8_cache(backend: str, spec: str, kv_dtype: torch.dtype) -> None:
    batch = _batch(spec, "32/8/128", kv_dtype=kv_dtype, scales="per_head")
    assert_as_oracle(BACKEND_OPS[backend], batch)


@pytest.mark.parametrize("spec", SPECS)
def test_each_token_is_what_its_branch_alone_is(backend: str, spec: str) -> None:
    batch = _batch(spec, "9/3/64")
    branches, rows = branches_of(batch)
    out, lse = run_paged_attention(BACKEND_OPS[backend], batch)
    alone, alone_lse = run_paged_attention(BACKEND_OPS[backend], branches)
    torch.testing.assert_close(out[: len(rows)], alone[rows], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[: len(rows)], alone_lse[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "spec", ["tree_small", "tree_mixed", *(["tree_full", "tree_uneven", LONG.name] if HOPPER else [])]
)
def test_the_cuda_kernels_take_trees(no_triton: Any, spec: str) -> None:  # noqa: F811
    """Decode's up to 8 query tokens, prefill's above."""
    batch = _batch(spec, "32/8/128", extra_columns=_beyond(SPECS[spec], 256))
    assert_as_oracle(BACKEND_OPS["cuda"], batch)


def test_chains_are_plain_query_tokens_bit_for_bit(backend: str) -> None:
    for count in (4, 8, 33):
        spec = tree_spec("chains", (300, 20), ((count, 0, "chain"), (count, 1, "chain")))
        assert spec.parents[0] == tuple(range(-1, count - 1))
        batch = make_tree_batch(
            spec, dtype=torch.bfloat16, device="cuda", num_heads=8, num_kv_heads=2, head_dim=128
        )
        out, lse = run_paged_attention(BACKEND_OPS[backend], batch)
        plain, plain_lse = run_paged_attention(BACKEND_OPS[backend], replace(batch, extras={}))
        torch.testing.assert_close(out, plain, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse, plain_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [5, 40])
def test_one_graph_serves_all_trees_of_a_bucket(backend: str, count: int) -> None:
    """Lengths, tables and words change between replays; the op is captured once."""
    specs = [
        tree_spec(f"tree_{seed}", contexts, ((count, seed, "random"), (count, seed + 9, "deep")))
        for seed, contexts in enumerate(((500, 500), (0, 77), (33, 410)))
    ]
    batches = [
        make_tree_batch(
            spec,
            dtype=torch.bfloat16,
            device="cuda",
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            extra_columns=_beyond(spec, 40),
            num_blocks=100,
            seed=seed,
        )
        for seed, spec in enumerate(specs)
    ]
    static = batches[0].to("cpu").to("cuda")
    metadata = AttentionMetadata(
        static.block_table,
        static.seq_lens,
        static.query_start_loc,
        None,
        None,
        count,
        16,
        tree_mask=static.extras["tree_mask"],
    )
    layer = PagedAttention(32, 128, 8, backend=backend, tree_mask=True, device="cuda", dtype=torch.bfloat16)
    call = (static.q, None, None, (static.k_cache, static.v_cache), metadata)
    with torch.inference_mode():
        graph, out = captured(lambda: layer(*call))
        for batch in batches[1:]:
            for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc"):
                getattr(static, name).copy_(getattr(batch, name))
            static.extras["tree_mask"].copy_(batch.extras["tree_mask"])
            graph.replay()
            torch.cuda.synchronize()
            assert_attention_close(out, None, batch)
        compiled = torch.compile(layer, fullgraph=True)(*call)
    torch.testing.assert_close(compiled, out)
