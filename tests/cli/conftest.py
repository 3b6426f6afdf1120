"""What the command line needs, and a model that its tests share."""

import pytest

for _package in ("typer", "rich", "transformers", "gguf", "safetensors"):
    pytest.importorskip(_package, reason=f"{_package} is not installed; pip install 'torchpaged[demo]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny llama with a tokenizer of one token per letter."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = {c: i for i, c in enumerate("?abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=28,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(path)
    return str(path)
