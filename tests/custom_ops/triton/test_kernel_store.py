"""Kernels of Triton kept and launched by us: what decides which one, what must fit, and when Triton launches
instead. No GPU: loaded_kernel.Kernel is a stand-in."""

import itertools
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launched
import pytest
import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.triton import paged_attention
from torchpaged.custom_ops.cuda import cubins, loaded_kernel
from torchpaged.custom_ops.mla.triton import mla_attention
from torchpaged.custom_ops.triton import installation, kernel_store, stored_kernel
from torchpaged.custom_ops.triton.kernel_store import Launch
from torchpaged.custom_ops.triton.stored_kernel import KernelRef
from torchpaged.testing import BatchSpec, make_batch, run_paged_attention

REFS: dict[str, tuple[KernelRef, Any]] = {
    "prefill_kernel": (paged_attention._PREFILL, paged_attention.PrefillArguments),
    "decode_kernel": (paged_attention._DECODE, paged_attention.DecodeArguments),
    "mla_kernel": (mla_attention._ATTEND, mla_attention.AttendArguments),
    "selected_kernel": (mla_attention._SELECTED, mla_attention.SelectedArguments),
    "merge_kernel": (mla_attention._MERGE, mla_attention.MergeArguments),
}
EVERYTHING = {"window_left": 100, "chunk_size": 256, "logits_soft_cap": 6.0}
BYTES = {"u64": 8, "b64": 8, "u32": 4, "b32": 4, "s32": 4, "f32": 4}


@pytest.mark.parametrize("name", REFS)
def test_a_reference_says_what_the_kernel_says(name: str) -> None:
    """The launchers' records have the kernel's names in its order, by which they are passed."""
    (ref, record), parameters = REFS[name], REFS[name][0].load().params
    assert record._fields == tuple(p.name for p in parameters if not p.is_constexpr)
    assert not any(p.is_constexpr for p in parameters[: len(record._fields)])
    assert ref.unspecialised == tuple(p.name for p in parameters if p.do_not_specialize)
    assert ref.unspecialised == record._fields[: len(ref.unspecialised)]
    assert not any(p.do_not_specialize_on_alignment for p in parameters)


def mixed_launches(**changes: Any) -> list[launched.Launch]:
    """The prefill and the decode kernel of a small mixed batch, with every mask."""
    batch = make_batch(
        BatchSpec("mixed", (40, 100, 7), (30, 1, 1)),
        num_heads=8,
        num_kv_heads=2,
        dtype=torch.bfloat16,
        sinks=True,
        alibi=True,
        **changes,
    )
    with launched.recorded() as launches:
        run_paged_attention(BACKEND_OPS["triton"], batch, **EVERYTHING)
    return launches


def latent_launches(indices: torch.Tensor | None = None) -> list[launched.Launch]:
    """The latent kernel over a context in parts, or over what is selected of it, and their merge."""
    with launched.recorded() as launches:
        BACKEND_OPS["triton"].mla_attention(
            torch.zeros(3, 16, 576, dtype=torch.bfloat16),
            torch.zeros(65, 16, 1, 576, dtype=torch.bfloat16),
            torch.arange(1, 65, dtype=torch.int32).repeat(2, 1),
            torch.tensor([900, 9], dtype=torch.int32),
            torch.tensor([0, 2, 3], dtype=torch.int32),
            torch.zeros(3, 16, 512, dtype=torch.bfloat16),
            max_query_len=2,
            scale=0.1,
            indices=indices,
        )
    return launches


def sparse_launches() -> list[launched.Launch]:
    return latent_launches(torch.zeros(3, 999, dtype=torch.int32))


def records(launch: launched.Launch) -> tuple[Any, ...]:
    """The arguments that the op passed by place."""
    return tuple(launch.arguments[name] for name in REFS[launch.name][1]._fields)


def as_records(like: tuple[Any, ...], flat: Sequence[Any]) -> tuple[Any, ...]:
    """The inverse of `stored_kernel.flatten`."""
    left = iter(flat)
    return tuple(
        type(value)(*itertools.islice(left, len(value))) if isinstance(value, tuple) else next(left)
        for value in like
    )


