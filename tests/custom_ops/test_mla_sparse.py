"""Sparse latent attention on a CPU: the oracle, over every batch and kind of selection; what is refused; and
who serves such calls."""

from typing import Any

import pytest
import torch
from kernels import Kernels, over
from op_inputs.latent import (
    SELECTIONS,
    assert_sparse_close,
    latent_tensors,
    make_latent_batch,
    run_mla_attention,
    selected,
)

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.mla import selection
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import shape
from torchpaged.testing import BATCH_SPECS

CPU, REFERENCE = BACKEND_OPS["cpu"], BACKEND_OPS["reference"]


@pytest.mark.parametrize("kind", SELECTIONS)
@over("cpu", "reference", spec=BATCH_SPECS)
def test_matches_the_oracle(on: Kernels, spec: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens at a time, too; on a GPU few positions, and so many that they are cut into parts."""
    for causal, at_once, top_k in ((True, 1 << 24, 11), (on.device == "cuda", 1 << 9, 300)):
        monkeypatch.setattr(selection, "_AT_ONCE", at_once)
        sizes: dict[str, Any] = {"rank": 24, "rope": 8, "block_size": 4}
        if on.device == "cuda":
            sizes = {"rank": 64, "rope": 16, "dtype": torch.bfloat16, "device": "cuda"}
        batch = make_latent_batch(BATCH_SPECS[spec], **sizes)
        indices = selected(batch, kind, top_k if on.device == "cuda" else 11)
        out, lse = run_mla_attention(on.ops, batch, indices=indices, causal=causal)
        assert_sparse_close(out, lse, batch, indices, causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_deepseeks_width(dtype: torch.dtype) -> None:
    batch = make_latent_batch(BATCH_SPECS["mixed_small"], num_heads=70, rank=512, rope=64, dtype=dtype)
    indices = selected(batch, "some")
    assert_sparse_close(*run_mla_attention(CPU, batch, indices=indices), batch, indices)


def test_all_positions_are_dense_attention() -> None:
    batch = make_latent_batch(BATCH_SPECS["mixed_padded"])
    every = torch.arange(90, dtype=torch.int32).expand(batch.q.shape[0], 90).contiguous()
    for want, got in zip(
        run_mla_attention(CPU, batch), run_mla_attention(CPU, batch, indices=every), strict=True
    ):
        torch.testing.assert_close(got, want)


BAD: dict[str, Any] = {
    "of int64": lambda x: x.long(),
    "of fewer tokens": lambda x: x[1:],
    "of one dimension": lambda x: x[:, 0],
    "of no positions": lambda x: x[:, :0],
    "in columns": lambda x: x.T.contiguous().T,
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    batch = make_latent_batch(BATCH_SPECS["mixed_small"])
    indices = BAD[case](selected(batch, "some"))
    out = torch.zeros(*batch.q.shape[:2], batch.v_cache.shape[-1])
    for ops in (REFERENCE, CPU):
        with pytest.raises(ArgumentError, match="^indices: expected"):
            ops.mla_attention(
                *latent_tensors(batch), out, max_query_len=batch.max_query_len, scale=0.1, indices=indices
            )
    assert not out.any()


def test_the_hopper_kernel_leaves_them_to_triton() -> None:
    batch = make_latent_batch(BATCH_SPECS["decode_one"], rank=512, rope=64, dtype=torch.bfloat16)
    out = torch.zeros(*batch.q.shape[:2], 512, dtype=torch.bfloat16)
    metadata = batch.block_table, batch.seq_lens, batch.query_start_loc
    call = LatentCall(batch.q, batch.k_cache, *metadata, out, None, 1, 0.1)
    assert shape.why_not(call, (9, 0)) is None
    why = shape.why_not(call._replace(indices=selected(batch, "some")), (9, 0))
    assert why is not None
    assert why.startswith("indices")
