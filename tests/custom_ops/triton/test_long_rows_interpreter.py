"""Heads that lie further apart than 32 bits count, as in one long row of HF's layout. In the interpreter:
see test_run_interpreter.py."""

import pytest
import torch
from op_inputs.rope import make_rope_inputs
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BatchSpec, make_batch

TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
# the third head begins at 2**31: past a signed number of 32 bits, while the stride itself is one
HEAD = 2**30


def far_apart(x: Tensor) -> Tensor:
    """``x [T, heads, dim]`` with HEAD numbers between heads; memory that nothing touches is never there."""
    tokens, heads, dim = x.shape
    storage = torch.empty((heads - 1) * HEAD + tokens * dim, dtype=x.dtype)
    view = storage.as_strided((tokens, heads, dim), (dim, HEAD, 1))
    view.copy_(x)
    return view


@pytest.mark.slow
@pytest.mark.parametrize("query_lens", [(1, 1), (12, 9)], ids=["decode", "prefill"])
def test_attention(query_lens: tuple[int, ...]) -> None:
    batch = make_batch(
        BatchSpec("far", (40, 20), query_lens), num_heads=3, num_kv_heads=3, head_dim=16, dtype=torch.float16
    )
    arguments = (batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens, batch.query_start_loc)
    options = {"max_query_len": batch.max_query_len, "scale": batch.scale}
    want, got = torch.zeros_like(batch.q), far_apart(torch.zeros_like(batch.q))
    REFERENCE.paged_attention(batch.q, *arguments, want, **options)
    TRITON.paged_attention(far_apart(batch.q), *arguments, got, **options)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_rope_write_kv() -> None:
    results = []
    for ops, place in ((REFERENCE, lambda x: x), (TRITON, far_apart)):
        inputs = make_rope_inputs(num_heads=3, num_kv_heads=3, dtype=torch.float16)
        inputs |= {name: place(inputs[name]) for name in ("q", "k", "v", "q_out")}
        ops.rope_write_kv(**inputs)
        results.append(inputs)
    for name in ("q_out", "k_cache", "v_cache"):
        torch.testing.assert_close(results[1][name], results[0][name], rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.slow
def test_write_kv() -> None:
    k, v = torch.randn(2, 5, 3, 16).half()
    slots = torch.tensor([4, 5, -1, 7, 9])
    want, got = (tuple(torch.zeros(4, 4, 3, 16, dtype=torch.float16) for _ in range(2)) for _ in range(2))
    REFERENCE.write_kv(k, v, *want, slots)
    TRITON.write_kv(far_apart(k), far_apart(v), *got, slots)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.slow
def test_merge_attn_states() -> None:
    a, b = torch.randn(2, 2, 3, 16).half()
    lse_a, lse_b = torch.randn(2, 2, 3)
    want, got = torch.zeros_like(a), far_apart(torch.zeros_like(a))
    REFERENCE.merge_attn_states(a, lse_a, b, lse_b, want)
    TRITON.merge_attn_states(far_apart(a), lse_a, far_apart(b), lse_b, got)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
