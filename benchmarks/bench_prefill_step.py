"""What one prefill step of a whole model costs, by its number of tokens: launched from Python and replayed,
and which kernels take the time.

    python benchmarks/bench_prefill_step.py [--shape llama-8b] [--tokens 512 2048 8192]
        [--plain] [--chunks 512 2048] [--json step.json]

One request of that many tokens without a context, the model with random weights and, unless ``--plain``,
fused. A step's roofline is its products alone, at the rate that a large product reaches on the machine.
``--chunks``: the engine, which prefills a prompt of 16,384 tokens in chunks of these sizes. Figures
are medians.
"""

import gc
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_step.cases import SHAPES, ModelShape, build_model
from documents import command_line, keep
from measuring import conditions

from torchpaged.engine import Generator, SamplingParams
from torchpaged.graphs import PackedGraphRunner
from torchpaged.hf import PagedModel, fuse
from torchpaged.metadata import AttentionMetadata

BLOCK_SIZE = 16
#: Kinds of kernels by their names, the first that fits.
KINDS = {
    "attention": "attend|prefill|paged|decode",
    "norm, rotation, gate": "rms|rope|act_and_mul|silu|elementwise|embedding|write_kv",
    "product": "gemm|nvjet|cutlass|sm90|sm80|linear|splitK",
}


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of a call, each between two events."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def kernels(call: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of the kernels of a call: by kind, and the eight names that take most."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            names[event.name] += event.time_range.elapsed_us() / 1e3
    kinds: dict[str, float] = defaultdict(float)
    for name, spent in names.items():
        kinds[next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")] += spent
    top = sorted(names.items(), key=lambda item: -item[1])[:8]
    return {
        "kinds_ms": {k: round(v, 3) for k, v in kinds.items()},
        "top_ms": {name[:90]: round(v, 3) for name, v in top},
    }


def product_rate() -> float:
    """FLOP/s of one large bf16 product."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / (milliseconds(lambda: a @ b, 20) * 1e-3)


def flops(shape: ModelShape, tokens: int) -> float:
    """Of the products of a step; the last token's logits and attention left out."""
    heads = shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    return 2.0 * tokens * shape.num_layers * shape.hidden_size * (heads + 3 * shape.intermediate_size)


def measure(paged: Any, shape: ModelShape, tokens: int, rate: float, repeats: int) -> dict[str, Any]:
    """The row of one step size."""
    blocks = -(-tokens // BLOCK_SIZE)
    table = list(range(1, blocks + 1))
    ids = list(range(tokens))
    metadata = AttentionMetadata.from_lists([tokens], [tokens], [table], block_size=BLOCK_SIZE, device="cuda")
    packed, last = torch.tensor(ids, device="cuda"), torch.tensor([tokens - 1], device="cuda")

    def eager() -> Any:
        with torch.inference_mode():
            return paged(packed, metadata, last)

    runner = PackedGraphRunner(
        paged,
        buckets=[tokens],
        max_num_reqs=8,
        max_blocks_per_req=blocks,
        block_size=BLOCK_SIZE,
        num_blocks=paged.kv_cache.num_blocks,
        device=paged.device,
    )
    runner.capture()

    def replay() -> Any:
        return runner.run(ids, [tokens], [tokens], [table], [tokens - 1])

    ideal = flops(shape, tokens) / rate * 1e3
    times = {"eager_ms": milliseconds(eager, repeats), "replay_ms": milliseconds(replay, repeats)}
    return {
        "tokens": tokens,
        "products_ideal_ms": round(ideal, 3),
        **{name: round(spent, 3) for name, spent in times.items()},
        "eager_tok_s": round(tokens / times["eager_ms"] * 1e3),
        "replay_tok_s": round(tokens / times["replay_ms"] * 1e3),
        **kernels(eager),
    }


def engine(model: Any, shape: ModelShape, chunk: int, fused: bool, prompt_len: int = 16384) -> dict[str, Any]:
    """The row of one chunk size: seconds from a prompt to its first token."""
    generator = Generator(
        model,
        max_batch_size=8,
        max_seq_len=prompt_len + 64,
        num_blocks=prompt_len // BLOCK_SIZE + 64,
        block_size=BLOCK_SIZE,
        fuse=fused,
        prefill_chunk_size=chunk,
        prefix_cache=False,  # the prompt comes again
    )
    prompt = [token % shape.vocab_size for token in range(prompt_len)]
    sampling, seconds = SamplingParams(max_new_tokens=1, ignore_eos=True), []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        generator.generate([prompt], sampling)
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[1:])
    return {
        "chunk": chunk,
        "prompt": prompt_len,
        "seconds": round(median, 4),
        "tok_s": round(prompt_len / median),
    }


def main() -> None:
    arguments = command_line(
        __doc__,
        shape={"choices": SHAPES, "default": "llama-8b"},
        tokens=[512, 1024, 2048, 4096, 8192],
        plain=(False, "the model as HuggingFace has it"),
        chunks=[int],
        repeats=9,
        json=Path,
    )
    device, shape = torch.device("cuda"), SHAPES[arguments.shape]
    model = build_model(shape, device, torch.bfloat16)
    if not arguments.plain:
        fuse(model, count=False)
    paged = PagedModel(model, num_blocks=max(arguments.tokens) // BLOCK_SIZE + 2, block_size=BLOCK_SIZE)
    rate = product_rate()
    document: dict[str, Any] = {
        "benchmark": "prefill step",
        "conditions": conditions.collect(device),
        "shape": shape.name,
        "fused": not arguments.plain,
        "product_tflops": round(rate / 1e12, 1),
        "rows": [],
    }
    for tokens in arguments.tokens:
        row = measure(paged, shape, tokens, rate, arguments.repeats)
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
        keep(document, arguments.json)
    del paged
    for chunk in arguments.chunks:
        row = engine(model, shape, chunk, not arguments.plain)
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
        keep(document, arguments.json)
        gc.collect()


if __name__ == "__main__":
    main()
