"""Which requests a step that raised is about: its requests are computed again, in halves where that raises
again, until one raises alone. That one ends with its error; what passes with time hurts none.

    try:
        stepper.step()
    except Exception as error:
        if not isolate(stepper, error):
            stepper.fail_all(...)

Each try begins from the tokens that a request was given, so that these are as they would have been.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from torchpaged.custom_ops.words import counted
from torchpaged.engine.sequence import Sequence
from torchpaged.engine.stepper import Stepper

_LOG = logging.getLogger("torchpaged.engine")


def isolate(stepper: Stepper, error: Exception) -> bool:
    """Deal with a step that raised ``error``.

    Returns:
        False: it concerns no request, or none came further; whatever raises would do so again.
    """
    suspects = stepper.in_step()
    _LOG.warning(
        "a step raised %s: %s; its %s are computed again",
        type(error).__name__,
        error,
        counted(len(suspects), "request"),
    )
    before, groups = sum(len(sequence.log) for sequence in suspects), [suspects]
    while groups:
        group = [sequence for sequence in groups.pop() if sequence.finish_reason is None]
        try:
            _try(stepper, group)
        except Exception as again:
            group = [sequence for sequence in group if sequence.finish_reason is None]
            if len(group) == 1:
                reason = f"a step with this request alone raised {type(again).__name__}: {again}"
                stepper.fail(group[0], reason)
                continue
            half = (len(group) + 1) // 2
            groups += [part for part in (group[half:], group[:half]) if part]
    stepper.start_over(list(stepper.requests.values()))
    return sum(len(sequence.log) for sequence in suspects) > before


def _try(stepper: Stepper, group: Seq[Sequence]) -> None:
    """Compute ``group`` without the others until each has a further event."""
    stepper.start_over(group)
    had = {sequence: len(sequence.log) for sequence in group}
    # A step computes a token at least, and reads those of the step before it.
    for _ in range(2 + sum(len(sequence.tokens) for sequence in group)):
        if all(len(sequence.log) > count for sequence, count in had.items()):
            break
        stepper.step()
