"""Numbers as users write them, plain ones and NumPy's, made Python's own; what is no number is not
made one."""

import numbers
from typing import Any

_SHOWN = 80  # characters


def as_integer(value: Any) -> int | None:
    """An integer of Python or NumPy as an int; None for all else, booleans and 2.0 included."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def as_float(value: Any) -> float | None:
    """A real number of Python or NumPy as a float; None for all else, booleans and integers beyond its
    range included."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def shown(value: Any) -> str:
    """``repr`` for an error message: short, and of any value."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, for one
        return f"a value of type {type(value).__name__} that can't be shown"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 4] + " ..."
