"""One backend around a library, proved on a GPU in a process of its own: what it does wrong may cost the
process its device.

    python tests/gpu/library_worker.py flash_attn suite       # batches x features x eager, compiled, captured
    python tests/gpu/library_worker.py flashinfer decode      # of these the decodes; or prefill
    python tests/gpu/library_worker.py flashinfer prefill 'window|soft_cap'     # checks of that name alone
    python tests/gpu/library_worker.py flash_attn declared    # graph support and batch invariance
    python tests/gpu/library_worker.py flashinfer_gdn states  # prompts of gated delta nets; or engine

Prints a line of JSON per check: its name, and its error if there was one.
"""

import dataclasses
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from library_backends import limits_of, spec_of
from library_states import engine_checks, state_checks

from torchpaged.backends import Backend, GraphSupport, get_backend
from torchpaged.graphs import CudaCapture, TapeCapture
from torchpaged.testing import (
    ATTENTION_VARIANTS,
    BATCH_SPECS,
    SURROUNDINGS,
    assert_attention_close,
    check_batch_invariance,
    check_graph_support,
    conformance_checks,
    make_batch,
)
from torchpaged.testing.conformance import EXTRAS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16}
SHAPE["device"] = DEVICE
DECODE = ("decode_one", "decode_edges", "decode_skewed", "decode_padded", "decode_empty_row")
PLAIN: dict[str, dict[str, Any]] = {"plain": {}}
Named = tuple[str, Callable[[], Any]]


def caller(session: Any, batch: Any, workspace: dict[str, torch.Tensor]) -> Any:
    """Attention of the batch with other queries, for a trace."""

    def call(q: torch.Tensor) -> torch.Tensor:
        out, numbers = torch.empty_like(q), {"max_query_len": batch.max_query_len, "scale": batch.scale}
        session.ops.paged_attention(q + 0.0, *batch.tensors[1:], out, **numbers, **workspace)
        return out

    return call


# what a user adds to FlexAttention: a bias that fades with the distance, and a window by hand
SLOPES = 2.0 ** -torch.linspace(1, 8, 8, device=DEVICE)
MODS: dict[str, Any] = {
    "score_mod": lambda score, request, head, query, key: score + SLOPES[head] * (key - query),
    "mask_mod": lambda request, head, query, key: key >= query - 20,
}


def with_mods(name: str, how: str) -> None:
    """They are ALiBi and a window: eagerly, compiled whole, and captured with other lengths replayed."""
    batch = make_batch(BATCH_SPECS[name], **SHAPE)
    batch.k_cache.nan_to_num_(0.0), batch.v_cache.nan_to_num_(0.0)
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


def declared_checks(backend: Backend) -> Iterator[Named]:
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
    },
    "flex": {"batches": ("decode_edges", "mixed_padded", "speculative"), "extras": PLAIN, "lse": (True,)},
}
#: Other heads, blocks, layouts and dtypes.
SHAPES: dict[str, list[dict[str, Any]]] = {
    "flash_attn": [
        {"head_dim": 96},
        {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3},
        {"block_size": 8},
        {"block_size": 64},
        {"heads_first": True},
        {"dtype": torch.float16},
    ],
    "flashinfer": [{"heads_first": True}, {"kv_dtype": torch.float8_e4m3fn, "scales": "per_head"}],
    "flex": [
        {"head_dim": width, "dtype": dtype, "lse": (False,)}
        for width in (16, 80, 320, 512)
        for dtype in (torch.bfloat16, torch.float32)
    ],
}


def suite_checks(backend: Backend, batches: tuple[str, ...] = tuple(BATCH_SPECS)) -> Iterator[Named]:
    """All batches and features eagerly, some captured, few compiled. What is refused is right, too."""
    given = {"device": DEVICE, **SHAPE, "batches": batches} | SUITES.get(backend.name, {})

    def over(mode: str, chosen: tuple[str, ...], **options: Any) -> Iterator[Named]:
        options["batches"] = [name for name in chosen if name in batches]
        return conformance_checks(backend, modes=(mode,), **given | options)

    some = ("decode_edges", "decode_padded", "speculative", "mixed_padded")
    few: dict[str, Any] = {"variants": {"window": ATTENTION_VARIANTS["window"]}, "extras": EXTRAS}
    yield from over("eager", given["batches"])
    if backend.name == "flex":  # which compiles every shape and option
        yield from over("captured", ("decode_edges", "mixed_small"), **few)
    else:
        yield from over("captured", some)
        yield from shape_checks(backend, batches)
    yield from over("compiled", ("decode_edges", "mixed_small"), **few)


def shape_checks(backend: Backend, batches: tuple[str, ...] = tuple(BATCH_SPECS)) -> Iterator[Named]:
    """`SHAPES`, eagerly; none of them may be refused."""
    plain = {"variants": {"causal": ATTENTION_VARIANTS["causal"]}, "extras": PLAIN, "modes": ("eager",)}
    chosen = [name for name in ("decode_edges", "mixed_padded") if name in batches]
    for shape in SHAPES.get(backend.name, ()):
        asked = {"device": DEVICE, **SHAPE, **plain, "batches": chosen, **shape}
        for name, run in conformance_checks(backend, **asked):
            yield f"{name} {shape}", partial(require_run, run)


def require_run(run: Callable[[], Any]) -> None:
    refused = run()
    assert not refused, f"refused: {refused}"


def flex_checks(backend: Backend) -> Iterator[Named]:
    for how, name in (("eager", "mixed_padded"), ("compiled", "decode_edges"), ("captured", "decode_edges")):
        yield f"{how} {name} mods", lambda how=how, name=name: with_mods(name, how)
    yield from shape_checks(backend)


PARTS: dict[str, Callable[[Backend], Iterator[Named]]] = {
    "suite": suite_checks,
    "decode": partial(suite_checks, batches=DECODE),
    "prefill": partial(suite_checks, batches=tuple(name for name in BATCH_SPECS if name not in DECODE)),
    "declared": declared_checks,
    "special": flex_checks,
    "states": state_checks,
    "engine": engine_checks,
}


def prove(name: str, part: str, only: str = "") -> None:
    backend, refusals = get_backend(name), []
    for check, run in PARTS[part](backend):
        if not re.search(only, check):
            continue
        began, error = time.time(), ""
        try:
            refusals.append(run())
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
    assert not (refusals and all(refusals)), f"ran nothing: {refusals[0]}"


if __name__ == "__main__":
    prove(*sys.argv[1:4])
