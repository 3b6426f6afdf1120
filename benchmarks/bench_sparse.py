"""Sparse latent attention on a GPU, at DeepSeek's sizes: attention to selected positions, the indexer's
logits and their top-k, each backend's alone, and all three in a row.

    PYTHONPATH=. python benchmarks/bench_sparse.py [--repeats 12] [--seconds 60] [--output FILE]

Latents of 512 + 64, the indexer's 64 heads of 128 over keys of bfloat16 and of e4m3, blocks of 64, shuffled;
random positions. Every result is compared with the reference's before it is timed. A round is one CUDA graph
of calls over several sets of inputs; backends are replayed in turns. Figures are microseconds per call. The
last line is one JSON document.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from documents import command_line, write_rows
from measuring.timing import CudaSampler, interleave
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS, BackendOps

SETS, CALLS, TOP_K = 4, 8, 2048
RANK, ROPE, INDEX_HEADS, INDEX_WIDTH, BLOCK = 512, 64, 64, 128, 64
#: requests, heads, context
ATTENTION = (
    *((reqs, 16, 32768) for reqs in (8, 1, 2, 4, 16)),
    (8, 16, 4096),
    (8, 64, 32768),
    (32, 16, 16384),
    (64, 128, 8192),
)
#: requests, keys
INDEXER = ((4, 131072), (1, 131072), (64, 8192))

Inputs = dict[str, Any]
Run = Callable[[BackendOps, Inputs], Tensor]


def batch_of(num_reqs: int, context: int, generator: torch.Generator) -> Inputs:
    """Metadata of one query token for each request; blocks are shuffled."""
    columns = -(-context // BLOCK)
    blocks = torch.randperm(num_reqs * columns, device="cuda", generator=generator) + 1
    return {
        "block_table": blocks.to(torch.int32).view(num_reqs, columns),
        "seq_lens": torch.full((num_reqs,), context, dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.arange(num_reqs + 1, dtype=torch.int32, device="cuda"),
        "max_query_len": 1,
    }


def attention_inputs(num_reqs: int, heads: int, context: int, seed: int) -> Inputs:
    """A call of ``mla_attention``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    make = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    batch = batch_of(num_reqs, context, generator)
    order = torch.rand(num_reqs, context, device="cuda", generator=generator).argsort(1)
    return {
        **batch,
        "q": torch.randn(num_reqs, heads, RANK + ROPE, **make),
        "kv_cache": torch.randn(batch["block_table"].numel() + 1, BLOCK, 1, RANK + ROPE, **make),
        "out": torch.empty(num_reqs, heads, RANK, dtype=torch.bfloat16, device="cuda"),
        "indices": order[:, :TOP_K].sort(1).values.to(torch.int32),
        "scale": 192**-0.5,
    }


def logits_inputs(num_reqs: int, context: int, fp8: bool, seed: int) -> Inputs:
    """A call of ``index_logits``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    make = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    batch = batch_of(num_reqs, context, generator)
    blocks = batch["block_table"].numel() + 1
    keys = torch.randn(blocks, BLOCK, 1, INDEX_WIDTH, **make)
    return {
        **batch,
        "q": torch.randn(num_reqs, INDEX_HEADS, INDEX_WIDTH, **make),
        "weights": torch.randn(num_reqs, INDEX_HEADS, device="cuda", generator=generator),
        "k_cache": keys.to(torch.float8_e4m3fn) if fp8 else keys,
        "k_scale": torch.rand(blocks, BLOCK, device="cuda", generator=generator) + 0.5 if fp8 else None,
        "logits": torch.empty(num_reqs, context, device="cuda"),
    }


def attend(ops: BackendOps, inputs: Inputs) -> Tensor:
    ops.mla_attention(**inputs)
    return inputs["out"]


def score(ops: BackendOps, inputs: Inputs) -> Tensor:
    ops.index_logits(**inputs)
    return inputs["logits"]


def choose(ops: BackendOps, inputs: Inputs) -> Tensor:
    """What is compared are the chosen logits, in order: which of equal ones are taken is not defined."""
    ops.top_k_indices(inputs["logits"], inputs["indices"])
    return inputs["indices"]


def all_three(ops: BackendOps, inputs: Inputs) -> Tensor:
    score(ops, inputs["score"])
    choose(ops, {"logits": inputs["score"]["logits"], "indices": inputs["attend"]["indices"]})
    return attend(ops, inputs["attend"])


def cases() -> Iterator[tuple[str, Run, Callable[[int], Inputs]]]:
    """Name, what runs, and what makes its inputs of a seed."""
    for reqs, heads, context in ATTENTION:
        name = f"attention, {reqs} x {heads} heads, {context} tokens"
        yield name, attend, lambda seed, c=(reqs, heads, context): attention_inputs(*c, seed)
    for reqs, keys in INDEXER:
        for fp8 in (True, False):
            name = f"logits, {reqs} x {keys} keys of {'e4m3' if fp8 else 'bf16'}"
            yield name, score, lambda seed, c=(reqs, keys, fp8): logits_inputs(*c, seed)
        yield f"top-k, {reqs} x {keys}", choose, lambda seed, c=(reqs, keys): row_inputs(*c, seed)
    yield "all three, 4 x 131072 keys of e4m3, 16 heads", all_three, step_inputs


def row_inputs(reqs: int, keys: int, seed: int) -> Inputs:
    """A call of ``top_k_indices``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        "logits": torch.randn(reqs, keys, device="cuda", generator=generator),
        "indices": torch.empty(reqs, TOP_K, dtype=torch.int32, device="cuda"),
    }


def step_inputs(seed: int) -> Inputs:
    """Of the indexer and of attention, over the same contexts."""
    return {"score": logits_inputs(4, 131072, True, seed), "attend": attention_inputs(4, 16, 131072, seed)}


def is_right(run: Run, ops: BackendOps, inputs: Inputs) -> bool:
    """Against the reference's, in bfloat16's or float32's rounding; chosen logits exactly."""
    got = run(ops, inputs).clone()
    want = run(BACKEND_OPS["reference"], inputs)
    if run is choose:
        got, want = (inputs["logits"].gather(1, x.long()).sort(1).values for x in (got, want))
        return torch.equal(got, want)
    limit = 1e-4 if run is score else 2e-2
    return bool((got - want).abs().max() <= limit * want.abs().max())


def measure(run: Run, make: Callable[[int], Inputs], repeats: int) -> dict[str, Any]:
    """Microseconds of the backends "cuda" and "triton"."""
    sets = [make(seed) for seed in range(2 if run is all_three else SETS)]
    samplers, failed = {}, {}
    for name in ("cuda", "triton"):
        ops = BACKEND_OPS[name]
        try:
            if not is_right(run, ops, sets[0]):
                raise AssertionError("wrong")
            samplers[name] = CudaSampler(
                [lambda i=i, ops=ops: run(ops, sets[i % len(sets)]) for i in range(CALLS)]
            )
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    found = interleave(samplers, repeats)
    return {"us": {name: round(timing.median_us, 2) for name, timing in found.items()}, "failed": failed}


def main() -> None:
    options = command_line(__doc__, repeats=12, seconds=(1e9, "no case begins later"), output=str)
    begin, rows = time.monotonic(), []
    for name, run, make in cases():
        if time.monotonic() - begin < options.seconds:
            rows.append({"case": name, **measure(run, make, options.repeats)})
            torch.cuda.empty_cache()
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    write_rows(rows, options.output)


if __name__ == "__main__":
    main()
