"""What a module ran before a function of ours took its place, in a form that copies of the module follow:
a bound method kept in a closure would run on the original's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torchpaged.custom_ops.errors import NotCopyableError

MARK = "_torchpaged_own_attention"


class Replaced:
    """What stood in a function's place on the instance.

    Args:
        name: of the module's attribute.
        before: what the instance had there; None: its class's.
    """

    def __init__(self, name: str, before: Any) -> None:
        self.name, self.before = name, before

    def __deepcopy__(self, memo: dict[int, Any]) -> Replaced:
        return Replaced(self.name, copy.deepcopy(self.before, memo))

    def __reduce__(self) -> Any:
        """Refuse: what is unpickled looks functions up by their names, and would find the class's.

        Raises:
            NotCopyableError: always.
        """
        raise NotCopyableError(
            "an attached model whose modules have functions of torchpaged's can't be pickled: call "
            "torchpaged.hf.detach(model) before, and attach what is loaded; copy.deepcopy and "
            "model.save_pretrained take it as it is"
        )


def plain_of(module: Any, name: str) -> Callable[..., Any]:
    """What ``module`` runs by ``name`` now, to be called with the module, or its copy, as first argument once
    a function of ours has its place."""
    if vars(module).get(name) is None:
        of_class: Callable[..., Any] = getattr(type(module), name)
        return of_class

    def plain(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(self, MARK).before(*args, **options)

    return plain
