"""A kernel of Triton as machine code takes it: what it is specialised on, which arguments are passed, and the
launch without Triton."""

import ctypes
import importlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchpaged.custom_ops.cuda import loaded_kernel
from torchpaged.custom_ops.triton import launching

#: struct's letters for the types of parameters; a pointer's is Q.
LETTERS = {"i32": "i", "i64": "q", "fp32": "f"}


@dataclass(frozen=True)
class KernelRef:
    """A kernel by name, so that naming it does not import Triton.

    Attributes:
        module, name: where the ``triton.jit`` function is; the module as ``torchpaged.custom_ops`` calls it.
        unspecialised: those of its parameters, the first ones, that it is not specialised on, as
            ``do_not_specialize`` says.
    """

    module: str
    name: str
    unspecialised: tuple[str, ...] = ()

    def load(self) -> Any:
        """The kernel itself; imports Triton."""
        kernel = getattr(importlib.import_module(f"torchpaged.custom_ops.{self.module}"), self.name)
        launching.watch_compiles()
        return kernel


class StoredKernel:
    """Machine code on one device, and how to pass it arguments."""

    def __init__(self, header: Mapping[str, Any], code: bytes, specialisation: tuple[object, ...]) -> None:
        places, types = parameters(specialisation)
        self._places = places
        # Triton's two scratch pointers
        self._struct = struct.Struct("@" + "".join(LETTERS.get(kind, "Q") for kind in types) + "QQ")
        self._threads, self._early = 32 * int(header["num_warps"]), bool(header["launch_pdl"])
        self._kernel = loaded_kernel.Kernel(code, header["name"], int(header["shared"]), prefer_shared=True)
        expected = layout(types)
        self._offsets = tuple(offset for offset, _ in self._kernel.parameters())
        if self._kernel.parameters() not in (expected, expected[:-1], expected[:-2]):
            raise ValueError(
                f"{header['name']}: parameters of {self._kernel.parameters()}, expected {expected}"
            )

    def launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Launch on the current stream."""
        values = [
            value.data_ptr() if isinstance(value := arguments[place], torch.Tensor) else value
            for place in self._places
        ]
        packed = ctypes.create_string_buffer(self._struct.pack(*values, 0, 0), self._struct.size)
        self._kernel.launch(grid[0], self._threads, packed, early=self._early, offsets=self._offsets)


def layout(types: tuple[str, ...]) -> list[tuple[int, int]]:
    """Offset and bytes of each parameter, as C lays them out: what ``struct`` does natively."""
    letters, layout = [LETTERS.get(kind, "Q") for kind in types] + ["Q", "Q"], []
    for n, letter in enumerate(letters):
        size = struct.calcsize(letter)
        layout.append((struct.calcsize("@" + "".join(letters[: n + 1])) - size, size))
    return layout


def flatten(arguments: Iterable[Any]) -> tuple[Any, ...]:
    """Arguments as machine code takes them: the fields of a record one after the other."""
    flat: list[Any] = []
    for value in arguments:
        if isinstance(value, tuple):
            flat += value
        else:
            flat.append(value)
    return tuple(flat)


def specialise(kernel: KernelRef, arguments: tuple[Any, ...]) -> tuple[object, ...]:
    """What the machine code depends on, argument by argument, as `flatten` gives them; at least as fine as
    what Triton's JIT looks at."""
    result: list[object] = []
    unspecialised = len(kernel.unspecialised)
    for place, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            result.append((value.dtype, value.data_ptr() % 16 == 0))
        elif value is None:
            result.append(("constant", None))
        elif isinstance(value, int) and not isinstance(value, bool):
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if place < unspecialised:
                result.append(kind)
            else:
                result.append(("constant", 1) if value == 1 else (kind, value % 16 == 0))
        elif isinstance(value, float):
            result.append("fp32")
        else:
            raise TypeError(
                f"argument {place} of {kernel.name}: expected a tensor, an int, a float or None, got "
                f"{type(value).__name__}"
            )
    return tuple(result)


def parameters(specialisation: tuple[object, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Places of the arguments that are passed at a launch, and their types: i32, i64, fp32, or a dtype where
    it is a pointer."""
    passed = [
        (place, entry if isinstance(entry, str) else str(entry[0]))  # type: ignore[index]
        for place, entry in enumerate(specialisation)
        if isinstance(entry, str) or entry[0] != "constant"  # type: ignore[index]
    ]
    return tuple(place for place, _ in passed), tuple(kind for _, kind in passed)
