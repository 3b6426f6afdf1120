"""What a run of the decode-step benchmark is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decode_step.cases import SHAPES
from torchpaged.names import option

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VARIANTS = ("k1", "k1+fuse", "k4+fuse")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Options:
    """What to run."""

    shapes: Sequence[str] = option(f"some of {', '.join(SHAPES)}, by commas", ("llama-1b", "llama-8b"))
    batches: Sequence[int] = option("batch sizes, separated by commas", (1, 8, 32, 64))
    context: int = option("KV tokens per request", 2048)
    only: Sequence[str] = option(
        "own contenders: logits or k1, k4 ..., with +fuse, +compile or +layers (`decode_step.own.Variant`); "
        f"'' for none; default: {','.join(VARIANTS)}",
        VARIANTS,
    )
    skip: Sequence[str] = option("contenders to leave out", ())
    peers: Sequence[str] = option("names in `decode_step.peers.PEERS`; minutes for the larger shapes", ())
    device: str = option("auto, cpu, cuda", "auto")
    dtype: str = option(", ".join(DTYPES), "bf16")
    backend: str = option("attention backend of the own contenders", "auto")
    repeats: int = option("steps timed at least, in bursts of 16", 64)
    idle_steps: int = option("steps traced for the idle share; 0: none", 1000)
    idle_batches: Sequence[int] = option("for these batches; default: the smallest and the largest", ())
    idle_only: Sequence[str] = option("for these contenders; default: the last one", ())
    #: From the first trace on, launches cost the host more: host figures of later rows are marked
    #: ``host_after_trace``.
    trace: bool = option("no torch.profiler: no kernels, no idle share; host times as without one", True)
    time_wrong: bool = option("measure what fails the gate all the same; its row stays 'wrong'", False)
    new_tokens: int = option("tokens a peer generates per request", 64)
    bandwidth: float | None = option("memory ceiling in TB/s; default: measured", None)
    time_limit: float | None = option("seconds after which no further case is begun", None)
    output: str = option("write the document to this JSON file, after every row", "")
    json_only: bool = option("print nothing but the JSON line", False)
