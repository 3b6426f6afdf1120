"""torch.compile(model, fullgraph=True) over a paged cache: one graph serves every length.

With HuggingFace's static cache the mask covers the maximum length; here the ops read the lengths from
device tensors.
"""

from __future__ import annotations

import torch
from transformers import MistralConfig, MistralForCausalLM

import torchpaged.hf

GRAPHS: list[torch.fx.GraphModule] = []


def counting_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    """Keep the traced graph and run it as it is ("inductor" in real use)."""
    GRAPHS.append(graph)
    return graph.forward


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    model = MistralForCausalLM(config).eval()
    model.set_attn_implementation("torchpaged")
    compiled = torch.compile(model, fullgraph=True, backend=counting_backend)
    ids = torch.randint(3, 256, (2, 30))
    cache = torchpaged.hf.PagedCache(model.config, max_batch_size=2, max_seq_len=64)
    model(ids[:, :10], past_key_values=cache)  # the prefill runs eagerly
    for position in range(10, 30):
        step = {"input_ids": ids[:, position : position + 1], "position_ids": torch.full((2, 1), position)}
        logits = compiled(**step, past_key_values=cache).logits[:, -1]
    want = model(ids, past_key_values=torchpaged.hf.PagedCache(model.config, 2, 64)).logits[:, -1]
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    assert len(GRAPHS) == 1
    ops = [str(node.target) for node in GRAPHS[0].graph.nodes if "torchpaged" in str(node.target)]
    print(f"20 decode steps, {len(GRAPHS)} graph, ops in it: {ops}")


if __name__ == "__main__":
    main()
