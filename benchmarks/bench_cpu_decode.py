"""Decode attention on a CPU: the native kernels against what plain torch does with the same blocks, and the
dispatch cost of every op.

    python benchmarks/bench_cpu_decode.py [--threads 1] [--context 4096] [--latents] [--seconds 1]
        [--output FILE]

Keys and values are gathered, then SDPA; latents, at DeepSeek's sizes, are gathered, then SDPA with heads as
rows, or two plain products with a softmax between. Each row is checked before it is timed, latents of more
than 1,024 keys by the contenders alone; contenders take turns. Figures are minima and medians with p20 and
p80, of one thread its own time, so that waiting for a core doesn't count; the last line is one JSON document.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from documents import command_line, finish, need_native

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from measuring import conditions
from op_inputs.latent import assert_latent_close, latent_tensors, make_latent_batch, run_mla_attention
from op_inputs.opcheck import opcheck_cases

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.registry import NATIVE_OPS
from torchpaged.testing import BatchSpec, assert_attention_close, make_batch, run_paged_attention
from torchpaged.testing.batches import Batch

CASES = [
    (heads, kv_heads, dim, reqs, dtype)
    for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64))
    for reqs in (1, 4)
    for dtype in (torch.float32, torch.bfloat16)
]


#: Query heads and requests over latents.
LATENT_CASES = [
    (heads, reqs, dtype)
    for heads in (8, 16, 64, 128)
    for reqs in (1, 4)
    for dtype in (torch.float32, torch.bfloat16)
]


def measure(functions: dict[str, Callable[[], Any]], seconds: float = 1.0) -> dict[str, dict[str, float]]:
    """Microseconds per call, called in turns: minimum, median, p20, p80."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    stop = time.perf_counter() + seconds * len(functions)
    while time.perf_counter() < stop or min(map(len, times.values())) < 5:
        for name, function in functions.items():
            start = clock()
            function()
            times[name].append((clock() - start) * 1e6)
    cuts = {name: statistics.quantiles(each, n=5) for name, each in times.items()}
    return {
        name: {
            "min_us": min(each),
            "median_us": statistics.median(each),
            "p20_us": cuts[name][0],
            "p80_us": cuts[name][3],
        }
        for name, each in times.items()
    }


