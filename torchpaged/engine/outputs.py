"""What a caller gets of requests: events as they come, results, text, counters of what was done, and how long
things took."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchpaged.cache import PrefixCacheStats
from torchpaged.custom_ops.errors import ArgumentError, RequestError
from torchpaged.custom_ops.words import counted, one_line, repr_of_fields, shown

#: Upper bounds of a histogram's buckets in seconds, ten per decade from 0.1 ms to 1,000 s.
BOUNDS = tuple(round(10 ** (k / 10 - 4), 9) for k in range(71))


@dataclass
class LatencyHistogram:
    """Seconds, counted in buckets a quarter wider than the one before: what is read from it is known to that.

    Attributes:
        counts: by bucket of `BOUNDS`, and of what took longer than the last.
        total: of all seconds.
        count: how many.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1), repr=False)
    total: float = 0.0
    count: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """``count`` waits of as many seconds each."""
        self.counts[bisect_left(BOUNDS, seconds)] += count
        self.total += seconds * count
        self.count += count

    def percentile(self, share: float) -> float | None:
        """Seconds that ``share`` of all, 0 to 1, took at most; None before the first. Beyond the last bound
        that bound.

        Raises:
            ArgumentError: no share.
        """
        if not 0 <= share <= 1:
            raise ArgumentError("share", "a number from 0 to 1", repr(share))
        if not self.count:
            return None
        wanted, below = share * self.count, 0
        for bound, before, count in zip(BOUNDS, (0.0, *BOUNDS), self.counts, strict=False):
            if count and below + count >= wanted:
                return before + (bound - before) * (wanted - below) / count
            below += count
        return BOUNDS[-1]


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
#: Tokens that are decoded again and again for their neighbours' sake, about; and where these give no text.
_CONTEXT, _CONTEXT_WITHOUT_TEXT = 8, 64


# Not frozen: such a class sets each field by a call, and a step of a large batch makes hundreds of events.
@dataclass(unsafe_hash=True)
class TokenEvent:
    """One new token, or the end of a request.

    Attributes:
        request_id: what `Generator.submit` gave.
        token_id: the token; None where a request ends without a further one (cancelled, or an error).
        text: what became certain with it; empty without a tokenizer.
        finish_reason: None before the end; "stop", "length", "out_of_blocks", "cancelled" or "error".
        error: with "error" what it was; its ``__cause__`` is what was raised.
        logprobs: natural logarithms of probabilities by token id, where ``SamplingParams.logprobs`` asks for
            them: first of the token itself, then of the likeliest ones, which it may be among.
        times: of the request, in its last event; two equal events may differ in them.
    """

    request_id: int
    token_id: int | None
    text: str
    finish_reason: str | None = None
    error: RequestError | None = None
    logprobs: dict[int, float] | None = field(default=None, hash=False)
    times: "RequestTimes | None" = field(default=None, compare=False, repr=False)

    __repr__ = repr_of_fields


@dataclass(frozen=True)
class RequestTimes:
    """Seconds of one request; None of what it did not come to.

    Attributes:
        queue: from `Generator.submit` or `Generator.generate` until it first ran.
        first_token: from the same moment to its first token.
        between_tokens: from its first token to its end, per token behind the first.
        end_to_end: from the call to its end, however it ended.
    """

    queue: float | None
    first_token: float | None
    between_tokens: float | None
    end_to_end: float | None

    def __repr__(self) -> str:
        reached = ((name, seconds) for name, seconds in vars(self).items() if seconds is not None)
        return one_line(self, *(f"{name}={seconds:.4g} s" for name, seconds in reached))


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes:
        request_id: its number.
        prompt_token_ids: the prompt, as given or of its text.
        token_ids: what was generated, the token that ended the request included; with "error" those before.
        text: of these, without an end token or stop id, special tokens and stop strings; empty without a
            tokenizer.
        finish_reason, error: as in `TokenEvent`.
        logprobs: as in `TokenEvent`, of each token; None where they were not asked for.
        times: two equal results may differ in them.
    """

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    error: RequestError | None = None
    logprobs: list[dict[int, float]] | None = None
    times: RequestTimes | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        more = [] if self.error is None else [f"error={self.error.reason!r}"]
        return one_line(
            self,
            f"request_id={self.request_id}",
            f"finish_reason={self.finish_reason!r}",
            *more,
            f"{counted(len(self.token_ids), 'token')}",
            f"text={shown(self.text)}",
        )


@dataclass
class GeneratorStats:
    """Counters since construction. Seconds are of prefill and of decode; a step of both is split by its
    parts' time, or by tokens where they run in one pass or are launched. ``passes``: forwards of the model,
    each of which reads the weights once; ``mixed_steps``: those with decodes and chunks of prompts.
    ``decode_tokens``: of decodes, counted by the step that reads them, which with graphs is one behind the
    step that computes them. ``late_compiles``: kernels and graphs of torch.compile that the process compiled
    while steps ran. ``prefix_cache``: tokens that were looked up and found, and why others were not, of each
    request once, put back or not. ``swapped``: of ``preemptions``, those whose blocks go to the host when
    others need them.
    ``finished``: requests by ``finish_reason``; ``queue``, ``first_token``, ``between_tokens``,
    ``end_to_end``: latencies, as in `EngineMetrics`."""

    num_blocks: int
    peak_blocks_used: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preemptions: int = 0
    swapped: int = 0
    steps: int = 0
    passes: int = 0
    mixed_steps: int = 0
    late_compiles: int = 0
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    finished: dict[str, int] = field(default_factory=dict)
    queue: LatencyHistogram = field(default_factory=LatencyHistogram)
    first_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    between_tokens: LatencyHistogram = field(default_factory=LatencyHistogram)
    end_to_end: LatencyHistogram = field(default_factory=LatencyHistogram)

    def __repr__(self) -> str:
        """What a run is asked about first; the counters have names of their own."""
        return one_line(
            self,
            f"{counted(sum(self.finished.values()), 'request')} finished",
            counted(self.prompt_tokens, "prompt token"),
            counted(self.new_tokens, "new token"),
            counted(self.steps, "step"),
            f"at most {self.peak_blocks_used} of {counted(self.num_blocks, 'block')} used",
        )

    @property
    def shared_tokens(self) -> int:
        """Tokens of prompts that were not prefilled, since a request that began alike had them."""
        return self.prefix_cache.hit_tokens

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of prompts and outputs that a pass over the weights computed on average; 0 before any."""
        return (self.prefill_tokens + self.decode_tokens) / max(self.passes, 1)

    def prefill_seconds_per_token(self) -> float:
        """What a token of a prompt took to compute on average; infinite before any."""
        return self.prefill_seconds / self.prefill_tokens if self.prefill_tokens else math.inf

    def add_pass(self, mixed: bool = False) -> None:
        """Count a forward, ``mixed`` if it had decodes and chunks."""
        self.passes += 1
        self.mixed_steps += mixed

    def add_step(self, seconds: float, decode_seconds: float | None, decoded: int, prefilled: int) -> None:
        """Count one step.

        Args:
            seconds: of the whole step.
            decode_seconds: of its decodes; None where they are not known apart, so that a mixed step is
                shared by tokens.
            decoded, prefilled: tokens.
        """
        if not prefilled:
            share = seconds
        elif not decoded:
            share = 0.0
        else:
            share = seconds * decoded / (decoded + prefilled) if decode_seconds is None else decode_seconds
        self.decode_seconds += share
        self.prefill_seconds += seconds - share
        self.decode_tokens += decoded
        self.prefill_tokens += prefilled
        self.steps += 1


