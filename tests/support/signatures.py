"""Stand-ins for functions of other libraries, by the signatures that these have."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def takes(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function of what it is given, one object with the arguments of ``signature`` as its attributes, is
    called by that; a method gets the object behind ``self``."""
    made: dict[str, Any] = {"torch": torch}
    exec(f"def taken({signature}): return dict(locals())", made)
    taken = made["taken"]

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            given = taken(*args, **options)
            of_method = [given.pop("self")] if "self" in given else []
            return function(*of_method, SimpleNamespace(**given))

        call.__signature__ = inspect.signature(taken)  # type: ignore[attr-defined]
        return call

    return of
