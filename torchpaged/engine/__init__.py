"""A small engine: continuous batching over a paged cache. No server.

from torchpaged.engine import Generator, SamplingParams
generator = Generator(model, tokenizer)
outputs = generator.generate(["The capital of France is"], SamplingParams(max_new_tokens=16))

An output is a `RequestOutput`, whose ``times`` are `RequestTimes`; `Generator.stream` gives a `TokenEvent`
per token, `Generator.stats` is a `GeneratorStats`, `Generator.metrics` gives `EngineMetrics`,
`Generator.start_report` is a `StartReport`.
"""

import torchpaged.engine.generate_batch  # noqa: F401  for torchpaged.hf
from torchpaged.engine.device.logits_stage import LogitsRows
from torchpaged.engine.generate_call import accelerate, unaccelerate
from torchpaged.engine.generator import Generator
from torchpaged.engine.metrics import EngineMetrics
from torchpaged.engine.outputs import GeneratorStats, RequestOutput, RequestTimes, TokenEvent
from torchpaged.engine.sampling import SamplingParams
from torchpaged.engine.start import StartPhase, StartReport

__all__ = [
    "EngineMetrics",
    "Generator",
    "GeneratorStats",
    "LogitsRows",
    "RequestOutput",
    "RequestTimes",
    "SamplingParams",
    "StartPhase",
    "StartReport",
    "TokenEvent",
    "accelerate",
    "unaccelerate",
]
