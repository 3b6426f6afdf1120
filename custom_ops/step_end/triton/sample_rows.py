"""The rows whose tokens are sampled, as kernels have them: logits, and what each row asks."""

from typing import Any, NamedTuple, Self

import triton
import triton.language as tl

from torchpaged.custom_ops.step_end.call import SampleCall

GROUP = tl.constexpr(64)  # tokens of a group


class LogitRows(NamedTuple):
    """Pointers to the logits of a batch's rows, to how each samples and to what it has seen, by the names of
    the op's arguments; how many logits there are, and strides."""

    logits: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    seen: Any
    seeds: Any
    counters: Any
    vocab_size: Any
    logits_row: Any
    seen_row: Any

    @classmethod
    def of(cls, call: SampleCall) -> Self:
        """Those of a call."""
        logits, seen = call.logits, call.seen
        inputs: tuple[Any, ...] = call[: call._fields.index("out")]
        return cls._make((*inputs, logits.shape[1], logits.stride(0), seen.stride(0)))


class Parameters(NamedTuple):
    """How a row samples, as a kernel has it; Triton compiles what it holds."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalty: Any
    seed: Any
    counter: Any


@triton.jit
def load_parameters(row, rows):
    """`Parameters` of a row. Read before the kernels ahead have finished, perhaps: from L2, since a
    first-level cache may hold an older step's."""
    # Above this all tokens are alike, and noise times the temperature would be infinite.
    temperature = tl.minimum(tl.load(rows.temperature + row, cache_modifier=".cg"), 1e36)
    penalty = tl.load(rows.repetition_penalty + row, cache_modifier=".cg")
    top_k = tl.load(rows.top_k + row, cache_modifier=".cg")
    top_p = tl.load(rows.top_p + row, cache_modifier=".cg")
    min_p = tl.load(rows.min_p + row, cache_modifier=".cg")
    seed = tl.load(rows.seeds + row, cache_modifier=".cg")
    counter = tl.load(rows.counters + row, cache_modifier=".cg")
    return Parameters(temperature, top_k, top_p, min_p, penalty, seed, counter)


@triton.jit
def is_truncated(parameters, vocab_size):
    """Whether a row keeps some tokens only."""
    drawn, top_k = parameters.temperature > 0.0, parameters.top_k
    return drawn & (
        ((top_k > 0) & (top_k < vocab_size)) | (parameters.top_p < 1.0) | (parameters.min_p > 0.0)
    )
