"""The line that says which backend a model got."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from torchpaged.backends.spec import AttentionSpec

_LOG = logging.getLogger("torchpaged.backends")


def logged(name: str, reason: str, specs: Sequence[AttentionSpec]) -> None:
    """Say a choice at level INFO, once for all layers of a model: equal lines are said once in a process."""
    kinds = dict.fromkeys(
        f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim} in "
        + str(spec.dtype).removeprefix("torch.")
        for spec in specs
    )
    _once(f"backend {name} for {', '.join(kinds)} on {specs[0].device}: {reason}")


@functools.lru_cache(maxsize=256)
def _once(text: str) -> None:
    _LOG.info(text)
