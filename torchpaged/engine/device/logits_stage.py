"""LogitsStage: what is done to logits in front of sampling, besides what the op ``finish_step`` does.

    stage = LogitsStage(processor=mine, max_extra_args=2)
    words = stage.words(sampling)                                       # of a request, for its row
    logits = stage.process(logits, words, counters, input_ids, seq_lens)   # torch's ops alone

Where nothing was asked for, ``process`` gives the model's own logits, and a captured step has no further
kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError

if TYPE_CHECKING:
    from torchpaged.engine.sampling import SamplingParams


class LogitsRows(NamedTuple):
    """What a logits processor is told of the rows of its logits. Tensors of the engine, on the device: they
    may be read, not written.

    Attributes:
        num_generated: ``[B]`` int64, tokens that the request was given before this one.
        last_token_ids: ``[B]`` int64, its newest token, of the prompt at first.
        seq_lens: ``[B]`` int32, tokens of its prompt and output so far; 0 in a row without a request, whose
            other values have no meaning.
        extra_args: ``[B, max_extra_args]`` float32, its ``SamplingParams.extra_args``, 0 behind them.
    """

    num_generated: Tensor
    last_token_ids: Tensor
    seq_lens: Tensor
    extra_args: Tensor


LogitsProcessor = Callable[[Tensor, LogitsRows], Tensor]


class LogitsStage:
    """What requests of an engine may ask of logits.

    Args:
        processor: ``processor(logits, rows)``: gives the logits to sample from; None: the model's.
        max_extra_args: numbers that a request may give it.

    Attributes:
        processes: whether `process` may give other logits than the model's.
        num_words: words of 4 bytes that a request brings into its row.
    """

    def __init__(self, processor: LogitsProcessor | None = None, max_extra_args: int = 0) -> None:
        self._processor, self._max_extra_args = processor, max_extra_args
        self.processes, self.num_words = processor is not None, max_extra_args

    def words(self, sampling: SamplingParams) -> tuple[int, ...]:
        """The request's part of a row: ``num_words`` signed integers of 32 bits.

        Raises:
            ArgumentError: it asks for more than the engine was made for.
        """
        args, most = sampling.extra_args, self._max_extra_args
        if len(args) > most:
            raise _too_much("extra_args", f"at most {most} numbers", str(len(args)), "max_extra_args")
        packed = struct.pack(f"={most}f", *args, *([0.0] * (most - len(args))))
        return struct.unpack(f"={self.num_words}i", packed)

    def process(
        self,
        logits: Tensor,
        words: Tensor,
        num_generated: Tensor,
        last_token_ids: Tensor,
        seq_lens: Tensor,
    ) -> Tensor:
        """The logits to sample from.

        Args:
            logits: ``[B, vocab_size]``, the model's; not written.
            words: ``[B, num_words]`` int32, of `words`.
            num_generated, last_token_ids, seq_lens: as in `LogitsRows`.

        Returns:
            ``[B, vocab_size]`` float32; ``logits`` themselves where nothing was asked for.

        Raises:
            ArgumentError: the processor gave something else.
        """
        if self._processor is None:
            return logits
        logits = logits.to(torch.float32, copy=True)
        rows = LogitsRows(num_generated, last_token_ids, seq_lens, words.view(torch.float32))
        processed = self._processor(logits, rows)
        if not isinstance(processed, Tensor):
            raise ArgumentError(
                "logits_processor", "logits", type(processed).__name__, "return those to sample from"
            )
        wanted, got = ((x.shape, x.dtype, x.device) for x in (logits, processed))
        if got != wanted:
            raise ArgumentError("logits_processor", _described(logits), _described(processed))
        return processed.contiguous()


def _described(logits: Tensor) -> str:
    return (
        f"{str(logits.dtype).removeprefix('torch.')} logits of shape {list(logits.shape)} on {logits.device}"
    )


def _too_much(name: str, expected: str, got: str, option: str) -> ArgumentError:
    return ArgumentError(name, expected, got, f"make the Generator with a larger {option}")
