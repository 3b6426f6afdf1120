"""The cache by each name that this transformers takes: the same logits, the same way through the model."""

import pytest
import torch
from model_coverage.architectures import model_of
from models import padded_prompts
from torch import Tensor

from torchpaged.hf import PagedCache, attach, fuse
from torchpaged.hf.cache_argument import CACHE, CACHE_LENGTH, CACHE_NAMES, STATES_CACHE, cache_of, take_cache


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["llama", "bloom", "mamba2", "trocr", "deepseek_v3"])
def test_by_each_name(name: str) -> None:
    model, inputs = attach(model_of(name)), padded_prompts()
    if name == "llama":
        assert fuse(model, count=False).replaced
    found: dict[str, Tensor] = {}
    for argument in {"past_key_values", CACHE, STATES_CACHE if name == "mamba2" else CACHE}:
        cache = PagedCache(model.config, 2, 32, block_size=4)
        with torch.no_grad():
            found[argument] = model(**inputs, **{argument: cache}).logits
        assert cache.ready
    assert all(torch.equal(logits, found[CACHE]) for logits in found.values())


def test_what_is_looked_for() -> None:
    for name in CACHE_NAMES:
        options = dict.fromkeys(CACHE_NAMES) | {name: 7, "use_cache": True}
        assert cache_of(options) == take_cache(options) == 7
        assert options == {"use_cache": True}
    assert cache_of({}) is None
    assert CACHE_LENGTH in ("past_key_values_length", "cache_length")
