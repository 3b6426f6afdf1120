"""A small random Llama through the engine with NVTX ranges, for Nsight Systems; profile_nsys.md says how.

On a CPU it runs as well, and prints the kernels (there: ops) per layer; without the nvtx package it says so
and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import gc

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchpaged import profiling
from torchpaged.engine import Generator, SamplingParams
from torchpaged.profiling.kernel_report import kernels_per_layer, layer_groups

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=1024 if DEVICE == "cuda" else 64)
    parser.add_argument("--layers", type=int, default=8 if DEVICE == "cuda" else 2)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=options.hidden_size,
        intermediate_size=2 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden_size // 32,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32).eval()
    prompts = [[1 + (7 * i + j) % 1000 for j in range(16 + i)] for i in range(options.batch_size)]
    sampling = SamplingParams(max_new_tokens=options.new_tokens)

    with contextlib.ExitStack() as stack:
        try:
            # the captures are inside, so that they are on the timeline too
            stack.enter_context(profiling.enabled())
        except profiling.ProfilingUnavailableError as error:
            print(f"no NVTX ranges: {error}")
        generator = Generator(model, max_batch_size=options.batch_size, max_seq_len=256, compile=False)
        with profiling.range("first generation"):  # captures, on a CPU
            generator.generate(prompts, sampling)
        with profiling.range("measured"):
            outputs = generator.generate(prompts, sampling)
    assert [len(output.token_ids) for output in outputs] == [options.new_tokens] * options.batch_size

    print_kernels(generator, model)
    generator.close()
    gc.collect()  # some releases of nsys lose records, or wait for ever, where graphs outlive the program


def print_kernels(generator: Generator, model: LlamaForCausalLM) -> None:
    """Of a decode step, layer by layer."""
    runner = generator.runner
    assert runner is not None
    rows = runner.buckets[-1]
    try:
        report = kernels_per_layer(lambda: runner.launch_eager(rows), model, lambda: runner.replay(rows))
    except profiling.ProfilingUnavailableError as error:  # under nsys, on a GPU
        print(f"no kernels per layer: {error}")
        return
    for group in layer_groups(report):
        each = " each" if group.indices else ""
        print(
            f"{group.name}: {group.kernels_each:g} {report.kind}s{each}, {group.rows.total.total_us:.0f} us"
        )
    print(
        f"{report.rows.total.count} {report.kind}s in a decode step of {rows} rows, "
        f"{sum(row.total.count for row in report.rows.unmatched.values())} not placed"
    )


if __name__ == "__main__":
    main()
