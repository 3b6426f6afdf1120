"""Every environment variable of torchpaged, in one table. Nonsense values raise instead of being ignored.

``custom_ops`` imports torch only and reads its two variables itself; they are listed here all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


@dataclass(frozen=True)
class Variable:
    """One environment variable: its default, what it means, and how its text is read."""

    name: str
    default: str
    meaning: str
    parse: Callable[[str], Any] = str


VARIABLES = (
    Variable("TORCHPAGED_BACKEND", "auto", "backend of whatever is built without an explicit one: auto, cuda, triton, cpu, reference"),
    Variable(
        "TORCHPAGED_CACHE",
        "~/.cache/torchpaged",
        "folder of downloaded and converted models, and of compiled kernels",
        lambda t: Path(t).expanduser(),
    ),
    Variable("TORCHPAGED_CHECK", "0", "1: check device values (block ids, lengths) and captured addresses; synchronises", _flag),
    Variable("TORCHPAGED_DEBUG", "0", "1: the command line shows tracebacks", _flag),
    Variable("TORCHPAGED_NATIVE", "1", "0: do not load the native CPU kernels", _flag),
    Variable("TORCHPAGED_NVTX", "0", "1: NVTX ranges around the engine's host work (needs torchpaged[profiling])", _flag),
)


def get(name: str) -> Any:
    """The parsed value of a variable of the table.

    Raises:
        ValueError: its text means nothing.
    """
    variable = next(v for v in VARIABLES if v.name == name)
    text = os.environ.get(name, variable.default)
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: expected {error}, got {text!r}") from None
