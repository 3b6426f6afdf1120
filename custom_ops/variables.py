"""The one reader of torchpaged's environment variables. Nonsense values raise instead of being ignored.

    variables.get("TORCHPAGED_CHECK")  # False, or True with TORCHPAGED_CHECK=1; anything but 0 and 1 raises

A variable is read when it is asked for, so that a change takes effect without a restart.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _name(text: str) -> str:
    if not text.strip():
        raise ValueError("a name")
    return text


def _folder(text: str) -> Path:
    if not text.strip():
        raise ValueError("a folder")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # a user that is not known, or no home: caches are left aside where they can be
        raise FileNotFoundError(f"expected a folder, got {text!r}, whose home is not known") from None


def _flex_compiler(text: str) -> str:
    if text not in ("inductor", "eager"):
        raise ValueError("inductor or eager")
    return text


@dataclass(frozen=True)
class Variable:
    """One environment variable: its default, what it means, and how its text is read."""

    name: str
    default: str
    meaning: str
    parse: Callable[[str], Any] = str


VARIABLES = (
    Variable(
        "TORCHPAGED_BACKEND",
        "auto",
        "backend of whatever is built without an explicit one: auto, or one that `torchpaged backends` lists",
        _name,
    ),
    Variable(
        "TORCHPAGED_CACHE",
        "~/.cache/torchpaged",
        "folder of downloaded and converted models and compiled kernels",
        _folder,
    ),
    Variable(
        "TORCHPAGED_CHECK",
        "0",
        "1: check device values (block ids, lengths) and captured addresses; synchronises",
        _flag,
    ),
    Variable(
        "TORCHPAGED_CUDA_PREFILL",
        "1",
        "0: backend cuda leaves prefill to Triton's kernels, also where its own in CUDA C++ can (Hopper)",
        _flag,
    ),
    Variable("TORCHPAGED_DEBUG", "0", "1: the command line shows tracebacks", _flag),
    Variable(
        "TORCHPAGED_FLEX_COMPILER",
        "inductor",
        "how backend flex runs FlexAttention: inductor, fused; eager, unfused over the whole pool",
        _flex_compiler,
    ),
    Variable("TORCHPAGED_NATIVE", "1", "0: do not load the native CPU kernels", _flag),
    Variable(
        "TORCHPAGED_NVTX",
        "0",
        "1: NVTX ranges around the engine's host work (needs torchpaged[profiling])",
        _flag,
    ),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str) -> Any:
    """The parsed value of a variable of the table.

    Raises:
        ValueError: its value is invalid.
        FileNotFoundError: it names a folder in a home that is not known.
    """
    variable = _BY_NAME[name]
    text = os.environ.get(name, variable.default)
    try:
        return variable.parse(text)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{name}: {error}; name one that can be written") from None
    except ValueError as error:
        raise ValueError(f"{name}: expected {error}, got {text!r}") from None