@pytest.mark.slow_cases("bf16")
@pytest.mark.parametrize("kind", ["bf16", "fp8", "latent", "sparse"])
def test_what_is_passed_is_what_the_machine_code_takes(kind: str) -> None:
    """Number, order and size of parameters of the real thing; another Triton that passes them otherwise
    fails here."""
    changes: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "scales": "per_head"} if kind == "fp8" else {}
    made = {"latent": latent_launches, "sparse": sparse_launches}
    launches = made[kind]() if kind in made else mixed_launches(**changes)
    attends = {"latent": "mla_kernel", "sparse": "selected_kernel"}
    names = [attends[kind], "merge_kernel"] if kind in attends else ["prefill_kernel", "decode_kernel"]
    assert [launch.name for launch in launches] == names
    for launch in launches:
        compiled = launched.compile_launch(launch)
        specialisation = stored_kernel.specialise(
            REFS[launch.name][0], stored_kernel.flatten(records(launch))
        )
        content = kernel_store.pack(compiled, specialisation)
        assert content is not None
        assert content.partition(b"\n")[2] == compiled.asm["cubin"]
        types = stored_kernel.parameters(specialisation)[1]
        entry = re.search(r"\.entry \w+\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
        assert entry is not None
        sizes = [BYTES[kind] for kind in re.findall(r"\.param \.(\w+)", entry[1])]
        expected = [size for _, size in stored_kernel.layout(types)]
        assert sizes in (expected, expected[:-1], expected[:-2]), (sizes, expected)


@pytest.mark.parametrize("name", REFS)
def test_as_fine_as_tritons_own_specialisation(name: str) -> None:
    """What looks the same to us looks the same to Triton's JIT: or it would compile a kernel where we launch
    the other's."""
    launches = sparse_launches() if name == "selected_kernel" else mixed_launches()
    if name in ("mla_kernel", "merge_kernel"):
        launches = latent_launches()
    ref, launch = REFS[name][0], next(launch for launch in launches if launch.name == name)
    jit_function = launch.kernel
    bind = create_function_from_signature(
        jit_function.signature,
        jit_function.params,
        CUDABackend(triton.backends.compiler.GPUTarget("cuda", 90, 32)),
    )
    given = records(launch)
    arguments = stored_kernel.flatten(given)
    names = [p.name for p in jit_function.params]
    constants = {key: launch.arguments[key] for key in names[len(given) :]}
    storage = torch.zeros(64, dtype=torch.int8)
    compared = 0
    for place, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            tries: list[Any] = [
                storage[at:].view(dtype) if at % dtype.itemsize == 0 else None
                for at in (0, 4, 8, 16, 24, 32)
                for dtype in (torch.int32, torch.bfloat16, torch.float32)
            ]
        elif type(value) is int:
            tries = [0, 1, 2, 8, 15, 16, 17, 24, 32, 48, 2**31 - 1, 2**31, 2**31 + 16, -1, -16, -(2**31) - 1]
        else:
            tries = [0.0, 1.0, 0.5, 16.0]
        seen: dict[object, object] = {}
        for other in tries:
            changed = (*arguments[:place], other, *arguments[place + 1 :])
            ours = stored_kernel.specialise(ref, changed)
            theirs = str(bind(*as_records(given, changed), **constants)[1])
            assert seen.setdefault(ours, theirs) == theirs, (
                f"argument {place}: {other!r} is another kernel to Triton"
            )
            compared += 1
    assert compared > 100


# ---------------------------------------------------------------------------------------- finding and keeping
REF = KernelRef("decode", "some_kernel", unspecialised=("n",))


class LoadedKernel:
    """Stands in for loaded_kernel.Kernel."""

    layout: list[tuple[int, int]]
    made: list[bytes]
    launches: list[tuple[Any, ...]]

    def __init__(self, code: bytes, name: str, shared_bytes: int, *, prefer_shared: bool) -> None:
        self.made.append(code)

    def parameters(self) -> list[tuple[int, int]]:
        return self.layout

    def launch(self, *arguments: Any, **options: Any) -> None:
        self.launches.append((*arguments, options))


def compiled_kernel(**metadata: Any) -> Any:
    known = {
        "name": "some_kernel",
        "shared": 64,
        "num_warps": 4,
        "num_ctas": 1,
        "launch_pdl": True,
        "launch_cooperative_grid": False,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        **metadata,
    }
    source = SimpleNamespace(signature={"n": "i32", "pair": ("*bf16", "i32"), "c": "constexpr", "x": "fp32"})
    return SimpleNamespace(metadata=SimpleNamespace(**known), src=source, asm={"cubin": b"machine\ncode"})


TENSOR = torch.zeros(8, dtype=torch.bfloat16)
ARGUMENTS = (5, TENSOR, 32, 0.5)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHPAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(loaded_kernel, "Kernel", LoadedKernel)
    monkeypatch.setattr(
        LoadedKernel, "layout", [(0, 4), (8, 8), (16, 4), (20, 4), (24, 8), (32, 8)], raising=False
    )
    monkeypatch.setattr(LoadedKernel, "made", [], raising=False)
    monkeypatch.setattr(LoadedKernel, "launches", [], raising=False)
    monkeypatch.setattr(kernel_store, "usable", lambda: True)
    monkeypatch.setattr(kernel_store, "_known", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield


def forget() -> None:
    """As in a new process."""
    kernel_store._known.clear()


def test_the_next_process_launches_it_with_the_same_arguments() -> None:
    assert kernel_store.find(REF, ARGUMENTS, {"TILE": 8}) is None
    kernel_store.keep(REF, ARGUMENTS, {"TILE": 8}, lambda: compiled_kernel())
    forget()
    stored = kernel_store.find(REF, (6, TENSOR, 64, 0.25), {"TILE": 8})
    assert stored is not None
    assert LoadedKernel.made == [b"machine\ncode"] * 2
    stored.launch((3,), (6, TENSOR, 64, 0.25))
    ((grid, threads, packed, options),) = LoadedKernel.launches
    assert (grid, threads, options) == (3, 128, {"early": True, "offsets": (0, 8, 16, 20, 24, 32)})
    assert struct.unpack("@iQifQQ", packed) == (6, TENSOR.data_ptr(), 64, 0.25, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((5, TENSOR[1:], 32, 0.5), {"TILE": 8}),
        ((5, TENSOR.float(), 32, 0.5), {"TILE": 8}),
        ((5, TENSOR, 33, 0.5), {"TILE": 8}),
        ((5, TENSOR, 1, 0.5), {"TILE": 8}),
        ((5, TENSOR, 2**40, 0.5), {"TILE": 8}),
        ((2**31, TENSOR, 32, 0.5), {"TILE": 8}),
        ((5, None, 32, 0.5), {"TILE": 8}),
        (ARGUMENTS, {"TILE": 16}),
    ],
)
def test_another_specialisation_is_another_kernel(
    arguments: tuple[Any, ...], options: dict[str, int]
) -> None:
    kernel_store.keep(REF, ARGUMENTS, {"TILE": 8}, lambda: compiled_kernel())
    assert kernel_store.find(REF, ARGUMENTS, {"TILE": 8}) is not None
    assert kernel_store.find(REF, arguments, options) is None


@pytest.mark.parametrize("what", ["_sources", "installed", "capability", "fusion"])
def test_another_source_triton_or_gpu_is_another_kernel(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_store.keep(REF, ARGUMENTS, {}, lambda: compiled_kernel())
    forget()
    if what == "fusion":
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "another")
    elif what == "capability":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (8, 0))
    else:
        monkeypatch.setattr(kernel_store, what, lambda: "another")
    assert kernel_store.find(REF, ARGUMENTS, {}) is None


