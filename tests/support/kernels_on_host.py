"""CUDA C++ kernels compiled by g++, with headers that stand in for the GPU's instructions, and launched by
their own launchers."""

import contextlib
import ctypes
import gc
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import write_sources

from torchpaged.custom_ops.cuda import gpu, specialised
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.cuda.loaded_kernel import Map

_HEADERS = Path(__file__).parents[1] / "custom_ops" / "cuda"


class HostMap(ctypes.Structure):
    """``struct Map`` of latent_on_host.h."""

    _fields_ = [
        ("begin", ctypes.c_void_p),
        ("sizes", ctypes.c_int * 4),
        ("strides", ctypes.c_int * 3),
        ("box", ctypes.c_int * 4),
        ("_padding", ctypes.c_ubyte * 76),
    ]


def host_map(address: int, sizes: list[int], strides: list[int], box: list[int]) -> ctypes.Array[Any]:
    """In place of `tensor_map`, of two to four dimensions."""
    sizes, strides, box = sizes + [1] * (4 - len(sizes)), strides + [0] * (3 - len(strides)), [*box, 1, 1]
    made = HostMap(
        address, (ctypes.c_int * 4)(*sizes), (ctypes.c_int * 3)(*strides), (ctypes.c_int * 4)(*box[:4])
    )
    return Map.from_buffer_copy(ctypes.string_at(ctypes.addressof(made), 128))


@dataclass
class HostKernel:
    """Stands for a loaded kernel; ``seed``: of the order in which threads take turns, another one at each
    launch."""

    library: ctypes.CDLL
    cluster: int = 1
    seed: int = 1

    def launch(self, grid: int, threads: int, arguments: ctypes.Structure, *, early: bool) -> None:
        assert grid % self.cluster == 0
        if _races is not None:
            _watch_tensors(self.library, arguments)
        ended = self.library.run(ctypes.byref(arguments), grid, threads, self.cluster, self.seed)
        self.seed += 1
        if _races is not None:
            _races.found |= _found_races(self.library, _races.early)
        assert ended == 0, "a wait without an end"


@dataclass
class Races:
    """What kernels do that no barrier orders, and what they read before they wait for those ahead.

    Attributes:
        early: parameters that may be read before that wait.
        changed: texts of sources and what stands in their place: mistakes that have to be found.
        found: one line each.
    """

    early: Collection[str]
    changed: tuple[tuple[str, str], ...]
    found: set[str] = field(default_factory=set)


_races: Races | None = None


@contextlib.contextmanager
def races(early: Collection[str] = (), *changed: tuple[str, str]) -> Iterator[Races]:
    """Kernels compiled and launched within are watched (races_on_host.cpp)."""
    global _races
    _races = Races(early, changed)
    try:
        yield _races
    finally:
        _races = None


def assert_no_races(early: Collection[str], test: Callable[..., None], *given: Any) -> None:
    """``early``: parameters that kernels of ``test`` may read before they wait for those ahead."""
    with races(early) as watched:
        test(*given)
    assert not watched.found, "\n".join(sorted(watched.found))


