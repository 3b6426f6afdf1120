"""Real weights: MiniLM without its padding, Whisper through paged self- and cross attention."""

from typing import Any

import pytest
import torch
from model_coverage.encoders import Attended
from real_models import minilm_path, spoken, whisper_tiny
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from torchpaged.hf import PagedEncoderDecoderCache, paged

TEXTS = [
    "A cat sits on the mat.",
    "The stock market fell sharply on Monday after a week of gains, analysts said in a long report.",
    "Hi",
    "On the mat there is a cat.",
]


def embeddings(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The means of the tokens' states, of length 1."""
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    kept = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * kept).sum(1) / kept.sum(1), dim=-1)


@pytest.mark.slow
def test_minilm() -> None:
    path = minilm_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    want = embeddings(model, batch)
    model.set_attn_implementation("torchpaged")
    with Attended() as counts:
        got = embeddings(model, batch)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert (counts.ours, counts.sdpa) == (6, 0)
    assert batch["attention_mask"].sum() < 60
    similar = got @ got.T
    assert similar[0, 3] > 0.8
    assert similar[0, 1] < 0.2
    assert similar[0, 2] < 0.2
    for row, text in enumerate(TEXTS):
        alone = embeddings(model, tokenizer([text], return_tensors="pt"))
        torch.testing.assert_close(alone[0], got[row], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_whisper_tiny() -> None:
    """Two recordings in a batch, through Whisper's own generate()."""
    model, extractor, tokenizer = whisper_tiny()
    sounds = [spoken("My dog likes to swim in the river."), spoken("The weather is very nice today.")]
    features = extractor(sounds, sampling_rate=16000, return_tensors="pt").input_features
    call = {"input_features": features, "max_new_tokens": 24, "do_sample": False}
    want = model.generate(**call)
    with paged(model):
        cache = PagedEncoderDecoderCache.for_inputs(model, **call)
        got = model.generate(**call, past_key_values=cache)
    assert torch.equal(got, want)
    said = " ".join(tokenizer.batch_decode(got, skip_special_tokens=True)).lower()
    assert "swim in the river" in said, said
    assert "nice today" in said, said
    assert cache.cross_attention_cache.max_seq_len == 1500
