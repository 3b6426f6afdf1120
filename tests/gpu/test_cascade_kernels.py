"""The three launches of cascade_attention on Hopper: equal to the plain path, the same bits every time, one
graph for all lengths and groups, whatever the CTAs."""

import random
from typing import Any

import pytest
import torch
from captured import captured
from gpus import needs_hopper

import torchpaged
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.prefixes import SharedPrefixes, cascade_attention, find_prefix_groups

pytestmark = [pytest.mark.gpu, needs_hopper]
BLOCK = 16
#: Of groups: shared blocks, own tokens, requests.
BATCHES: dict[str, list[tuple[int, int, int]]] = {
    "few": [(64, 40, 7)],
    "some alone": [(64, 40, 40), (0, 300, 5)],
    "many": [(64, 40, 200)],
    "lengths": [(256, 33, 96), (80, 17, 64), (0, 5, 3)],
    "alike": [(30, 100, 64)] * 4,
    "long": [(900, 20, 120)],
    "alone": [(0, 100, 9)],
}


class Batch:
    """Requests in random order, and their groups."""

    def __init__(
        self,
        spec: list[tuple[int, int, int]],
        shape: tuple[int, int, int] = (32, 8, 128),
        query_len: int = 1,
        padding: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        torch.manual_seed(0)
        heads, kv_heads, dim = shape
        rng, tables, lens, block = random.Random(1), [], [], 1
        for shared, own, count in spec:
            prefix = list(range(block, block + shared))
            block += shared
            for _ in range(count):
                mine = -(-own // BLOCK)
                tables.append([*prefix, *range(block, block + mine)])
                lens.append(shared * BLOCK + own)
                block += mine
        mixed = rng.sample(range(len(lens)), len(lens))
        self.tables, self.lens = [tables[i] for i in mixed], [lens[i] for i in mixed]
        self.queries = [query_len] * len(lens)
        width = max(map(len, tables))
        tokens = len(lens) * query_len + padding
        self.pools = [torch.randn(block, BLOCK, kv_heads, dim, device="cuda").to(dtype) for _ in range(2)]
        if kv_dtype is not None:
            self.pools = [pool.to(kv_dtype) for pool in self.pools]
        self.q = torch.randn(tokens, heads, dim, device="cuda").to(dtype)
        rows = [row + [0] * (width - len(row)) for row in self.tables]
        self.table = torch.tensor(rows, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.tensor(self.lens, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(len(lens) + 1, dtype=torch.int32, device="cuda") * query_len
        self.prefixes = SharedPrefixes.allocate(
            max_num_groups=8,
            num_reqs=len(lens),
            num_tokens=tokens,
            max_blocks_per_req=width,
            block_size=BLOCK,
            device="cuda",
        )
        self.regroup(self.lens)
        self.query_len = query_len

    def regroup(self, lens: list[int]) -> None:
        groups = find_prefix_groups(self.tables, self.queries, lens, block_size=BLOCK)
        self.prefixes.set(groups[:8], self.tables, self.queries, lens)

    def plain(self, **options: Any) -> Any:
        batch = self.table, self.seq_lens, self.starts
        return torchpaged.paged_attention(
            self.q, *self.pools, *batch, max_query_len=self.query_len, **options
        )

    def cascade(self, **options: Any) -> Any:
        batch = self.table, self.seq_lens, self.starts
        options = {"max_query_len": self.query_len, "ops": BACKEND_OPS["cuda"], **options}
        return cascade_attention(self.q, *self.pools, *batch, self.prefixes, **options)


def assert_equal_to_plain(batch: Batch, **options: Any) -> None:
    want, want_lse = batch.plain(return_lse=True, **options)
    got, lse = batch.cascade(return_lse=True, **options)
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=4e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-3)
    again = batch.cascade(**options)
    assert torch.equal(got, again), "the same bits, with LSE and without"


@pytest.mark.parametrize("name", BATCHES)
def test_equal_to_the_plain_path(name: str) -> None:
    assert_equal_to_plain(Batch(BATCHES[name]))


@pytest.mark.parametrize(
    ("spec", "made", "options"),
    [
        ([(300, 50, 100)], {"shape": (9, 3, 64)}, {}),
        ([(300, 50, 60)], {"shape": (8, 2, 256)}, {"logits_soft_cap": 5.0}),
        ([(100, 50, 30)], {"query_len": 3, "padding": 2}, {}),
        ([(500, 20, 70)], {"dtype": torch.float16}, {"sinks": "sinks"}),
        ([(200, 20, 70)], {"kv_dtype": torch.float8_e4m3fn}, {"k_scale": 0.5, "v_scale": 2.0}),
    ],
    ids=["width 64", "width 256, soft cap", "three tokens", "sinks", "fp8"],
)
def test_shapes_and_features(
    spec: list[tuple[int, int, int]], made: dict[str, Any], options: dict[str, Any]
) -> None:
    batch = Batch(spec, **made)
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = torch.randn(batch.q.shape[1], device="cuda").to(batch.q.dtype)
    for name in ("k_scale", "v_scale"):
        if name in options:
            options[name] = torch.tensor([options[name]], device="cuda")
    assert_equal_to_plain(batch, **options)


@pytest.mark.parametrize("ctas", [1, 40, 100, 120, 132])
def test_any_number_of_ctas(ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchpaged.custom_ops.attention.cuda import cascade_attention as module

    monkeypatch.setattr(module, "prefix_ctas", lambda num_sms: ctas)
    for name in ("few", "lengths", "long"):
        assert_equal_to_plain(Batch(BATCHES[name]))


def test_it_is_these_launches() -> None:
    """What the tests above are about is reached, and left where it has no room."""
    from torchpaged.custom_ops.attention.call import AttentionCall
    from torchpaged.custom_ops.attention.cascade_call import CascadeCall
    from torchpaged.custom_ops.attention.cuda.cascade_attention import refuse

    batch = Batch(BATCHES["many"])
    out = torch.empty_like(batch.q)

    def refused(max_query_len: int) -> str | None:
        lengths = (batch.table, batch.seq_lens, batch.starts)
        own = AttentionCall(batch.q, *batch.pools, *lengths, out, None, max_query_len, 0.1)
        shared = batch.prefixes
        groups = (shared.block_table, shared.lens, shared.query_start_loc, shared.order, shared.inverse)
        return refuse(CascadeCall(own, *groups))

    assert refused(1) is None
    assert "suffixes" in str(refused(700))


def test_one_graph_for_all_lengths_and_groups() -> None:
    batch = Batch(BATCHES["lengths"], padding=4)
    graph, out = captured(batch.cascade)
    for step in range(4):
        lens = [n + step for n in batch.lens] if step < 3 else [1] * len(batch.lens)
        batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        if step == 2:
            batch.prefixes.clear()
        else:
            batch.regroup(lens)
        torch.cuda.synchronize()
        for _ in range(2):
            graph.replay()
        torch.testing.assert_close(out.float(), batch.plain().float(), rtol=2e-2, atol=4e-3)
