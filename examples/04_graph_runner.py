"""DecodeGraphRunner: capture a decode step per batch bucket, replay it for every batch and length.

On a GPU these are CUDA graphs; on a CPU the same buckets, padding and buffers run with an eager capture.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchpaged.cache import BlockPool
from torchpaged.graphs import DecodeGraphRunner
from torchpaged.hf import PagedModel

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
    starts = [5, 77, 130]
    want = [
        model.generate(torch.tensor([[t]], device=DEVICE), max_new_tokens=24, do_sample=False)[0].tolist()
        for t in starts
    ]

    paged = PagedModel(model, num_blocks=64, block_size=4)
    runner = DecodeGraphRunner(
        lambda input_ids, metadata: paged(input_ids, metadata),
        max_batch_size=4,
        max_blocks_per_req=8,
        block_size=4,
        num_blocks=paged.kv_cache.num_blocks,
        device=DEVICE,
        compile=DEVICE == "cuda",
        progress=lambda done, total, text: print(f"captured {done} of {total}: {text}"),
    )
    runner.capture()
    pool = BlockPool(paged.kv_cache.num_blocks)
    tables = [pool.allocate(7) for _ in starts]
    rows = [[token] for token in starts]
    for step in range(24):
        # two requests leave half way: a smaller bucket takes over
        live = range(3) if step < 12 else range(2, 3)
        logits = runner.run(
            [rows[i][-1] for i in live], [len(rows[i]) for i in live], [tables[i] for i in live]
        )
        for i, token in zip(live, logits.argmax(-1).tolist(), strict=True):
            rows[i].append(token)
    assert rows[2] == want[2] and rows[0] == want[0][:13] and rows[1] == want[1][:13]
    for report in runner.report():
        print(report)


if __name__ == "__main__":
    main()
