"""`Contender`: a name, the reasons why it can't run, and a way to prepare its calls for a case; `Prepared`:
these calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpaged.bench.attention.cases import AttentionCase
from torchpaged.bench.attention.inputs import Inputs


@dataclass(frozen=True)
class Prepared:
    """What a contender runs: one call per KV cache, and the host microseconds of its plan, which no
    timing includes."""

    calls: list[Callable[[], Tensor]]
    plan_us: float | None = None


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    Attributes:
        name: as tables show it and ``--skip`` matches it.
        own: whether it is one of torchpaged's backends.
        unavailable: why it can't run on this machine at all, or None.
        why_not: why it can't run a case on a device, or None.
        prepare: ``(case, inputs)`` to its calls; whatever it needs besides the inputs is made here, outside
            every timing.
    """

    name: str
    own: bool
    unavailable: Callable[[], str | None]
    why_not: Callable[[AttentionCase, torch.device], str | None]
    prepare: Callable[[AttentionCase, Inputs], Prepared]
