"""One backend around a library, proved on a GPU in a process of its own: what it does wrong may cost the
process its device.

    python tests/gpu/library_worker.py flashinfer decode      # or prefill; flash_attn, flex, torch_sdpa
    python tests/gpu/library_worker.py flashinfer prefill 'window|soft_cap'     # checks of that name alone
    python tests/gpu/library_worker.py flash_attn declared    # graph support and batch invariance
    python tests/gpu/library_worker.py flashinfer_xqa suite   # batches x features x eager, compiled, captured
    python tests/gpu/library_worker.py flashinfer_gdn states  # prompts of gated delta nets; or engine
    python tests/gpu/library_worker.py flash_attn,cuda time 10    # no new case after 10 seconds of one

Prints a line of JSON per check: its name, and its error if there was one; "time" prints microseconds per call
and per plan.
"""

import dataclasses
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from library_backends import attend, host_of, limits_of, spec_of
from library_states import engine_checks, state_checks

from torchpaged import Limits, PlanError
from torchpaged.backends import Backend, GraphSupport, get_backend
from torchpaged.graphs import CudaCapture, TapeCapture
from torchpaged.testing import (
    ATTENTION_VARIANTS,
    BATCH_SPECS,
    SURROUNDINGS,
    Batch,
    BatchSpec,
    assert_attention_close,
    check_batch_invariance,
    check_graph_support,
    conformance_checks,
    make_batch,
)
from torchpaged.testing.graph_conformance import Case, check_replays, conformance_cases

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16}
SHAPE["device"] = DEVICE
DECODE = ("decode_one", "decode_edges", "decode_skewed", "decode_padded", "decode_empty_row")
PROMPTS = ("prefill_small", "prefill_long", "chunked", "speculative", "mixed_small", "mixed_padded")
LEFT = ("left_padded", "left_padded_chunk")


def batch_of(backend: Backend, name: str, **options: Any) -> Batch:
    batch = make_batch(BATCH_SPECS[name], **SHAPE | options)
    if backend.capabilities.finite_pools:
        batch.k_cache.nan_to_num_(0.0), batch.v_cache.nan_to_num_(0.0)
    return batch


def close(backend: Backend, name: str, options: dict[str, Any], lse: bool = True, **shape: Any) -> None:
    batch = batch_of(backend, name, **shape)
    out, total = attend(backend.open([], limits_of(batch), DEVICE), batch, lse, **options)
    assert_attention_close(out, total, batch, **options)


def compiled(backend: Backend, name: str) -> None:
    batch = batch_of(backend, name)
    session = backend.open([], limits_of(batch), DEVICE)
    workspace = session.workspace(spec_of(batch))
    session.plan(batch, host_of(batch))

    call = caller(session, batch, workspace)
    assert_attention_close(torch.compile(call, fullgraph=True)(batch.q), None, batch)


def caller(session: Any, batch: Any, workspace: dict[str, torch.Tensor]) -> Any:
    """Attention of the batch with other queries, for a trace."""

    def call(q: torch.Tensor) -> torch.Tensor:
        out, numbers = torch.empty_like(q), {"max_query_len": batch.max_query_len, "scale": batch.scale}
        session.ops.paged_attention(q + 0.0, *batch.tensors[1:], out, **numbers, **workspace)
        return out

    return call


def refused(backend: Backend, name: str) -> None:
    try:
        close(backend, name, {})
    except PlanError:
        return
    raise AssertionError("a batch with left padding was planned")


def captured(backend: Backend, case: Case) -> None:
    capture = CudaCapture(DEVICE) if DEVICE.type == "cuda" else TapeCapture()
    check_replays(backend, case, capture, **SHAPE)


# what a user adds to FlexAttention: a bias that fades with the distance, and a window by hand
SLOPES = 2.0 ** -torch.linspace(1, 8, 8, device=DEVICE)
MODS: dict[str, Any] = {
    "score_mod": lambda score, request, head, query, key: score + SLOPES[head] * (key - query),
    "mask_mod": lambda request, head, query, key: key >= query - 20,
}


