"""What a CUDA kernel is compiled for, as a C++ header of constants: described once, with types and comments.

A family of kernels has one `Table`. A `Config` is a table with values; its text is what the kernels' sources
include under the table's name (``decode_config.cuh``). The file of that name among the sources is an
example for readers and editors: the compiler gets the text made for its specialisation (``jit.py``).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_type_hints

#: ``macro``: an int that the preprocessor must see; what the constant says ends with the reason.
Kind = Literal["int", "bool", "long long", "macro"]
_WIDTH = 110
_LIMITS = {"int": 1 << 31, "macro": 1 << 31, "long long": 1 << 63, "bool": 2}


class Constant(NamedTuple):
    """A name that the sources use, its type in C++, and what it says."""

    name: str
    kind: Kind
    what: str


@dataclass(frozen=True, eq=False)
class Table:
    """The constants of a family of kernels.

    Attributes:
        header: the name under which the sources include them.
        kernels: the sources that do.
        example: what the file of that name in the repository was made for.
        constants: in the order of the header.
    """

    header: str
    kernels: tuple[str, ...]
    example: str
    constants: tuple[Constant, ...]

    @classmethod
    def of_fields(
        cls, spec: type[Any], header: str, kernels: tuple[str, ...], example: str, *further: Constant
    ) -> Table:
        """A table with a constant for each field of the NamedTuple ``spec``, under its name in capitals, and
        ``further`` ones. A field is ``Annotated[int, what]`` or ``Annotated[bool, what]``; a macro's has
        "macro" behind that."""
        constants = []
        for name, hint in get_type_hints(spec, include_extras=True).items():
            what, *kind = hint.__metadata__
            constants.append(Constant(name.upper(), kind[0] if kind else hint.__origin__.__name__, what))
        return cls(header, kernels, example, (*constants, *further))

    def names(self) -> list[str]:
        """Of the constants."""
        return [constant.name for constant in self.constants]

    def config(self, values: Mapping[str, int], *, exact: bool = False) -> Config:
        """These constants with values.

        Raises:
            ValueError: a constant has no value, a value no constant, or a value does not fit its type.
        """
        names = self.names()
        if set(names) != set(values):
            absent, unknown = sorted(set(names) - set(values)), sorted(set(values) - set(names))
            raise ValueError(
                f"{self.header}: constants without a value: {absent}, values without a constant: {unknown}"
            )
        for constant in self.constants:
            value, limit = int(values[constant.name]), _LIMITS[constant.kind]
            if not (0 if constant.kind == "bool" else -limit) <= value < limit:
                raise ValueError(f"{self.header}: {constant.name} is {constant.kind}, not {value}")
        return Config(self, tuple(int(values[name]) for name in names), exact)

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

    def __getitem__(self, name: str) -> int:
        for constant, value in zip(self.table.constants, self.values, strict=True):
            if constant.name == name:
                return value
        raise KeyError(name)

    def text(self) -> str:
        """The header."""
        *others, last = self.table.kernels
        kernels = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        about = (
            f"What {kernels} compiled for. Generated: "
            "each specialisation has one of its own. The file of this name in the repository is an example, "
            f"{self.table.example}, and no kernel is compiled with it."
        )
        lines = [*_comment(about), "#pragma once", ""]
        for constant, value in zip(self.table.constants, self.values, strict=True):
            if constant.kind == "macro":
                code = f"#define {constant.name} {value}"
            else:
                said = ("false", "true")[value] if constant.kind == "bool" else str(value)
                code = f"inline constexpr {constant.kind} {constant.name} = {said};"
            line = f"{code:<45}  // {constant.what}"
            lines += [line] if len(line) <= _WIDTH else [*_comment(constant.what), code]
        return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"// {line}" for line in textwrap.wrap(text, _WIDTH - 3)]
