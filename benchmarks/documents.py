"""What benchmarks of attention layers share: rounds of calls on a GPU, and the document at the end."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import conditions
from measuring.timing import Call, CudaSampler, interleave


def write_rows(rows: Sequence[dict[str, Any]], output: str | None, device: str = "cuda") -> None:
    """Print ``rows`` and the conditions on the device as one line of JSON, and write it to ``output``."""
    document = json.dumps({"rows": rows, "conditions": conditions.collect(torch.device(device))})
    if output:
        Path(output).write_text(document)
    print(document)


def time_layers(calls: dict[str, list[Call]], layers: int, repeats: int) -> dict[str, float]:
    """Median microseconds per call of each contender, in turns; a round is at least 8 calls, one CUDA graph.

    Args:
        calls: one for each of the ``layers``.
        repeats: rounds of each.
    """
    samplers = {name: CudaSampler(each * max(1, 8 // layers)) for name, each in calls.items()}
    return {name: round(timing.median_us, 2) for name, timing in interleave(samplers, repeats).items()}


def write_results(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """``rows`` and the conditions on the GPU as JSON, if there is a ``path``."""
    document = {"results": rows, "conditions": conditions.collect(torch.device("cuda"))}
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")
