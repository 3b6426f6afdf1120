"""A request on its way through the engine."""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torchpaged.cache.cached_text import CachedText
from torchpaged.cache.host_blocks import Arrival
from torchpaged.custom_ops.errors import RequestError
from torchpaged.engine.outputs import RequestOutput, RequestTimes, TextStream, TokenEvent
from torchpaged.engine.sampling import SamplingParams


@dataclass
class StepCount:
    """Decode steps that a `DecodeLoop` has started so far, for all its rows: a launch counts them once, not
    in every sequence.

    Attributes:
        started: those of launches.
        most: these and packed batches: tokens that any row may have been given by now, at most.
    """

    started: int = 0
    most: int = 0


#: ``token_id``, ``text``, ``finish_reason``, ``error`` and ``logprobs`` of a `TokenEvent`.
EventRow = tuple[int | None, str, str | None, RequestError | None, dict[int, float] | None]


class EventLog:
    """The events of one request: its tokens from here on, and what few of them have besides. A token makes no
    object that the garbage collector counts: those of a load of 256 requests would make it visit the whole
    process in the middle of serving, 0.3 s without a step.

    Args:
        request_id: of all of them.
        tokens: of the request, with its prompt alone; one that comes is an event.
    """

    def __init__(self, request_id: int, tokens: "array[int]") -> None:
        self._request_id, self._tokens, self._first = request_id, tokens, len(tokens)
        self._has_end = False  # an end without a token, behind them
        self._texts: dict[int, str] = {}  # by place; of those that have any
        self._rest: dict[int, tuple[str | None, RequestError | None, dict[int, float] | None]] = {}

    def append(self, event: EventRow) -> None:
        """One more; all of it, or nothing that is seen, if it is interrupted."""
        token, text, finish_reason, error, logprobs = event
        place = len(self)
        if text:
            self._texts[place] = text
        if finish_reason is not None or logprobs is not None:
            self._rest[place] = finish_reason, error, logprobs
        if token is None:
            self._has_end = True
        else:
            self._tokens.append(token)

    def __len__(self) -> int:
        return len(self._tokens) - self._first + self._has_end

    def __getitem__(self, index: int) -> TokenEvent:
        """Of a place from 0 on."""
        place, text = self._first + index, self._texts.get(index, "")
        token = self._tokens[place] if place < len(self._tokens) else None
        if index not in self._rest:
            return TokenEvent(self._request_id, token, text)
        return TokenEvent(self._request_id, token, text, *self._rest[index])

    def __iter__(self) -> Iterator[TokenEvent]:
        return (self[index] for index in range(len(self)))


class Inbox:
    """Where events of some requests wait for the call that owns these.

    Args:
        wants_results: the call gives `Sequence.result` of each, too.

    Attributes:
        wants_results: as given.
        live: its requests that have not ended, as a set in order.
        ready: those with events to take, likewise; some may have none.
    """

    def __init__(self, wants_results: bool = False) -> None:
        self.wants_results = wants_results
        self.live: dict[Sequence, None] = {}
        self.ready: dict[Sequence, None] = {}

    @property
    def waiting(self) -> "dict[Sequence, int]":
        """Requests with events to take, and how many each has had, those that were taken among them."""
        return {one: had for one in list(self.ready) if one.taken < (had := len(one.log))}

    def forget(self) -> None:
        """The call is over: its requests, which know it, would stay until the garbage collector comes."""
        self.ready.clear()


