"""What a caller's modes would change within an op that consists of torch's own."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

#: Devices that have autocast: of others torch refuses the question.
_AUTOCAST = frozenset(kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind))


def _without_autocast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Within it products are of their operands' dtype, whatever ``torch.autocast`` says for that kind of
    device around it: an op computes in what it was given."""
    if kind in _AUTOCAST and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def apart_from_modes(function: Callable[..., None]) -> Callable[..., None]:
    """``function``, whose first argument is a tensor, without autocast and in inference mode: outside of it
    torch writes into no tensor that was made in it, which kernels do."""

    def run(*args: Any, **kwargs: Any) -> None:
        with torch.inference_mode(), _without_autocast(args[0].device.type):
            function(*args, **kwargs)

    return run
