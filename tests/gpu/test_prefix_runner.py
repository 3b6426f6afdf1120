"""A runner whose steps share blocks takes its second graph, and gives what the plain one gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchpaged import AttentionMetadata, PagedAttention
from torchpaged.graphs import DecodeGraphRunner
from torchpaged.prefixes import AutomaticPrefixes, CascadeCosts

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, DIM, BLOCK, WIDTH = 32, 8, 128, 16, 40


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
def test_steps_in_groups_equal_steps_alone(compile: bool) -> None:
    free = CascadeCosts(0.0, 0.0, 1.0, 1e12, "whatever is shared pays")
    sizes: Any = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "kv_dtype": torch.bfloat16}
    prefixes = AutomaticPrefixes(
        **sizes, max_blocks_per_req=WIDTH, block_size=BLOCK, device="cuda", costs=free
    )
    words = [
        torch.randn(50, n, DIM, dtype=torch.bfloat16, device="cuda") for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    first = [torch.randn(200, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    runners = []
    for given in (prefixes, None):
        layer = PagedAttention(HEADS, DIM, KV_HEADS, device="cuda", dtype=torch.bfloat16)
        pools = [pool.clone() for pool in first]

        def step(ids: Tensor, metadata: AttentionMetadata, layer: Any = layer, pools: Any = pools) -> Tensor:
            q, k, v = (of[ids] for of in words)
            return layer(q, k, v, (pools[0], pools[1]), metadata).flatten(1)

        options: Any = {"max_batch_size": 4, "max_blocks_per_req": WIDTH, "block_size": BLOCK}
        runners.append(
            DecodeGraphRunner(
                step, **options, buckets=[4], num_blocks=200, device="cuda", compile=compile, prefixes=given
            )
        )
    shared = list(range(1, 21))
    tables = [[*shared, *range(30 + 10 * row, 40 + 10 * row)] for row in range(3)]
    alone = list(range(100, 140))
    for n in range(6):
        rows = [*tables[: 2 + n % 2], alone]
        lens = [325 + 7 * row + n for row in range(len(rows) - 1)] + [500 + n]
        ids = [(5 * n + row) % 50 for row in range(len(rows))]
        got, want = (runner.run(ids, lens, rows).float().clone() for runner in runners)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert runners[0].prefix_graphs is not None
    assert sum(report.hits for report in runners[0].prefix_graphs.report()) == 6
