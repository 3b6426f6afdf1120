"""LogitsStage: what is done to logits in front of sampling, besides what the op ``finish_step`` does.

    stage = LogitsStage(processor=mine, max_extra_args=2, max_logit_bias=8)
    logits = stage.process(logits, words, counters, input_ids, seq_lens)    # torch's ops alone

Where nothing was asked for, ``process`` gives the model's own logits, and a captured step has no further
kernel.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import repr_of_fields


class LogitsRows(NamedTuple):
    """What a logits processor gets about the rows of its logits. Tensors of the engine, on the device: they
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

    def __repr__(self) -> str:
        return repr_of_fields(self)


LogitsProcessor = Callable[[Tensor, LogitsRows], Tensor]


class LogitsStage:
    """What requests of an engine may ask of logits.

    Args:
        processor: ``processor(logits, rows)``: gives the logits to sample from; None: the model's.
        max_extra_args: numbers that a request may give it.
        max_logit_bias: tokens of a request whose logits something is added to.
        max_logprobs: likeliest tokens of which `logprobs` tells; None: it is not called.

    Attributes:
        max_extra_args, max_logit_bias, max_logprobs: as given.
        processes: whether `process` may give other logits than the model's.
        num_words: words of 4 bytes that a request brings into its row.
        record_words: words of 8 bytes that `logprobs` gives for a token, 0 where it is not called.
    """

    def __init__(
        self,
        processor: LogitsProcessor | None = None,
        max_extra_args: int = 0,
        max_logit_bias: int = 0,
        max_logprobs: int | None = None,
    ) -> None:
        self._processor, self.max_extra_args, self.max_logit_bias = processor, max_extra_args, max_logit_bias
        self.max_logprobs, self.record_words = max_logprobs, 0 if max_logprobs is None else max_logprobs + 1
        self.processes = processor is not None or max_logit_bias > 0
        self.num_words = 3 * max_logit_bias + max_extra_args

    def process(
        self, logits: Tensor, words: Tensor, num_generated: Tensor, last_token_ids: Tensor, seq_lens: Tensor
    ) -> Tensor:
        """The logits to sample from.

        Args:
            logits: ``[B, vocab_size]``, the model's; not written.
            words: ``[B, num_words]`` int32, of each row's request: ``max_logit_bias`` tokens, numbers of
                generated tokens before which something is added to their logits, what this is, as bits of
                float32, and likewise ``max_extra_args`` numbers.
            num_generated, last_token_ids, seq_lens: as in `LogitsRows`.

        Returns:
            ``[B, vocab_size]`` float32; where nothing was asked for ``logits`` themselves, if they are not
            float64, which nothing samples from.

        Raises:
            ArgumentError: the processor gave something else.
        """
        if not self.processes:
            return as_sampled(logits)
        logits = logits.to(torch.float32, copy=True)
        most = self.max_logit_bias
        if most:
            tokens, until, added = words[:, : 3 * most].unflatten(1, (3, most)).unbind(1)
            added = torch.where(num_generated[:, None] < until, added.view(torch.float32), 0.0)
            # `scatter_add_`, since a token may have several entries. Their order does not matter: one of them
            # at most is neither 0 nor -inf.
            logits.scatter_add_(1, tokens.long(), added)
        if self._processor is None:
            return logits
        extra_args = words[:, 3 * most :].view(torch.float32)
        rows = LogitsRows(num_generated, last_token_ids, seq_lens, extra_args)
        processed = self._processor(logits, rows)
        if not isinstance(processed, Tensor):
            raise ArgumentError(
                "logits_processor", "logits", type(processed).__name__, "return those to sample from"
            )
        wanted, got = ((x.shape, x.dtype, x.device) for x in (logits, processed))
        if got != wanted:
            raise ArgumentError("logits_processor", _described(logits), _described(processed))
        return processed.contiguous()

    def logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Log probabilities of drawn tokens, and of the likeliest ones.

        Args:
            logits: ``[B, vocab_size]``, the model's, whose softmax they are of.
            tokens: ``[B]`` int64; rows of a negative one give values of no meaning.

        Returns:
            ``[B, record_words]`` int64, to be read by `TokenLogprobs`.
        """
        logits = logits.float()
        own = logits.gather(1, tokens.clamp_min(0)[:, None])
        likeliest, ids = logits.topk(self.record_words - 1)
        values = torch.cat([own, likeliest], 1) - logits.logsumexp(1, keepdim=True)
        return torch.cat([values.view(torch.int32), tokens[:, None].int(), ids.int()], 1).view(torch.int64)


class TokenLogprobs:
    """What `LogitsStage.logprobs` says, on the host.

    Args:
        records: ``[..., record_words]`` int64; tokens are counted over the dimensions in front.
    """

    def __init__(self, records: Tensor) -> None:
        words = records.shape[-1]
        records = records.reshape(-1, words)
        self._values: list[list[float]] = records.view(torch.float32)[:, :words].tolist()
        self._ids: list[list[int]] = records.view(torch.int32)[:, words:].tolist()

    def of(self, index: int, count: int) -> dict[int, float]:
        """Of token ``index``: itself and the ``count`` likeliest, those last, in their order."""
        values, ids = self._values[index], self._ids[index]
        return dict(zip(ids[: count + 1], values, strict=False))


def as_sampled(logits: Tensor) -> Tensor:
    """``logits`` in a dtype that tokens are drawn from."""
    return logits.float() if logits.dtype == torch.float64 else logits


def _described(logits: Tensor) -> str:
    return (
        f"{str(logits.dtype).removeprefix('torch.')} logits of shape {list(logits.shape)} on {logits.device}"
    )