def with_mods(name: str, how: str) -> None:
    """They are ALiBi and a window: eagerly, compiled whole, and captured with other lengths replayed."""
    batch = batch_of(get_backend("flex"), name)
    batch.extras["alibi_slopes"] = SLOPES
    plain = get_backend("flex").open([], limits_of(batch), DEVICE)
    spec = dataclasses.replace(spec_of(batch, lse=False), uses=frozenset(), **MODS)
    call = caller(plain, batch, plain.workspace(spec))
    if how == "compiled":
        out = torch.compile(call, fullgraph=True)(batch.q)
    elif how == "captured":
        capture = CudaCapture(DEVICE) if DEVICE.type == "cuda" else TapeCapture()
        capture.warmup(lambda: call(batch.q), 2)
        graph = capture.capture(lambda: call(batch.q), capture.new_pool())
        graph.replay()
        assert_attention_close(graph.output, None, batch, window_left=20)
        batch.seq_lens.copy_((batch.seq_lens - 3).clamp_min(1))
        graph.replay()
        out = graph.output
    else:
        out = call(batch.q)
    assert_attention_close(out, None, batch, window_left=20)


def declared_checks(backend: Backend) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What it declares, held to it; and whether those that do not declare batch invariance might."""
    few = backend.name == "flex"
    heads: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    if backend.name not in SUITES:
        heads["head_dim"] = 64
    yield (
        "graph support",
        lambda: print(check_graph_support(backend, device=DEVICE, dtypes=(torch.bfloat16,), **heads)),
    )
    if backend.capabilities.graph_support == GraphSupport.ALWAYS and few:
        shape: dict[str, Any] = {
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 80,
            "dtypes": (torch.float32,),
        }
        yield "graph support 6/2/80 float32", lambda: check_graph_support(backend, device=DEVICE, **shape)
    declared = backend.capabilities.batch_invariant
    asked: dict[str, Any] = {"device": DEVICE, "declared": declared, "dtypes": (torch.bfloat16,)}
    asked |= {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    if few:  # each shape compiles
        asked |= {"requests": ((1, 700), (20, 150)), "options": ({},)}
        asked["surroundings"] = [rest for rest in SURROUNDINGS if rest.name not in ("a short one", "padding")]
    yield (
        f"batch invariance{'' if declared else ', undeclared'}",
        lambda: print(check_batch_invariance(backend, **asked)),
    )


#: Parts of the suite, where all of it would compile for too long.
SUITES: dict[str, dict[str, Any]] = {
    "flashinfer_xqa": {
        "variants": {name: ATTENTION_VARIANTS[name] for name in ("causal", "window")},
        "lse": (False,),
        "batches": DECODE,
    }
}


def suite_checks(backend: Backend) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All batches and features eagerly, some captured, few compiled. What is refused is right, too."""
    given = {"device": DEVICE, **SHAPE} | SUITES.get(backend.name, {})
    some = {"batches": ("decode_edges", "decode_padded", "speculative", "mixed_padded")}
    few = {"batches": ("decode_edges",), "variants": {"window": ATTENTION_VARIANTS["window"]}}
    yield from conformance_checks(backend, modes=("eager",), **given)
    yield from conformance_checks(backend, modes=("captured",), **given | some)
    yield from conformance_checks(backend, modes=("compiled",), **given | few)


def flex_checks(backend: Backend) -> Iterator[tuple[str, Callable[[], Any]]]:
    for how, name in (("eager", "mixed_padded"), ("compiled", "decode_edges"), ("captured", "decode_edges")):
        yield f"{how} {name} mods", lambda how=how, name=name: with_mods(name, how)
    for width in (16, 80, 320, 512):
        for dtype in (torch.bfloat16, torch.float32):
            for name in ("decode_edges", "mixed_padded"):
                yield (
                    f"eager {name} head_dim {width} {dtype}",
                    lambda name=name, width=width, dtype=dtype: close(
                        backend, name, {}, lse=False, head_dim=width, dtype=dtype
                    ),
                )


