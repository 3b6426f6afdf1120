"""Compiled code as one file: what torch.compile, Triton and NVRTC made in this process, for a start
without compiling.

    report = torchpaged.load_compile_cache("llama.tpc")     # before the first compilation
    ...                                                     # build, capture, generate
    report = torchpaged.save_compile_cache("llama.tpc")     # after it

The file is a zip archive: torch's cache artifacts (Inductor's and AOTAutograd's, with the Triton kernels
Inductor generated), the machine code of torchpaged's own Triton kernels for this GPU, and that of its CUDA
kernels. It fits one version of torch, Triton, torchpaged and Python and one GPU model; another's is not
loaded, and the report and a warning say why. What it holds for other sources or shapes is not used: every
part is looked up by the hash of what it was compiled from. Loading runs code from the file: load only files
you trust.
"""

import io
import json
import os
import platform
import re
import sys
import time
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.custom_ops.whole_files import replacing
from torchpaged.version import __version__

_FORMAT = 1
# two safe names: nothing from an archive leaves its folder
_MEMBER = re.compile(r"(cubin|triton/[\w-]+)/([\w.-]+)")
# the kernels of a family of ops, or of all
_TRITON_MODULE = re.compile(r"torchpaged\.custom_ops\.(\w+\.)?triton\b")
# what Triton compiles with the C compiler, per signature and per machine
_LAUNCHERS = ("__triton_launcher", "cuda_utils", "hip_utils")


class CompileCacheError(TorchpagedError, ValueError):
    """The file is not a compile cache, or is damaged."""


class CompileCacheWarning(UserWarning):
    """A compile cache was not loaded; the message says why."""


@dataclass
class CompileCacheReport:
    """What was saved or loaded.

    Attributes:
        path: the file.
        loaded: False only if `load_compile_cache` found another version's or another GPU's.
        reason: why it was not loaded, or not all of its kernels were; "" otherwise.
        artifacts: torch's artifacts by kind ("inductor", "aot_autograd" ...), how many.
        triton_kernels, cuda_kernels: how many of torchpaged's own.
        num_bytes: of the file.
        seconds: it took.
    """

    path: str
    loaded: bool = True
    reason: str = ""
    artifacts: dict[str, int] = field(default_factory=dict)
    triton_kernels: int = 0
    cuda_kernels: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


def _versions() -> dict[str, Any]:
    """What compiled code depends on, besides its source."""
    try:
        import triton
    except ImportError:
        triton = None
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    )
    return {
        "format": _FORMAT,
        "torchpaged": __version__,
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", None),
        "python": platform.python_version().rsplit(".", 1)[0],
        "machine": platform.machine(),
        "device": device,
    }


# ------------------------------------------------------------------------------------------------------- save
def save_compile_cache(path: str | os.PathLike[str]) -> CompileCacheReport:
    """Write everything compiled so far to ``path``, whole or not at all; an existing file is replaced.

    Returns:
        A report; its counts may all be 0, if nothing was compiled.

    Raises:
        OSError: the file can't be written.
    """
    started, target = time.perf_counter(), Path(path)
    report = CompileCacheReport(str(target))
    saved = torch.compiler.save_cache_artifacts()
    with replacing(target) as partial:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("versions.json", json.dumps(_versions()))
            if saved is not None:
                archive.writestr("torch", saved[0])
                report.artifacts = {kind: len(keys) for kind, keys in saved[1].artifacts.items()}
            for file in _cubins():
                archive.write(file, f"cubin/{file.name}")
                report.cuda_kernels += 1
            for entry in _triton_entries():
                for file in entry.iterdir():
                    if _MEMBER.fullmatch(f"triton/{entry.name}/{file.name}") and file.is_file():
                        archive.write(file, f"triton/{entry.name}/{file.name}")
                report.triton_kernels += 1
        report.num_bytes = partial.stat().st_size
    report.seconds = time.perf_counter() - started
    return report


def _cubins() -> list[Path]:
    folder = jit.cache_folder()
    return sorted(folder.glob("*.cubin")) if folder.is_dir() else []


def _triton_folders() -> list[Path]:
    """Where Triton keeps its cache in this process, now and after Inductor's first GPU kernel.

    Inductor then sets TRITON_CACHE_DIR to a folder of its own unless it is set, and kernels launched later
    are sought there. That folder's name is only to be had from a private function.
    """
    try:
        import triton
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    except ImportError:
        return []
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return [Path(folder) for folder in dict.fromkeys((triton.knobs.cache.dir, triton_cache_dir(device)))]


def _own_kernels() -> set[str]:
    """Names of torchpaged's Triton kernels that were imported; Triton names a compiled kernel's files after
    its function."""
    modules = [module for name, module in list(sys.modules.items()) if _TRITON_MODULE.match(name)]
    found = [value for module in modules for value in vars(module).values()]
    return {value.fn.__name__ for value in found if hasattr(value, "arg_names") and hasattr(value, "fn")}


def _triton_entries() -> Iterator[Path]:
    """Folders of Triton's cache that hold one of our kernels for this GPU, or a launcher."""
    kernels, seen = _own_kernels(), set()
    target = (
        "".join(str(number) for number in torch.cuda.get_device_capability())
        if torch.cuda.is_available()
        else None
    )
    for folder in _triton_folders():
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if entry.name not in seen and entry.is_dir() and _is_wanted(entry, kernels, target):
                seen.add(entry.name)
                yield entry


