"""Every decoder architecture of transformers, tiny and left-padded, through generate(): paged, dense and
without a cache, against eager attention.

tests/data/architectures.json says what each of the three gives: "right" (greedy tokens and logits), or which
refusal, by the name it has in `REFUSALS`. There is no entry for a wrong answer or for an error of another
kind; "as sdpa" is a model for which transformers' own sdpa differs from its own eager attention. A status
that changes, for better or worse, fails here.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from families import logits_of
from model_coverage.architectures import LEFT_OUT, model_of
from model_coverage.checks import generate_masked
from models import padded_prompts
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchpaged import UnsupportedModelError
from torchpaged.hf import PagedCache, attach
from torchpaged.hf.cache_argument import CACHE
from torchpaged.hf.families import family_of
from torchpaged.hf.support import lacks_causal_mask

MODES = ["paged", "dense", "none"]
TABLE: dict[str, list[str]] = json.loads((Path(__file__).parents[1] / "data/architectures.json").read_text())
if CACHE == "cache":  # transformers 5.24: new architectures, and two that got the attention interface
    _PAGED = ("apertus1p5_text", "codegen", "exaone", "gptj", "lara_mini", "sarvam_moe")
    TABLE |= {name: ["right"] * 3 for name in _PAGED}
    TABLE |= {"sarvam_mla": ["computes", "right", "right"], "dory": ["loops", "loops", "right"]}
    TABLE |= {"inkling2_loop_text": ["loops", "loops", "right"]}
#: name in the table -> what the message says
REFUSALS = {
    "loops": "keeps the keys of each pass through its loop",
    "no interface": "do not call transformers' attention interface",
    "computes": r"computes with its cached keys or values.*use PagedCache\(\.\.\., dense=True\)",
    "position bias": r"position bias.*use PagedCache\(\.\.\., dense=True\)",
    "not dense": r"dense=True makes max_seq_len; leave dense out, and call torchpaged.hf.attach\(model\)",
    "own cache": "keeps a cache of its own kind; call generate",
    "own cache, attached": "keeps a cache of its own kind; call torchpaged.hf.attach",
    "nothing to page": "keeps no keys and values in any layer.*call generate",
    "states alone": "keeps states alone.*attach.*leave dense out",
    "no static cache": "transformers' StaticCache.*can't be built.*use DynamicCache",
    "indexer": "caches an indexer",
    "sparse": "selects keys sparsely",
}


def run(model_type: str, implementation: str, mode: str = "none") -> Tensor:
    """Logits of every new token ``[tokens, rows, vocab]``."""
    if implementation == "torchpaged" and family_of(model_type).own_attention:
        model = attach(model_of(model_type, "eager"))
    else:
        model = model_of(model_type, implementation)
    cache = None if mode == "none" else PagedCache(model.config, 2, 32, block_size=4, dense=mode == "dense")
    return logits_of(model, padded_prompts(), cache, eos_token_id=None)


@functools.lru_cache(maxsize=2)
def eager(model_type: str) -> Tensor:
    model = model_of(model_type, "eager")
    masked = lacks_causal_mask(model)
    logits = generate_masked(model, padded_prompts(), 5) if masked else run(model_type, "eager")
    assert logits.isfinite().all()
    return logits


def agree(got: Tensor, want: Tensor) -> bool:
    """Greedy tokens too: the fifth token's logits come from the four before."""
    close = torch.allclose(got, want, rtol=1e-4, atol=1e-4 * max(float(want.abs().max()), 1.0))
    return close and torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.slow_cases(
    but=(
        *("llama-*", "gpt_oss-*", "opt-*", "qwen3_next-*", "deepseek_v3-*", "falcon-*", "bart-*"),
        # masks of ones, masks that no layer uses, chunks that begin at a row's first token, and no keys in
        # the first layer
        *("qwen2_moe-*", "biogpt-paged", "marian-paged", "pegasus-paged", "lfm2-paged"),
        *("gemma3_text-paged", "cohere2-paged"),
        *("llama4_text-*", "recurrent_gemma-*", "minicpm3-dense", "diffllama-*", "jetmoe-dense"),
    )
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", sorted(TABLE))
def test_architecture(model_type: str, mode: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    expected = TABLE[model_type][MODES.index(mode)]
    if expected in REFUSALS:
        with pytest.raises(UnsupportedModelError, match=REFUSALS[expected]):
            run(model_type, "torchpaged", mode)
        return
    got = run(model_type, "torchpaged", mode)
    assert agree(got, eager(model_type)) == (expected == "right")
    if expected == "as sdpa":
        assert agree(got, run(model_type, "sdpa"))
        pytest.xfail("transformers' own sdpa differs from its eager attention, alike")


@pytest.mark.slow
def test_the_table_is_complete() -> None:
    """What transformers maps to a CausalLM is listed, or left out by name; and the table knows no
    other words."""
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(TABLE) | set(LEFT_OUT)
    assert not set(TABLE) & set(LEFT_OUT)
    assert {status for row in TABLE.values() for status in row} <= {"right", "as sdpa", *REFUSALS}
    assert all(len(row) == len(MODES) for row in TABLE.values())
    assert [name for name, row in TABLE.items() if "as sdpa" in row] == ["minimax"]