def checks(backend: Backend, part: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The checks of a backend, cheap ones first, by name."""
    parts = {
        "declared": declared_checks,
        "special": flex_checks,
        "suite": suite_checks,
        "states": state_checks,
        "engine": engine_checks,
    }
    if part in parts:
        yield from parts[part](backend)
        return
    few = backend.name == "flex"  # which compiles every shape and option
    decodes, prompts = (("decode_edges",), ("mixed_padded", "speculative")) if few else (DECODE, PROMPTS)
    for name in (*(decodes if part != "prefill" else ()), *(prompts if part != "decode" else ())):
        yield f"eager {name}", lambda name=name: close(backend, name, {})
    if part != "prefill":
        yield "eager decode_edges without lse", lambda: close(backend, "decode_edges", {}, lse=False)
        yield "eager decode_edges sinks", lambda: close(backend, "decode_edges", {}, sinks=True)
        yield "compiled decode_edges", lambda: compiled(backend, "decode_edges")
    if part != "decode":
        yield "compiled mixed_small", lambda: compiled(backend, "mixed_small")
    if not few and part == "all":
        for name in LEFT:
            yield f"eager {name}", lambda name=name: close(backend, name, {})
    if part != "prefill":
        for case in conformance_cases(backend.capabilities.graph_support):
            if not few or case.name in ("decode", "mixed"):
                yield f"captured {case.name}", lambda case=case: captured(backend, case)
    name = "decode_edges" if part == "decode" else "mixed_padded"
    for variant, options in ATTENTION_VARIANTS.items():
        batch = make_batch(BATCH_SPECS[name], **SHAPE)
        if options and not backend.reject(spec_of(batch, **options)):
            yield f"eager {name} {variant}", lambda options=options: close(backend, name, options)
    if backend.name == "flash_attn":
        yield "eager mixed_padded head_dim 96", lambda: close(backend, "mixed_padded", {}, head_dim=96)
        yield (
            "eager mixed_padded head_dim 64, groups of 3",
            lambda: close(backend, "mixed_padded", {}, head_dim=64, num_heads=9, num_kv_heads=3),
        )
        for size in (8, 64):
            yield (
                f"eager mixed_padded block_size {size}",
                lambda size=size: close(backend, "mixed_padded", {}, block_size=size),
            )
        yield "eager mixed_padded heads first", lambda: close(backend, "mixed_padded", {}, heads_first=True)
        yield "eager mixed_padded float16", lambda: close(backend, "mixed_padded", {}, dtype=torch.float16)
    if backend.name == "flashinfer" and part == "decode":
        yield "eager decode_edges heads first", lambda: close(backend, "decode_edges", {}, heads_first=True)
        yield (
            "eager decode_edges fp8",
            lambda: close(backend, "decode_edges", {}, kv_dtype=torch.float8_e4m3fn, scales="per_head"),
        )
    if backend.name == "flashinfer" and part == "prefill":
        for name in PROMPTS:
            yield (
                f"eager {name} fp8",
                lambda name=name: close(backend, name, {}, kv_dtype=torch.float8_e4m3fn, scales="per_head"),
            )
        yield "eager mixed_padded sinks", lambda: close(backend, "mixed_padded", {}, sinks=True)
        yield "eager mixed_padded without lse", lambda: close(backend, "mixed_padded", {}, lse=False)
        yield "eager mixed_padded heads first", lambda: close(backend, "mixed_padded", {}, heads_first=True)
        for name in LEFT:
            yield f"refused {name}", lambda name=name: refused(backend, name)


def prove(name: str, part: str, only: str = "") -> None:
    backend = get_backend(name)
    for check, run in checks(backend, part):
        if not re.search(only, check):
            continue
        began, error = time.time(), ""
        try:
            run()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
        except Exception as failure:
            error = f"{type(failure).__name__}: {str(failure)[:300]}"
            if "CUDA error" in error or "illegal" in error:
                error += traceback.format_exc()[-300:]
        print(
            json.dumps({"backend": name, "check": check, "s": round(time.time() - began, 1), "error": error}),
            flush=True,
        )
        if "illegal" in error or "device-side assert" in error:
            break


# ----------------------------------------------------------------------------------------------------- times
TIMED = {
    "1x1k": ((32, 8, 128), [1024]),
    "1x8k": ((32, 8, 128), [8192]),
    "8x8k": ((32, 8, 128), [8192] * 8),
    "64x4k": ((32, 8, 128), [4096] * 64),
    "1x128k+127x512": ((32, 8, 128), [131072] + [512] * 127),
    "64x4k 28/4": ((28, 4, 128), [4096] * 64),
}


def measure(name: str, limit_s: float) -> None:
    """Per case: microseconds of one call in a graph of several over different pools, and of one plan with
    host lengths."""
    backend, end = get_backend(name), time.time() + limit_s
    for case, ((heads, kv_heads, width), lens) in TIMED.items():
        if time.time() > end or (name in ("flex", "torch_sdpa") and max(lens) > 100_000):
            continue
        spec = BatchSpec(case, tuple(lens), (1,) * len(lens))
        useful = 2 * sum(lens) * kv_heads * width * 2
        try:
            row = {"backend": name, "case": case, "ideal": round(useful / 4.35e6, 1)}
            print(json.dumps(row | timed(backend, spec, heads, kv_heads, width, useful)), flush=True)
        except Exception as failure:
            print(json.dumps({"backend": name, "case": case, "error": f"{failure!r}"[:300]}), flush=True)
        torch.cuda.empty_cache()


def timed(
    backend: Backend, spec: BatchSpec, heads: int, kv_heads: int, width: int, useful: int
) -> dict[str, float]:
    pools = max(2, min(16, int(2.5e8 / useful) + 1))
    blocks = sum(-(-n // 16) for n in spec.seq_lens) + 1
    device, dtype = DEVICE, torch.bfloat16
    table = torch.zeros(len(spec.seq_lens), max(-(-n // 16) for n in spec.seq_lens), dtype=torch.int32)
    ids, taken = (torch.randperm(blocks - 1) + 1).int(), 0
    for row, n in enumerate(-(-n // 16) for n in spec.seq_lens):
        table[row, :n] = ids[taken : taken + n]
        taken += n
    shape = (2, blocks, 16, kv_heads, width)
    caches = [torch.randn(shape, device=device, dtype=dtype).unbind() for _ in range(pools)]
    q = torch.randn(len(table), heads, width, device=device, dtype=dtype)
    lens = torch.tensor(spec.seq_lens, dtype=torch.int32, device=device)
    starts = torch.arange(len(table) + 1, dtype=torch.int32, device=device)
    batch = Batch(spec, q, *caches[0], table.to(device), lens, starts, 1, width**-0.5)
    session = backend.open([], Limits(len(table), len(table), table.shape[1], blocks, 16), device)
    workspace, host = session.workspace(spec_of(batch, lse=False)), host_of(batch)
    out = torch.empty_like(q)

    def step() -> torch.Tensor:
        for k_cache, v_cache in caches:
            session.ops.paged_attention(
                q,
                k_cache,
                v_cache,
                batch.block_table,
                lens,
                batch.query_start_loc,
                out,
                max_query_len=1,
                scale=batch.scale,
                **workspace,
            )
        return out

    capture = CudaCapture(device)
    session.plan(batch, host)
    with torch.inference_mode():
        capture.warmup(step, 2)
        graph = capture.capture(step, capture.new_pool())
    times = []
    for _ in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(), graph.replay(), stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / pools)
    result = {"us": round(sorted(times)[len(times) // 2], 1)}
    if session.plans_every_step:
        plans = []
        for _ in range(10):
            torch.cuda.synchronize()
            began = time.perf_counter()
            session.plan(batch, host)
            plans.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()
        result["plan_us"] = round(sorted(plans)[5])
    return result


if __name__ == "__main__":
    if sys.argv[2] == "time":
        for name in sys.argv[1].split(","):
            measure(name, float(sys.argv[3]))
    else:
        prove(*sys.argv[1:4])
