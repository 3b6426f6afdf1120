"""Whole decode steps in one graph, four per launch: the model, sampling and bookkeeping, without the host.

The model is tiny and random. `fuse` makes each layer a few large kernels; the engine captures the steps per
batch size and reads tokens one launch late. On a CPU the same code runs with an eager capture.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchpaged.engine import Generator, SamplingParams
from torchpaged.graphs import bucket_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().to(DEVICE)
    prompts = [[5, 9, 2], [77], list(range(100, 130))]
    greedy = SamplingParams(max_new_tokens=18)
    drawn = SamplingParams(max_new_tokens=11, temperature=0.8, top_p=0.9, seed=7)
    sampling = [greedy, drawn, greedy]
    one_by_one = Generator(model, max_batch_size=4, graphs=False).generate(prompts, sampling)

    generator = Generator(model, max_batch_size=4, buckets=[1, 2, 4], fuse=True, steps_per_launch=4)
    outputs = generator.generate(prompts, sampling)
    for output, want in zip(outputs, one_by_one, strict=True):
        # the same tokens as without graphs, fusion and launches ahead
        assert output.token_ids == want.token_ids
        print(output.prompt_token_ids[:3], "->", output.token_ids)

    print("\ngraphs:", generator.graph_reason, "\ncompile:", generator.compile_reason)
    assert generator.runner is not None
    print("\n" + bucket_table(generator.runner.report()))
    print(f"\n{generator.fusion_report}")
    # several tokens of a request per launch
    launches = sum(report.hits for report in generator.runner.report())
    assert launches < max(len(output.token_ids) for output in outputs)


if __name__ == "__main__":
    main()
