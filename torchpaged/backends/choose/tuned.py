"""The order that `torchpaged tune` measured on this device, kept in the user's cache folder.

    tuned_for(device, names)    # Tuned(decode=("cuda", ...), prefill=(...), ...), or None

A file counts for the device and the versions that it was measured with. One that is of other versions, or
can't be read, is said in a warning, once, and the table of order.py is used in its place.
TORCHPAGED_TUNED=0 leaves all of them aside.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.whole_files import replacing

FORMAT = 1
_PACKAGES = ("torchpaged", "triton", "flashinfer-python", "tokenspeed-fa3", "fa3-fwd", "flash-attn-3")


class TunedFileWarning(UserWarning):
    """A file of `torchpaged tune` that is not used, and why."""


@dataclass(frozen=True)
class Tuned:
    """What was measured.

    Attributes:
        device: its name.
        versions: of what was measured: torch and the packages that have kernels; None = not installed.
        decode: backends for decodes, best first; those that could not run everything are not there.
        prefill: backends for prompts and mixed batches, best first.
        measured: when, as an ISO date.
    """

    device: str
    versions: dict[str, str | None]
    decode: tuple[str, ...]
    prefill: tuple[str, ...]
    measured: str


def device_name(device: torch.device) -> str:
    """What a file is named after: the GPU's name, or the CPU's kind."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str | None]:
    """Of everything that has kernels."""
    found: dict[str, str | None] = {"torch": torch.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def path_for(device: torch.device) -> Path:
    """Where the file of a device lies."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return _folder() / f"{slug}.json"


def _folder() -> Path:
    folder: Path = variables.get("TORCHPAGED_CACHE")
    return folder / "tuned"


def save(tuned: Tuned, device: torch.device, evidence: dict[str, Any]) -> Path:
    """Write the file of ``device``, whole or not at all; ``evidence``: the figures behind it."""
    path = path_for(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, **asdict(tuned), "evidence": evidence}, indent=1) + "\n"
    with replacing(path) as partial:
        partial.write_text(text)
    _FOUND.clear()
    _SAVED.append(path)
    return path


_FOUND: dict[tuple[str, str], Tuned | None] = {}  # by path and device: read once in a process
_SAVED: list[Path] = []  # by this process
_TOLD: set[tuple[tuple[str, str], tuple[str, ...]]] = set()  # names unknown here, likewise


def state() -> tuple[str, str, int]:
    """What `tuned_for` follows from besides the device, for keys: cheap, and other where it may say other
    things. A file that another process writes is not noticed."""
    return variables.text_of("TORCHPAGED_TUNED"), variables.text_of("TORCHPAGED_CACHE"), len(_SAVED)


def tuned_for(device: torch.device, backends: Collection[str]) -> Tuned | None:
    """What was measured on ``device`` with these versions, of ``backends`` alone; None where nothing was, or
    it may not be used.

    Warns:
        TunedFileWarning: there is a file, and it can't be used.
    """
    if device.type not in ("cpu", "cuda") or not variables.get("TORCHPAGED_TUNED"):
        return None
    if device.type == "cuda" and not torch.cuda.is_available():
        return None
    key = variables.text_of("TORCHPAGED_CACHE"), str(device)
    if key not in _FOUND:
        _FOUND[key] = _read(device) if _is_there() else None
    tuned = _FOUND[key]
    unknown = () if tuned is None else tuple(dict.fromkeys(tuned.decode + tuned.prefill))
    unknown = tuple(name for name in unknown if name not in backends)
    if unknown and (key, unknown) not in _TOLD:
        _TOLD.add((key, unknown))
        _refused(path_for(device), f"no backend here is named {', '.join(unknown)}")
    return None if unknown else tuned


def _is_there() -> bool:
    """Whether there is such a folder; a name that can't be looked up is said, as a file would be."""
    try:
        return _folder().is_dir()
    except OSError as error:
        _refused(Path(variables.text_of("TORCHPAGED_CACHE")), f"it can't be read: {error}")
        return False


def _read(device: torch.device) -> Tuned | None:
    path = path_for(device)
    try:
        if path.exists() and not path.is_file():  # a FIFO would be waited for
            return _refused(path, "it can't be read: it is no file")
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        return _refused(path, f"it can't be read: {error}")
    try:
        tuned = _parsed(json.loads(content))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return _refused(path, f"it is no file of this format: {error}")
    here = device_name(device), versions()
    if tuned.device != here[0]:
        return _refused(path, f"it was measured on {tuned.device}, this is {here[0]}")
    other = [
        f"{name} {tuned.versions.get(name)}, here {now}"
        for name, now in here[1].items()
        if tuned.versions.get(name) != now
    ]
    if other:
        return _refused(path, f"it was measured with other versions: {'; '.join(other)}")
    return tuned


def _parsed(content: Any) -> Tuned:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT}")
    orders = {}
    for part in ("decode", "prefill"):
        names = content[part]
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{part}: expected names of backends")
        orders[part] = tuple(names)
    if not isinstance(content["versions"], dict):
        raise ValueError("versions: expected versions by package")
    return Tuned(str(content["device"]), content["versions"], measured=str(content["measured"]), **orders)


def _refused(path: Path, why: str) -> Tuned | None:
    warnings.warn(
        f"{path} is not used to choose backends: {why}; run `torchpaged tune` again, or remove it",
        TunedFileWarning,
        stacklevel=2,
    )
    return None
