"""CUDA C++ to a kernel that can be launched: NVRTC, a cache on disk, and the machine code loaded.

    kernel = jit.kernel("decode.cu", "paged_decode", config, device, shared_bytes=104448)
    kernel.launch(grid, threads, packed_arguments, early=True)

Machine code is kept in ``TORCHPAGED_CACHE`` (default ``~/.cache/torchpaged``) under the hash of source,
constants, architecture and compiler build; the driver is no part of it, since what is kept is for one
architecture and needs no translation. The first launch of a specialisation compiles for a second or two, says
so where stderr is a terminal, and must not happen inside a capture.
"""

import functools
import hashlib
import re
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from torchpaged.custom_ops import ahead, compiles
from torchpaged.custom_ops.cuda import cubins
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.cuda.loaded_kernel import Kernel, checked
from torchpaged.custom_ops.errors import BackendUnavailableError, CaptureError

_HERE = Path(__file__).parent
_INCLUDE = re.compile(r'#include "(?:[^"/]*/)+([^"/]+)"')


@functools.cache
def unavailable() -> str | None:
    """Why CUDA C++ kernels can't be compiled here, or None; asks the compiler once."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        return "the cuda-bindings package is not installed; pip install 'torchpaged[cuda]'"
    try:
        architectures = checked(nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")
    except Exception as error:  # a library that is absent or does not fit raises all sorts of things
        return f"NVRTC can't be used: {type(error).__name__}: {error}"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major * 10 + minor not in list(architectures):
            return (
                f"NVRTC does not know compute capability {major}.{minor}; install a newer cuda-bindings "
                "and NVRTC"
            )
    return None


def cache_folder() -> Path:
    """Where machine code is kept; it need not exist."""
    return cubins.folder()


def options(config: Config, capability: tuple[int, int]) -> list[str]:
    """The compiler's arguments; the same for NVRTC and nvcc. Everything else that a kernel is compiled for
    stands in its header of constants."""
    return [f"-arch=sm_{capability[0]}{capability[1]}{'a' if config.exact else ''}", "-std=c++17"]


@functools.cache
def files() -> dict[str, Path]:
    """The sources and headers by name: those of this folder, and in and below the folder ``cuda`` of every
    family of ops. No name is there twice. Headers of constants are left out: those on the disk are
    examples."""
    folders = (_HERE, *sorted(_HERE.parent.glob("*/cuda")))
    paths = [
        path
        for folder in folders
        for path in sorted(folder.rglob("*.cu*"))
        if path.suffix in (".cu", ".cuh") and not path.name.endswith("_config.cuh")
    ]
    found = {path.name: path for path in paths}
    if len(found) < len(paths):
        raise RuntimeError(
            "two CUDA sources share a name: "
            f"{sorted(str(path) for path in paths if path not in found.values())}"
        )
    return found


@functools.cache
def sources() -> dict[str, str]:
    """The texts of `files` by name, read once: what is compiled is what its key was made from.

    Includes name files relative to their own place, for editors and nvcc; NVRTC, which gets texts, finds them
    by their names alone.
    """
    return {name: _INCLUDE.sub(r'#include "\1"', path.read_text()) for name, path in files().items()}


@functools.cache
def compiler_build() -> str:
    """NVRTC's build, its patch level included: ``nvrtcVersion`` gives two numbers, what the compiler writes
    into its PTX all of them."""
    major, minor = checked(_nvrtc().nvrtcVersion(), "nvrtcVersion")
    lines = [
        line
        for line in _compile("", {}, [], "PTX").decode().splitlines()
        if line.startswith("//") and line.strip("/ ")
    ]
    return "\n".join([f"NVRTC {major}.{minor}", *lines])


def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _compile(source: str, included: dict[str, str], arguments: list[str], kind: str) -> bytes:
    """The "CUBIN" or "PTX" of ``source``; raises `BackendUnavailableError` with the compiler's messages."""
    nvrtc = _nvrtc()
    names, texts = [name.encode() for name in included], [text.encode() for text in included.values()]
    program = checked(
        nvrtc.nvrtcCreateProgram(source.encode(), b"torchpaged.cu", len(names), texts, names),
        "nvrtcCreateProgram",
    )
    try:
        encoded = [argument.encode() for argument in arguments]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(error):
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BackendUnavailableError(
                f"backend 'cuda': NVRTC does not compile a kernel: {error} for {' '.join(arguments)}; "
                "install another cuda-bindings and NVRTC, or use backend='triton'; NVRTC's messages:\n"
                + log.decode(errors="replace")
            )
        code = b" " * checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program), f"nvrtcGet{kind}Size")
        checked(getattr(nvrtc, f"nvrtcGet{kind}")(program, code), f"nvrtcGet{kind}")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


