"""What the launching functions would launch on a GPU, recorded on the CPU and compiled ahead of time.

The functions behind the ops run as they are; only the last step, Triton's launch, is replaced by a note of
kernel and arguments. So a test compiles exactly what a user's call would: tiles, strides, alignment, flags.
The specialisation is the one of Triton's JIT: integers that are 1 become constants, pointers and integers
divisible by 16 are known to be.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import aot
import ptx
import torch
import triton
import ttgir
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.triton import config
from torchpaged.custom_ops.attention.triton.paged_attention import paged_attention
from torchpaged.custom_ops.mla.triton import config as latent_config
from torchpaged.custom_ops.mla.triton import mla_attention
from torchpaged.custom_ops.step_end.triton import sample_tokens
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
def recorded(target: str = "sm_90") -> Iterator[list[Launch]]:
    """Launches of Triton kernels within are noted, not done; CPU tensors pass for those of a GPU, one of
    `aot.TARGETS`."""
    hip = target.startswith("gfx")
    launches: list[Launch] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        launches.append(Launch(kernel, arguments, options))

    def decode_options(device: torch.device, tiles: config.DecodeTiles) -> dict[str, Any]:
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        return options if hip else options | {"maxnreg": config.max_registers(tiles)}

    replaced: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", note),
        (launching, "INTERPRET", True),  # what lets CPU tensors pass
        (sample_tokens, "INTERPRET", False),  # its tiles are those of a GPU
        (launching, "num_sms", lambda device: 132),
        (launching, "is_hopper", lambda device: target == "sm_90"),
        (config, "num_programs", lambda device, tiles: 132 * tiles.programs_per_sm),
        (config, "has_large_tiles", lambda device: target in ("sm_90", "sm_100")),
        (config, "decode_tiles", functools.partial(config.decode_tiles, hip=hip)),
        (config, "decode_options", decode_options),
        (latent_config, "tiles", functools.partial(latent_config.tiles, hip=hip)),
        (mla_attention, "_takes_ptx", lambda: not hip),
        (sample_tokens, "_takes_ptx", lambda: not hip),
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
    """Compile as the launch would, with programmatic dependent launch where the kernel knows it. No kernel
    may copy rows to where its products still read, hold a barrier but Triton's own, or ask for more shared
    memory than there is."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def kind_of(value: Any, path: tuple[int, ...], parameter: Any) -> Any:
        """Of an argument, or of a record's fields."""
        specialised = not parameter.do_not_specialize or len(path) > 1
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            return type(value)(*(kind_of(x, (*path, i), parameter) for i, x in enumerate(value)))  # type: ignore[call-arg]
        if isinstance(value, torch.Tensor):
            if value.data_ptr() % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return "*" + _TYPES[value.dtype]
        if isinstance(value, int):
            if specialised and value % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    early = target in ("sm_90", "sm_100")
    for index, parameter in enumerate(launch.kernel.params):
        value = early if parameter.name == "PDL" else launch.arguments[parameter.name]
        signature[parameter.name] = kind_of(value, (index,), parameter)
    options = {name: value for name, value in launch.options.items() if name != "launch_pdl"}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=aot.TARGETS[target], options=options)
    assert ttgir.overwritten(compiled.asm["ttgir"]) == [], launch.name
    assert "ptx" not in compiled.asm or ptx.complaints(compiled.asm["ptx"]) == [], launch.name
    assert compiled.metadata.shared <= aot.SHARED_LIMIT[target], (launch.name, compiled.metadata.shared)
    return compiled


def attention_launches(
    target: str,
    dtype: str,
    dim: int,
    group: int,
    query_lens: tuple[int, ...],
    capacity: int,
    block_size: int = 16,
    kv_dtype: str | None = None,
    lse: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    scales: bool = False,
    tree: bool = False,
    fp8_results: bool = False,
    **options: Any,
) -> list[Launch]:
    """Those of ``paged_attention``, for 8 kv heads and contiguous pools, whose memory is not touched.

    Args:
        dtype, kv_dtype: as Triton calls them.
        capacity: tokens that a row of the block table holds.
        alibi, sinks, scales, tree: whether the call has such tensors; ``fp8_results``: an ``output_scale``.
        options: of the call.
    """
    kinds = {name: torch_dtype for torch_dtype, name in _TYPES.items()}
    heads, tokens, columns = 8 * group, sum(query_lens), capacity // block_size
    q = torch.empty(tokens, heads, dim, dtype=kinds[dtype])
    pools = [torch.empty(columns + 1, block_size, 8, dim, dtype=kinds[kv_dtype or dtype]) for _ in range(2)]
    lens = torch.tensor(query_lens, dtype=torch.int32)
    if tree:
        options["tree_mask"] = torch.ones(tokens, dtype=torch.int64)
    if alibi:
        options["alibi_slopes"] = torch.ones(heads)
    if sinks:
        options["sinks"] = torch.ones(heads, dtype=q.dtype)
    if scales:
        options["k_scale"], options["v_scale"] = torch.ones(8), torch.ones(8)
    out = torch.empty_like(q)
    if fp8_results:
        options["output_scale"], out = torch.ones(1), out.to(torch.float8_e4m3fn)
    call = AttentionCall.of(
        q,
        *pools,
        torch.arange(1, columns + 1, dtype=torch.int32).expand(len(lens), -1).contiguous(),
        lens,
        torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        out,
        torch.empty(tokens, heads) if lse else None,
        max(query_lens),
        0.1,
        **options,
    )
    with recorded(target) as launches:
        paged_attention(call)
    return launches


def check(op: str, inputs: dict[str, Any], target: str, **once: int) -> list[Any]:
    """Each launch of an op compiles for a target, and spills nothing, or of kernels that ``once`` names so
    many bytes outside of loops. Returns what they compile to."""
    with recorded(target) as launches:
        getattr(BACKEND_OPS["triton"], op)(**inputs)
    assert launches
    compiled = [compile_launch(launch, target) for launch in launches]
    for one in compiled:
        aot.check_spills(one, once.get(one.metadata.name, 0))
    return compiled


def check_without_spills(op: str, inputs: dict[str, Any], target: str) -> list[Any]:
    """As `check`, but none may spill under any Triton, outside of loops neither."""
    compiled = check(op, inputs, target)
    for one in compiled:
        assert aot.resources(one)["spilled"] == 0, one.metadata.name
    return compiled
