"""The CUDA C++ kernel of sparse latent attention for many heads, on Hopper, against the oracle."""

from typing import Any

import pytest
import torch
from captured import captured
from gpus import needs_hopper
from op_inputs.latent import (
    SELECTIONS,
    as_fp8,
    assert_sparse_close,
    latent_tensors,
    make_latent_batch,
    of_size,
    run_mla_attention,
    selected,
)

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import latent_selected, mla_attention
from torchpaged.testing import BatchSpec

pytestmark = [pytest.mark.gpu, needs_hopper]
CUDA = BACKEND_OPS["cuda"]
#: Lengths of several tiles of 64, on their borders and around; drafts; prompts of more tokens than CTAs fit.
BATCHES = {
    "one": BatchSpec("one", (5000,), (1,)),
    "edges": BatchSpec("edges", (64, 3, 0, 65, 700), (1,) * 5, padded_tokens=2),
    "drafts": BatchSpec("drafts", (900, 8, -2), (3, 2, 4)),
    "prompts": BatchSpec("prompts", (400, 90, 3000), (120, 30, 20)),
}


@pytest.fixture(autouse=True)
def _few_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_CTAS", "MIN_FP8_CTAS"):
        monkeypatch.setattr(latent_selected, name, 1)


def alone_or_in_turns(monkeypatch: pytest.MonkeyPatch, turns: bool) -> None:
    """One CTA, or two, for 64 heads of a token."""
    monkeypatch.setattr(gpu, "num_sms", lambda _: 1 << 20 if turns else 1)


def check(
    spec: BatchSpec, heads: int, block_size: int, dtype: torch.dtype, kind: str, **options: Any
) -> None:
    """Against the oracle; a second call gives the same bits."""
    top_k, fp8, power = options.pop("top_k"), options.pop("fp8", False), options.pop("power", 0)
    batch = make_latent_batch(
        spec, rank=512, rope=64, device="cuda", num_heads=heads, block_size=block_size, dtype=dtype
    )
    batch = of_size(batch, power)
    batch = as_fp8(batch) if fp8 else batch
    options["indices"] = selected(batch, kind, top_k)
    out, lse = run_mla_attention(CUDA, batch, **options)
    call = LatentCall(*latent_tensors(batch), out, lse, batch.max_query_len, batch.scale, **options)
    assert mla_attention.route(call) is None and latent_selected.why_not(call) is None
    assert_sparse_close(out, lse, batch, **options)
    again, lse_again = run_mla_attention(CUDA, batch, **options)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("kind", SELECTIONS)
@pytest.mark.parametrize("name", BATCHES)
def test_selected(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unwritten rows of the pool are NaN."""
    number = SELECTIONS.index(kind)
    alone_or_in_turns(monkeypatch, (number + list(BATCHES).index(name)) % 2 == 1)
    heads, dtype = (64, 128, 33, 100)[number % 4], (torch.bfloat16, torch.float16)[number % 2]
    top_k, causal = (2048, 200, 65)[number % 3], number != 3
    check(BATCHES[name], heads, (64, 32, 16)[number % 3], dtype, kind, top_k=top_k, causal=causal)


FP8_KINDS = "some", "all", "beyond", "none"


@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.parametrize("name", BATCHES)
def test_selected_rows_of_fp8(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone_or_in_turns(monkeypatch, (FP8_KINDS.index(kind) + list(BATCHES).index(name)) % 2 == 1)
    heads = 128 if name in ("edges", "prompts") else 64
    check(BATCHES[name], heads, 64, torch.bfloat16, kind, top_k=2048 if kind == "some" else 200, fp8=True)


def test_large_sums_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs send each other sums as float16 over a power of two."""
    alone_or_in_turns(monkeypatch, True)
    check(BATCHES["one"], 64, 64, torch.bfloat16, "some", top_k=300, power=90)


def test_one_capture_serves_other_lengths() -> None:
    sizes: dict[str, Any] = {"num_heads": 64, "rank": 512, "rope": 64, "block_size": 64}
    longest = BatchSpec("longest", (1500,) * 4, (1,) * 4)
    batch = make_latent_batch(longest, dtype=torch.bfloat16, device="cuda", **sizes)
    indices = selected(batch, "some", 300)
    graph, (out, lse) = captured(lambda: run_mla_attention(CUDA, batch, indices=indices))
    for seq_lens in ((1500, 3, 700, 64), (0, 129, 1, 1500), (1, 1, 0, 0)):
        batch.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        graph.replay()
        assert_sparse_close(out, lse, batch, indices)