def test_a_damaged_file_is_as_good_as_absent() -> None:
    kernel_store.keep(REF, ARGUMENTS, {}, lambda: compiled_kernel())
    forget()
    (path,) = cubins.folder().iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert kernel_store.find(REF, ARGUMENTS, {}) is None


@pytest.mark.parametrize(
    "metadata",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 4},
        {"profile_scratch_size": 4},
        {"layout": [(0, 4), (8, 8), (16, 4)]},
        {"layout": [(0, 8), (8, 8), (16, 4), (20, 4), (24, 8), (32, 8)]},
        {"layout": []},
        {"n": "constexpr"},
    ],
    ids=str,
)
def test_what_is_launched_otherwise_stays_tritons(
    metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes more than arguments; machine code with other parameters, another signature than ours."""
    metadata = dict(metadata)
    monkeypatch.setattr(LoadedKernel, "layout", metadata.pop("layout", LoadedKernel.layout))
    kind = metadata.pop("n", "i32")
    compiled = compiled_kernel(**metadata)
    compiled.src.signature["n"] = kind
    kernel_store.keep(REF, ARGUMENTS, {}, lambda: compiled)
    assert kernel_store.find(REF, ARGUMENTS, {}) is None
    assert not cubins.folder().exists()


def test_nothing_is_loaded_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_store.keep(REF, ARGUMENTS, {}, lambda: compiled_kernel())
    forget()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernel_store.find(REF, ARGUMENTS, {}) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert kernel_store.find(REF, ARGUMENTS, {}) is not None


@pytest.mark.parametrize("num_ctas", [1, 2])
def test_a_launch_loads_triton_only_where_nothing_is_stored(
    num_ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []

    class Jit:
        def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
            runs.append(("compile", grid, arguments, options))
            return compiled_kernel(num_ctas=num_ctas)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: runs.append(("launch", grid, arguments, options))

    monkeypatch.setattr(KernelRef, "load", lambda self: Jit())
    monkeypatch.setattr(kernel_store, "_on_cuda", lambda arguments: True)
    launch = Launch(REF, (3,), ARGUMENTS, {"TILE": 8})
    assert not launch.is_stored()
    launch()
    launch()
    if num_ctas == 1:
        assert runs == [("compile", (3,), ARGUMENTS, {"TILE": 8})]
        assert launch.is_stored()
        assert len(LoadedKernel.launches) == 2
        forget()
        launch()
        assert len(runs) == 1
        assert len(LoadedKernel.launches) == 3
    else:
        assert [run[0] for run in runs] == ["compile", "launch", "launch"]
        assert not LoadedKernel.launches


# ---------------------------------------------------------------------------------------- when it is not used
@pytest.mark.parametrize(
    "name", ["TRITON_DISABLE_LINE_INFO", "DISABLE_PTXAS_OPT", "MLIR_ENABLE_DUMP", "TRITON_ALWAYS_COMPILE"]
)
def test_variables_of_triton_leave_all_to_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(installation, "_bindings", lambda: True)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    installation._may_be_used.cache_clear()
    assert kernel_store.usable()
    monkeypatch.setenv(name, "1")
    installation._may_be_used.cache_clear()
    assert not kernel_store.usable()
    monkeypatch.undo()
    installation._may_be_used.cache_clear()


def test_what_was_compiled_from_a_changed_source_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kernel is edited while a process runs: its machine code must not lie on the disk under the name
    of another text."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "kernel.py").write_text("old")
    monkeypatch.setattr(kernel_store, "_HERE", folder)
    kernel_store._sources.cache_clear()
    kernel_store._sources()

    def compile() -> Any:
        (folder / "kernel.py").write_text("new")
        return compiled_kernel()

    try:
        stored = kernel_store.keep(REF, ARGUMENTS, {}, compile)
        assert stored is not None
        assert kernel_store.find(REF, ARGUMENTS, {}) is stored
        assert not cubins.folder().exists()
        assert kernel_store._read_sources() != kernel_store._sources()
    finally:
        kernel_store._sources.cache_clear()


def test_sources_are_read_when_the_store_is_imported() -> None:
    """Ahead of the kernels, whose texts Triton reads when they are imported: read at the first launch, they
    could be newer than those."""
    code = (
        "import pathlib; read = pathlib.Path.read_bytes; seen = []\n"
        "pathlib.Path.read_bytes = lambda self: (seen.append(self.name), read(self))[1]\n"
        "import torchpaged.custom_ops.triton.kernel_store as store\n"
        "assert 'decode.py' in seen; seen.clear(); store._sources(); assert not seen"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("changed", ["knob", "variable", "pipeline"])
def test_a_compiler_that_was_changed_meanwhile_stores_nothing(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Triton's knobs, or a variable set behind the first launch, make of a kernel is nothing for the
    next process. Reads ``triton.knobs.runtime.add_stages_inspection_hook``; assigned knobs are in the
    environment, too."""
    with triton.knobs.compilation.scope(), triton.knobs.runtime.scope():
        if changed == "knob":
            # what the assignment below changes comes back
            monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
            triton.knobs.compilation.disable_line_info = True
        elif changed == "variable":
            monkeypatch.setenv("TRITON_KERNEL_OVERRIDE", "1")
        else:
            assert triton.knobs.runtime.add_stages_inspection_hook is None
            triton.knobs.runtime.add_stages_inspection_hook = lambda *arguments: ("key", "hash")  # type: ignore[assignment, misc]
        assert kernel_store.keep(REF, ARGUMENTS, {}, lambda: compiled_kernel()) is None
        assert not cubins.folder().exists()
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO", raising=False)
    monkeypatch.delenv("TRITON_KERNEL_OVERRIDE", raising=False)
    assert kernel_store.keep(REF, ARGUMENTS, {}, lambda: compiled_kernel()) is not None


@pytest.mark.parametrize("home", ["full", "a file", "unset"])
def test_a_disk_that_takes_nothing_costs_time_alone(
    home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if home == "unset":
        monkeypatch.delenv("TORCHPAGED_CACHE")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    elif home == "a file":
        (tmp_path / "cubin").write_text("")
    else:

        def refuse(*_: Any, **__: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", refuse)
    assert kernel_store.keep(REF, ARGUMENTS, {}, lambda: compiled_kernel()) is not None
    assert kernel_store.find(REF, ARGUMENTS, {}) is not None
    forget()
    assert kernel_store.find(REF, ARGUMENTS, {}) is None
    if home == "full":
        assert list(cubins.folder().iterdir()) == [], "half a file was left"


def test_hooks_around_tritons_launches_are_seen() -> None:
    """Reads ``triton.knobs.runtime.launch_enter_hook`` and the ``calls`` of its chain."""
    assert not installation.hooked()
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        assert installation.hooked()
    finally:
        hook.remove(print)
    assert not installation.hooked()


def test_every_source_of_kernels_belongs_to_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels lie in several folders: machine code of a changed one must not be found again."""
    root = Path(kernel_store.__file__).parents[1]
    read: set[Path] = set()
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.add(path), read_bytes(path))[1])
    kernel_store._sources.__wrapped__()
    assert len(read) > 20
    assert read == {path for path in root.rglob("*.py") if path.parent.name == "triton"}