def _watch_tensors(library: ctypes.CDLL, arguments: ctypes.Structure) -> None:
    """By the names of a kernel's parameters."""
    tensors = (t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for name, kind, *_ in arguments._fields_:
        given = getattr(arguments, name)
        at = HostMap.from_buffer_copy(given).begin if kind is Map else given
        if kind not in (Map, ctypes.c_void_p) or at is None:
            continue
        for begin, count in storages.items():
            if begin <= at < begin + count:
                library.races_watch(name.encode(), ctypes.c_void_p(begin), ctypes.c_int64(count))


def _found_races(library: ctypes.CDLL, early: Collection[str]) -> set[str]:
    """With lines of sources in place of addresses."""
    library.races_found.restype = ctypes.c_char_p
    text = library.races_found().decode()
    for place in set(re.findall(r"@(\w+);", text)):
        command = ["addr2line", "-e", library._name, "-i", hex(int(place, 16) - 1)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
        named = [line.split("/")[-1].split(" ")[0] for line in lines if line]
        of_kernel = [line for line in named if ".cu" in line] or named
        text = text.replace(f"@{place};", of_kernel[0])
    return {line for line in text.splitlines() if line.removeprefix("early read: ") not in early}


_ARRAY = re.compile(r"__shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[(.+)\];")


def _in_memory(found: re.Match[str], place: int) -> str:
    """An array of a CTA, where other CTAs of its cluster find it; 16 KiB at most."""
    kind, name, count = found.groups()
    return f"{kind} (&{name})[{count}] = *({kind} (*)[{count}])(cta_memory() + CTA_BYTES - {place} * 16384);"


def compiled(
    folder: Path, file: str, name: str, config: Config, header: str, replaced: tuple[str, ...]
) -> ctypes.CDLL:
    """Kernel ``name`` of ``file``, with ``header`` of tests/custom_ops/cuda in place of machine.cuh and of
    the headers in ``replaced``; ``folder`` does not exist."""
    source = write_sources(folder, file, config)
    for stand_in in _HEADERS.glob("*_on_host.*"):
        (folder / stand_in.name).write_text(stand_in.read_text())
    (folder / "machine.cuh").write_text(f'#include "{config.table.header}"\n#include "{header}"\n')
    for other in replaced:
        (folder / other).write_text('#pragma once\n#include "machine.cuh"\n')
    arrays = itertools.count(1)  # from the end of a CTA's memory on
    for path in folder.iterdir():
        text = re.sub(r"extern __shared__[^;]*;", "char *memory = cta_memory();", path.read_text())
        text = text.replace("__shared__ Shared s;", "Shared &s = *(Shared *)cta_memory();")
        if file in ("linear_wide.cu", "linear_large.cu"):
            text = text.replace("char *memory = cta_memory();", "char *shared = cta_memory();")
            text = _ARRAY.sub(lambda m: _in_memory(m, next(arrays)), text)
        text = text.replace("__shared__", "SHARED_ARRAY")
        text = re.sub(r"#pragma unroll.*|asm volatile\(\"\" : \"\+[rlf]\"\([^;]*\)\);", "", text)
        for old, new in () if _races is None else _races.changed:
            text = text.replace(old, new)
        path.write_text(text)
    with source.open("a") as end:
        end.write(
            "template <class P> void call(void (*kernel)(P), const void *p) { kernel(*(const P *)p); }\n"
            'extern "C" int run(const void *p, int ctas, int threads, int cluster, int seed) {\n'
            f"  return launch(ctas, threads, cluster, seed, [&] {{ call({name}, p); }});\n}}\n"
        )
    # else libraries of one process would share variables, and who comes first would set them
    options = ("-x", "c++", "-std=c++20", "-O1", "-w", "-fPIC", "-fno-gnu-unique")
    texts = sorted(path.name for path in folder.iterdir())
    if _races is None:
        _gxx(folder, "kernel.so", (*options, "-shared", file), texts)
    else:  # the calls of -fsanitize=thread end in races_on_host.cpp, which stands first
        watched = (*options, "-g", "-DRACES", "-c")
        _gxx(folder, "races.o", (*watched, _RACES[0]), _RACES)
        _gxx(folder, "kernel.o", (*watched, "-fsanitize=thread", file), texts)
        _gxx(folder, "kernel.so", ("-shared", "races.o", "kernel.o"), ("races.o", "kernel.o"))
    return ctypes.CDLL(str(folder / "kernel.so"))


#: The first, and all that it includes.
_RACES = ("races_on_host.cpp", "races_on_host.h", "hopper_on_host.h")
#: By g++, of the same files with the same options.
_made: dict[object, Path] = {}


def _gxx(folder: Path, target: str, options: tuple[str, ...], files: Sequence[str]) -> None:
    """``target`` in ``folder``; ``files``: what it is made of."""
    key = (target, options, *((name, (folder / name).read_bytes()) for name in files))
    if key in _made:
        shutil.copy(_made[key], folder)  # a library of its own, which shares no variables
        return
    command = ["g++", *options, "-o", target]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[:3000]
    _made[key] = folder / target


#: Of a file: the header and the replaced ones of `compiled`.
_STAND_INS: dict[str, tuple[str, tuple[str, ...]]] = {
    "delta_chunks.cu": ("state_on_host.h", ()),
    "delta_pass.cu": ("delta_pass_on_host.h", ("bulk.cuh", "wgmma.cuh", "delta_pass_instructions.cuh")),
    "key_chunks.cu": ("state_on_host.h", ()),
    "index_logits.cu": ("sparse_on_host.h", ("wgmma.cuh", "logits_instructions.cuh")),
}


def launched_on_host(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cluster: Callable[[Any], int] = lambda spec: 1
) -> None:
    """`custom_ops.cuda.specialised` launches kernels of the host, one per specialisation, in place of a
    GPU's; ``cluster``: CTAs of one, of a specialisation. ``folder`` does not exist."""
    made: dict[Any, HostKernel] = {}
    folder.mkdir()

    def kernel(file: str, name: str, spec: Any, _: int) -> HostKernel:
        if (file, spec) not in made:
            stand_ins = _STAND_INS.get(file, ("state_on_host.h", ("bulk.cuh",)))
            library = compiled(folder / str(len(made)), file, name, spec.config(), *stand_ins)
            made[file, spec] = HostKernel(library, cluster(spec))
        return made[file, spec]

    monkeypatch.setattr(specialised, "kernel", kernel)
    monkeypatch.setattr(gpu, "launches_early", lambda _: True)
