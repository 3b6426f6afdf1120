"""The document that a benchmark ends with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchpaged.bench import conditions


def write_rows(rows: Sequence[dict[str, Any]], output: str | None, device: str = "cuda") -> None:
    """Print ``rows`` and the conditions on the device as one line of JSON, and write it to ``output``."""
    document = json.dumps({"rows": rows, "conditions": conditions.collect(torch.device(device))})
    if output:
        Path(output).write_text(document)
    print(document)
