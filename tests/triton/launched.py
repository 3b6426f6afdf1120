"""What the launching functions would launch on a Hopper GPU, recorded on the CPU and compiled ahead of time.

The functions behind the ops run as they are; only the last step, Triton's launch, is replaced by a note of
kernel and arguments. So a test compiles exactly what a user's call would: tiles, strides, alignment, flags.
The specialisation is the one of Triton's JIT: integers that are 1 become constants, pointers and integers
divisible by 16 are known to be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import aot
import torch
import triton
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from torchpaged.custom_ops.attention.triton import config
from torchpaged.custom_ops.triton import launching

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
}


class Launch(NamedTuple):
    """``arguments``: of the kernel, by name, as given; ``options``: num_warps and the like."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches of Triton kernels within are noted, not done; CPU tensors pass for a Hopper GPU's."""
    launches: list[Launch] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        launches.append(Launch(kernel, arguments, options))

    def decode_options(device: torch.device, tiles: config.DecodeTiles) -> dict[str, Any]:
        return {
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            "maxnreg": config.max_registers(tiles),
        }

    replaced: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", note),
        (launching, "INTERPRET", True),  # what lets CPU tensors pass, with Hopper's tiles
        (launching, "num_sms", lambda device: 132),
        (config, "num_programs", lambda device, tiles: 132 * tiles.programs_per_sm),
        (config, "decode_options", decode_options),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield launches
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def compile_launch(launch: Launch, target: str = "sm_90") -> Any:
    """Compile as the launch would, with programmatic dependent launch where the kernel knows it."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    hopper = {"PDL": target in ("sm_90", "sm_100"), "INTERPRET": False}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = hopper[name] if name in hopper else launch.arguments[name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if specialised and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    options = {name: value for name, value in launch.options.items() if name != "launch_pdl"}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=aot.TARGETS[target], options=options)
