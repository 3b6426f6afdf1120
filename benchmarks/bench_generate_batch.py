"""A step of transformers' continuous batching, ``generate_batch()``: its own attention against ours.

    PYTHONPATH=. python benchmarks/bench_generate_batch.py --output generate_batch.json
    # seconds, any machine
    PYTHONPATH=. python benchmarks/bench_generate_batch.py --shape tiny --batches 2 --context 48 --new 12

Random weights; requests of ``--context`` random tokens. transformers' own timestamps from token to token
while all requests decode, of the second run: the first compiles and captures. transformers turns CUDA graphs
and its double buffering on by itself for names with "flash" in them alone; for ours both are asked for.
FlashAttention-3 is found by its distribution's name, ``flash-attn-3``. The last line is one JSON document.
"""

import json
import sys
import time
from typing import Any, NamedTuple

import torch
from decode_step.cases import build_model, select_shapes
from decode_step.options import DTYPES
from decode_step.peers import generate_batch
from documents import command_line, keep
from measuring import conditions

import torchpaged.hf  # noqa: F401  # registers its attention


class Way(NamedTuple):
    """An attention by transformers' name, tokens per block, and what the configuration is asked for."""

    name: str
    attention: str
    block_size: int
    config: dict[str, Any]


_GRAPHS = {"use_cuda_graph": True, "use_async_batching": True}
WAYS = (
    Way("flash_attention_3", "paged|flash_attention_3", 256, {}),
    Way("torchpaged", "paged|torchpaged", 256, _GRAPHS),
    Way("torchpaged, blocks of 32", "paged|torchpaged", 32, _GRAPHS),
    Way("torchpaged, no graphs", "paged|torchpaged", 256, {}),
    Way("sdpa", "paged|sdpa", 32, {}),
)


def main() -> None:
    given = command_line(
        __doc__,
        shape="llama-8b",
        dtype=("bf16", ", ".join(DTYPES)),
        batches=[1, 64],
        context=2048,
        new=64,
        only={"type": lambda text: text.split(";"), "help": "names of ways, by semicolons"},
        seconds=(600.0, "begin no way after so long"),
        output="",
    )
    end = time.monotonic() + given.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(select_shapes([given.shape])[0], device, DTYPES[given.dtype])
    document: dict[str, Any] = {
        "benchmark": "generate_batch",
        "conditions": conditions.collect(device),
        "shape": given.shape,
        "context": given.context,
        "rows": [],
    }
    for way in WAYS:
        if given.only is not None and way.name not in given.only:
            continue
        for batch in given.batches:
            row: dict[str, Any] = {
                "way": way.name,
                "batch": batch,
                "block_size": way.block_size,
                **way.config,
            }
            if time.monotonic() > end:
                row["failed"] = "no time was left"
            else:
                try:
                    row |= generate_batch(
                        model, batch, given.context, given.new, way.attention, way.block_size, **way.config
                    )
                except Exception as error:  # one way's failure is a line of the document
                    row["failed"] = f"{type(error).__name__}: {error}"[:300]
            document["rows"].append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            keep(document, given.output)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
