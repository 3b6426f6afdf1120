"""Tree attention: every query token of a tree comes out as it would at the end of its branch alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from as_oracle import assert_as_oracle
from kernels import Kernels, Values, over
from op_inputs.trees import TREE_SPECS, branches_of, make_tree_batch, random_parents, tree_spec, words_of

import torchpaged
from torchpaged import ArgumentError, AttentionMetadata, BackendUnavailableError, PagedAttention
from torchpaged.backends import attention_spec, select_backend
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import Batch, assert_attention_close, run_paged_attention

CPU, REFERENCE = BACKEND_OPS["cpu"], BACKEND_OPS["reference"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 5},
    "soft_cap": {"logits_soft_cap": 5.0},
    "chunked": {"chunk_size": 7},
}


def _assert_like_branches(ops: Any, batch: Batch, tolerance: float, **options: Any) -> None:
    branches, rows = branches_of(batch)
    out, lse = run_paged_attention(ops, batch, **options)
    alone, alone_lse = run_paged_attention(ops, branches, **options)
    used = len(rows)
    torch.testing.assert_close(out[:used], alone[rows], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse[:used], alone_lse[rows], rtol=tolerance, atol=tolerance)
    assert not out[used:].any()
    assert bool((lse[used:] == float("-inf")).all())


#: Every tree, and every mask.
CASES = [(spec, "plain") for spec in TREE_SPECS]
CASES += [
    (spec, variant) for spec in ("tree_small", "tree_uneven") for variant in VARIANTS if variant != "plain"
]


@pytest.mark.parametrize(("spec", "variant"), CASES)
def test_the_reference_gives_each_token_what_its_branch_alone_gives(spec: str, variant: str) -> None:
    batch = make_tree_batch(TREE_SPECS[spec], sinks=True, alibi=True, head_dim=16)
    _assert_like_branches(REFERENCE, batch, 1e-5, **VARIANTS[variant])


#: Contexts of many tiles, beside those of `TREE_SPECS`.
LONG = tree_spec(
    "tree_behind_much",
    (1500, 3000, 700),
    ((8, 0, "random"), (40, 1, "random"), (64, 2, "deep")),
    padded_tokens=3,
)
SPECS = {**TREE_SPECS, LONG.name: LONG}
#: In the interpreter by the decode kernel, in slices and not, by the prefill kernel, and by both.
FEW = [("tree_chain", "soft_cap"), ("tree_mixed", "plain"), ("tree_small", "window")]
FEW += [("tree_uneven", "chunked"), ("tree_full", "window")]
SOME = ("plain", "window", "soft_cap", "chunked")
CASE = Values(CASES, FEW, [(spec, variant) for spec in SPECS for variant in SOME])
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"num_heads": 6, "head_dim": 40},
    "triton": {"head_dim": 16},
    "cuda": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "device": "cuda"},
}
FLOATS = (torch.float32, torch.bfloat16)


@pytest.mark.slow_cases("triton-cpu-*float32", but=("triton-cpu-*soft_cap*",))
@over("cpu", "triton", gpu=("cuda", "triton"), case=CASE, dtype=Values(FLOATS, FLOATS, FLOATS[1:]))
def test_kernels_match_the_oracle(on: Kernels, case: tuple[str, str], dtype: torch.dtype) -> None:
    """Slopes and sinks go with a window and a cap, and on this CPU with each mask once more."""
    spec, variant = case
    special = (variant in ("window", "soft_cap"),) if on.backend != "cpu" else (False, True)
    for alibi in special:
        shape = SHAPES[on.backend if on.device == "cpu" else "cuda"]
        batch = make_tree_batch(SPECS[spec], dtype=dtype, alibi=alibi, sinks=alibi, **shape)
        assert_as_oracle(on.ops, batch, **VARIANTS[variant])


@pytest.mark.usefixtures("native")
def test_the_cpu_kernel_splits_a_tree_over_threads(threads: Any) -> None:
    spec = tree_spec("tree_split", (3000,), ((40, 8, "random"),))
    threads(3)
    for options in ({}, {"window_left": 20}, {"chunk_size": 16}):
        batch = make_tree_batch(spec, num_heads=8, num_kv_heads=2, head_dim=64)
        assert_as_oracle(CPU, batch, **options)


@pytest.mark.parametrize("backend", ("reference", "cpu"))
def test_a_chain_is_what_plain_query_tokens_are(backend: str, native: None) -> None:
    spec = tree_spec("chains", (30, 0), ((9, 0, "chain"), (64, 0, "chain")))
    if tuple(range(-1, 8)) != spec.parents[0]:
        raise AssertionError("a chain's parents are the tokens before")
    batch = make_tree_batch(spec)
    plain = replace(batch, extras={})
    for mine, other in zip(
        run_paged_attention(BACKEND_OPS[backend], batch),
        run_paged_attention(BACKEND_OPS[backend], plain),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("backend", ("reference", "cpu"))
def test_what_a_branch_does_not_see_does_not_matter(backend: str, native: None) -> None:
    spec = tree_spec("siblings", (20,), ((-1, -1, 0, 1, 2),))
    batch = make_tree_batch(spec, head_dim=16)
    ops = BACKEND_OPS[backend]
    expected, _ = run_paged_attention(ops, batch)
    block, slot = batch.block_table[0, 21 // 16], 21 % 16  # query token 1's key: tokens 1 and 3 see it
    for value in (float("nan"), float("inf")):
        batch.k_cache[block, slot] = batch.v_cache[block, slot] = value
        out, _ = run_paged_attention(ops, batch)
        assert torch.equal(out[[0, 2, 4]], expected[[0, 2, 4]])
        assert bool(out[[1, 3]].isnan().all())


def test_words_and_positions_of_parents() -> None:
    parents = [[-1, -1, 0, 2, 2], [-1], list(random_parents(64, 1))]
    lens = [len(each) for each in parents]
    flat = torch.tensor([p for each in parents for p in each] + [77, -5], dtype=torch.int32)
    starts = torch.tensor([0, 5, 6, 6, 70, 70], dtype=torch.int32)
    words = torchpaged.tree_mask_from_parents(flat, starts)
    assert words[:5].tolist() == [1, 2, 5, 13, 21]
    assert words[:70].tolist() == [word for each in parents for word in words_of(each)]
    assert words[70:].tolist() == [0, 0]
    seq_lens = torch.tensor([15, 4, 0, 64, 0], dtype=torch.int32)
    positions = torchpaged.tree_token_positions(words, seq_lens, starts)
    assert positions[:6].tolist() == [10, 10, 11, 12, 12, 3]
    assert positions[70:].tolist() == [0, 0]
    metadata = AttentionMetadata.from_lists(
        lens, [15, 4, 64], [[1], [2], [3, 4, 5, 6]], block_size=16, tree_parents=parents
    )
    assert torch.equal(metadata.tree_mask, words[:70])
    assert torch.equal(metadata.positions, positions[:70])
    alone = torchpaged.tree_mask_from_parents(flat[:5])
    assert torch.equal(alone, words[:5])
    assert torchpaged.tree_token_positions(alone, seq_lens[:1]).tolist() == [10, 10, 11, 12, 12]


@pytest.mark.parametrize(
    "parents, starts, match",
    [
        ([0], None, "parents"),
        ([-1, 1], None, "query token 1"),
        ([-2], None, "parents"),
        ([-1] * 65, None, "at most 64"),
        ([-1, 0, 1], [0, 2, 3], "row 2"),
        ([-1, 0], [0, 9, 1], "query_start_loc: expected 0 first, not decreasing, at most 2 tokens"),
        ([-1, 0], [1, 2], "query_start_loc"),
    ],
)
def test_parents_that_are_no_tree_are_refused(parents: list[int], starts: Any, match: str) -> None:
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=match):
        torchpaged.tree_mask_from_parents(torch.tensor(parents, dtype=torch.int32), starts)


@pytest.mark.parametrize(
    "parents",
    [[-1, 0.9], ["-1", "0"], [-1, False], -1, iter([-1, 0])],
    ids=["float", "str", "bool", "one", "iterator"],
)
def test_parents_are_not_rounded(parents: Any) -> None:
    with pytest.raises(ArgumentError, match="tree_parents: expected a list of ints"):
        AttentionMetadata.from_lists([2], [5], [[1]], block_size=8, tree_parents=[parents])


def test_positions_want_tensors() -> None:
    seq_lens = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="query_start_loc: expected a tensor"):
        torchpaged.tree_token_positions(torch.tensor([1, 3]), seq_lens, [0, 2])


def _word(batch: Batch, row: int, word: int) -> dict[str, Any]:
    mask = batch.extras["tree_mask"].clone()
    mask[row] = word
    return {"tree_mask": mask}


REFUSED: dict[str, tuple[Any, str]] = {
    "dtype": (lambda b: {"tree_mask": b.extras["tree_mask"].int()}, "tree_mask"),
    "length": (lambda b: {"tree_mask": b.extras["tree_mask"][:-1]}, "tree_mask"),
    "stride": (lambda b: {"tree_mask": b.extras["tree_mask"].repeat_interleave(2)[::2]}, "tree_mask"),
    "bidirectional": (lambda b: {"causal": False}, "causal"),
    "longer": (lambda b: {"max_query_len": 65}, "at most 64"),
    "later": (lambda b: _word(b, 2, 0b1100), "later"),
    "sign": (lambda b: _word(b, 62, -(1 << 63)), "later"),
}


@pytest.mark.parametrize("backend", ("reference", "cpu"))
@pytest.mark.parametrize("case", REFUSED)
def test_bad_trees_are_refused_and_nothing_is_written(case: str, backend: str, native: None) -> None:
    change, match = REFUSED[case]
    batch = make_tree_batch(tree_spec("one", (4,), ((64, 0, "random"),)), head_dim=16)
    out = torch.full_like(batch.q, 7.0)
    options = {"max_query_len": 64, "scale": 1.0, **batch.extras, **change(batch)}
    tensors = batch.tensors
    with pytest.raises((ArgumentError, RuntimeError), match=match):
        BACKEND_OPS[backend].paged_attention(*tensors, out, **options)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("backend", ("reference", "cpu"))
def test_a_sequence_shorter_than_its_tree_is_refused(backend: str, native: None) -> None:
    batch = make_tree_batch(TREE_SPECS["tree_small"], head_dim=16)
    batch.seq_lens[1] = 3
    with pytest.raises((ArgumentError, RuntimeError), match="query length"):
        run_paged_attention(BACKEND_OPS[backend], batch)
    batch.seq_lens[1] = 0  # a padding row
    out, _ = run_paged_attention(BACKEND_OPS[backend], batch)
    assert not out[7:12].any()


def test_backends_without_trees_say_so() -> None:
    spec = attention_spec(
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        tree_mask=True,
    )
    for name in ("torch_sdpa", "flex"):
        with pytest.raises(BackendUnavailableError, match="tree_mask is not supported"):
            select_backend(spec, name)
    choice = select_backend(spec)
    assert choice.name in ("cpu", "reference")
    batch = make_tree_batch(TREE_SPECS["tree_small"])
    with pytest.raises(BackendUnavailableError, match="tree_mask is not supported"):
        run_paged_attention(select_backend(replace(spec, uses=frozenset()), "torch_sdpa").backend.ops, batch)


def _metadata(batch: Batch) -> AttentionMetadata:
    return AttentionMetadata(
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        None,
        None,
        batch.max_query_len,
        16,
        tree_mask=batch.extras["tree_mask"],
    )


def test_the_module_takes_trees_from_the_metadata_eagerly_and_compiled() -> None:
    batch = make_tree_batch(TREE_SPECS["tree_mixed"])
    layer = PagedAttention(4, 64, 2, tree_mask=True)
    call = (batch.q, None, None, (batch.k_cache, batch.v_cache), _metadata(batch))
    with torch.inference_mode():
        out = layer(*call)
        assert_attention_close(out, None, batch)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(*call)
    assert torch.equal(out, compiled)


def test_the_function_takes_trees_eagerly_and_compiled() -> None:
    batch = make_tree_batch(TREE_SPECS["tree_mixed"], head_dim=16)
    tensors = batch.tensors

    def attend(tree_mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torchpaged.paged_attention(*tensors, max_query_len=8, tree_mask=tree_mask)
        return out

    with torch.inference_mode():
        out = attend(batch.extras["tree_mask"])
        assert_attention_close(out, None, batch)
        torch._dynamo.reset()
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        assert torch.equal(out, compiled(batch.extras["tree_mask"]))
        with torchpaged.use_backend("torch_sdpa"):
            with pytest.raises(BackendUnavailableError, match="tree_mask is not supported"):
                attend(batch.extras["tree_mask"])
            torch._dynamo.reset()
            with pytest.raises(Exception, match="tree_mask is not supported"):
                compiled(batch.extras["tree_mask"])
    with pytest.raises(ArgumentError, match="tree_mask"):
        attend([1])  # type: ignore[arg-type]


def test_the_module_refuses_trees_that_its_backend_does_not_take() -> None:
    batch = make_tree_batch(TREE_SPECS["tree_mixed"])
    layer = PagedAttention(4, 64, 2, backend="torch_sdpa")
    with pytest.raises(BackendUnavailableError, match="tree_mask=True"):
        layer(batch.q, None, None, (batch.k_cache, batch.v_cache), _metadata(batch))
    with pytest.raises(BackendUnavailableError, match="tree_mask is not supported"):
        PagedAttention(4, 64, 2, backend="torch_sdpa", tree_mask=True)
