"""The CUDA C++ kernels of sparse latent attention and of its indexer on Hopper: oracles over heads, blocks
and lengths, the same bits every time, one capture for other lengths."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from captured import captured
from gpus import needs_hopper
from op_inputs.indexer import exact_logits, make_index_batch, run_index_logits, weights_of
from op_inputs.latent import (
    SELECTIONS,
    assert_sparse_close,
    latent_tensors,
    make_latent_batch,
    run_mla_attention,
    selected,
)
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.indexer.call import IndexCall
from torchpaged.custom_ops.indexer.cuda import index_logits, top_k_indices
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import mla_attention
from torchpaged.custom_ops.mla.cuda import selected as selected_cuda
from torchpaged.testing import BATCH_SPECS, BatchSpec

pytestmark = [pytest.mark.gpu, needs_hopper]
CUDA, REFERENCE = BACKEND_OPS["cuda"], BACKEND_OPS["reference"]
FEW = {
    **{
        name: BATCH_SPECS[name]
        for name in ("decode_edges", "decode_padded", "speculative", "left_padded_chunk")
    },
    "long": BatchSpec("long", (5000, 3, 0, 700), (1, 1, 1, 1), padded_tokens=2),
}
#: So many tokens that the kernel takes more than 16 heads, and a cluster is no larger than positions need.
MANY = BatchSpec("many", tuple(2600 if i == 50 else 37 * i % 300 for i in range(80)), (1,) * 80)


def check_selected(spec: BatchSpec, top_k: int, kind: str, options: dict[str, Any], **sizes: Any) -> None:
    """Against the oracle; a second call gives the same bits."""
    batch = make_latent_batch(spec, rank=512, rope=64, device="cuda", **sizes)
    options = {**options, "indices": selected(batch, kind, top_k)}
    out, lse = run_mla_attention(CUDA, batch, **options)
    call = LatentCall(*latent_tensors(batch), out, lse, batch.max_query_len, batch.scale, **options)
    assert mla_attention.route(call) is None
    assert_sparse_close(out, lse, batch, **options)
    again, lse_again = run_mla_attention(CUDA, batch, **options)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("kind", SELECTIONS)
@pytest.mark.parametrize(("num_heads", "block_size"), [(16, 64), (5, 16)])
@pytest.mark.parametrize("kernel", ["few", "clusters"])
def test_selected(
    kernel: str, num_heads: int, block_size: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that meet in a second launch; few positions of a CTA, and so many that a cluster shares them."""
    if kernel == "clusters":
        monkeypatch.setattr(selected_cuda, "few_parts", lambda *_: 0)
    for number, spec in enumerate((*FEW.values(), MANY)):
        options = {"causal": number % 3 != 2}
        dtype = torch.float16 if number % 2 else torch.bfloat16
        for top_k in (11, 2048):
            check_selected(
                spec, top_k, kind, options, num_heads=num_heads, block_size=block_size, dtype=dtype
            )


@pytest.mark.parametrize(("kind", "top_k"), [("some", 2048), ("all", 4096), ("beyond", 11)])
@pytest.mark.parametrize(("num_heads", "block_size"), [(64, 64), (128, 32), (64, 128)])
def test_selected_by_many_heads(num_heads: int, block_size: int, kind: str, top_k: int) -> None:
    """By latent_selected.cu; blocks of 128 by selected.cu, where 4,096 positions take two CTAs."""
    dtype = torch.bfloat16 if top_k == 2048 else torch.float16
    options = {"causal": top_k != 11}
    check_selected(MANY, top_k, kind, options, num_heads=num_heads, block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("num_heads", "block_size"), [(64, 64), (20, 16), (32, 128)])
def test_logits(num_heads: int, block_size: int, fp8: bool) -> None:
    for number, spec in enumerate((*FEW.values(), MANY)):
        sizes = {"width": 128, "num_heads": num_heads, "block_size": block_size}
        batch = make_index_batch(spec, **sizes, dtype=torch.bfloat16, device="cuda")
        options: dict[str, Any] = {"causal": number % 3 != 2}
        if fp8:
            batch = replace(batch, k_cache=batch.k_cache.to(torch.float8_e4m3fn))
            options["k_scale"] = torch.rand(batch.k_cache.shape[:2], device="cuda") + 0.5
        got = run_index_logits(CUDA, batch, **options)
        tensors = batch.k_cache, batch.block_table, batch.seq_lens, batch.query_start_loc
        call = IndexCall(batch.q, weights_of(batch), *tensors, got, batch.max_query_len, **options)
        assert index_logits.why_not(call, (9, 0)) is None and index_logits.why_slower(call) is None
        want = exact_logits(batch, **options)
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-3)
        assert torch.equal(got, run_index_logits(CUDA, batch, **options))


