"""Acceptor: tokens into requests, until their ends."""

import time

from torchpaged.custom_ops.errors import RequestError
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.outputs import GeneratorStats
from torchpaged.engine.scheduler import Scheduler
from torchpaged.engine.sequence import EventRow, Sequence


class Acceptor:
    """What happens to a request with each of its tokens, and with its end.

    Args:
        requests: those that wait or run, by id; one that ends is taken out.
        scheduler, loop: let go of one that ends; ``loop`` None: there is none.
        model: whose end tokens these are.
        stats: count it.

    Attributes:
        first_tokens: tokens that were a request's first; its reader sets it to 0.
    """

    def __init__(
        self,
        requests: dict[int, Sequence],
        scheduler: Scheduler,
        loop: DecodeLoop | None,
        model: PagedModelProtocol,
        stats: GeneratorStats,
    ) -> None:
        self._requests, self._scheduler, self._loop = requests, scheduler, loop
        self._model, self._stats = model, stats
        self.first_tokens = 0

    def accept(self, sequence: Sequence, token: int, logprobs: dict[int, float] | None) -> None:
        """Add a sampled token; end the request if it is its last, or none."""
        if token < 0:
            return self.fail(
                sequence,
                f"its output token {sequence.num_output} could not be drawn: a logit is NaN, or all are "
                "-inf; look at the model's weights and dtype, at logit_bias and logits_processor",
            )
        params = sequence.sampling
        ends = token in self._model.eos_token_ids and not params.ignore_eos
        reason = "stop" if ends or token in params.stop_token_ids else None
        try:
            text = "" if reason else sequence.stream.push(token)
            if reason is None and sequence.stream.stopped:
                reason = "stop"
            elif reason is None and len(sequence.tokens) + 1 >= sequence.max_len:
                reason = sequence.last_reason
            if reason:
                text += sequence.stream.flush()
                reason = "stop" if sequence.stream.stopped else reason
        except Exception as error:
            return self.fail(
                sequence,
                f"the tokenizer could not decode token {token}: {type(error).__name__}: {error}",
                error,
            )
        if text or reason or logprobs is not None or len(sequence.tokens) == len(sequence.prompt):
            return self.emit(sequence, (token, text, reason, None, logprobs))
        # As `emit`, of a token and nothing else: a step of a large batch has hundreds.
        sequence.inbox.ready[sequence] = None
        sequence.log.append_token(token)
        sequence.tokens.append(token)
        self._stats.new_tokens += 1

    def fail(self, sequence: Sequence, reason: str, cause: BaseException | None = None) -> None:
        """End one request with an error, ``cause`` its `__cause__`."""
        self.emit(sequence, (None, "", "error", request_error(sequence, reason, cause), None))

    def lose(self, sequence: Sequence, error: Exception) -> None:
        """End one whose `Sequence.reset` raised, within `Stepper.reset`, which does the rest."""
        said = "the tokenizer could not decode its tokens once more"
        reason = f"{said}: {type(error).__name__}: {error}"
        sequence.inbox.ready[sequence] = None
        sequence.log.append((None, "", "error", request_error(sequence, reason, error), None))
        self._count_end(sequence, "error")
        sequence.reset()

    def emit(self, sequence: Sequence, event: EventRow) -> None:
        """Give the owner ``event``, then make everything else agree with it."""
        token, text, finish_reason, error, _ = event
        sequence.inbox.ready[sequence] = None
        sequence.log.append(event)
        sequence.text += text
        if token is not None:
            if len(sequence.tokens) == len(sequence.prompt):
                self.first_tokens += 1
                sequence.spoke = time.perf_counter()
                self._stats.first_token.add(sequence.spoke - sequence.submitted)
            sequence.tokens.append(token)
            self._stats.new_tokens += 1
        if finish_reason is not None:
            sequence.finish_reason, sequence.error = finish_reason, error
            self._count_end(sequence, finish_reason)
            if self._loop is not None:
                self._loop.release(sequence)
            self._scheduler.remove(sequence)
            sequence.inbox.live.pop(sequence, None)
            del self._requests[sequence.request_id]

    def _count_end(self, sequence: Sequence, reason: str) -> None:
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1
        sequence.ended = time.perf_counter()
        if reason not in ("cancelled", "error"):
            self._stats.end_to_end.add(sequence.ended - sequence.submitted)


def request_error(sequence: Sequence, reason: str, cause: BaseException | None) -> RequestError:
    """Without the traceback of ``cause``: a result that is kept would keep the engine, in its frames."""
    error = RequestError(sequence.request_id, reason)
    error.__cause__ = None if cause is None else cause.with_traceback(None)
    return error
