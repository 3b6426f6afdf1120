"""Models that look their attention class up by the implementation's name are built with ours, or say
why not."""

import importlib
import re
from pathlib import Path

import pytest
import torch
import transformers
from families import logits_of
from model_coverage.architectures import model_of
from models import padded_prompts
from transformers import Data2VecVisionConfig, Data2VecVisionModel, GitConfig, GitForCausalLM

from torchpaged import UnsupportedModelError
from torchpaged.hf import PagedCache
from torchpaged.hf.families import CLASS_TABLES


def test_every_table_is_known() -> None:
    """By the text of transformers' modelling files: a table that is new, renamed or gone shows here."""
    folder = Path(transformers.__file__).parent / "models"
    found = {}
    for file in folder.glob("*/modeling_*.py"):
        for table in re.findall(r"\b(\w+)\[(?:self\.)?(?:config\._)?attn_implementation\]", file.read_text()):
            if table.endswith("_CLASSES"):
                found[f"{file.parent.name}.{file.stem}"] = table
    known = dict(path.rsplit(".", 1) for path in CLASS_TABLES)
    assert found == {
        module: table for module, table in known.items() if (folder / module.split(".")[0]).exists()
    }
    for module, table in found.items():
        assert {"eager", "torchpaged"} <= set(
            getattr(importlib.import_module(f"transformers.models.{module}"), table)
        )


@pytest.mark.parametrize("model_type", ["falcon", "gpt_neo"])
def test_decoders_run_their_own_attention(model_type: str) -> None:
    """With their mask, without a PagedCache; with one they ask to be attached."""
    inputs = padded_prompts()
    want, got = (logits_of(model_of(model_type, name), inputs) for name in ("eager", "torchpaged"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    model = model_of(model_type, "torchpaged")
    with pytest.raises(UnsupportedModelError, match=r"attach\(model\)"):
        logits_of(model, inputs, PagedCache(model.config, 2, 32))
    torch.testing.assert_close(logits_of(model, inputs), want, rtol=1e-5, atol=1e-5)


def test_others_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"git cannot be built.*build it with 'eager'"):
        GitForCausalLM._from_config(
            GitConfig(num_hidden_layers=1, vocab_size=99), attn_implementation="torchpaged"
        )
    config = Data2VecVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(UnsupportedModelError, match="data2vec cannot be built"):
        Data2VecVisionModel._from_config(config, attn_implementation="torchpaged")
