"""What a run of the decode-step benchmark is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VARIANTS = ("k1", "k1+fuse", "k4+fuse")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        shapes: names in ``step_cases.SHAPES``.
        batches: batch sizes.
        context: KV tokens per request.
        only: own contenders (see `decode_step.own.Variant`); empty: none, for a run of peers.
        skip: contenders to leave out, own ones or peers.
        peers: names in ``step_peers.PEERS``.
        device: "auto", "cpu", "cuda".
        dtype: bf16, fp16 or fp32.
        backend: attention backend of the own contenders.
        repeats: steps timed at least, in bursts of 16.
        idle_steps: steps whose kernels are traced for the idle share; 0 = none.
        idle_batches: batches for which that is done; empty: the smallest and the largest.
        idle_only: contenders for which that is done; empty: the last of ``only``.
        trace: count kernels and measure idle shares by torch.profiler. From the first trace on, launches cost
            the host more: host figures of later rows are marked ``host_after_trace``.
        time_wrong: measure a contender that fails the gate all the same; its row stays "wrong".
        new_tokens: tokens a peer generates per request.
        bandwidth: memory ceiling in TB/s; None = measured.
        time_limit: seconds after which no further case is begun (its row says so); None = none.
        output: write the document here, after every row.
        json_only: print nothing but the JSON line.
    """

    shapes: Sequence[str] = ("llama-1b", "llama-8b")
    batches: Sequence[int] = (1, 8, 32, 64)
    context: int = 2048
    only: Sequence[str] = VARIANTS
    skip: Sequence[str] = ()
    peers: Sequence[str] = ()
    device: str = "auto"
    dtype: str = "bf16"
    backend: str = "auto"
    repeats: int = 64
    idle_steps: int = 1000
    idle_batches: Sequence[int] = ()
    idle_only: Sequence[str] = ()
    trace: bool = True
    time_wrong: bool = False
    new_tokens: int = 64
    bandwidth: float | None = None
    time_limit: float | None = None
    output: str = ""
    json_only: bool = False
