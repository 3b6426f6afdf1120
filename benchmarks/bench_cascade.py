"""Decode steps of requests that share a prefix: the plain path, `cascade_attention`, FlashInfer's cascade.

    python benchmarks/bench_cascade.py --output benchmarks/results/h200_cascade.json

Rounds over the pools of several layers, so that nothing stays in the L2 cache, each in a CUDA graph, without
the host's share: groups and plans are made once. Microseconds per call. The rule of torchpaged/prefixes is
fitted to the rows. Needs a GPU.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from documents import command_line, keep
from measuring import conditions
from measuring.timing import CudaSampler, interleave
from torch import Tensor

from torchpaged import paged_attention
from torchpaged.custom_ops.attention.cascade_call import CascadeCall
from torchpaged.custom_ops.attention.triton.cascade_attention import compose
from torchpaged.prefixes import SharedPrefixes, cascade_attention, find_prefix_groups

BLOCK = 16
SHAPES = ((32, 8, 128), (9, 3, 64))
#: Shared tokens, own tokens, requests: the goal's case first, then what the rule is fitted to.
GRID = (
    (32768, 256, 256),
    *(
        (shared, own, rows)
        for rows in (2, 4, 8, 16, 32, 64, 256)
        for shared in (256, 1024, 4096, 16384)
        for own in (256, 2048)
    ),
)


Calls = list[Callable[[], Tensor]]


def layers(kv_heads: int, dim: int, num_blocks: int) -> list[tuple[Tensor, Tensor]]:
    """Pools of as many layers as fill the L2 cache twice, eight at most."""
    size = (num_blocks, BLOCK, kv_heads, dim)
    count = min(8, 1 + 120_000_000 // (4 * num_blocks * BLOCK * kv_heads * dim))
    return [
        tuple(torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)) for _ in range(count)
    ]


def case(
    shape: tuple[int, int, int], shared: int, own: int, rows: int, more: bool, flashinfer: bool
) -> tuple[dict[str, Calls], dict[str, str]]:
    """Calls per way, and why FlashInfer's are not among them."""
    heads, kv_heads, dim = shape
    n, m = shared // BLOCK, own // BLOCK
    tables = [[*range(1, n + 1), *range(1 + n + m * row, 1 + n + m * (row + 1))] for row in range(rows)]
    pools = layers(kv_heads, dim, 1 + n + m * rows)
    q = torch.randn(rows, heads, dim, dtype=torch.bfloat16, device="cuda")
    lens = torch.full((rows,), shared + own, dtype=torch.int32, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    table = torch.tensor(tables, dtype=torch.int32, device="cuda")
    prefixes = SharedPrefixes.allocate(
        max_num_groups=8,  # as AutomaticPrefixes has them
        num_reqs=rows,
        num_tokens=rows,
        max_blocks_per_req=n + m,
        block_size=BLOCK,
        device="cuda",
    )
    groups = find_prefix_groups(tables, [1] * rows, [shared + own] * rows, block_size=BLOCK)
    prefixes.set(groups, tables, [1] * rows, [shared + own] * rows)
    suffix = prefixes.suffix(table, lens)
    batch = table, lens, starts
    found = {
        "plain": [partial(paged_attention, q, *pool, *batch, max_query_len=1) for pool in pools],
        "cascade": [
            partial(cascade_attention, q, *pool, *batch, prefixes, max_query_len=1, suffix=suffix)
            for pool in pools
        ],
    }
    if more:
        of_groups = prefixes.block_table, prefixes.lens, prefixes.query_start_loc
        arguments = (*suffix, starts, *of_groups, prefixes.order, prefixes.inverse)
        found["two passes"] = [partial(two_passes, q, pool, arguments) for pool in pools]
    if not flashinfer:
        return found, {}
    try:
        return found | flashinfer_calls(q, pools, heads, shared, own), {}
    except Exception as error:  # a peer's failure is a line of the document
        return found, {"flashinfer": f"{type(error).__name__}: {error}"[:300]}


def two_passes(q: Tensor, pools: tuple[Tensor, Tensor], arguments: tuple[Tensor, ...]) -> Tensor:
    """Two calls of ``paged_attention`` and ``merge_attn_states``, with the copies that bring groups
    together: what serves a call that the op's own launches can't take."""
    ops, out = torch.ops.torchpaged, torch.empty_like(q)
    call = CascadeCall.of(q, *pools, *arguments, out, max_query_len=1, scale=q.shape[2] ** -0.5)
    compose(ops.paged_attention.cuda, ops.merge_attn_states.triton, call)
    return out


def flashinfer_calls(q: Tensor, pools: Any, heads: int, shared: int, own: int) -> dict[str, Calls]:
    """FlashInfer's two-level cascade over the same blocks, and its parts put together by hand: the wrapper
    takes prefill's kernels for the own tokens, too, for which its decode kernels are faster."""
    import flashinfer

    rows, kv_heads, dim = len(q), pools[0][0].shape[2], q.shape[2]
    n, m = shared // BLOCK, own // BLOCK
    ints: Any = {"dtype": torch.int32, "device": "cuda"}
    both: Any = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    workspaces = [torch.zeros(512 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
    prefix = [torch.tensor([0, n], **ints), torch.arange(1, n + 1, **ints), torch.full((1,), BLOCK, **ints)]
    suffix = [
        torch.arange(rows + 1, **ints) * m,
        torch.arange(1 + n, 1 + n + m * rows, **ints),
        torch.full((rows,), BLOCK, **ints),
    ]
    sizes = (heads, kv_heads, dim, BLOCK)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspaces[0], "NHD")
    starts = [torch.tensor([0, rows], **ints), torch.arange(rows + 1, **ints)]
    levels = [list(pair) for pair in zip(prefix, suffix, strict=True)]
    wrapper.plan(starts, *levels, *sizes, causal=True, **both)
    first = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspaces[1], "NHD", backend="fa3")
    first.plan(starts[0], *prefix, *sizes, causal=False, **both)
    second = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspaces[2], "NHD", use_tensor_cores=True, backend="fa2"
    )
    second.plan(*suffix, *sizes, **both)

    def by_hand(pool: Any) -> Tensor:
        out, lse = second.run(q, pool, return_lse=True)
        flashinfer.merge_state_in_place(out, lse, *first.run(q, pool, return_lse=True))
        return out

    return {
        "flashinfer": [partial(wrapper.run, q, pool) for pool in pools],
        "flashinfer by hand": [partial(by_hand, pool) for pool in pools],
    }