def _is_wanted(entry: Path, kernels: set[str], target: str | None) -> bool:
    for file in entry.iterdir():
        if file.name.startswith(_LAUNCHERS):
            return True
        if file.suffix == ".json" and file.stem in kernels:
            arch = json.loads(file.read_text()).get("target", {}).get("arch")
            return target is None or str(arch) == target
    return False


# ------------------------------------------------------------------------------------------------------- load
def load_compile_cache(path: str | os.PathLike[str]) -> CompileCacheReport:
    """Put what ``path`` holds where torch, Triton and torchpaged look before they compile. Call it before
    anything is compiled.

    Returns:
        A report. ``loaded`` is False, and a `CompileCacheWarning` is given, if the file belongs to other
        versions or another GPU; nothing was changed then, and everything is compiled as usual. So are
        kernels that can't be written where they are looked for, of which it warns, too.

    Raises:
        FileNotFoundError: there is no such file.
        CompileCacheError: it is not a compile cache, or is damaged.
    """
    started, source = time.perf_counter(), Path(path)
    report = CompileCacheReport(str(source), num_bytes=source.stat().st_size)
    members, report.reason = _read(source)
    if report.reason:
        report.loaded = False
        warnings.warn(f"compile cache not loaded: {report.reason}", CompileCacheWarning, stacklevel=2)
        return report
    if "torch" in members:
        try:
            info, reason = torch.compiler.load_cache_artifacts(members["torch"]), ""
        except Exception as error:
            info, reason = None, f" ({type(error).__name__}: {error})"
        if info is None:
            raise CompileCacheError(
                f"{source}: torch can't read its own artifacts in it{reason}; delete it and save anew"
            )
        report.artifacts = {kind: len(keys) for kind, keys in info.artifacts.items()}
    entries: dict[str, dict[str, bytes]] = {}
    for name, content in members.items():
        match = _MEMBER.fullmatch(name)
        if match is not None:
            entries.setdefault(match[1], {})[match[2]] = content
    failed = []
    for group, files in entries.items():
        try:
            if group == "cubin":
                _write_files(jit.cache_folder(), files)
                report.cuda_kernels = len(files)
            else:
                for folder in _triton_folders():
                    _write_triton(folder / group.removeprefix("triton/"), files)
                report.triton_kernels += 1
        except OSError as error:  # a full disk, or one to read only: a cache costs time alone
            failed.append(str(error))
    if failed:
        report.reason = f"{source}: {failed[0]}"
        warnings.warn(f"compile cache not loaded as a whole: {failed[0]}", CompileCacheWarning, stacklevel=2)
    report.seconds = time.perf_counter() - started
    return report


def _read(source: Path) -> tuple[dict[str, bytes], str]:
    """All of a file, checked before anything is written; or why it is not used."""
    wanted = f"{source}: expected a file of save_compile_cache()"
    if not source.is_file():
        raise CompileCacheError(f"{wanted}, got a folder, a pipe or a device")
    whole = io.BytesIO(source.read_bytes())
    try:
        with zipfile.ZipFile(whole) as archive:
            found, here = json.loads(archive.read("versions.json")), _versions()
            if not isinstance(found, dict):
                raise ValueError(f"versions.json holds a {type(found).__name__}")
            differs = [
                f"{name} {found.get(name)}, here {x}" for name, x in here.items() if found.get(name) != x
            ]
            if differs:
                return {}, f"{source}: made with {'; '.join(differs)}"
            members = {name: archive.read(name) for name in archive.namelist()}
        for name in members:
            if name.rpartition("/")[2].startswith("__grp__"):
                _children(members[name])
    except Exception as error:  # a damaged file is anything to zipfile, zlib and json
        raise CompileCacheError(f"{wanted}, got {error}; delete it and save anew") from error
    return members, ""


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Files that are not there yet, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: content for name, content in files.items() if not (folder / name).exists()}
    if missing:
        for name, content in missing.items():
            with replacing(folder / name) as partial:
                partial.write_bytes(content)


def _children(group: bytes) -> list[str]:
    """Names of the files that a group file of Triton's lists; raises ValueError."""
    found = json.loads(group)
    if not isinstance(found, dict) or not isinstance(found.get("child_paths"), dict):
        raise ValueError("a group file of Triton's without child_paths")
    return list(found["child_paths"])


def _write_triton(folder: Path, files: dict[str, bytes]) -> None:
    """A kernel's entry. Its group file lists the others by their absolute paths, and is what Triton looks
    for: it comes last."""
    groups = {name: content for name, content in files.items() if name.startswith("__grp__")}
    _write_files(folder, {name: content for name, content in files.items() if name not in groups})
    for name, content in groups.items():
        moved = json.dumps({"child_paths": {child: str(folder / child) for child in _children(content)}})
        _write_files(folder, {name: moved.encode()})


def with_own_code(function: Callable[..., Any], name: str) -> Any:
    """``function``, closure included, with a code object of its own, called ``name``.

    Dynamo keeps its compiled entries, and counts its recompile limit, per code object: shared by all batch
    sizes, the limit of 8 would end the ninth.

    Args:
        function: a Python function without default arguments; a small one as a rule, since dynamo inlines
            what it calls.
        name: as it stands in stack traces and in the compiler's logs.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, None, function.__closure__)
