"""The CUDA C++ kernel of latent attention on Hopper: the float64 oracle over heads, queries, blocks and
lengths, the same bits every time, one capture for other lengths."""

from typing import Any

import pytest
import torch
from captured import captured
from gpus import needs_hopper
from op_inputs.latent import assert_latent_close, latent_tensors, make_latent_batch, run_mla_attention

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import shape
from torchpaged.testing import BATCH_SPECS, Batch, BatchSpec

pytestmark = [pytest.mark.gpu, needs_hopper]
CUDA = BACKEND_OPS["cuda"]
MANY = tuple(37 * i % 900 for i in range(300))
SPECS = {
    **{
        name: BATCH_SPECS[name]
        for name in ("decode_one", "decode_edges", "decode_padded", "speculative", "left_padded_chunk")
    },
    "edges of tiles": BatchSpec("edges of tiles", (63, 64, 65, 127, 128, 129), (1,) * 6),
    "one long": BatchSpec("one long", (5000,), (1,)),
    "skewed": BatchSpec("skewed", (9000, *(100,) * 20), (1,) * 21, padded_tokens=3, padded_reqs=2),
    "many": BatchSpec("many", MANY, (1,) * len(MANY), padded_tokens=1),
    "drafts": BatchSpec("drafts", (700, 5, 2049, 1), (8, 8, 3, 1)),
    "clusters": BatchSpec("clusters", (2000, 1, 0, 65, 1000, 513, 512, 1030), (1,) * 8, padded_tokens=2),
    "drafts in clusters": BatchSpec("drafts in clusters", (700, -2, 1900, 2), (2, 2, 1, 2), padded_reqs=1),
}


def check_that_it_is_taken(batch: Batch) -> None:
    """Not left to Triton."""
    shapes = (*batch.q.shape[:2], batch.v_cache.shape[-1])
    call = LatentCall(
        *latent_tensors(batch),
        torch.empty(shapes, dtype=batch.q.dtype, device="cuda"),
        None,
        batch.max_query_len,
        batch.scale,
    )
    assert shape.why_not(call, (9, 0)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("num_heads", [1, 5, 8, 16, 20, 32, 64, 128])
def test_matches_the_oracle(num_heads: int, block_size: int, dtype: torch.dtype) -> None:
    for number, spec in enumerate(SPECS.values()):
        if max(spec.query_lens) * num_heads > shape.MAX_ROWS:
            continue
        options: dict[str, Any] = {"causal": number % 3 != 2}
        batch = make_latent_batch(
            spec,
            num_heads=num_heads,
            rank=512,
            rope=64,
            dtype=dtype,
            device="cuda",
            block_size=block_size,
            seed=number,
        )
        check_that_it_is_taken(batch)
        out, lse = run_mla_attention(CUDA, batch, **options)
        assert_latent_close(out, lse, batch, **options)
        again, lse_again = run_mla_attention(CUDA, batch, **options)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("seq_lens", [(1, 3, 300, 64), (2, 2000) + (500,) * 20], ids=["clusters", "ranges"])
@pytest.mark.parametrize("num_heads", [2, 5, 16])
def test_not_causal_ahead_of_the_first_key(num_heads: int, seq_lens: tuple[int, ...]) -> None:
    """Query tokens at negative positions see nothing, those behind them all keys."""
    spec = BatchSpec("left padded", seq_lens, (4,) * len(seq_lens))
    shapes: dict[str, Any] = {"num_heads": num_heads, "rank": 512, "rope": 64}
    batch = make_latent_batch(spec, **shapes, dtype=torch.bfloat16, device="cuda")
    out, lse = run_mla_attention(CUDA, batch, causal=False)
    assert_latent_close(out, lse, batch, causal=False)
    assert not out[0].any() and bool(lse[0].isneginf().all()) and bool(out[3].any())


@pytest.mark.parametrize(("num_heads", "query_len"), [(8, 2), (16, 1), (16, 8), (128, 1)])
def test_one_capture_serves_other_lengths(num_heads: int, query_len: int) -> None:
    longest = BatchSpec("longest", (1500,) * 6, (query_len,) * 6)
    batch = make_latent_batch(
        longest, num_heads=num_heads, rank=512, rope=64, dtype=torch.bfloat16, device="cuda"
    )
    batch.k_cache.nan_to_num_()
    graph, (out, lse) = captured(lambda: run_mla_attention(CUDA, batch))
    for seq_lens in (
        (1500, 3, 700, 0, 64, 65),
        (0, 129, 1, 0, 0, 1000),
        (1, 1, 0, 0, 0, 0),
        (0,) * 6,
        (1500,) * 6,
    ):
        batch.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        graph.replay()
        assert_latent_close(out, lse, batch)


def test_a_row_that_sees_nan_gives_nan_and_no_other_row_does() -> None:
    spec = BatchSpec("nan", (300, 200, 100), (1, 1, 1))
    batch = make_latent_batch(spec, num_heads=16, rank=512, rope=64, dtype=torch.bfloat16, device="cuda")
    block = int(batch.block_table[1, 3])
    batch.k_cache[block, 5, 0, 540] = float("nan")  # of a rotated key
    out, lse = run_mla_attention(CUDA, batch)
    assert out[1].isnan().all() and lse[1].isnan().all()
    assert out[[0, 2]].isfinite().all() and lse[[0, 2]].isfinite().all()
