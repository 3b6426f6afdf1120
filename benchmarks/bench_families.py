"""Decode steps of hybrids and latent models through the engine, next to the bytes that a step can't avoid.

    PYTHONPATH=. python benchmarks/bench_families.py [--shapes lfm2-1b qwen3.5-1b deepseek-v2-lite]
        [--batches 1 8 64] [--context 512] [--new 128] [--seconds 300] [--output FILE] [--trace]

Models have the sizes below and random weights, bf16 on a GPU; the engine runs with its defaults and `fuse`.
``step_ms`` is what one more token of every request takes: the difference of two runs with ``--new`` and half
as many new tokens, halved likewise. ``prompts_ms``: all prompts and one token each. ``floor_ms`` is of the
bytes alone, at ``--bandwidth`` (TB/s): every weight once, of routed experts as many as different tokens are
expected to choose, a state read and written, keys or latents read. ``share`` is floor by step. ``--trace``:
what each launch of a replayed step takes, and ``share`` by their sum. The last line is one JSON document.
"""

import argparse
import collections
import contextlib
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_step.cases import SHAPES as DENSE
from decode_step.cases import build_model
from documents import command_line, keep
from measuring import conditions
from transformers import AutoConfig, AutoModelForCausalLM

from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import attach

SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
#: Model type and config, with sizes of LFM2-1.2B, Qwen3.5-0.8B (its vocabulary cut), DeepSeek-V2-Lite,
#: Granite 4.0 H 1B and Falcon-H1-1.5B, these two with multipliers like theirs; Kimi Linear's layers at sizes
#: of a small model, without experts.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2-1b": (
        "lfm2",
        {
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 65536,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
    "qwen3.5-1b": (
        "qwen3_5_text",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "vocab_size": 102400,
        },
    ),
    "granite4-h-1b": (
        "granitemoehybrid",
        {
            "hidden_size": 1536,
            "shared_intermediate_size": 4096,
            "num_hidden_layers": 40,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 0,
            "layer_types": [("attention" if n % 10 == 5 else "mamba") for n in range(40)],
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "vocab_size": 100352,
            "tie_word_embeddings": True,
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "falcon-h1-1.5b": (
        "falcon_h1",
        {
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 256,
            "vocab_size": 65536,
            "attention_out_multiplier": 0.9375,
            "key_multiplier": 0.390625,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738],
            "ssm_out_multiplier": 0.23570226039551587,
        },
    ),
    "kimi-linear-1b": (
        "kimi_linear",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "linear_num_heads": 16,
            "layer_types": [("full_attention" if n % 4 == 3 else "linear_attention") for n in range(16)],
            "mlp_layer_types": ["dense"] * 16,
            "vocab_size": 65536,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": (
        "lfm2",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "full_attn_idxs": [1],
        },
    ),
}


