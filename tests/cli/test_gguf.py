"""A model in a file of GGUF, as llama.cpp has them: read through transformers."""

import json
from pathlib import Path
from typing import Any

from command import run

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """``model.layers.1.mlp.up_proj.weight`` is ``blk.1.ffn_up.weight`` there."""
    name = name.removesuffix(".weight")
    if name in NAMES:
        return f"{NAMES[name]}.weight"
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleaved(weight: Any, num_heads: int) -> Any:
    """Rows of queries or keys, in the order in which llama.cpp rotates them: pairs are neighbours."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def write_gguf(folder: str, path: Path) -> None:
    """The llama of ``folder`` as GGUF, its letters as the tokens of a GPT-2 vocabulary without merges."""
    import gguf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["?", *"abcdefghijklmnopqrstuvwxyz", "Ġ"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_unk_token_id(0)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        part = name.split(".")[-2]
        rows = interleaved(weight, heads[part]) if part in heads else weight
        writer.add_tensor(gguf_name(name), rows.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_tokens_of_its_folder(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(folder, path)
    options = ("--max-new-tokens", "12", "--device", "cpu", "--ignore-eos", "--json")
    found = [run("generate", "hello you", "--model", model, *options) for model in (folder, str(path))]
    assert [done.returncode for done in found] == [0, 0], found[1].stderr
    expected, got = (json.loads(done.stdout)["outputs"][0] for done in found)
    assert len(got["token_ids"]) == 12
    assert got["token_ids"] == expected["token_ids"]


def test_a_folder_with_a_gguf_file_alone_names_it(folder: str, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "tiny.gguf")
    done = run("generate", "hello", "--model", str(tmp_path))
    assert done.returncode == 2
    assert f"give the file: --model {tmp_path / 'tiny.gguf'}" in done.stderr
