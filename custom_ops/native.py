"""Finds and loads the native CPU library, and says clearly when there is none.

The library (``torchpaged_C``, built by CMakeLists.txt on LibTorch's stable ABI) registers the default and
``.cpu`` overload of every op for the CPU key. Without it the package works: CPU calls then run the reference.
"""

import hashlib
import importlib.metadata
import warnings
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


def stamp(schemas: dict[str, str]) -> str:
    """What a library of these ops has in its file (stamp.cpp): how many arguments each takes."""
    counts = []
    for op, schema in sorted(schemas.items()):
        arguments = schema[: schema.rindex("->")].strip()[1:-1].split(",")
        counts.append(f"{op} {sum(argument.strip() != '*' for argument in arguments)}")
    return f"torchpaged native ops: {', '.join(counts)};"


def digest(root: Path) -> str | None:
    """Of the C++ sources below ``root``, as ``custom_ops/cpu/sources.cmake`` makes it; None where there are
    none, as in a wheel."""
    folders = [root / "custom_ops" / "cpu", *root.glob("custom_ops/*/cpu")]
    kinds = (".h", ".cpp", ".cmake", ".txt")
    found = (path for folder in folders for path in folder.glob("*") if path.suffix in kinds)
    files = [path for path in found if path.is_file()]  # an editor's lock is a link to nothing
    if not files or not (root / "CMakeLists.txt").is_file():
        return None
    named = sorted((path.relative_to(root).as_posix(), path) for path in (*files, root / "CMakeLists.txt"))
    lines = (f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for name, path in named)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _nearest_of_these_sources(found: list[Path]) -> Path:
    """The first library that the sources of this checkout were built into; else the first, with a warning."""
    own = digest(Path(__file__).resolve().parents[1])
    built = [path for path in found if own is None or f"sources: {own};".encode() in path.read_bytes()]
    if not built:
        warnings.warn(
            f"{found[0]} was built from other C++ sources than those of this checkout; "
            'run `pip install --no-build-isolation -e ".[dev]"`',
            stacklevel=2,
        )
    return (built or found)[0]


def load(schemas: dict[str, str]) -> bool:
    """Load the library of these ops if it is there. Honours ``TORCHPAGED_NATIVE=0`` (do not load); an
    invalid value raises where a caller asks what was loaded, and in every op on a CPU: not in an import."""
    global _state, wrong
    try:
        wanted = variables.get("TORCHPAGED_NATIVE")
    except ValueError as error:
        wrong = str(error)
        _state = (False, wrong)
        return False
    if not wanted:
        _state = (False, "switched off by TORCHPAGED_NATIVE=0")
        return False
    found = _candidates()
    if not found:
        _state = (False, "the native CPU kernel library torchpaged_C is not installed; " + _HOW)
        return False
    built = found[0]
    found = [path for path in found if stamp(schemas).encode() in path.read_bytes()]
    if not found:
        _state = (False, f"{built.name} was built from other sources than these; " + _HOW)
        return False
    path = _nearest_of_these_sources(found)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        # built against another libtorch or CPU: say so, keep the pure-Python package alive
        _state = (False, f"{path.name} could not be loaded ({error}); " + _HOW)
        return False
    _state = (True, str(path))
    return True


def status() -> tuple[bool, str]:
    """``(loaded, path or reason)``. Raises ValueError if the value of ``TORCHPAGED_NATIVE`` is invalid."""
    if wrong:
        raise ValueError(wrong)
    return _state


def raise_absent(*_: Any, **__: Any) -> NoReturn:
    """The ``.cpu`` kernels' stand-in when the library is absent."""
    raise BackendUnavailableError(f"backend 'cpu': {_state[1]}")
