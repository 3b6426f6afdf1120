"""The engine behind generate() on a GPU: transformers' own greedy tokens in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fuse", [False, True])
def test_generate_of_an_accelerated_model(make_llama: Callable[..., Any], fuse: bool) -> None:
    import torchpaged.hf as hf

    model = make_llama(vocab_size=99, hidden_size=256, intermediate_size=384, max_position_embeddings=256)
    model = model.to("cuda").eval()
    ids = torch.randint(1, 99, (3, 21), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :7], ids[1, :7] = 0, 0
    call = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    model.set_attn_implementation("eager")
    free = model.generate(ids, eos_token_id=None, **call)
    ends = [int(free[0, 25]), int(free[2, 30])]
    want = model.generate(ids, eos_token_id=ends, **call)
    hf.accelerate(model, max_batch_size=2, max_seq_len=64, fuse=fuse)
    assert model.generate.generator.loop is not None
    assert torch.equal(model.generate(ids, eos_token_id=None, **call), free)
    assert torch.equal(model.generate(ids, eos_token_id=ends, **call), want)