def rows_of(pool: torch.Tensor, batch: Batch, request: int) -> torch.Tensor:
    """A request's keys, values or latents, gathered: ``[num_kv_heads, seq_len, head_dim]``."""
    length = int(batch.seq_lens[request])
    blocks = batch.block_table[request, : -(-length // pool.shape[1])].long()
    return pool[blocks].flatten(0, 1)[:length].transpose(0, 1)


def gather_then_sdpa(batch: Batch) -> torch.Tensor:
    """What plain PyTorch does with a paged cache: gather each request's blocks, then SDPA."""
    outs = []
    for row in range(batch.q.shape[0]):
        k, v = rows_of(batch.k_cache, batch, row)[None], rows_of(batch.v_cache, batch, row)[None]
        q = batch.q[row][None, :, None]
        outs.append(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0, :, 0])
    return torch.stack(outs)


def latent_native(batch: Batch) -> torch.Tensor:
    """The kernel, into new outputs that nothing has filled."""
    out = batch.q.new_empty(*batch.q.shape[:2], batch.v_cache.shape[-1])
    sizes: dict[str, Any] = {"max_query_len": batch.max_query_len, "scale": batch.scale}
    BACKEND_OPS["cpu"].mla_attention(*latent_tensors(batch), out, None, **sizes)
    return out


def latent_sdpa(batch: Batch) -> torch.Tensor:
    """The same over latents, which all heads share: heads are rows of one product."""
    outs = []
    for row in range(batch.q.shape[0]):
        k = rows_of(batch.k_cache, batch, row)
        v = k[..., : batch.v_cache.shape[-1]]
        outs.append(F.scaled_dot_product_attention(batch.q[row][None], k, v, scale=batch.scale)[0])
    return torch.stack(outs)


def latent_products(batch: Batch) -> torch.Tensor:
    """Two products and a softmax between, in the dtype of the pool."""
    outs = []
    for row in range(batch.q.shape[0]):
        k = rows_of(batch.k_cache, batch, row)[0]
        weights = torch.softmax(batch.q[row] @ k.T * batch.scale, dim=-1)
        outs.append(weights @ k[:, : batch.v_cache.shape[-1]])
    return torch.stack(outs)


def decode_row(case: tuple[Any, ...], context: int, seconds: float) -> dict[str, Any]:
    """One case over keys and values, checked and timed."""
    heads, kv_heads, dim, reqs, dtype = case
    spec = BatchSpec("bench", (context,) * reqs, (1,) * reqs)
    batch = make_batch(
        spec, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, extra_columns=0
    )
    out, lse = run_paged_attention(BACKEND_OPS["cpu"], batch)
    assert_attention_close(out, lse, batch)
    contenders = {
        "native": lambda: run_paged_attention(BACKEND_OPS["cpu"], batch)[0],
        "gather_sdpa": lambda: gather_then_sdpa(batch),
    }
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    return {**sizes, "reqs": reqs, "dtype": str(dtype)[6:], **timed(contenders, out, seconds)}


def latent_row(case: tuple[Any, ...], context: int, seconds: float) -> dict[str, Any]:
    """One case over latents of 512 + 64 columns, checked and timed."""
    heads, reqs, dtype = case
    spec = BatchSpec("bench", (context,) * reqs, (1,) * reqs)
    batch = make_latent_batch(spec, rank=512, rope=64, num_heads=heads, dtype=dtype, extra_columns=0)
    out, lse = run_mla_attention(BACKEND_OPS["cpu"], batch)
    if context <= 1024:  # the oracle has a copy of the keys for each head
        assert_latent_close(out, lse, batch)
    contenders = {
        "native": lambda: latent_native(batch),
        "gather_sdpa": lambda: latent_sdpa(batch),
        "products": lambda: latent_products(batch),
    }
    return {"heads": heads, "reqs": reqs, "dtype": str(dtype)[6:], **timed(contenders, out, seconds)}


def timed(
    contenders: dict[str, Callable[[], torch.Tensor]], out: torch.Tensor, seconds: float
) -> dict[str, dict[str, float]]:
    """Figures by contender, each of which computes ``out``."""
    for contender in contenders.values():
        torch.testing.assert_close(contender().float(), out.float(), rtol=2e-2, atol=2e-2)
    return measure(contenders, seconds)


@torch.inference_mode()
def dispatch(seconds: float) -> dict[str, dict[str, float]]:
    """Of one call of each native op with tiny inputs: those of its first case."""
    found: dict[str, dict[str, float]] = {}
    for case, (op, inputs, options) in opcheck_cases().items():
        if op in found or op not in NATIVE_OPS:
            continue
        if case == "attention":  # one request of one token: what is left is dispatch
            tiny = make_batch(BatchSpec("tiny", (1,), (1,)), num_heads=1, num_kv_heads=1, head_dim=8)
            (*inputs, _), options = tiny.arguments(torch.zeros_like(tiny.q), None, scale=1.0)
        handle = getattr(BACKEND_OPS["cpu"], op)

        def hundred(handle: Any = handle, inputs: Any = inputs, options: Any = options) -> None:
            for _ in range(100):
                handle(*inputs, **options)

        found[op] = {name: value / 100 for name, value in measure({op: hundred}, seconds)[op].items()}
    return found


def main() -> None:
    args = command_line(
        __doc__,
        threads=1,
        context=4096,
        latents=(False, "no other rows"),
        seconds=(1.0, "for each contender of a case"),
        output=Path,
    )
    torch.set_num_threads(args.threads)
    need_native()
    document: dict[str, Any] = {
        "conditions": conditions.collect(torch.device("cpu")),
        "context": args.context,
        "decode": [],
        "latents": [],
    }
    kinds = [("decode", CASES, decode_row), ("latents", LATENT_CASES, latent_row)]
    for kind, cases, run in kinds[args.latents :]:
        for case in cases:
            row = run(case, args.context, args.seconds)
            document[kind].append(row)
            sizes = " ".join(str(value) for value in row.values() if not isinstance(value, dict))
            us = ", ".join(f"{name} {of['min_us']:.0f}" for name, of in row.items() if isinstance(of, dict))
            print(f"{kind} {sizes}: {us} us", file=sys.stderr)
    document["dispatch"] = {} if args.latents else dispatch(args.seconds)
    for op, figures in document["dispatch"].items():
        print(f"{op:>20} {figures['median_us']:>8.1f} us", file=sys.stderr)
    finish(document, args.output)


if __name__ == "__main__":
    main()