def build(name: str, device: torch.device) -> Any:
    """The model of a shape, its weights made on the device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name in DENSE:
        return build_model(DENSE[name], device, dtype)
    family, sizes = FAMILIES[name]
    width = 0.9 * sizes["hidden_size"] ** -0.5
    config = AutoConfig.for_model(
        family, **{**sizes, **SPECIAL, "initializer_range": width, "max_position_embeddings": 8192}
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.requires_grad_(False)
    return attach(model) if hasattr(config, "kv_lora_rank") else model  # latents need functions of the family


def weight_bytes(model: Any, batch: int) -> float:
    """Of a step; embeddings count only where they are the lm_head, too."""
    config = model.config
    count, top_k = getattr(config, "n_routed_experts", 0), getattr(config, "num_experts_per_tok", 0)
    met = 1 - (1 - top_k / count) ** batch if count else 1.0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = 0.0
    for name, weight in model.named_parameters():
        if weight is embedding and head is not embedding:
            continue
        routed = ".experts." in name
        total += weight.numel() * weight.element_size() * (met if routed else 1.0)
    return total


def cache_bytes(generator: Generator, batch: int, context: float) -> float:
    """Read of keys, values and latents, read and written of states, in a step."""
    cache = generator.model.kv_cache
    states = sum(cache.layers[n].bytes_per_block(cache.block_size, cache.dtype) for n in cache.per_request)
    return batch * (context * cache.bytes_per_token + 2 * states)


def seconds_of(generator: Generator, batch: int, context: int, new: int, seed: int) -> float:
    """Of a batch of requests, all at once, with prompts of their own."""
    vocab = generator.model.vocab_size
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, vocab, (batch, context), generator=draw).tolist()
    begun = time.perf_counter()
    generator.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True))
    return time.perf_counter() - begun


def launches_of(call: Callable[[], Any]) -> dict[str, Any]:
    """Of the steps that a call replays: ``span_us``, by how much later a step ended than the one ahead of it,
    and ``launches``: ``[name, grid, threads, bytes of shared memory, launches of a step, us, early]``, us by
    which one ended later than the one that ended before it, since kernels that were launched early run while
    they wait, and us by which it had begun before that end. Medians over steps, means over launches of a
    kernel and shape, the most of a step first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    steps: list[list[tuple[Any, float, float]]] = [[]]
    before = 0.0
    kernels = [event for event in events if event.get("cat") == "kernel"]
    for event in sorted(kernels, key=lambda event: event["ts"] + event["dur"]):
        what, end = event["args"], event["ts"] + event["dur"]
        threads = math.prod(what.get("block", [0]))
        key = (event["name"][:60], tuple(what.get("grid", ())), threads, what.get("shared memory", 0))
        steps[-1].append((key, end - before, before - event["ts"]))
        before = end
        if event["name"].startswith("finish_step"):
            steps.append([])
    length = statistics.mode(len(step) for step in steps)  # not a prompt's
    same = [step for step in steps if len(step) == length]
    same = same[: len(same) // 3 + 1]  # later ones have fewer requests, since they began one by one
    launches: dict[Any, list[list[float]]] = {}
    for turns in zip(*same, strict=True):
        key = collections.Counter(key for key, *_ in turns).most_common(1)[0][0]
        launches.setdefault(key, []).append([statistics.median(turn[n] for turn in turns) for n in (1, 2)])
    rows = [
        [*key, len(all_us), *(round(statistics.fmean(us), 2) for us in zip(*all_us, strict=True))]
        for key, all_us in launches.items()
    ]
    span = statistics.median(sum(us for _, us, _ in step) for step in same[1:])
    return {"span_us": round(span, 1), "launches": sorted(rows, key=lambda row: -row[4] * row[5])}


def measure(name: str, args: argparse.Namespace, device: torch.device, end: float) -> list[dict[str, Any]]:
    """Rows of one shape, a batch each."""
    model, rows = build(name, device), []
    begun = time.perf_counter()
    sizes = {"max_batch_size": max(args.batches), "max_seq_len": args.context + args.new + 16}
    with Generator(model, fuse=True, prefix_cache=False, buckets=sorted(args.batches), **sizes) as generator:
        for batch in args.batches:
            row: dict[str, Any] = {"shape": name, "batch": batch, "context": args.context}
            rows.append(row)
            if time.monotonic() > end:
                row["failed"] = "no time was left"
                continue
            half, steps = args.new // 2, args.new - args.new // 2
            seconds_of(generator, batch, args.context, half, 0)
            taken = []
            for turn in range(args.repeats):
                short = seconds_of(generator, batch, args.context, half, 2 * turn + 1)
                taken.append(
                    (seconds_of(generator, batch, args.context, args.new, 2 * turn + 2) - short) / steps
                )
            read = weight_bytes(model, batch)
            read += cache_bytes(generator, batch, args.context + args.new * 0.75)
            row["step_ms"] = round(1e3 * statistics.median(taken), 4)
            row["floor_ms"] = round(read / args.bandwidth / 1e9, 4)
            row["share"] = round(row["floor_ms"] / row["step_ms"], 3)
            alone = [seconds_of(generator, batch, args.context, 1, 50 + turn) for turn in range(args.repeats)]
            row["prompts_ms"] = round(1e3 * statistics.median(alone), 2)
            row["backend"] = generator.choice.name
            print(json.dumps(row), file=sys.stderr, flush=True)
            if args.trace:
                row |= launches_of(lambda n=batch: seconds_of(generator, n, args.context, args.new, 99))
                row["share"] = round(1e3 * row["floor_ms"] / row["span_us"], 3)
        print(f"{name}: {time.perf_counter() - begun:.1f} s, {generator.start_report}", file=sys.stderr)
    return rows


def main() -> None:
    args = command_line(
        __doc__,
        shapes=["lfm2-1b", "qwen3.5-1b", "deepseek-v2-lite"],
        batches=[1, 8, 64],
        context=512,
        new=128,
        repeats=3,
        seconds=(300.0, "after which no row is begun"),
        bandwidth=(4.35, "TB/s that copies reach"),
        trace=(False, "times of a step's launches"),
        output=Path,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    end = time.monotonic() + args.seconds
    document: dict[str, Any] = {"benchmark": "families", "conditions": conditions.collect(device), "rows": []}
    for name in args.shapes:
        try:
            document["rows"] += measure(name, args, device, end)
        except Exception as error:  # one shape's failure is a line of the document
            document["rows"].append({"shape": name, "failed": f"{type(error).__name__}: {error}"[:400]})
            print(document["rows"][-1], file=sys.stderr, flush=True)
        gc.collect()
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
        keep(document, args.output)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
