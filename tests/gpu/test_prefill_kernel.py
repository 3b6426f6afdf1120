"""The CUDA C++ prefill kernel with queries of e4m3: it ends, its results are right, and the same every time;
under a watchdog."""

from collections.abc import Callable, Iterator

import pytest
import torch
from gpus import needs_hopper
from prefill_worker import CONFIGURATIONS
from watched import watched

import torchpaged
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.testing import BatchSpec, make_batch, run_paged_attention

pytestmark = [pytest.mark.gpu, needs_hopper]
BATCHES = 25  # of each configuration


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., None]]:
    with watched("prefill_worker:run", launching=120) as run:
        yield run


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_random_batches(run: Callable[..., None], name: str) -> None:
    for seed in range(BATCHES):
        run(name=name, seed=seed)


@pytest.mark.parametrize("query_lens", [(1, 1, 1), (40, 300, 7)], ids=["single tokens", "prompts"])
def test_the_function_with_queries_of_e4m3(query_lens: tuple[int, ...]) -> None:
    """Chosen by itself; short queries too; a scale per kv head."""
    spec = BatchSpec("drawn", tuple(n + 100 for n in query_lens), query_lens, padded_tokens=3)
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "kv_dtype": torch.float8_e4m3fn}
    batch = make_batch(spec, seed=3, dtype=torch.bfloat16, scales="per_head", **sizes).to("cuda")
    q, q_scale = batch.q.to(torch.float8_e4m3fn), torch.tensor([0.5, 1.5], device="cuda")
    lengths = (batch.block_table, batch.seq_lens, batch.query_start_loc)
    options = {**batch.extras, "max_query_len": batch.max_query_len, "q_scale": q_scale, "return_lse": True}
    out, lse = torchpaged.paged_attention(q, batch.k_cache, batch.v_cache, *lengths, **options)
    exact = torch.empty(*out.shape, dtype=torch.float64, device="cuda")
    reference = {**options, "out": exact, "ops": BACKEND_OPS["reference"]}
    _, exact_lse = torchpaged.paged_attention(q, batch.k_cache, batch.v_cache, *lengths, **reference)
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).norm() < 0.05 * exact.norm()
    torch.testing.assert_close(lse, exact_lse, atol=1e-2, rtol=0)


def test_queries_of_e4m3_that_no_kernel_takes() -> None:
    """Refused, not run by another kernel."""
    spec = BatchSpec("drawn", (40,), (40,))
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 96, "kv_dtype": torch.float8_e4m3fn}
    batch = make_batch(spec, dtype=torch.bfloat16, **sizes).to("cuda")
    batch.q = batch.q.to(torch.float8_e4m3fn)
    with pytest.raises(BackendUnavailableError, match="head_dim 96/96"):
        run_paged_attention(BACKEND_OPS["cuda"], batch)
