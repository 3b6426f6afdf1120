"""The indexer's ops: keys as they are stored, logits against float64, the selection, and what is
refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels import INTERPRETED, Kernels, Values, over
from op_inputs.indexer import exact_logits, is_top_k, make_index_batch, run_index_logits, weights_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BATCH_SPECS

OPS = BACKEND_OPS["default"]
E4M3 = torch.float8_e4m3fn
INF = float("inf")


@pytest.mark.slow_cases(
    "triton-cpu-*",
    but=("triton-cpu-mixed_*-True", "triton-cpu-decode_*-True", "triton-cpu-left_padded-False"),
)
@over("default", "triton", gpu=(), spec=BATCH_SPECS, causal=(True, False))
def test_logits_match_the_oracle(on: Kernels, spec: str, causal: bool) -> None:
    batch = make_index_batch(BATCH_SPECS[spec])
    got = run_index_logits(on.ops, batch, causal=causal)
    torch.testing.assert_close(got.double(), exact_logits(batch, causal), rtol=1e-5, atol=1e-5)


SIZES: dict[str, dict[str, Any]] = {
    "deepseek": {"width": 128, "num_heads": 64, "block_size": 16, "dtype": torch.bfloat16},
    "odd": {"width": 20, "num_heads": 17, "block_size": 1, "dtype": torch.float16},
    "wide": {"width": 200, "num_heads": 1, "block_size": 64, "dtype": torch.float32},
}


@over("triton", gpu=(), sizes=SIZES)
def test_shapes_and_dtypes(on: Kernels, sizes: str) -> None:
    batch = make_index_batch(BATCH_SPECS["mixed_padded"], **SIZES[sizes])
    exact = exact_logits(batch)
    torch.testing.assert_close(run_index_logits(on.ops, batch).double(), exact, rtol=1e-3, atol=1e-3)


@over("triton", spec=Values((), ("mixed_padded",), BATCH_SPECS))
def test_what_is_stored_is_the_references(on: Kernels, spec: str) -> None:
    """And logits over it, and their positions. In the interpreter of numbers that e4m3 holds: it rounds
    others otherwise."""
    deepseek = {"width": 128, "num_heads": 64, "block_size": 64, "dtype": torch.bfloat16}
    batch = make_index_batch(BATCH_SPECS[spec], device=on.device, **({} if INTERPRETED else deepseek))
    keys = batch.k_cache.nan_to_num(0.0).flatten(0, 2)
    if INTERPRETED:
        keys = torch.randint(-8, 8, keys.shape) / 8.0
        keys[:, 0] = 448 / 256  # the scale is a power of two
    else:
        got = run_index_logits(on.ops, batch)
        torch.testing.assert_close(got.cpu().double(), exact_logits(batch), rtol=2e-3, atol=2e-3)
        indices = torch.empty(len(got), 20, dtype=torch.int32, device="cuda")
        on.ops.top_k_indices(got, indices)
        assert is_top_k(indices, got)
    keys[7] = 0.0
    slots = torch.arange(len(keys), device=on.device)
    slots[5] = -1
    made: list[Any] = []
    for ops in (on.ops, BACKEND_OPS["reference"]):
        pool = torch.zeros(batch.k_cache.shape, device=on.device).to(E4M3)
        plain, scales = torch.zeros_like(batch.k_cache), torch.full(pool.shape[:2], 3.0, device=on.device)
        ops.write_index_keys(keys, pool, slots, scales)
        ops.write_index_keys(keys, plain, slots)
        made.append((pool.view(torch.uint8), scales, plain))
    assert all(map(torch.equal, *made))
    stored, scales = replace(batch, k_cache=made[0][0].view(E4M3)), made[0][1]
    got, want = run_index_logits(on.ops, stored, k_scale=scales), exact_logits(stored, True, scales)
    close = 1e-5 if INTERPRETED else 2e-3
    torch.testing.assert_close(got.cpu().double(), want, rtol=close, atol=close)


@over("triton", gpu=())
def test_a_nan_key_shows(on: Kernels) -> None:
    batch = make_index_batch(BATCH_SPECS["decode_one"])
    batch.k_cache[batch.block_table[0, 0].long(), 0] = float("nan")
    assert run_index_logits(on.ops, batch)[0, 0].isnan()
    with pytest.raises(ArgumentError, match="^q: expected at most 128 heads"):
        run_index_logits(on.ops, make_index_batch(BATCH_SPECS["decode_one"], num_heads=129))


def test_a_key_and_its_scale() -> None:
    keys = torch.randn(5, 16) * torch.tensor([1e-3, 1, 1e4, 0, 1])[:, None]
    pool, scales = torch.zeros(4, 4, 1, 16).to(E4M3), torch.full((4, 4), 7.0)
    OPS.write_index_keys(keys, pool, torch.tensor([4, 15, 6, 9, -1]), scales)
    for token, (block, offset) in enumerate(((1, 0), (3, 3), (1, 2), (2, 1))):
        stored = pool[block, offset, 0].float() * scales[block, offset]
        assert (stored - keys[token]).abs().max() <= keys[token].abs().max() / 16
    assert scales[2, 1] == 1  # of zeros
    assert int((scales != 7).sum()) == 4
    plain = torch.full((4, 4, 1, 16), 7.0)
    OPS.write_index_keys(keys, plain, torch.tensor([4, 15, 6, 9, -1]))
    assert torch.equal(plain[3, 3, 0], keys[1])
    assert int((plain != 7).any(-1).sum()) == 4


@pytest.mark.parametrize("spec", ["mixed_padded", "decode_edges"])
def test_logits_over_fp8_keys(spec: str) -> None:
    batch = make_index_batch(BATCH_SPECS[spec])
    keys = batch.k_cache.nan_to_num(0.0).flatten(0, 2)
    batch.k_cache, scales = torch.zeros(batch.k_cache.shape).to(E4M3), torch.ones(batch.k_cache.shape[:2])
    OPS.write_index_keys(keys, batch.k_cache, torch.arange(len(keys)), scales)
    got = run_index_logits(OPS, batch, k_scale=scales)
    torch.testing.assert_close(got.double(), exact_logits(batch, True, scales), rtol=1e-5, atol=1e-5)


@over("reference", "default", "triton", gpu=(), top_k=(1, 7, 40))
def test_selection(on: Kernels, top_k: int) -> None:
    """Of many, of fewer than are asked for, of equal ones, of none; more columns than ``top_k`` and fewer."""
    logits = torch.randn(6, 31)
    logits[1, 5:] = -INF
    logits[2] = -INF
    logits[3] = logits[3].round()
    logits[4, 3], logits[4, 9] = INF, -1e38
    logits[5] = 0.0
    indices = torch.full((6, top_k), 99, dtype=torch.int32)
    on.ops.top_k_indices(logits, indices)
    assert is_top_k(indices, logits)
    logits[0, 30] = float("nan")
    on.ops.top_k_indices(logits, indices)
    assert 30 in indices[0]


def arguments() -> dict[str, Any]:
    batch = make_index_batch(BATCH_SPECS["mixed_small"])
    return {
        "q": batch.q,
        "weights": weights_of(batch),
        "k_cache": batch.k_cache,
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
        "query_start_loc": batch.query_start_loc,
        "logits": torch.zeros(batch.q.shape[0], batch.block_table.shape[1] * 4),
        "max_query_len": batch.max_query_len,
    }


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "another width": ("k_cache", lambda a: {"q": a["q"][..., :8].contiguous()}),
    "no heads": ("q", lambda a: {"q": a["q"][:, :0]}),
    "a pool of another dtype": ("k_cache", lambda a: {"k_cache": a["k_cache"].half()}),
    "an fp8 pool without scales": ("k_cache", lambda a: {"k_cache": a["k_cache"].to(E4M3)}),
    "scales of a float pool": ("k_cache", lambda a: {"k_scale": torch.ones(a["k_cache"].shape[:2])}),
    "scales of another shape": (
        "k_scale",
        lambda a: {"k_cache": a["k_cache"].to(E4M3), "k_scale": torch.ones(3, 4)},
    ),
    "weights of another dtype": ("weights", lambda a: {"weights": a["weights"].half()}),
    "weights of fewer heads": ("weights", lambda a: {"weights": a["weights"][:, :2].contiguous()}),
    "too few columns": ("logits", lambda a: {"logits": a["logits"][:, 1:].contiguous()}),
    "logits of another dtype": ("logits", lambda a: {"logits": a["logits"].double()}),
    "too small a maximum": ("max_query_len", lambda a: {"max_query_len": 2}),
    "a length past the table": ("seq_lens", lambda a: {"seq_lens": a["seq_lens"] + 4000}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    name, change = BAD[case]
    given = arguments()
    given |= change(given)
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        OPS.index_logits(**given)
    assert not given["logits"].any()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k", {"k": torch.ones(3, 16)}),
        ("k_cache", {"k": torch.ones(2, 8)}),
        ("k_cache", {"k_scale": torch.ones(3, 4)}),
        ("slot_mapping", {"slot_mapping": torch.tensor([4, 99])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([4, 5], dtype=torch.int32)}),
    ],
    ids=["fewer slots", "another width", "scales of a float pool", "a slot outside", "slots of int32"],
)
def test_what_is_not_written(name: str, change: dict[str, Tensor]) -> None:
    given = {
        "k": torch.ones(2, 16),
        "k_cache": torch.zeros(3, 4, 1, 16),
        "slot_mapping": torch.tensor([4, 5]),
    }
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        OPS.write_index_keys(**given | change)
    assert not given["k_cache"].any()


def test_indices_are_refused() -> None:
    for bad in (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)):
        with pytest.raises(ArgumentError, match="^indices: expected"):
            OPS.top_k_indices(torch.zeros(3, 9), bad)


def test_one_graph_for_all_sizes() -> None:
    """From the key's write to the positions, with fixed shapes."""
    torch._dynamo.reset()  # another test's model may have made sizes dynamic
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def step(q: Tensor, w: Tensor, k: Tensor, slots: Tensor, pool: Tensor, *batch: Tensor) -> Tensor:
        OPS.write_index_keys(k, pool, slots)
        logits = w.new_empty(q.shape[0], batch[0].shape[1] * 4)
        OPS.index_logits(q, w, pool, *batch, logits, max_query_len=1)
        indices = slots.new_empty(q.shape[0], 2, dtype=torch.int32)
        OPS.top_k_indices(logits, indices)
        return indices

    for rows in (5, 3, 9):  # unlike every other size
        pool = torch.randn(12, 4, 1, 16)
        table = torch.arange(1, rows + 1, dtype=torch.int32)[:, None]
        lens, starts = torch.full((rows,), 3, dtype=torch.int32), torch.arange(rows + 1, dtype=torch.int32)
        q, k, w = torch.randn(rows, 7, 16), torch.randn(rows, 16), torch.rand(rows, 7)
        got = step(q, w, k, table[:, 0].long() * 4 + 2, pool, table, lens, starts)
        keys = pool[1 : rows + 1, :3, 0]
        assert torch.equal(keys[:, 2], k)
        want = torch.einsum("th,thn->tn", w, torch.einsum("thd,tnd->thn", q, keys).relu())
        assert is_top_k(got, want)
    assert counter.frame_count == 1
