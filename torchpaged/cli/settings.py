"""The options of ``torchpaged generate``, declared once, and what they are read as."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import typer

from torchpaged.backends import list_backends
from torchpaged.names import LONG_NAMES, device_named, option, short_dtype

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_SAMPLING = "max_new_tokens temperature top_k top_p min_p repetition_penalty seed ignore_eos"


def dtype_named(name: str, flag: str, of_caches: bool = False) -> torch.dtype:
    """The dtype of that name; of fp8 for caches alone."""
    short = short_dtype(name)
    known = [short for short in DTYPES if of_caches or not short.startswith("fp8")]
    if short not in known:
        raise typer.BadParameter(
            f"expected one of {', '.join([*known, *LONG_NAMES])}, got {name!r}", param_hint=flag
        )
    return DTYPES[short]


def _sizes(text: str, flag: str) -> list[int] | None:
    """``"1,2,4"`` as numbers; None for an empty text."""
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise typer.BadParameter(
            f"expected numbers of at least 1 such as 1,2,4, got {text!r}", param_hint=flag
        )
    return [int(word) for word in words]


@dataclass(frozen=True)
class Settings:
    """As typed; `check` reads them."""

    prompts: list[str] = option(
        "one or more prompts; they run in one continuous batch; -: the lines of stdin", (), argument=True
    )
    model: str = option(
        "folder or hub id of HuggingFace, or a .gguf file; default: SmolLM2-135M-Instruct, fetched once", ""
    )
    input: str = option(
        'prompts from this file instead, a line each: {"id": 1, "prompt": "..."}; -: stdin', ""
    )
    output: str = option("append results to this file, a line each; ids that it has are skipped", "")
    max_new_tokens: int = option("new tokens per prompt at most", 64)
    temperature: float = option("0 = greedy", 0.0)
    top_k: int = option("0 = all", 0)
    top_p: float = option("1 = all", 1.0)
    min_p: float = option("least share of the likeliest token's probability; 0 = all", 0.0)
    repetition_penalty: float = option("on tokens that occurred; 1 = off", 1.0)
    seed: int | None = option("seed of the draws; default: a fresh one", None)
    stop: list[str] | None = option("end at this text; may be given several times", None)
    ignore_eos: bool = option("go on past the model's end token", False)
    chat: bool = option(
        "wrap each prompt in the model's chat template; without prompts: a conversation, line by line", False
    )
    system: str = option("with --chat: the system's message, ahead of each prompt or conversation", "")
    compile: bool | None = option(
        "torch.compile the decode step; default: on a GPU unless fully fused", None, "--compile/--no-compile"
    )
    fuse: bool = option("fewer, larger kernels per layer: torchpaged.hf.fuse", False, "--fuse/--no-fuse")
    steps_per_launch: int = option("decode steps per graph launch", 1, min=1)
    buckets: str = option(
        "batch sizes to capture, such as 1,2,4; the largest is how many prompts run at once; "
        "default: for all prompts",
        "",
    )
    prefill_buckets: str = option(
        "numbers of prompt tokens to capture prefills for, such as 64,512; none: launched from Python; "
        "default: automatic",
        "",
    )
    backend: str = option(f"auto, {', '.join(list_backends())}", "auto")
    dtype: str = option(
        "auto, fp32, bf16, fp16 (or float32, bfloat16, float16); auto: bf16 on a GPU, fp32 on a CPU", "auto"
    )
    device: str = option("auto, cpu, cuda, cuda:1", "auto")
    max_seq_len: int = option("tokens per request, prompt included; 0: the model's, at most 2048", 0, min=0)
    block_size: int = option("tokens per block of the cache", 16, min=1)
    num_blocks: int = option("blocks of the cache; 0: enough for all prompts", 0, min=0)
    offline: bool = option("download nothing", False)
    as_json: bool = option("print one JSON document and nothing else", False, "--json")
    verbose: bool = option(
        "print decisions with reasons, the fusion report and the table of buckets", False, "--verbose"
    )
    profile: str = option(
        "write a torch.profiler trace of the generation to this file, and list kernels by module", ""
    )
    compile_cache: str = option(
        "keep compiled code in this file: read if it is there, written if not; read only files you trust", ""
    )

    @functools.cached_property
    def place(self) -> torch.device:
        """``device``, of this machine."""
        return device_named(self.device)

    @functools.cached_property
    def torch_dtype(self) -> torch.dtype:
        """Of weights and caches."""
        automatic = "bf16" if self.place.type == "cuda" else "fp32"
        return dtype_named(automatic if self.dtype == "auto" else self.dtype, "--dtype")

    @functools.cached_property
    def batch_sizes(self) -> list[int] | None:
        """``buckets``; the largest is the batch size; None: as many as there are prompts, at most 64."""
        return _sizes(self.buckets, "--buckets")

    @functools.cached_property
    def prompt_sizes(self) -> list[int] | str:
        """``prefill_buckets``; []: none."""
        if self.prefill_buckets == "none":
            return []
        return _sizes(self.prefill_buckets, "--prefill-buckets") or "auto"

    @property
    def is_conversation(self) -> bool:
        """Whether stdin has the turns of one conversation."""
        return self.chat and not self.prompts and not self.input

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `torchpaged.engine.SamplingParams`."""
        return {name: getattr(self, name) for name in _SAMPLING.split()} | {"stop": tuple(self.stop or ())}

    def check(self) -> None:
        """Refuse options that can't be read; raises `typer.BadParameter` or `ArgumentError`."""
        if bool(self.input) != bool(self.output):
            raise typer.BadParameter("expected both or none of the two", param_hint="--input, --output")
        if self.input and self.prompts:
            raise typer.BadParameter("expected none with --input", param_hint="PROMPTS")
        if self.system and not self.chat:
            raise typer.BadParameter("expected --chat with it", param_hint="--system")
        if self.is_conversation and self.as_json:
            raise typer.BadParameter("expected prompts with it", param_hint="--json")
        if not self.input and not self.is_conversation and not any(self.prompts):
            got = "an empty prompt" if self.prompts else 'none; such as "The capital of France is"'
            raise typer.BadParameter(f"expected text, got {got}", param_hint="PROMPTS")
        _ = self.place, self.torch_dtype, self.batch_sizes, self.prompt_sizes
