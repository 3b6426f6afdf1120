"""Numbers and objects as people read them, for messages, reprs and reports."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

#: Columns that a repr takes at most.
WIDTH = 110


def counted(number: int, thing: str) -> str:
    """``counted(1, "layer")`` is "1 layer", ``counted(2, "layer")`` "2 layers"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def of_bytes(number: int) -> str:
    """``of_bytes(1536)`` is "1.50 KiB": in the largest unit of which it has one."""
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(max(number.bit_length() - 1, 0) // 10, len(units))
    return f"{number / 2 ** (10 * power):.2f} {units[power - 1]}" if power else counted(number, "byte")


def shortened(numbers: Sequence[object], most: int = 8) -> str:
    """A list for a repr: ``most`` of its numbers, and how many there are."""
    first = ", ".join(map(str, numbers[:most]))
    return f"[{first}]" if len(numbers) <= most else f"[{first}, ... {len(numbers)} in all]"


# ----------------------------------------------------------------------------------------------------- reprs
def one_line(owner: object, *facts: str) -> str:
    """``Class(fact, fact)``: a repr of at most `WIDTH` columns. The most important fact comes first: where
    there is no room for all, "..." stands for the last ones."""
    name, words = type(owner).__name__, [" ".join(fact.split()) for fact in facts]
    line = f"{name}({', '.join(words)})"
    while len(line) > WIDTH and words:
        words.pop()
        line = f"{name}({', '.join([*words, '...'])})"
    return line


def repr_of_fields(record: Any) -> str:
    """`one_line` of the fields of a dataclass or named tuple that differ from their defaults; of
    tensors their dtypes and shapes."""
    return one_line(record, *(f"{name}={shown(value)}" for name, value in _changed(record)))


def _changed(record: Any) -> Iterator[tuple[str, object]]:
    if isinstance(record, tuple):
        defaults = record._field_defaults  # type: ignore[attr-defined]
    else:
        defaults = {each.name: _default(each) for each in dataclasses.fields(record) if each.repr}
    for name in record._fields if isinstance(record, tuple) else defaults:  # type: ignore[attr-defined]
        value = getattr(record, name)
        default = defaults.get(name, dataclasses.MISSING)
        if type(value) is not type(default) or (value is not default and value != default):
            yield name, value


def _default(each: dataclasses.Field[Any]) -> object:
    return each.default if each.default_factory is dataclasses.MISSING else each.default_factory()


def shown(value: object) -> str:
    """A value for a repr: long texts and lists in part, of tensors dtypes and shapes."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return shortened([shown(each) for each in value[:9]] + [""] * (len(value) - 9))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, str) and len(value) > 48:
        return repr(f"{value[:44]} ...")
    return repr(value)
