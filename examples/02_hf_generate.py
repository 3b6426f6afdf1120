"""A HuggingFace model through unmodified generate(): set the attention implementation, pass a PagedCache.

The model is tiny and random, so that nothing is downloaded; a real one takes the same three lines.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torchpaged.hf


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 512, (2, 24))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0  # the first prompt is shorter: left padding
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    want = model.generate(**inputs)
    beams = model.generate(**inputs, num_beams=3)

    model.set_attn_implementation("torchpaged")
    cache = torchpaged.hf.PagedCache(model.config, max_batch_size=2, max_seq_len=64)
    got = model.generate(**inputs, past_key_values=cache)
    print("backend:", cache.choice.name, "-", cache.choice.reason)
    print(cache.describe())
    assert torch.equal(got, want)
    print("greedy tokens equal HuggingFace's own")

    cache = torchpaged.hf.PagedCache(model.config, max_batch_size=6, max_seq_len=64)
    assert torch.equal(model.generate(**inputs, num_beams=3, past_key_values=cache), beams)
    print(f"beam search too: {cache.pool.num_used} blocks used, full blocks shared between beams")


if __name__ == "__main__":
    main()
