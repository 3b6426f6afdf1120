"""The engine against HuggingFace's generate(): decode tokens per second, one prompt and eight of
different lengths.

    python benchmarks/bench_engine.py [--model FOLDER] [--device cpu|cuda] [--dtype fp32|bf16]
        [--new-tokens 64] [--repeats 3]

Tokens are compared first (greedy, float32 only: in bf16 near-ties may fall either way). Figures are medians;
the last line is one JSON document.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from documents import command_line
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchpaged.cli.demo import ensure_smollm2
from torchpaged.engine import Generator, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "Water boils at",
    "A short list of prime numbers: 2, 3, 5, 7, 11,",
    "In the beginning the universe was created. This has made a lot of people very angry and",
    "Python is a programming language that",
    "The three laws of motion, as stated by Isaac Newton in his book about natural philosophy, say that",
    "Hello",
]


def seconds(functions: dict[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each function, run in turn, so that a machine whose speed drifts is fair to all."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    args = command_line(
        __doc__,
        model=Path,
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype={"choices": ("fp32", "bf16"), "default": "fp32"},
        new_tokens=64,
        repeats=3,
        compile=False,
    )
    device, new = torch.device(args.device), args.new_tokens
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    folder = args.model or ensure_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None  # both sides go on to the last token
    machine = (
        torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    )
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]

    own = model.config._attn_implementation  # what HuggingFace chose; the engine sets its own

    def hf(prompt: list[int]) -> list[int]:
        model.set_attn_implementation(own)
        inputs = torch.tensor([prompt], device=device)
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    hf_tokens = [hf(prompt) for prompt in ids]  # also the warm-up
    sizes = {"max_batch_size": 8, "max_seq_len": 256}
    generator = Generator(model, **sizes, compile=args.compile, prefix_cache=False)  # prompts come again
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    same = [
        out.token_ids == want for out, want in zip(generator.generate(ids, sampling), hf_tokens, strict=True)
    ]
    if dtype == torch.float32 and not all(same):
        raise SystemExit(f"tokens differ from generate()'s: {same}")

    def engine(prompts: list[list[int]]) -> None:
        model.set_attn_implementation("torchpaged")
        generator.generate(prompts, sampling)

    timed = {"hf": lambda: hf(ids[0]), "one": lambda: engine(ids[:1]), "eight": lambda: engine(ids)}
    took = seconds(timed, device, args.repeats)
    hf_one, one, eight = new / took["hf"], new / took["one"], 8 * new / took["eight"]
    result = {
        "machine": machine,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(device),
        "dtype": args.dtype,
        "backend": generator.choice.name,
        "compile": args.compile,
        "new_tokens": new,
        "same_tokens": sum(same),
        "hf_generate_tok_s": hf_one,
        "engine_batch1_tok_s": one,
        "engine_batch8_tok_s": eight,
        "batch1_ratio": one / hf_one,
        "batch8_ratio": eight / hf_one,
    }
    print(
        f"{machine}, torch {torch.__version__}, {args.dtype}, backend {generator.choice.name}, {new} new "
        "tokens per prompt"
    )
    print(f"HF generate(), dynamic cache, batch 1: {hf_one:8.1f} tok/s")
    print(f"engine, 1 prompt:                      {one:8.1f} tok/s ({one / hf_one:.2f}x)")
    print(f"engine, 8 prompts at once:             {eight:8.1f} tok/s ({eight / hf_one:.2f}x)")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