class TextStream:
    """The text of one request, from tokens as they come: multi-byte characters whole, stop strings never
    shown in part. Spaces are those of the tokens: cleaning up (``clean_up_tokenization_spaces``) would take
    back what was shown.

    Args:
        tokenizer: anything with ``decode(ids, skip_special_tokens=True)``, and
            ``clean_up_tokenization_spaces`` if it has such an attribute that is true; None gives no text.
        stop: strings that end it.
        min_new_tokens: tokens at the beginning within which none of these ends.

    Attributes:
        gives_text: whether there is a tokenizer.
        stopped: a stop string was met; nothing follows.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), min_new_tokens: int = 0) -> None:
        self._tokenizer, self._stop, self._least = tokenizer, tuple(stop), min_new_tokens
        self.gives_text = tokenizer is not None
        self._options = {"skip_special_tokens": True}
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self._options["clean_up_tokenization_spaces"] = False
        self._ids: list[int] = []
        # Tokens before `_known` are text already; decoding starts at `_shown`, for context, whose text, up to
        # `_known`, is `_before`.
        self._shown, self._known, self._before = 0, 0, ""
        self._held, self._early = "", 0  # letters of it from the first `_least` tokens
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take one token; returns the text that is now certain, often one word, sometimes nothing."""
        if not self.gives_text or self.stopped:
            return ""
        self._ids.append(token_id)
        return self._release(self._decode(final=False))

    def replayed(self, token_ids: Sequence[int]) -> "TextStream":
        """A new stream of the same tokenizer and stop strings that has taken ``token_ids``."""
        stream = TextStream(self._tokenizer, self._stop, self._least)
        for token_id in token_ids:
            stream.push(token_id)
        return stream

    def flush(self) -> str:
        """The rest, when no token follows: incomplete characters and beginnings of stop strings included."""
        if not self.gives_text or self.stopped:
            return ""
        text = self._release(self._decode(final=True))
        rest, self._held = ("" if self.stopped else self._held), ""
        return text + rest

    def _decode(self, final: bool) -> str:
        # With the tokens in front, because a token's text depends on its neighbours (spaces, joined bytes).
        # What they give is known from the decode before, until there are so many that others take their
        # place, which have text: behind none, a space that begins a token would be left out, as at the
        # beginning of a text.
        decode = self._tokenizer.decode
        after = decode(self._ids[self._shown :], **self._options)
        if not final and after.endswith(_INCOMPLETE):
            return ""
        text, self._before = str(after[len(self._before) :]), after
        context = len(self._ids) - self._shown
        if context > _CONTEXT:
            alone = decode(self._ids[self._known :], **self._options)
            if alone or context > _CONTEXT_WITHOUT_TEXT:
                self._shown, self._before = self._known, alone
        self._known = len(self._ids)
        return text

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        self._held += text
        searches = len(self._ids) > self._least
        # Behind what the first tokens gave: a stop string that ended there ends nothing later.
        starts = ((s, max(self._early - len(s) + 1, 0)) for s in self._stop if searches)
        ends = [at for at in (self._held.find(s, start) for s, start in starts) if at >= 0]
        if ends:
            self.stopped = True
            shown, self._held = self._held[: min(ends)], ""
            return shown
        most = len(self._held) + 1  # a stop string may be far longer
        sizes = ((s, n) for s in self._stop for n in range(1, min(len(s), most)))
        keep = max((n for s, n in sizes if self._held.endswith(s[:n])), default=0)
        cut = len(self._held) - keep
        self._early = max(self._early - cut, 0) if searches else keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown
