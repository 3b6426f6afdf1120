"""Acceptor: tokens into requests, until their ends."""

import time

from torchpaged.custom_ops.errors import RequestError
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.device import TokenLogprobs
from torchpaged.engine.launches import IDLE_TOKEN, Launch
from torchpaged.engine.outputs import GeneratorStats
from torchpaged.engine.scheduler import Scheduler
from torchpaged.engine.sequence import EventRow, Sequence


class Acceptor:
    """What happens to a request with each of its tokens, and with its end.

    Args:
        requests: those that wait or run, by id; one that ends is taken out.
        scheduler, loop: let go of one that ends; ``loop`` None: there is none.
        stats: count it.

    Attributes:
        first_tokens: tokens that were a request's first; its reader sets it to 0.
        decoded: tokens of decodes in launches; likewise.
    """

    def __init__(
        self,
        requests: dict[int, Sequence],
        scheduler: Scheduler,
        loop: DecodeLoop | None,
        stats: GeneratorStats,
    ) -> None:
        self._requests, self._scheduler, self._loop, self._stats = requests, scheduler, loop, stats
        self.first_tokens = self.decoded = 0

    def accept_launch(self, launch: Launch, steps: list[list[int]], records: TokenLogprobs | None) -> None:
        """Take the tokens of a launch, ``[steps][columns]``, request by request."""
        num_plain, num_decodes = 0, launch.decodes
        try:
            for column, sequence in enumerate(launch.columns):
                if sequence is None or sequence.finish_reason is not None:
                    continue
                sequence.steps_read += launch.num_steps
                for number, step in enumerate(steps):
                    if (token := step[column]) == IDLE_TOKEN:
                        continue
                    self.decoded += column < num_decodes
                    # What a row produced after a stop that only the host could see is dropped.
                    if sequence.finish_reason is not None:
                        continue
                    # The step that drew it wrote the one before.
                    sequence.num_computed = length = len(sequence.tokens)
                    if length in sequence.plain and token >= 0 and token not in sequence.end_token_ids:
                        # As `accept`, of a token and nothing else: a step of a large batch has hundreds.
                        sequence.inbox.ready[sequence] = None
                        sequence.tokens.append(token)
                        num_plain += 1
                        continue
                    logprobs, count = None, sequence.sampling.logprobs
                    if records is not None and count is not None:
                        logprobs = records.of(number * len(step) + column, count)
                    self.accept(sequence, token, logprobs)
        finally:
            self._stats.new_tokens += num_plain

    def accept(self, sequence: Sequence, token: int, logprobs: dict[int, float] | None) -> None:
        """Add a sampled token; end the request if it is its last, or none."""
        if token < 0:
            return self.fail(
                sequence,
                f"its output token {sequence.num_output} could not be drawn: a logit is NaN, or all are "
                "-inf; look at the model's weights and dtype, at logit_bias and logits_processor",
            )
        reason = "stop" if token in sequence.end_token_ids else None
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
        self.emit(sequence, (token, text, reason, None, logprobs))

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
            if sequence.num_output == 1:
                self.first_tokens += 1
                sequence.spoke = time.perf_counter()
                self._stats.first_token.add(sequence.spoke - sequence.submitted)
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
