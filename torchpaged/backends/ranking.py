"""In which order the automatic choice tries backends on a device, and where that order comes from."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchpaged.backends.platforms import platform_of
from torchpaged.backends.tuned import tuned_for


class Ranking(NamedTuple):
    """The order for each part of a batch.

    Attributes:
        decode: names for requests of one query token.
        prefill: names for everything else.
        preferred: those of them that a measurement or the table names for this device.
        evidence: where the order comes from.
    """

    decode: tuple[str, ...]
    prefill: tuple[str, ...]
    preferred: tuple[str, ...]
    evidence: str


def ranking_of(
    device: torch.device, automatic: tuple[str, ...], built_in: tuple[str, ...], registered: tuple[str, ...]
) -> Ranking:
    """The order on ``device``.

    Args:
        device: where.
        automatic: names that may be chosen without being asked for; those that are not built in come first.
        built_in: names of all built-in backends.
        registered: names of the others. A measurement that names one that is neither is not used.

    Warns:
        TunedFileWarning: a measurement that can't be used.
    """
    first = tuple(name for name in automatic if name not in built_in)
    tuned, row = tuned_for(device, {*built_in, *registered}), platform_of(device)
    if tuned is None:
        names = tuple(dict.fromkeys((*first, *row.order, *automatic)))
        return Ranking(names, names, row.order, f"{row.name}: {row.evidence}")
    decode, prefill = (
        tuple(dict.fromkeys((*first, *part, *automatic))) for part in (tuned.decode, tuned.prefill)
    )
    preferred = tuple(dict.fromkeys(tuned.decode + tuned.prefill))
    return Ranking(decode, prefill, preferred, f"measured on this {tuned.device} on {tuned.measured}")
