"""Numbers as people read them, for messages and reports."""

from __future__ import annotations

from collections.abc import Sequence


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
    shown = ", ".join(map(str, numbers[:most]))
    return f"[{shown}]" if len(numbers) <= most else f"[{shown}, ... {len(numbers)} in all]"
