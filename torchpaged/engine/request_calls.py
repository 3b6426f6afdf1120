"""Requests of a `Generator`: queued, cancelled, streamed, run to their ends, or moved on by one step."""

import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from torchpaged.cache import BlockPool
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.calls import Calls
from torchpaged.engine.device import DecodeRows
from torchpaged.engine.hand_out import HandOut
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.model_watch import ModelWatch
from torchpaged.engine.numbers import as_integer, shown
from torchpaged.engine.outputs import RequestOutput, TextStream, TokenEvent
from torchpaged.engine.prompts import (
    as_sampling,
    encoded,
    list_prompts,
    list_sampling,
    logits_words,
    token_ids,
)
from torchpaged.engine.sampling import SamplingParams
from torchpaged.engine.scheduler import Scheduler
from torchpaged.engine.sequence import Inbox, Sequence
from torchpaged.engine.stepper import Stepper


class RequestCalls:
    """What `Generator` has of it."""

    max_seq_len: int
    model: PagedModelProtocol
    pool: BlockPool
    scheduler: Scheduler
    tokenizer: Any
    _calls: Calls
    _longest_text: int | None
    _next_id: int
    _requests: dict[int, Sequence]
    _rows: DecodeRows
    _stepper: Stepper

    def submit(self, prompt: str | Seq[int], sampling: SamplingParams | None = None) -> int:
        """Queue a request; returns its id. Its events come from `stream`, `events` or `step`.

        Args:
            prompt: text, or token ids: integers in a list, an array or a tensor of one dimension.
            sampling: default: `SamplingParams()`; of one sample.

        Raises:
            ArgumentError: an empty prompt, ids that are no integers or outside the vocabulary, a prompt that
                does not fit ``max_seq_len`` or the pool, strings without a tokenizer, or a ``sampling`` that
                this Generator was not made for. Nothing is queued then.
        """
        params, sequence = as_sampling(sampling), None
        prompt = encoded(prompt, self.tokenizer, bool(params.stop))
        try:
            with self._calls.entered():
                self._stepper.look(ModelWatch.at_request)
                sequence = self._sequence(prompt, params, self._calls.inbox)
                self._stepper.add(sequence)
            return sequence.request_id
        except BaseException:
            if sequence is not None:  # interrupted: its id was not returned
                self._calls.leave([sequence])
            raise

    def answer(
        self, prompt: str | Seq[int], sampling: SamplingParams | None = None
    ) -> AsyncIterator[TokenEvent]:
        """Queue a request, and give its events as they come, for asyncio; with `start`.

            async for event in generator.answer("Once upon a time"):
                print(event.text, end="")

        The request is queued, in a thread, when the first event is asked for: an iteration that never begins
        leaves none behind. One that breaks off, or whose task is cancelled, even while the request is being
        queued, cancels it.

        Args:
            prompt, sampling: as of `submit`.

        Raises:
            ArgumentError: as `submit`, where the first event is asked for.
            TorchpagedError: no background loop runs (`start`), or none in this process, or a step raised.
            ClosedError: the Generator is closed.
        """

        def queued() -> Callable[[Inbox], None]:
            params = as_sampling(sampling)
            ids = encoded(prompt, self.tokenizer, bool(params.stop))

            def queue(inbox: Inbox) -> None:
                self._stepper.look(ModelWatch.at_request)
                self._stepper.add(self._sequence(ids, params, inbox))

            return queue

        return self._calls.loop_for("answer()").events(queued, self)

    def cancel(self, request_id: int) -> None:
        """End a request now; its blocks are free at once, its event comes to its owner. One that has ended
        stays as it is, whether its owner has learnt of it or not.

        Events that are not read stay in memory. Of requests that were cancelled, before or behind their end,
        and belong to no stream, the latest 1,024 keep theirs; those of earlier ones are given up.

        Raises:
            ArgumentError: an id that no request has had.
        """
        number = as_integer(request_id)
        if number is None or not 0 <= number < self._next_id:
            raise ArgumentError("request_id", "an id that submit() has given", shown(request_id))
        with self._calls.entered():
            self._calls.cancel(request_id)

    def stream(self, request_ids: Seq[int] | None = None) -> Iterator[TokenEvent]:
        """Step until every request is done, giving events as they come.

        Left early, by an error, Ctrl-C, ``break`` or ``close()``, it cancels its requests; to only pause,
        keep the iterator.

        Args:
            request_ids: of submitted requests, which then belong to this stream; default: all that were
                submitted and belong to no other stream, those submitted while it runs included. There can be
                one such stream at a time; threads name their requests.

        Raises:
            ArgumentError: an id that is unknown, finished, given up (`cancel`), or another stream's; or the
                model is not what its graphs were made with.
            TorchpagedError: a second stream over all requests.
            Exception: of a step, as in `generate`.
        """
        self._calls.require_open()
        self._stepper.require_unchanged()
        if request_ids is None:
            return self._calls.stream(None, self)
        if not isinstance(request_ids, Iterable):
            raise ArgumentError(
                "request_ids", "a list of ids, or None for all", repr(request_ids), "for one: [request_id]"
            )
        stream = self._calls.stream(list(request_ids), self)
        next(stream)
        return stream

    def generate(
        self, prompts: str | Seq[str | Seq[int]], sampling: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Run ``prompts`` to their ends, in one continuous batch; results in their order, the ``n`` samples
        of a prompt next to each other.

        Args:
            prompts: strings or lists of token ids. One string is one prompt, as if it stood in a list.
            sampling: for all of them, or one each.

        Returns:
            One result per prompt, or ``sampling.n``. A request that failed alone, of NaN logits for instance
            or since a step with it alone raises again and again, has ``finish_reason`` "error", an ``error``
            and its ``__cause__``; the others have the tokens that they have without it.

        Raises:
            ArgumentError: a prompt or parameter that `submit` refuses; then none of them runs.
            Exception: of a step, with whichever request it was tried: the requests of this call end, those of
                others stay. With a background loop: a `TorchpagedError` with it as ``__cause__``.
        """
        texts = list_prompts(prompts)
        each = list_sampling(sampling, len(texts))
        texts = [encoded(t, self.tokenizer, bool(p.stop)) for t, p in zip(texts, each, strict=True)]
        samples = [(text, one) for text, params in zip(texts, each, strict=True) for one in params.samples()]
        inbox, sequences = Inbox(wants_results=True), list[Sequence]()
        try:
            with self._calls.entered():
                makes_steps = self._calls.background is None
                self._stepper.look(ModelWatch.at_call if makes_steps else ModelWatch.look)
                sequences += [self._sequence(text, one, inbox) for text, one in samples]
                for sequence in sequences:
                    self._stepper.add(sequence)
                wait = self._calls.waiter(inbox)
            wait()
            while inbox.live:
                self._calls.advance(inbox)
        except BaseException:
            if sequences:
                self._calls.leave(sequences)
            raise
        inbox.forget()
        return [sequence.result() for sequence in sequences]

    def step(self) -> list[TokenEvent]:
        """One step of the whole batch; returns the events of submitted requests not handed out yet, those
        of open streams over some of them left out.

        If it is interrupted, the next call or stream gives the events that this one did not return. After a
        step that raised, the next ones compute some of its requests alone, until it is known which it is
        about; there may be no events meanwhile.

        Raises:
            TorchpagedError: a background loop makes the steps.
            Exception: of a step, as in `generate`; requests stay as they are, and the next call tries again.
        """
        handed: HandOut | None = None
        try:
            with self._calls.entered():
                self._calls.require_no_background()
                self._stepper.step()
                handed = HandOut(self._calls.inbox)
                events = handed.take()
            return events
        except BaseException:
            if handed is not None:
                with self._calls.entered(if_closed=True):
                    handed.give_back()
            raise

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return not self._calls.closed and bool(self._requests or self._calls.inbox.waiting)

    def _sequence(self, prompt: Any, params: SamplingParams, inbox: Inbox) -> Sequence:
        """A request that fits, not queued yet. Text was `encoded` ahead of the lock: a long one takes as long
        as several steps, in which others would have no tokens."""
        if params.n > 1:
            fix = "submit each of sampling.samples(), or call generate()"
            raise ArgumentError("n", "1 for a request", str(params.n), fix)
        ids = token_ids(prompt, self.model.vocab_size)
        params.check_vocabulary(self.model.vocab_size)
        words = logits_words(self._rows.stage, params, self.model.eos_token_ids, self.model.vocab_size)
        room = self._room
        if len(ids) >= room:
            raise ArgumentError(
                "prompt",
                f"at most {room - 1} tokens (max_seq_len {self.max_seq_len}, {self.pool.num_usable} blocks "
                f"of {self.scheduler.block_size})",
                str(len(ids)),
                f"{self._how_to_raise_room()}shorten the prompt",
            )
        request_id, self._next_id = self._next_id, self._next_id + 1
        seed = secrets.randbits(63) if params.seed is None else params.seed
        # The last token is not stored, hence room for one more.
        asked = min(len(ids) + params.max_new_tokens, self.max_seq_len)
        return Sequence(
            request_id,
            ids,
            params,
            seed,
            TextStream(self.tokenizer, params.stop, params.min_new_tokens),
            max_len=min(asked, room + 1),
            last_reason="length" if asked <= room + 1 else "out_of_blocks",
            inbox=inbox,
            logits_words=words,
            end_token_ids=params.end_token_ids(self.model.eos_token_ids),
        )

    @property
    def _room(self) -> int:
        """Tokens of a request at most, prompt and output."""
        return min(self.max_seq_len, self.pool.num_usable * self.scheduler.block_size)

    def _how_to_raise_room(self) -> str:
        """Advice that ends in "or ", nothing where the model itself takes no longer text."""
        if self._room < self.max_seq_len:
            return "raise num_blocks, or "
        return "" if self.max_seq_len == self._longest_text else "raise max_seq_len, or "