def test_a_nan_of_e4m3_is_seen() -> None:
    """Of either sign, by the kernel, which leaves calls of one token over few keys to Triton's."""
    batch = make_index_batch(
        BatchSpec("nan", (300, 70, 1, 2), (1,) * 4),
        width=128,
        num_heads=64,
        block_size=64,
        dtype=torch.bfloat16,
        device="cuda",
    )
    keys = batch.k_cache.nan_to_num(0.0).to(torch.float8_e4m3fn)
    for position, column, bits in ((3, 77, 0x7F), (259, 0, 0xFF)):
        block = int(batch.block_table[0, position // 64])
        keys.view(torch.uint8)[block, position % 64, 0, column] = bits
    scales = torch.ones(keys.shape[:2], device="cuda")
    got = run_index_logits(CUDA, replace(batch, k_cache=keys), k_scale=scales)
    assert got.isnan().nonzero().tolist() == [[0, 3], [0, 259]]


def rows_of_logits(rows: int, columns: int) -> Tensor:
    """On the CPU."""
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(rows, columns, generator=generator)
    for row, values in enumerate(logits):
        if row % 6 == 1:
            values[::3] = float("-inf")
        elif row % 6 == 2:
            values.round_()  # most are equal
        elif row % 6 == 3:
            values[columns // 30 :] = float("-inf")
        elif row % 6 == 4:
            values[5:9] = torch.tensor([float("nan"), float("inf"), -float("nan"), -0.0])
        elif row % 6 == 5:
            values.sign_().mul_(0.0)
    return logits


SHAPES = [(6, 40), (6, 5000), (12, 131072), (64, 8192), (200, 20000)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_top_k(rows: int, columns: int) -> None:
    """Those of the reference on the CPU, of equal ones the first, in ascending order; and on the GPU the
    reference says the same, signs of NaN included."""
    cpu = rows_of_logits(rows, columns)
    logits = cpu.cuda()
    for top_k in (1, 512, 2048):
        got, there = (torch.full((rows, top_k), -7, dtype=torch.int32, device="cuda") for _ in range(2))
        want = torch.full((rows, top_k), -7, dtype=torch.int32)
        assert top_k_indices.why_not(logits, got, (9, 0)) is None
        CUDA.top_k_indices(logits, got)
        REFERENCE.top_k_indices(cpu, want)
        REFERENCE.top_k_indices(logits, there)
        assert torch.equal(there.cpu(), want)
        behind = torch.iinfo(torch.int32).max
        ordered = want.where(want >= 0, behind).sort(1).values
        assert torch.equal(got.cpu(), ordered.where(ordered < behind, -1))


def test_one_capture_serves_other_lengths() -> None:
    """Logits, the best positions, and attention to them, in one graph."""
    longest = BatchSpec("longest", (1500,) * 4, (1,) * 4)
    latents = make_latent_batch(
        longest, num_heads=16, rank=512, rope=64, dtype=torch.bfloat16, device="cuda", block_size=64
    )
    keys = make_index_batch(
        longest, width=128, num_heads=64, block_size=64, dtype=torch.bfloat16, device="cuda"
    )
    weights = weights_of(keys)

    def step() -> tuple[Tensor, ...]:
        logits = run_index_logits(CUDA, keys, weights)
        indices = torch.empty(4, 100, dtype=torch.int32, device="cuda")
        CUDA.top_k_indices(logits, indices)
        return logits, indices, *run_mla_attention(CUDA, latents, indices=indices)

    graph, (logits, indices, out, lse) = captured(step)
    for seq_lens in ((1500, 3, 700, 64), (0, 129, 1, 1500), (1, 1, 0, 0)):
        for batch in (latents, keys):
            batch.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        graph.replay()
        torch.testing.assert_close(logits.cpu().double(), exact_logits(keys), rtol=1e-4, atol=1e-3)
        want = torch.empty_like(indices, device="cpu")
        REFERENCE.top_k_indices(logits.cpu(), want)
        assert torch.equal(indices.cpu().sort(1).values, want.sort(1).values)
        assert_sparse_close(out, lse, latents, indices)
