"""The model of ``torchpaged generate``: its config and weights read, and held against the memory."""

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchpaged.cache.kinds import memory_of
from torchpaged.cli.settings import Settings
from torchpaged.custom_ops.errors import ArgumentError, TorchpagedError
from torchpaged.names import short_dtype

CONFIGS = ("config.json", "adapter_config.json")
#: What a folder's tokenizer is in, by its kind.
TOKENIZERS = ("tokenizer*", "vocab*", "spiece.model", "tekken.json", "*.tiktoken", "sentencepiece*.model")


@contextlib.contextmanager
def reading(model: str, what: str) -> Iterator[None]:
    """All that other libraries raise over a user's files is one line here: its kind, and how it begins."""
    try:
        yield
    except TorchpagedError:
        raise
    except Exception as error:
        first = textwrap.shorten(str(error), 240, placeholder=" ...")
        got = repr(model) if os.path.exists(model) else f"{model!r}, no file or folder here"
        raise ValueError(
            f"--model: expected {what} that transformers can read, got {got}: {type(error).__name__}: {first}"
        ) from error


def source(model: str) -> dict[str, str]:
    """Where transformers finds a model, as arguments of its ``from_pretrained``: a folder or hub id, or a
    file of GGUF in a folder."""
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": model}


def read_config(model: str) -> Any:
    """The config of a folder, hub id or file of GGUF.

    Raises:
        ArgumentError, ValueError: there is no such folder, it holds no config that can be read, or one of no
            causal language model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    expected, path = "a HuggingFace folder, hub id or .gguf file", Path(model)
    if not path.exists():
        owner = path.parent != Path(".") and path.parent.is_dir()  # a folder here, no name on the hub
        if model.startswith((".", "/", "~")) or path.suffix == ".gguf" or owner:
            raise ArgumentError("--model", expected, f"{model!r}, which does not exist")
    elif path.is_file() and path.suffix != ".gguf":
        raise ArgumentError("--model", expected, f"{model!r}, another file", "give the folder that it is in")
    elif path.is_dir() and not any((path / name).is_file() for name in CONFIGS):
        files = sorted(path.glob("*.gguf"))
        fix = f"give the file: --model {files[0]}" if files else ""
        raise ArgumentError("--model", expected, f"{model!r}, a folder without {CONFIGS[0]}", fix)
    with reading(model, "a config"):
        if not (path / CONFIGS[0]).is_file() and (path / CONFIGS[1]).is_file():
            base = json.loads((path / CONFIGS[1]).read_text())["base_model_name_or_path"]
        else:
            base = model
        config = AutoConfig.from_pretrained(**source(base))
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.is_encoder_decoder or not (remote or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING):
        kind = "an encoder-decoder" if config.is_encoder_decoder else "no such model"
        fix = "run it by model.generate() with torchpaged.hf.PagedEncoderDecoderCache"
        raise ArgumentError(
            "--model",
            "a causal language model",
            f"{model!r}, {config.model_type}, {kind}",
            fix if config.is_encoder_decoder else "",
        )
    return config


def read_tokenizer(model: str) -> Any:
    """The tokenizer of a folder, hub id or file of GGUF.

    Raises:
        ArgumentError, ValueError: there is none, or it can't be read.
    """
    from transformers import AutoTokenizer

    path = Path(model)
    if path.is_dir() and not any(any(path.glob(name)) for name in TOKENIZERS):
        raise ArgumentError(
            "--model",
            "a folder with a tokenizer that transformers can read",
            f"{model!r}, a folder without tokenizer.json",
            "tokenizer.save_pretrained(folder) puts it there",
        )
    with reading(model, "a tokenizer"):
        return AutoTokenizer.from_pretrained(**source(model))


def load(settings: Settings, config: Any) -> Any:
    """The model, of a folder or the hub. Its size is said, and held against the memory, before any of it is
    allocated.

    Raises:
        ArgumentError, ValueError: it does not fit into memory, or its weights are damaged or not all there.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    count = 0
    # What can't be built here says below, with its weights, why not; those that are quantised are smaller.
    with contextlib.suppress(Exception), torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
        if getattr(config, "quantization_config", None) is None:
            count = sum(parameter.numel() for parameter in empty.parameters())
    if count:
        _require_memory(settings, count)
    with reading(settings.model, "a config and weights"):
        model, report = AutoModelForCausalLM.from_pretrained(
            **source(settings.model), dtype=settings.torch_dtype, output_loading_info=True
        )
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise ArgumentError(
            "--model",
            f"weights of every parameter of {type(model).__name__}",
            f"{settings.model!r}, which lacks {len(names)}, such as {names[0]}",
            "they would be random numbers",
        )
    return model.to(settings.place).eval()


def _require_memory(settings: Settings, count: int) -> None:
    """Say how large a model of ``count`` parameters is, and refuse one that its device can't hold."""
    size, memory = count * settings.torch_dtype.itemsize, memory_of(settings.place)
    kind = short_dtype(str(settings.torch_dtype))
    text = f"{count / 1e6:,.1f} M parameters, {size / 2**30:,.2f} GiB in {kind}"
    if not settings.as_json:
        print(f"model: {text}", file=sys.stderr)
    if memory is not None and size > memory:
        raise ArgumentError(
            "--model",
            f"one that fits into the {memory / 2**30:,.1f} GiB of {settings.place}",
            f"{settings.model!r}: {text}",
            "take a smaller one or --dtype; sizes that config.json leaves out are the model type's own",
        )
