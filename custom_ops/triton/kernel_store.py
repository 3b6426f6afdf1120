"""Machine code that Triton made, kept and launched by us: where it is on disk, neither Triton nor its
compiler is imported.

    Launch(kernel, grid, arguments, options)()

Triton's own cache spares the compilation, not the import of Triton and the hash of its libraries, 0.3 s each.
Nor does a launch of ours need the launcher that Triton 3.6 makes of each kernel's signature with a C
compiler. What is kept here is for one specialisation as Triton's JIT cuts them: integers that are 1 are
constants, pointers and integers divisible by 16 are known to be. Its name is a hash of that, of our sources,
of the options, the GPU's compute capability and the Triton that is installed.

How a kernel takes its arguments is internal to Triton and may change. So the driver reads the parameters of
the machine code: if they are not those that would be passed, Triton launches. The same where
anything but the default is asked of Triton: variables of its environment, hooks around launches; on AMD; and
where cuda-bindings is absent.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpaged.custom_ops import ahead
from torchpaged.custom_ops.cuda import cubins
from torchpaged.custom_ops.triton.installation import installed, is_as_installed, usable
from torchpaged.custom_ops.triton.stored_kernel import (
    LETTERS,
    KernelRef,
    StoredKernel,
    flatten,
    parameters,
    specialise,
)

_HERE = Path(__file__).parent


def _read_sources() -> str:
    """A hash of the sources of this folder and of every family's kernels, as they are now."""
    digest = hashlib.sha256()
    for path in sorted([*_HERE.glob("*.py"), *_HERE.parent.glob("*/triton/*.py")]):
        digest.update(path.relative_to(_HERE.parent).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _sources() -> str:
    """`_read_sources`, once: when this file is imported, which is ahead of the kernels. Triton compiles what
    was imported."""
    return _read_sources()


_known: dict[tuple[object, ...], StoredKernel | None] = {}


def _key(kernel: KernelRef, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[object, ...]:
    return (kernel.name, torch.cuda.current_device(), specialise(kernel, arguments), tuple(options.items()))


def _file(key: tuple[object, ...]) -> str:
    name, index, *rest = key
    assert isinstance(index, int)
    what = (
        name,
        torch.cuda.get_device_capability(index),
        rest,
        _sources(),
        installed(),
        os.environ.get("TRITON_DEFAULT_FP_FUSION"),
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32] + ".triton.cubin"


def find(kernel: KernelRef, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> StoredKernel | None:
    """The kernel as this process knows it, or as it lies on the disk; None if Triton is to launch. Tensors on
    the current CUDA device."""
    if not usable():
        return None
    key = _key(kernel, arguments, options)
    if key not in _known:
        if torch.cuda.is_current_stream_capturing():  # nothing is loaded within a capture
            return None
        content = cubins.load(_file(key))
        if content is None:
            return None
        _known[key] = _load(content, key)
    return _known[key]


def keep(
    kernel: KernelRef, arguments: tuple[Any, ...], options: Mapping[str, Any], compile: Callable[[], Any]
) -> StoredKernel | None:
    """What ``compile`` has Triton compile for these arguments, kept for this process and on disk; None if
    Triton is to launch."""
    if not usable() or torch.cuda.is_current_stream_capturing() or not is_as_installed():
        return None
    key = _key(kernel, arguments, options)
    if key not in _known:
        content = pack(compile(), key[2])  # type: ignore[arg-type]
        _known[key] = None if content is None else _load(content, key)
        # else it may be another text's
        if content is not None and _known[key] is not None and _read_sources() == _sources():
            cubins.store(_file(key), content)
    return _known[key]


def pack(compiled: Any, specialisation: tuple[object, ...]) -> bytes | None:
    """Header and machine code of a kernel compiled by Triton; None if a launch takes more than `StoredKernel`
    gives it."""
    metadata = compiled.metadata
    plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    passed = [kind for kind in flatten(compiled.src.signature.values()) if kind != "constexpr"]
    expected = parameters(specialisation)[1]
    same = len(passed) == len(expected) and all(
        kind == want if want in LETTERS else kind.startswith("*")
        for kind, want in zip(passed, expected, strict=True)
    )
    if not plain or scratch or not same or "cubin" not in compiled.asm:
        return None
    header = {name: getattr(metadata, name) for name in ("name", "shared", "num_warps", "launch_pdl")}
    return json.dumps(header).encode() + b"\n" + bytes(compiled.asm["cubin"])


def _load(content: bytes, key: tuple[object, ...]) -> StoredKernel | None:
    """None if the driver refuses it or its parameters differ: then Triton launches."""
    head, _, code = content.partition(b"\n")
    try:
        return StoredKernel(json.loads(head), code, key[2])  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError):
        return None


class Launch(NamedTuple):
    """A kernel and all that it is launched with; ``grid`` has one dimension, as stored ones need.
    ``arguments``: a named tuple of the kernel's parameters that are no constants, records among them."""

    kernel: KernelRef
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> None:
        """Launch, on the current device and stream: what is stored, else by Triton.

        Raises:
            ValueError: ``grid`` has more than one dimension.
        """
        if len(self.grid) != 1:
            raise ValueError(f"grid: expected one dimension, got {self.grid}")
        flat = flatten(self.arguments)
        stored = None
        gathering = ahead.here()
        if gathering is not None and _on_cuda(flat):
            self._gather(gathering, flat)
            return
        if _on_cuda(flat):
            stored = find(self.kernel, flat, self.options)
            if stored is None:
                stored = keep(self.kernel, flat, self.options, self._compiled)
        if stored is not None:
            stored.launch(self.grid, flat)
        else:
            self.kernel.load()[self.grid](*self.arguments, **self.options)

    def _gather(self, gathering: ahead.Gathering, flat: tuple[Any, ...]) -> None:
        """Compile in a thread instead (`custom_ops.ahead`), unless it is stored."""
        key = _key(self.kernel, flat, self.options)
        if key not in gathering.kernels and find(self.kernel, flat, self.options) is None:
            device = torch.device("cuda", torch.cuda.current_device())
            self.kernel.load()  # imported by one thread
            small = self._replace(arguments=_stand_in(self.arguments))
            gathering.compile(key, self.kernel.name, lambda: small.compile(device))

    def _compiled(self) -> Any:
        return self.kernel.load().warmup(*self.arguments, grid=self.grid, **self.options)

    def is_stored(self) -> bool:
        """Whether Triton is not needed."""
        flat = flatten(self.arguments)
        return _on_cuda(flat) and find(self.kernel, flat, self.options) is not None

    def compile(self, device: torch.device) -> None:
        """Compile for these arguments; nothing is launched. A thread of its own starts on device 0."""
        with torch.cuda.device(device):
            self._compiled()


def launch_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel that is not stored, by Triton. While kernels are gathered (`custom_ops.ahead`), it is
    compiled in a thread instead."""
    gathering = ahead.here()
    if gathering is None or not _on_cuda(flat := flatten(arguments)):
        kernel[grid](*arguments, **options)
        return
    device, name = torch.cuda.current_device(), kernel.__name__
    key = name, device, specialise(KernelRef("", name), flat), tuple(options.items())
    if key in gathering.kernels:
        return
    small = _stand_in(arguments)

    def compile() -> None:
        with torch.cuda.device(device):  # a thread of its own starts on device 0
            kernel.warmup(*small, grid=grid, **options)

    gathering.compile(key, name, compile)


def _stand_in(value: Any) -> Any:
    """What compiles as an argument, a record or a tuple of these does, without its memory: threads hold it
    until their turn comes, and the largest steps are gathered first."""
    if isinstance(value, torch.Tensor):
        begin = value.data_ptr() % 16
        memory = torch.empty(32, dtype=torch.uint8, device=value.device)
        return memory[begin : begin + 16].view(value.dtype)
    if isinstance(value, tuple):
        parts = map(_stand_in, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _on_cuda(arguments: tuple[Any, ...]) -> bool:
    """Of the first tensor; the others are checked to be where it is."""
    first = next((value for value in arguments if isinstance(value, torch.Tensor)), None)
    return first is not None and first.device.type == "cuda"


_sources()
