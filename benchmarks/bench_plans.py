"""What a backend's plan of a step costs the host, for those that plan.

    PYTHONPATH=. python benchmarks/bench_plans.py [--backends flash_attn,flashinfer] [--output plans.json]

Needs a GPU and the libraries. A step is planned once for all layers of a kind. Per batch: the first plan of a
session, which makes its wrappers; the next ones, where only lengths have advanced, with lengths that the host
knows; and the same with lengths that must be read from the device, which waits for it. Host microseconds,
median of ``--repeats``, the device idle before each; the kernels that a plan launches run behind it. A row
``replay`` is one decode call of a captured graph of ``--layers`` layers, for comparison, in device time.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from documents import command_line, keep
from measuring import conditions

from torchpaged import Limits
from torchpaged.backends import Backend, HostLengths, Session, attention_spec, get_backend
from torchpaged.backends.choose.route_session import Part

DEVICE, DTYPE, BLOCK_SIZE = torch.device("cuda"), torch.bfloat16, 16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
#: ``(requests, query tokens, keys)``.
DECODES = [(1, 1, 1024), (8, 1, 4096), (64, 1, 4096), (256, 1, 1024)]
PROMPTS = [(1, 2048, 2048), (8, 256, 4096)]


def step_of(requests: int, query_len: int, keys: int) -> tuple[Part, HostLengths, Limits]:
    """A batch of equal requests whose blocks follow one another, and limits with room for more lengths."""
    width = keys // BLOCK_SIZE + 2
    ints: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    table = torch.arange(1, requests * width + 1, **ints).view(requests, width)
    lens = torch.full((requests,), keys, **ints)
    starts = torch.arange(requests + 1, **ints) * query_len
    host = HostLengths([query_len] * requests, [keys] * requests)
    limits = Limits(requests, requests * query_len, width, requests * width + 1, BLOCK_SIZE)
    return Part(table, lens, starts, query_len), host, limits


def advanced(batch: Part, host: HostLengths, by: int) -> HostLengths:
    """The same batch, ``by`` keys longer, in place."""
    batch.seq_lens.fill_(host.seq_lens[0] + by)
    return HostLengths(host.query_lens, [length + by for length in host.seq_lens])


def timed(call: Callable[[], Any]) -> float:
    """Host microseconds of one call, the device idle before."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6


def attend(session: Session, spec: Any, batch: Part, pools: list[Any]) -> Callable[[], torch.Tensor]:
    """A step of one call per pair of pools."""
    tokens, workspace = int(batch.query_start_loc[-1]), session.workspace(spec)
    q = torch.randn(tokens, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    out = torch.empty_like(q)

    def step() -> torch.Tensor:
        for k_cache, v_cache in pools:
            session.ops.paged_attention(
                q,
                k_cache,
                v_cache,
                batch.block_table,
                batch.seq_lens,
                batch.query_start_loc,
                out,
                max_query_len=batch.max_query_len,
                scale=HEAD_DIM**-0.5,
                **workspace,
            )
        return out

    return step


def row_of(backend: Backend, sizes: tuple[int, int, int], repeats: int, layers: int) -> dict[str, Any]:
    batch, host, limits = step_of(*sizes)
    spec = attention_spec(
        device=DEVICE,
        dtype=DTYPE,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
    )
    backend.open([spec], limits, DEVICE).plan(batch, host)  # loads kernels
    session = backend.open([spec], limits, DEVICE)
    first = timed(lambda: session.plan(batch, host))
    pool = torch.randn(
        2, int(limits.num_blocks or 0), BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE
    )
    step = attend(session, spec, batch, [pool.unbind()] * layers)
    step()
    again, read = [], []
    for i in range(repeats):
        longer = advanced(batch, host, i % BLOCK_SIZE)
        again.append(timed(lambda longer=longer: session.plan(batch, longer)))
        read.append(timed(lambda: session.plan(batch)))
    row = {"first": round(first), "again": round(median(again)), "lengths_read": round(median(read))}
    if sizes[1] == 1:
        graph = torch.cuda.CUDAGraph()
        session.plan(batch, longer)
        with torch.inference_mode(), torch.cuda.graph(graph):
            step()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        times = []
        for _ in range(repeats):
            session.plan(batch, longer)
            events[0].record(), graph.replay(), events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]) * 1e3)
        row["replay"] = round(median(times), 1)
    return row


def main() -> None:
    arguments = command_line(
        __doc__,
        backends=["flash_attn", "flashinfer"],
        repeats=32,
        layers=(32, "of the captured step"),
        prompts=(False, "plans of prompts, too"),
        output=Path,
    )
    rows = []
    for name in arguments.backends:
        for sizes in [*DECODES, *(PROMPTS if arguments.prompts else [])]:
            row: dict[str, Any] = {
                "backend": name,
                **dict(zip(("requests", "query_tokens", "keys"), sizes, strict=True)),
            }
            try:
                row |= row_of(get_backend(name), sizes, arguments.repeats, arguments.layers)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            print(json.dumps(row), flush=True)
            rows.append(row)
    document = {
        "conditions": conditions.collect(DEVICE),
        "unit": "us",
        "layers": arguments.layers,
        "rows": rows,
    }
    keep(document, arguments.output)


if __name__ == "__main__":
    main()
