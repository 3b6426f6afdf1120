"""A kernel's parameters as ctypes has them, made from what its source declares."""

import ctypes
import functools
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from torchpaged.custom_ops.cuda import jit
from torchpaged.custom_ops.cuda.loaded_kernel import Map

_KINDS: dict[str, Any] = {"i64": ctypes.c_int64, "float": ctypes.c_float, "int": ctypes.c_int, "Map": Map}
#: A tensor map, and so a struct that has one, begins and ends at multiples of so many bytes.
_MAP_ALIGNMENT = 64
_made: dict[tuple[str, tuple[tuple[str, Any], ...]], type[ctypes.Structure]] = {}


def steps_of(**tensors: Tensor | None) -> dict[str, int]:
    """Members ``NAME_token`` and ``NAME_head``: strides of ``[num_tokens, num_heads, ...]``, 0 of None."""
    return {
        f"{name}_{step}": 0 if tensor is None else tensor.stride(dim)
        for name, tensor in tensors.items()
        for dim, step in enumerate(("token", "head"))
    }


@functools.cache
def struct_of(file: str, name: str = "Params") -> type[ctypes.Structure]:
    """``struct name`` as ``file``, one of `jit.files`, or a header that it includes declares it. Its members
    are given by keyword, those left out are 0; one that it does not have raises AttributeError.

    Raises:
        ValueError: it is not declared, or a member is no number, pointer or struct.
    """
    fields: list[tuple[str, Any]] = []
    for line in re.sub(r"//.*", "", _body(file, name)).split(";"):
        kind, _, members = line.strip().removeprefix("const ").partition(" ")
        for member in filter(None, map(str.strip, members.split(","))):
            if not member.removeprefix("*").isidentifier():
                raise ValueError(f"{file}: {member!r} of struct {name} is no number, pointer or struct")
            if member.startswith("*"):
                fields.append((member[1:], ctypes.c_void_p))
            else:
                fields.append((member, _KINDS.get(kind) or struct_of(file, kind)))
    size = ctypes.sizeof(_structure(name, tuple(fields)))
    if any(kind is Map for _, kind in fields) and size % _MAP_ALIGNMENT:
        fields.append(("_padding", ctypes.c_ubyte * (_MAP_ALIGNMENT - size % _MAP_ALIGNMENT)))
    return _structure(name, tuple(fields))


def _structure(name: str, fields: tuple[tuple[str, Any], ...]) -> type[ctypes.Structure]:
    """One type for equal declarations, in all threads: a member takes instances of its own type alone."""
    made = type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": fields})
    return _made.setdefault((name, fields), made)


def _body(file: str, name: str) -> str:
    declared = re.compile(rf"^struct {name} \{{.*?\n(.*?)^\}};", re.MULTILINE | re.DOTALL)
    for text in _with_headers(file, set()):
        if found := declared.search(text):
            return found[1]
    raise ValueError(f"{file} and its headers declare no struct {name}")


def _with_headers(file: str, seen: set[str]) -> Iterator[str]:
    """Its text, then those of the headers that it includes, each once."""
    text = jit.sources().get(file, "")  # headers of constants are not among them
    seen.add(file)
    yield text
    for header in re.findall(r'^#include "(\w+\.cuh)"', text, re.MULTILINE):
        if header not in seen:
            yield from _with_headers(header, seen)