@dataclass(eq=False, slots=True, weakref_slot=True)  # looked up in lists at every step: by identity
class Sequence:
    """A request's state. ``num_computed`` tokens have their keys and values in ``blocks``.

    A sequence whose only uncomputed token is its last one decodes; one with more prefills. Preemption sets
    ``num_computed`` back to 0 and keeps the tokens. Steps of large batches look at every sequence several
    times: what they ask is a plain attribute or the length of a list.

    ``log`` is the truth about what the request was given: an event is in it or isn't, its token with it, and
    `reset` makes the rest agree with it after a step that broke off.

    Attributes:
        inbox: of the call that owns the request.
        submitted, began, spoke, ended: when it was queued, first ran, had its first token, and ended, by
            `time.perf_counter`; the last three None before.
        prompt, tokens: ids as integers of 64 bits; the latter with the output.
        log, taken, taker: its events, how many of them the owner has taken, and the mark of the `HandOut`
            that took last.
        max_len: tokens at which it ends, prompt included.
        last_reason: its ``finish_reason`` then.
        row: its row in the decode loop, None while it has none.
        step_count, steps_read: the loop's count, and where in it the host is with reading this
            sequence's tokens.
        has_room_until: ``most`` of the loop's count up to which its blocks hold the next step; minus
            infinity: it was not looked at since it has a row, or has none.
        blocks_on_device: how many of ``blocks`` stand in the row's block table.
        prompt_ids: ``prompt`` as a list, once it is made (`list_prompt`).
        logits_words: what it asks of logits, of `torchpaged.engine.prompts.logits_words`.
        end_token_ids: tokens that end it.
        plain: lengths of ``tokens`` at which one more that does not end it is an event and nothing else.
        cached: its text in the prefix cache; None: it has not asked yet, or there is no cache.
        arrival: of blocks on their way from the host; None: none is.
        has_begun: whether it ran before: that it asks again, put back since, is not counted.
    """

    request_id: int
    prompt: "array[int]"
    sampling: SamplingParams
    seed: int
    stream: TextStream
    max_len: int
    last_reason: str = "length"
    inbox: Inbox = field(default_factory=Inbox)
    submitted: float = 0.0
    began: float | None = None
    spoke: float | None = None
    ended: float | None = None
    logits_words: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    prompt_ids: list[int] | None = None
    tokens: "array[int]" = field(init=False)
    log: EventLog = field(init=False)
    plain: range = field(init=False)
    taken: int = 0
    taker: object = None
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    row: int | None = None
    step_count: StepCount = field(default_factory=StepCount)
    steps_read: int = 0
    has_room_until: float = -math.inf
    blocks_on_device: int = 0
    cached: CachedText | None = None
    arrival: Arrival | None = None
    has_begun: bool = False
    text: str = ""
    finish_reason: str | None = None
    error: RequestError | None = None

    def __post_init__(self) -> None:
        if type(self.prompt) is not array or self.prompt.typecode != "q":
            self.prompt = array("q", self.prompt)
        self.tokens = self.prompt[:]
        self.log = EventLog(self.request_id, self.tokens)
        asks = self.stream.gives_text or self.sampling.logprobs is not None
        self.plain = range(0 if asks else len(self.prompt) + 1, 0 if asks else self.max_len - 1)

    @property
    def output(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[len(self.prompt) :].tolist()

    @property
    def num_output(self) -> int:
        """How many these are."""
        return len(self.tokens) - len(self.prompt)

    @property
    def in_flight(self) -> int:
        """Tokens it may have been given that the host has not read; 0 without a row."""
        return 0 if self.row is None else self.step_count.started - self.steps_read

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def decodes(self) -> bool:
        """Whether all but its newest token is computed."""
        return self.row is not None or len(self.tokens) - self.num_computed == 1

    @property
    def wants_token(self) -> bool:
        """Whether it decodes, and does not have all its tokens on their way."""
        return self.decodes and len(self.tokens) + self.in_flight < self.max_len

    def reset(self) -> None:
        """After a step that broke off: without a row, and output, text and end agree with ``log``."""
        self.row = None
        self.text = "".join(event.text for event in self.log)
        last = self.log[len(self.log) - 1] if len(self.log) else None
        self.finish_reason, self.error = (None, None) if last is None else (last.finish_reason, last.error)
        if self.finish_reason is None:
            self.stream = self.stream.replayed(self.output)
            self.num_computed = min(self.num_computed, len(self.tokens) - 1)

    def event(self, index: int) -> TokenEvent:
        """One of ``log``; the last has the times."""
        event = self.log[index]
        return event if event.finish_reason is None else replace(event, times=self._times())

    def list_prompt(self) -> None:
        """Make the list of ids for `result` now, if one token more ends the request: between the launch and
        that token the host has nothing else to do."""
        if self.inbox.wants_results and len(self.tokens) + 1 >= self.max_len:
            self.prompt_ids = self.prompt.tolist()

    def result(self) -> RequestOutput:
        """What the caller gets."""
        return RequestOutput(
            self.request_id,
            self.prompt.tolist() if self.prompt_ids is None else self.prompt_ids,
            self.output,
            self.text,
            self.finish_reason or "cancelled",
            self.error,
            None
            if self.sampling.logprobs is None
            else [e.logprobs for e in self.log if e.logprobs is not None],
            self._times(),
        )

    def _times(self) -> RequestTimes:
        queue, first, whole = (
            None if then is None else then - self.submitted for then in (self.began, self.spoke, self.ended)
        )
        between = None
        if first is not None and whole is not None and self.num_output > 1:
            between = (whole - first) / (self.num_output - 1)
        return RequestTimes(queue, first, between, whole)
