"""Devices, dtypes and options as people type them on a command line."""

from dataclasses import field
from typing import Any

import torch

from torchpaged.custom_ops.checks import no_cuda
from torchpaged.custom_ops.errors import ArgumentError

#: torch's names of dtypes -> ours.
LONG_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def option(words: str, default: Any = ..., *flags: str, argument: bool = False, **limits: Any) -> Any:
    """A field of a dataclass that declares a command's options, one per field.

    Args:
        words: its help.
        default: left out: it must be given.
        flags: as typed, where they don't follow from the field's name.
        argument: it is given by its place; one without a default is, too.
        limits: such as ``min``.
    """
    by_place = argument or default is ...
    metadata = {"help": words, "flags": flags, "limits": limits, "argument": by_place}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


def short_dtype(name: str) -> str:
    """``"torch.bfloat16"``, ``"bfloat16"`` or ``"bf16"`` as ``"bf16"``; other names as they are."""
    name = name.removeprefix("torch.")
    return LONG_NAMES.get(name, name)


def device_named(name: str) -> torch.device:
    """The device of that name; "auto": the GPU if there is one.

    Raises:
        ArgumentError: another kind of device, or one that this machine or this torch does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, colon, index = name.partition(":")
    if (
        kind not in ("cpu", "cuda")
        or (colon and not index.isdecimal())
        or (kind == "cpu" and index not in ("", "0"))
    ):
        raise ArgumentError("--device", "auto, cpu, cuda or cuda:1", repr(name))
    if kind == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "--device",
            "a device of this machine",
            repr(name),
            f"{no_cuda()}; --device cpu runs anywhere, `torchpaged env` shows more",
        )
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise ArgumentError("--device", f"a GPU below cuda:{torch.cuda.device_count()}", repr(name))
    return torch.device(name)