def measure(calls: dict[str, Calls], repeats: int) -> dict[str, Any]:
    samplers, failed = {}, {}
    for name, call in calls.items():
        try:
            samplers[name] = CudaSampler(call * max(1, 4 // len(call)))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    timed = interleave(samplers, repeats)
    return {name: round(timing.median_us, 2) for name, timing in timed.items()} | failed


def main() -> None:
    given = command_line(
        __doc__,
        output="",
        seconds=(600.0, "begin no case after so long"),
        repeats=8,
        flashinfer=(False, "against FlashInfer's cascade, fewer cases"),
        variants=(False, "measure what is not in use, too"),
        first=(int, "only so many cases of each shape"),
    )
    end = time.monotonic() + given.seconds
    document: dict[str, Any] = {
        "benchmark": "cascade",
        "conditions": conditions.collect(torch.device("cuda")),
        "rows": [],
    }
    for shape in SHAPES:
        for shared, own, rows in GRID[: given.first]:
            if given.flashinfer and (own != 256 or rows < 16):
                continue
            if time.monotonic() > end:
                break
            row: dict[str, Any] = {"heads": list(shape), "shared": shared, "own": own, "requests": rows}
            calls, row["failed"] = case(shape, shared, own, rows, given.variants, given.flashinfer)
            plain = calls["plain"][0]()
            row["difference"] = {
                name: float((of_layers[0]() - plain).abs().max()) for name, of_layers in calls.items()
            }
            assert max(row["difference"].values()) < 1e-2, row  # of outputs of about 0.1, in bf16
            row["us"] = measure(calls, given.repeats)
            document["rows"].append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
            keep(document, given.output)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
