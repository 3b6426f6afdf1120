"""Cases that may hang, for processes that may be killed: tests/gpu/test_hangs.py."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from captured import captured
from hanging_batches import CASES, Case, make_hanging_batch
from torch import Tensor

from torchpaged.backends.semaphore import make_semaphore
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import Batch, BatchSpec, assert_within_budget, make_batch, run_paged_attention

REFERENCE = BACKEND_OPS["reference"]
Beat = Callable[..., None]


def check(batch: Batch, case: Case, out: Tensor, lse: Tensor) -> None:
    """Against the float64 oracle, on the GPU for the sake of long prompts."""
    extras = {name: x for name, x in batch.extras.items() if name != "semaphore"}
    same = replace(batch, extras=extras)
    if case.kv_dtype is not None:
        same = replace(same, k_cache=batch.k_cache.to(case.dtype), v_cache=batch.v_cache.to(case.dtype))
    wide = replace(
        same,
        q=batch.q.double(),
        k_cache=batch.k_cache.double(),
        v_cache=batch.v_cache.double(),
        extras={name: x.double() if name == "sinks" else x for name, x in extras.items()},
    )
    exact, exact_lse = run_paged_attention(REFERENCE, wide, **case.options)
    nearly, _ = run_paged_attention(REFERENCE, same, **case.options)
    assert_within_budget("out", out, nearly, exact, case.dtype)
    assert_within_budget("lse", lse, exact_lse, exact_lse, torch.float16)
    assert not batch.extras["semaphore"].any(), "a semaphore is left above 0"


def attend_once(backend: str, name: str, beat: Beat) -> None:
    case = CASES[name]
    batch = make_hanging_batch(case, "cuda")
    batch.extras["semaphore"] = torch.zeros(
        len(case.seq_lens) * case.num_kv_heads, dtype=torch.int32, device="cuda"
    )
    torch.cuda.synchronize()
    out, lse = run_paged_attention(BACKEND_OPS[backend], batch, **case.options)
    beat("running")
    torch.cuda.synchronize()
    check(batch, case, out, lse)


def replay(backend: str, name: str, beat: Beat) -> None:
    """One graph; contexts become shorter between replays, then the last request ends and its token rows
    become padding."""
    case = CASES[name]
    batch = make_hanging_batch(case, "cuda")
    batch.extras["semaphore"] = torch.zeros(
        len(case.seq_lens) * case.num_kv_heads, dtype=torch.int32, device="cuda"
    )
    attend = partial(run_paged_attention, BACKEND_OPS[backend], batch, **case.options)
    attend()
    beat("running")
    graph, (out, lse) = captured(attend)
    lens, starts = batch.seq_lens.clone(), batch.query_start_loc.clone()
    query_lens = starts.diff()
    ended = starts.clone()
    ended[-1] = starts[-2]
    none_left = lens.clone()
    none_left[-1] = 0
    for seq_lens, query_starts in (
        (lens, starts),
        (torch.minimum(lens, query_lens + 3), starts),
        (none_left, ended),
        (lens, starts),
    ):
        batch.seq_lens.copy_(seq_lens)
        batch.query_start_loc.copy_(query_starts)
        graph.replay()
        torch.cuda.synchronize()
        check(batch, case, out, lse)


def layers(backend: str, name: str, beat: Beat) -> None:
    """64 decodes and a chunk of 20, six layers in a graph: each rewrites the one q buffer, and nothing stands
    between its attention's two overlapping launches and the next layer's writes. Pools and outputs are NaN
    before each replay."""
    ops, num_layers, shape = BACKEND_OPS[backend], 6, {"dtype": torch.bfloat16, "device": "cuda"}
    generator = torch.Generator().manual_seed(1)
    context = torch.randint(0, 500, (65,), generator=generator).tolist()
    query_lens = (*[1] * 64, 20)
    spec = BatchSpec("layers", tuple(c + q for c, q in zip(context, query_lens, strict=True)), query_lens)
    batch = make_batch(spec, num_heads=16, num_kv_heads=4, head_dim=128, **shape)
    tokens = batch.q.shape[0]
    table = batch.block_table.tolist()
    places = [[table[r][at // 16] * 16 + at % 16 for at in range(n)] for r, n in enumerate(spec.seq_lens)]
    before = [slot for row, count in zip(places, context, strict=True) for slot in row[:count]]
    new_slots = [slot for row, count in zip(places, context, strict=True) for slot in row[count:]]
    slot_mapping, context_slots = (torch.tensor(slots, device="cuda") for slots in (new_slots, before))
    pools = [(torch.empty_like(batch.k_cache), torch.empty_like(batch.v_cache)) for _ in range(num_layers)]
    past = [torch.empty(2, len(before), 4, 128, **shape) for _ in range(num_layers)]
    new = [torch.empty(3, tokens, 16, 128, **shape) for _ in range(num_layers)]
    outs = [torch.empty_like(batch.q) for _ in range(num_layers)]
    q = torch.empty_like(batch.q)
    cos_sin = (torch.arange(128, device="cuda") < 64).float()[None]  # angles of 0
    positions = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    semaphore = make_semaphore(65 * 4, torch.device("cuda"))
    sizes: dict[str, Any] = {"max_query_len": 20, "scale": batch.scale}

    def step() -> None:
        for (k_cache, v_cache), numbers, out in zip(pools, new, outs, strict=True):
            new_q, new_k, new_v = numbers[0], numbers[1, :, :4], numbers[2, :, :4]
            written = (positions, cos_sin, slot_mapping, q, k_cache, v_cache)
            ops.rope_write_kv(new_q, new_k, new_v, *written, are_query_tokens=True)
            ops.paged_attention(q, k_cache, v_cache, *batch.tensors[3:], out, **sizes, semaphore=semaphore)

    def refill() -> None:
        for x in (*past, *new):
            x.normal_()
        for x in (*outs, q, *(pool for both in pools for pool in both)):
            x.fill_(float("nan"))
        for both, numbers in zip(pools, past, strict=True):
            for pool, x in zip(both, numbers, strict=True):
                pool.view(-1, 4, 128)[context_slots] = x

    refill()
    step()
    beat("running")
    graph, _ = captured(step)
    for _ in range(25):
        refill()
        graph.replay()
        torch.cuda.synchronize()
        assert not semaphore.any(), "a semaphore is left above 0"
        for (k_cache, v_cache), numbers, out in zip(pools, new, outs, strict=True):
            want = torch.empty_like(out, dtype=torch.float32)
            wide = (x.float() for x in (numbers[0], k_cache, v_cache))
            REFERENCE.paged_attention(*wide, *batch.tensors[3:], want, **sizes)
            torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)


KINDS: dict[str, Callable[[str, str, Beat], None]] = {"once": attend_once, "replay": replay, "layers": layers}


def run(case: dict[str, str], beat: Beat) -> dict[str, Any]:
    """A kind of case, its backend and its name."""
    beat("launching")
    KINDS[case["kind"]](case["backend"], case["name"], beat)
    return {}
