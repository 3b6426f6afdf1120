"""What the command line needs, and a model that its tests share."""

import pytest
from tiny_models import tiny_model

for _package in ("typer", "rich", "transformers", "gguf", "safetensors"):
    pytest.importorskip(_package, reason=f"{_package} is not installed; pip install 'torchpaged[demo]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny llama with a tokenizer of one token per letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate("?abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    path = tmp_path_factory.mktemp("model")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model("Llama", vocab_size=28, **heads, max_position_embeddings=64, bos_token_id=None)
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(path)
    return str(path)
