"""Native CPU kernels open a parallel region only where each thread gets enough work: the library counts
its regions."""

import ctypes
from typing import Any

import pytest
import torch
from op_inputs.channels import make_channel_inputs
from op_inputs.state import Rows, clone

from torchpaged import AttentionMetadata
from torchpaged.custom_ops import BACKEND_OPS, native_status

MIN_WORK = 1 << 19


@pytest.fixture
def library(native: None) -> ctypes.CDLL:
    library = ctypes.CDLL(native_status()[1])
    library.torchpaged_workers_for.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.torchpaged_workers_for.restype = library.torchpaged_parallel_regions.restype = ctypes.c_int64
    return library


@pytest.mark.parametrize(
    ("work", "threads", "want"),
    [
        (0, 8, 1),
        (MIN_WORK - 1, 8, 1),
        (2 * MIN_WORK - 1, 8, 1),
        (2 * MIN_WORK, 8, 2),
        (5 * MIN_WORK, 8, 5),
        (99 * MIN_WORK, 8, 8),
        (99 * MIN_WORK, 1, 1),
    ],
)
def test_every_thread_gets_enough_work(library: Any, work: int, threads: int, want: int) -> None:
    assert library.torchpaged_workers_for(work, threads) == want


def attend(seq_len: int, num_reqs: int) -> None:
    """Decode of 8 query and 2 kv heads of 64: 1024 multiply-adds a key."""
    blocks = -(-seq_len // 16)
    cache = torch.randn(num_reqs * blocks + 1, 16, 2, 64)
    tables = [list(range(1 + r * blocks, 1 + (r + 1) * blocks)) for r in range(num_reqs)]
    m = AttentionMetadata.from_lists([1] * num_reqs, [seq_len] * num_reqs, tables, block_size=16)
    q = torch.randn(num_reqs, 8, 64)
    out, want = torch.empty_like(q), torch.empty_like(q)
    arguments = (q, cache, cache.flip(0), m.block_table, m.seq_lens, m.query_start_loc)
    BACKEND_OPS["cpu"].paged_attention(*arguments, out, max_query_len=1, scale=0.125)
    BACKEND_OPS["reference"].paged_attention(*arguments, want, max_query_len=1, scale=0.125)
    torch.testing.assert_close(out, want)


def write(num_tokens: int) -> None:
    """1 KiB of keys and as much of values a token."""
    cache = torch.zeros(num_tokens // 16 + 2, 16, 4, 64)
    k = torch.randn(num_tokens, 4, 64)
    BACKEND_OPS["cpu"].write_kv(k, k, cache, torch.zeros_like(cache), torch.arange(num_tokens))
    assert torch.equal(cache.view(-1, 4, 64)[:num_tokens], k)


def merge(num_tokens: int) -> None:
    x, lse = torch.randn(num_tokens, 8, 64), torch.zeros(num_tokens, 8)
    out = torch.empty_like(x)
    BACKEND_OPS["cpu"].merge_attn_states(x, lse, x, lse, out)
    torch.testing.assert_close(out, x)


@pytest.mark.parametrize(
    ("run", "regions"),
    [
        (lambda: attend(1000, 1), 0),
        (lambda: attend(240, 4), 0),
        (lambda: attend(1040, 1), 1),
        (lambda: attend(300, 4), 1),
        (lambda: write(1000), 0),
        (lambda: write(2100), 2),
        (lambda: merge(500), 0),
        (lambda: merge(600), 1),
    ],
    ids=[
        "decode-short",
        "decode-batch-short",
        "decode-long",
        "decode-batch",
        "write",
        "write-long",
        "merge",
        "merge-long",
    ],
)
def test_regions(library: Any, threads: Any, run: Any, regions: int) -> None:
    threads(2)
    before = library.torchpaged_parallel_regions()
    run()
    assert library.torchpaged_parallel_regions() - before == regions


@pytest.mark.parametrize("op", ["selective_scan", "rg_lru"])
def test_channels_of_states_are_shared_by_threads(library: Any, threads: Any, op: str) -> None:
    """With the last ones in a piece that is not full; each is what one thread makes of it."""
    sizes = {"channels": 300, "key_dim": 16} if op == "selective_scan" else {"blocks": 3, "width": 144}
    threads(2)
    shared = make_channel_inputs(op, Rows(((0, 50), (7, 1))), **sizes)
    alone = clone(shared)
    before = library.torchpaged_parallel_regions()
    getattr(BACKEND_OPS["cpu"], op)(**shared)
    assert library.torchpaged_parallel_regions() - before == 1
    threads(1)
    getattr(BACKEND_OPS["cpu"], op)(**alone)
    for name in ("out", "state"):
        torch.testing.assert_close(shared[name], alone[name], rtol=0, atol=0, equal_nan=True)