def headers(config: Config) -> dict[str, str]:
    """All that a source may include, by name: the headers of `files`, and its constants."""
    found = {name: text for name, text in sources().items() if name.endswith(".cuh")}
    return {**found, config.table.header: config.text()}


def compile_source(source: str, config: Config, capability: tuple[int, int]) -> bytes:
    """Machine code of ``source``, which may include `headers`."""
    return _compile(source, headers(config), options(config, capability), "CUBIN")


def cache_name(file: str, config: Config, capability: tuple[int, int]) -> str:
    """The file in the cache: a hash of all that the machine code follows from."""
    follows = sources()[file], headers(config), options(config, capability), compiler_build()
    return hashlib.sha256(repr(follows).encode()).hexdigest()[:32] + ".cubin"


def machine_code(file: str, config: Config, capability: tuple[int, int]) -> bytes:
    """Machine code of one of `files`, from the cache or compiled now."""
    name = cache_name(file, config, capability)
    code = cubins.load(name)
    if code is None:
        if sys.stderr is not None and sys.stderr.isatty():
            print(
                f"torchpaged: compiling {file} for sm_{capability[0]}{capability[1]}",
                file=sys.stderr,
                flush=True,
            )
        started = time.perf_counter()
        code = compile_source(sources()[file], config, capability)
        compiles.note("nvrtc", file, time.perf_counter() - started)
        cubins.store(name, code)
    return code


_Key = tuple[str, Config, tuple[int, int]]
_ahead: dict[_Key, Future[bytes]] = {}
_ahead_lock = threading.Lock()


def compile_ahead(file: str, config: Config, capability: tuple[int, int]) -> None:
    """Begin, in a thread, to make the machine code that `kernel` will soon be asked for: several kernels of
    one call then take the time of the slowest one. Does nothing where the thread runs already. What fails
    there is raised by `kernel`.
    """
    key = file, config, capability
    with _ahead_lock:
        if key not in _ahead:
            _ahead[key] = ahead.in_a_thread(lambda: machine_code(file, config, capability), file)
        future = _ahead[key]
    gathering = ahead.here()
    if gathering is not None:
        gathering.kernels[key] = file, future


def _is_made(file: str, config: Config, capability: tuple[int, int]) -> bool:
    """Whether a thread that began ahead has ended."""
    with _ahead_lock:
        future = _ahead.get((file, config, capability))
    return future is not None and future.done()


def _code(file: str, config: Config, capability: tuple[int, int]) -> bytes:
    """Machine code: from a thread that began ahead, from the cache, or compiled now."""
    with _ahead_lock:
        future = _ahead.pop((file, config, capability), None)
    return machine_code(file, config, capability) if future is None else future.result()


@functools.cache
def _kernel(file: str, name: str, config: Config, index: int, shared_bytes: int) -> Kernel:
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"backend 'cuda': {file} is not compiled for this shape yet, which can't be done inside a CUDA "
            "graph capture; run the same call once before capturing"
        )
    with torch.cuda.device(index):
        capability = torch.cuda.get_device_capability(index)
        if ahead.here() is not None and not _is_made(file, config, capability):
            compile_ahead(file, config, capability)
            raise ahead.Postponed
        # no second try: a damaged file in the cache was found by its checksum, so what fails here is refused
        # by the device
        return Kernel(_code(file, config, capability), name, shared_bytes)


def kernel(file: str, name: str, config: Config, device: torch.device, *, shared_bytes: int) -> Kernel:
    """Kernel ``name`` of ``file`` (one of `files`), compiled with ``config`` for ``device``; the same object
    for the same arguments.

    Raises:
        BackendUnavailableError: cuda-bindings is absent, the source does not compile, or the device refuses
            the kernel.
        CaptureError: it would have to be compiled inside a capture.
        Postponed: kernels are being gathered (`custom_ops.ahead`), and this one is not compiled.
    """
    missing = unavailable()
    if missing:
        raise BackendUnavailableError(f"backend 'cuda': {missing}")
    return _kernel(file, name, config, device.index or 0, shared_bytes)
