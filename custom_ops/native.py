"""Finds and loads the native CPU library, and says clearly when there is none.

The library (``torchpaged_C``, built by CMakeLists.txt on LibTorch's stable ABI) registers the default and
``.cpu`` overload of every op for the CPU key. Without it the package works: CPU calls then run the reference.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any, NoReturn

import torch

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.errors import BackendUnavailableError

_HOW = (
    "to build it, install torch first, then run `pip install .` in a checkout "
    "(needs a C++17 compiler; -Ccmake.define.TORCHPAGED_NATIVE=ON turns a failed build into an error)"
)
_state: tuple[bool, str] = (False, "not looked for yet")
wrong = ""  #: what is wrong with the variable's value, if it is invalid
missing: tuple[str, ...] = ()  #: ops without a kernel in the loaded library, built before they had one


def _candidates() -> list[Path]:
    """Places where a wheel, an editable install or a by-hand build puts the library, nearest first."""
    here = Path(__file__).resolve().parent
    found = sorted(here.glob("torchpaged_C*.so"))
    try:  # an editable install keeps the library in site-packages while the sources stay in the checkout
        for file in importlib.metadata.files("torchpaged") or ():
            if file.name.startswith("torchpaged_C") and file.name.endswith(".so"):
                found.append(Path(str(file.locate())))
    except importlib.metadata.PackageNotFoundError:
        pass
    return [path for path in found if path.is_file()]


def served(path: Path, schemas: dict[str, str]) -> frozenset[str]:
    """The ops of a library, by what it has in its file (registration.cpp): how many arguments each takes.
    None of them if one takes others here. A library built before an op had a kernel serves the rest."""
    stamp = re.search(rb"torchpaged native ops: ([\w, ]+);", path.read_bytes())
    counts = dict(each.split() for each in stamp[1].decode().split(", ")) if stamp else {}
    here = {op: text[: text.rindex("->")].strip()[1:-1].split(",") for op, text in schemas.items()}
    fits = all(
        op in here and sum(argument.strip() != "*" for argument in here[op]) == int(count)
        for op, count in counts.items()
    )
    return frozenset(counts) if fits else frozenset()


def load(schemas: dict[str, str]) -> frozenset[str]:
    """Load the library of these ops if it is there; returns the ops that it has. Honours
    ``TORCHPAGED_NATIVE=0`` (do not load); an invalid value raises where a caller asks what was loaded, and in
    every op on a CPU: not in an import."""
    global _state, missing, wrong
    try:
        wanted = variables.get("TORCHPAGED_NATIVE")
    except ValueError as error:
        wrong = str(error)
        _state = (False, wrong)
        return frozenset()
    if not wanted:
        _state = (False, "switched off by TORCHPAGED_NATIVE=0")
        return frozenset()
    found = _candidates()
    if not found:
        _state = (False, "the native CPU kernel library torchpaged_C is not installed; " + _HOW)
        return frozenset()
    ops, path = max(((served(path, schemas), path) for path in found), key=lambda each: len(each[0]))
    if not ops:
        _state = (False, f"{found[0].name} was built from other sources than these; " + _HOW)
        return frozenset()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        # built against another libtorch or CPU: say so, keep the pure-Python package alive
        _state = (False, f"{path.name} could not be loaded ({error}); " + _HOW)
        return frozenset()
    _state, missing = (True, str(path)), tuple(sorted(schemas.keys() - ops))
    return ops


def status() -> tuple[bool, str]:
    """``(loaded, path or reason)``. Raises ValueError if the value of ``TORCHPAGED_NATIVE`` is invalid."""
    if wrong:
        raise ValueError(wrong)
    return _state


def raise_absent(*_: Any, **__: Any) -> NoReturn:
    """The ``.cpu`` kernels' stand-in when the library is absent."""
    raise BackendUnavailableError(f"backend 'cpu': {_state[1]}")
