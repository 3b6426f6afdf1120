"""What a CUDA C++ kernel is compiled for: constants that a header beside its source declares.

A family of kernels has one `Table`, its header: names, types, comments, and the values of an example, for
readers and editors. A `Config` is a table with the values of a specialisation; its text, the header with
these, is what the compiler gets under the header's name (``jit.py``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[1]
#: Its type, or none of a macro; its name; its value.
_DECLARED = re.compile(r"^(?:inline constexpr (int|bool|long long)|#define) (\w+) (?:= )?([^\s;]+)", re.M)
_LIMITS = {"int": 1 << 31, "long long": 1 << 63, "bool": 2}


@dataclass(frozen=True, eq=False)
class Table:
    """The constants of a family of kernels: ``inline constexpr int NAME = 1;`` (``bool``, ``long long``), and
    ``#define NAME 1`` where the preprocessor must see an int.

    Attributes:
        header: the name under which the sources include them.
        text: of that file.
    """

    header: str
    text: str

    @classmethod
    def of_file(cls, path: str) -> Table:
        """Those of a header in ``custom_ops``."""
        file = _FOLDER / path
        return cls(file.name, file.read_text())

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """Name -> type, in the order of the header; "" of macros."""
        return {name: kind or "" for kind, name, _ in _DECLARED.findall(self.text)}

    def config(self, values: Mapping[str, int], *, exact: bool = False) -> Config:
        """These constants with values.

        Raises:
            ValueError: a constant has no value, a value no constant, or a value does not fit its type.
        """
        if set(self.kinds) != set(values):
            absent, unknown = sorted(set(self.kinds) - set(values)), sorted(set(values) - set(self.kinds))
            raise ValueError(
                f"{self.header}: constants without a value: {absent}, values without a constant: {unknown}"
            )
        for name, kind in self.kinds.items():
            value, limit = int(values[name]), _LIMITS[kind or "int"]
            if not (0 if kind == "bool" else -limit) <= value < limit:
                raise ValueError(f"{self.header}: {name} is {kind or 'a macro'}, not {value}")
        return Config(self, tuple(int(values[name]) for name in self.kinds), exact)

    def of(self, spec: Any, *, exact: bool = False, **further: int) -> Config:
        """These constants with the values of a NamedTuple's fields, whose names are theirs in small letters,
        and with ``further`` ones; errors as `config`."""
        values = {name.upper(): int(value) for name, value in spec._asdict().items()}
        return self.config({**values, **further}, exact=exact)


@dataclass(frozen=True)
class Config:
    """Constants with values; as a key it stands for one specialisation.

    Attributes:
        exact: the kernel needs what only this one architecture has (``sm_90a``), such as wgmma.
    """

    table: Table
    values: tuple[int, ...]
    exact: bool = False

    @functools.cached_property
    def _by_name(self) -> dict[str, int]:
        return dict(zip(self.table.kinds, self.values, strict=True))

    def __getitem__(self, name: str) -> int:
        return self._by_name[name]

    def text(self) -> str:
        """The header with these values."""
        return _DECLARED.sub(self._with_value, self.table.text)

    def _with_value(self, found: re.Match[str]) -> str:
        kind, name, before = found.groups()
        value = self[name]
        return found[0].removesuffix(before) + (("false", "true")[value] if kind == "bool" else str(value))
