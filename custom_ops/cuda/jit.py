"""CUDA C++ to a kernel that can be launched: NVRTC, a cache on disk, the driver's launch call.

    kernel = jit.kernel("decode.cu", "paged_decode", {"DIM": 128, ...}, device, shared_bytes=104448)
    kernel.launch(grid, threads, packed_arguments, early=True)

Machine code is kept in ``TORCHPAGED_CACHE`` (default ``~/.cache/torchpaged``) under the hash of source, macros, architecture and
compiler version. The first launch of a specialisation compiles for half a second or so, and must not happen inside a capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.errors import BackendUnavailableError

_HERE = Path(__file__).parent


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
        architectures = _check(nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")
    except Exception as error:  # a library that is absent or does not fit raises all sorts of things
        return f"NVRTC can't be used: {type(error).__name__}: {error}"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major * 10 + minor not in list(architectures):
            return f"NVRTC does not know compute capability {major}.{minor}; install a newer cuda-bindings and NVRTC"
    return None


def cache_folder() -> Path:
    """Where machine code is kept; it need not exist."""
    return Path(variables.get("TORCHPAGED_CACHE")) / "cubin"


def _check(result: Any, what: str) -> Any:
    """The values of a cuda.bindings call, or its error as an exception."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"{what} failed: {error}")
    return values[0] if len(values) == 1 else values


def options(macros: dict[str, int], capability: tuple[int, int]) -> list[str]:
    """The compiler's arguments; the same for NVRTC and nvcc. The macro WGMMA asks for what only this one architecture has."""
    only = "a" if macros.get("WGMMA") else ""
    return [
        f"-arch=sm_{capability[0]}{capability[1]}{only}",
        "-std=c++17",
        *(f"-D{name}={value}" for name, value in sorted(macros.items())),
    ]


def headers() -> dict[str, str]:
    """The headers of this folder by name."""
    return {path.name: path.read_text() for path in sorted(_HERE.glob("*.cuh"))}


def compile_source(source: str, arguments: list[str]) -> bytes:
    """Machine code of ``source``; raises RuntimeError with the compiler's messages."""
    from cuda.bindings import nvrtc

    included = headers()
    names, texts = [name.encode() for name in included], [text.encode() for text in included.values()]
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"torchpaged.cu", len(names), texts, names), "nvrtcCreateProgram")
    encoded = [argument.encode() for argument in arguments]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if int(error):
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC: {error} for {' '.join(arguments)}\n{log.decode(errors='replace')}")
    code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    _check(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(program)
    return code


def machine_code(file: str, macros: dict[str, int], capability: tuple[int, int], fresh: bool = False) -> bytes:
    """Machine code of a file of this folder, from the cache or compiled now; ``fresh``: compile anyway."""
    from cuda.bindings import nvrtc

    source, arguments = (_HERE / file).read_text(), options(macros, capability)
    version = _check(nvrtc.nvrtcVersion(), "nvrtcVersion")
    name = hashlib.sha256(repr((source, headers(), arguments, version)).encode()).hexdigest()[:32] + ".cubin"
    with contextlib.suppress(OSError, RuntimeError):  # no home directory, unreadable: a cache costs time, not correctness
        target = cache_folder() / name
        if not fresh and target.is_file():
            return target.read_bytes()
    code = compile_source(source, arguments)
    with contextlib.suppress(OSError, RuntimeError):
        target = cache_folder() / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # whole or not at all: several processes may compile the same
            (Path(folder) / name).write_bytes(code)
            os.replace(Path(folder) / name, target)
    return code


class Kernel:
    """A loaded kernel of one device."""

    def __init__(self, code: bytes, name: str, shared_bytes: int) -> None:
        from cuda.bindings import driver

        torch.empty(1, device="cuda")  # the device's context exists and is current from here on
        self._driver = driver
        self._module = _check(driver.cuModuleLoadData(code), "cuModuleLoadData")
        self._function = _check(driver.cuModuleGetFunction(self._module, name.encode()), "cuModuleGetFunction")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes), "cuFuncSetAttribute")
        self._resident: dict[tuple[int, int, int], int] = {}
        self._early = driver.CUlaunchAttribute()
        self._early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._early.value.programmaticStreamSerializationAllowed = 1
        self._shared_bytes = shared_bytes
        self._local = threading.local()  # a launch fills in a configuration: threads must not share one

    def _config(self) -> Any:
        if not hasattr(self._local, "config"):
            config = self._driver.CUlaunchConfig()
            config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
            config.sharedMemBytes = self._shared_bytes
            self._local.config = config
        return self._local.config

    def resident(self, threads: int, cluster: int, wanted: int) -> int:
        """CTAs that run at once: ``wanted``, or for clusters (a power of two CTAs each) as many as the device places together."""
        if cluster == 1:
            return wanted
        key = threads, cluster, wanted
        if key not in self._resident:
            driver, config = self._driver, self._driver.CUlaunchConfig()
            if cluster > 8:
                allowed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                _check(driver.cuFuncSetAttribute(self._function, allowed, 1), "cuFuncSetAttribute")
            config.gridDimX, config.gridDimY, config.gridDimZ = wanted // cluster * cluster, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = self._shared_bytes
            dimension = driver.CUlaunchAttribute()
            dimension.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension.value.clusterDim.x, dimension.value.clusterDim.y, dimension.value.clusterDim.z = cluster, 1, 1
            config.attrs, config.numAttrs = [dimension], 1
            most = _check(driver.cuOccupancyMaxActiveClusters(self._function, config), "cuOccupancyMaxActiveClusters")
            if most < 1:
                raise RuntimeError(f"cuOccupancyMaxActiveClusters: no cluster of {cluster} CTAs fits the device")
            self._resident[key] = min(most * cluster, wanted // cluster * cluster)
        return self._resident[key]

    def launch(self, grid: int, threads: int, arguments: bytes, *, early: bool) -> None:
        """Launch on the current stream. ``arguments``: the kernel's one parameter, a struct. ``early``: programmatic dependent launch."""
        config = self._config()
        config.gridDimX, config.blockDimX = grid, threads
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = ([self._early], 1) if early else ([], 0)
        packed = ctypes.create_string_buffer(arguments, len(arguments))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
        (error,) = self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0)
        if int(error):
            raise RuntimeError(f"cuLaunchKernelEx failed: {error}")


@functools.cache
def _kernel(file: str, name: str, macros: tuple[tuple[str, int], ...], index: int, shared_bytes: int) -> Kernel:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"backend 'cuda': {file} is not compiled for this shape yet, which can't be done inside a CUDA graph capture; "
                           "run the same call once before capturing")  # fmt: skip
    with torch.cuda.device(index):
        capability = torch.cuda.get_device_capability(index)
        try:
            return Kernel(machine_code(file, dict(macros), capability), name, shared_bytes)
        except RuntimeError:  # a damaged file in the cache, perhaps: once more from the source
            return Kernel(machine_code(file, dict(macros), capability, fresh=True), name, shared_bytes)


def kernel(file: str, name: str, macros: dict[str, int], device: torch.device, *, shared_bytes: int) -> Kernel:
    """Kernel ``name`` of ``file`` (in this folder), compiled with ``macros`` for ``device``; the same object for the same arguments.

    Raises:
        BackendUnavailableError: cuda-bindings is absent.
        RuntimeError: the source does not compile, or the device refuses it.
    """
    missing = unavailable()
    if missing:
        raise BackendUnavailableError(f"backend 'cuda': {missing}")
    return _kernel(file, name, tuple(sorted(macros.items())), device.index or 0, shared_bytes)
