"""A small engine: continuous batching over a paged cache. No server.

from torchpaged.engine import Generator, SamplingParams
generator = Generator(model, tokenizer)
outputs = generator.generate(["The capital of France is"], SamplingParams(max_new_tokens=16))
"""

from torchpaged.engine.generator import Generator, GeneratorStats
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.sampling import SamplingParams
from torchpaged.engine.sequence import RequestOutput, TokenEvent

__all__ = ["Generator", "GeneratorStats", "PagedModelProtocol", "RequestOutput", "SamplingParams", "TokenEvent"]
