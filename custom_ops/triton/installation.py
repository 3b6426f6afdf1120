"""Whether the Triton that is installed is one whose machine code may be kept, and launched without it.

if usable(): ...
installed()         # which Triton it is, without importing it
"""

import functools
import importlib.util
import os
import sys
from pathlib import Path

import torch

from torchpaged.custom_ops.triton import launching

#: Variables that Triton's compiler reads begin like this; with any of them set, Triton does all by itself.
_PREFIXES = (
    "TRITON_",
    "MLIR_",
    "LLVM_",
    "NVPTX_",
    "PTXAS_",
    "DISABLE_",
    "ENABLE_",
    "ALLOW_",
    "USE_IR_LOC",
    "USE_TTGIR_LOC",
)
_HARMLESS = frozenset({"TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"})


@functools.cache
def installed() -> str | None:
    """Which Triton is installed, without importing it: sizes and times of what compiles. None: there is none,
    or it is not to be seen."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    files = [
        Path(spec.origin),
        *sorted((folder / "_C").glob("libtriton*.so")),
        *sorted((folder / "backends" / "nvidia" / "bin").glob("ptxas*")),
    ]
    if len(files) < 2:
        return None
    return repr(
        [(str(path.relative_to(folder)), (at := path.stat()).st_size, at.st_mtime_ns) for path in files]
    )


@functools.cache
def _bindings() -> bool:
    try:
        from cuda.bindings import driver
    except ImportError:
        return False
    return hasattr(driver, "cuFuncGetParamInfo")


def usable() -> bool:
    """Whether kernels may be kept and launched here; see the head of kernel_store.py."""
    return _may_be_used() and not hooked()


@functools.cache
def _may_be_used() -> bool:
    """What does not change while a process runs; asked at every launch."""
    if torch.version.cuda is None or launching.INTERPRET or not is_as_installed():
        return False
    return installed() is not None and _bindings()


def is_as_installed() -> bool:
    """Whether Triton's compiler is what `installed` says, asked ahead of what will be stored: variables and
    knobs, which are variables, too, may be set while a process runs."""
    if any(name.startswith(_PREFIXES) and name not in _HARMLESS for name in os.environ):
        return False
    runtime = getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)
    return getattr(runtime, "add_stages_inspection_hook", None) is None


def hooked() -> bool:
    """Whether a hook watches Triton's launches, as its profiler does: it would not see these."""
    triton = sys.modules.get("triton")
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    hooks = [getattr(runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook")]
    return any(getattr(hook, "calls", hook) for hook in hooks)  # a chain of hooks, which is there and empty
