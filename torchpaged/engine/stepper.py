"""Stepper: the requests of a continuous batch, moved on one step at a time.

    stepper.add(sequence)
    while stepper.requests:
        stepper.step()              # events are in the sequences' logs and inboxes

With a `DecodeLoop`, a step starts a launch of whole decode steps for all running requests, or, where prompts
wait, one pass over a token of each of these and a chunk of the prompts; then it reads the tokens of the step
before. Without, it decodes and prefills in one pass, samples and reads. Tokens are the same.

A step that breaks off has lost its rows: `reset` takes every request back to the events in its log, and the
next step computes the rest again. After an error the next steps find the requests that are faulty
(`FaultBisection`): these end with it, and the others go on. `Calls` lets Ctrl-C wait until the step is over.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial

import torch

from torchpaged.engine.acceptor import Acceptor
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.device import LogitsStage
from torchpaged.engine.fault_bisection import FaultBisection
from torchpaged.engine.model import CacheOwner, PagedModelProtocol
from torchpaged.engine.model_watch import ModelWatch
from torchpaged.engine.outputs import GeneratorStats
from torchpaged.engine.packed_steps import PackedSteps
from torchpaged.engine.request_blocks import leave_arrival
from torchpaged.engine.scheduler import Schedule, Scheduler
from torchpaged.engine.sequence import Sequence
from torchpaged.engine.start import LateCompiles
from torchpaged.engine.step_graphs import PrefillGraphs
from torchpaged.engine.step_times import StepTimes
from torchpaged.prefixes import AutomaticPrefixes
from torchpaged.profiling import range as profile_range


class Lost(Enum):
    """What a step loses if it breaks off where it is."""

    NOTHING = "no step runs"
    ROWS = "the rows on the device and the tokens in flight: it is in a launch or forward"
    BLOCKS = "these, and keys and values: the books of requests and their blocks may be half written"


class Stepper:
    """Steps of one model.

    Args:
        model: the paged model.
        scheduler: which requests run, and with which blocks.
        loop: the decode loop; None to decode without graphs.
        watch: of the model, as it was before ``loop`` was captured.
        prefill_graphs: of prefills; None: all are launched from Python.
        prefixes: finds the groups of decode steps without a loop; None: no groups.
        mixes: decodes and chunks run in one pass.
        stage: as in `PackedSteps`.

    Attributes:
        requests: by id, those that wait or run.
        stats: counters.
        late: counts what is compiled while steps run.
    """

    def __init__(
        self,
        model: PagedModelProtocol,
        scheduler: Scheduler,
        loop: DecodeLoop | None,
        watch: ModelWatch,
        prefill_graphs: PrefillGraphs | None = None,
        prefixes: AutomaticPrefixes | None = None,
        mixes: bool = False,
        stage: LogitsStage | None = None,
    ) -> None:
        self._model, self._scheduler, self._loop, self._mixes = model, scheduler, loop, mixes
        self._watch = watch
        rows = None if loop is None else loop.rows
        self._packed = PackedSteps(model, prefill_graphs, prefixes, rows, stage)
        self._lost = Lost.NOTHING
        self._launches_return_at_once = torch.device(model.device).type == "cuda"
        self.requests: dict[int, Sequence] = {}
        self._plan: Schedule | None = None  # of the last step; None: it did not come so far
        self._plan_before: Schedule | None = None  # and of the one before, until the device has work
        self._bisection: FaultBisection | None = None  # after a step that raised
        self._limited_for: list[Sequence] = []  # while one of them lives, steps take fewer requests
        self._owner = CacheOwner(model.kv_cache, self.requests)
        self.stats = GeneratorStats(scheduler.pool.num_usable, queue=scheduler.queue)
        if scheduler.prefixes is not None:
            self.stats.prefix_cache = scheduler.prefixes.stats
            if scheduler.prefixes.host is not None:
                scheduler.prefixes.host.recompute_seconds = self.stats.prefill_seconds_per_token
        waits_later = self._launches_return_at_once and loop is not None
        self._times = StepTimes(self.stats, scheduler.budget, waits_later)
        self._acceptor = Acceptor(self.requests, scheduler, loop, model, self.stats)
        self.late = LateCompiles(self.stats, warns=False)

    def add(self, sequence: Sequence) -> None:
        """Queue a new request; the first one's prompt gives fp8 pools the scales if none were given.

        Raises:
            TorchpagedError: another engine runs requests in the model's cache.
        """
        self.require_cache()
        if getattr(self._model, "needs_scales", False):
            self._model.find_scales(sequence.prompt)  # type: ignore[attr-defined]
        sequence.submitted = time.perf_counter()
        if not self.requests:
            self._times.begin(sequence.submitted)  # none waited for tokens before
        with self._at_work():
            self.requests[sequence.request_id] = sequence
            sequence.inbox.live[sequence] = None
            if self._bisection is None:  # it waits until that is over
                self._scheduler.add(sequence)
            self.stats.prompt_tokens += len(sequence.prompt)

    def cancel(self, request_id: int) -> None:
        """End a request now; nothing if it has ended."""
        sequence = self.requests.get(request_id)
        if sequence is None:
            return
        with self._at_work():
            text = ""
            with contextlib.suppress(Exception):  # a tokenizer's: the request ends anyway
                text = sequence.stream.flush()
            self._acceptor.emit(sequence, (None, text, "cancelled", None, None))

    def fail_all(self, reason: str) -> None:
        """End every request with an error now."""
        with self._at_work():
            for sequence in list(self.requests.values()):
                self._acceptor.fail(sequence, reason)

    def step(self) -> None:
        """One step of the whole batch; after one that raised, of those requests alone that it may be about.
        Of these, one that raises alone ends with "error".

        Raises:
            TorchpagedError: another engine has the model's cache.
            ArgumentError: the model was fused or unfused since its graphs were made; or it changed otherwise,
                and a request came since the last step.
            Exception: none of them got through a step alone, so that it is no matter of a request. They go on
                with the next step.
        """
        if self.requests:
            self.require_cache()
            self._forget(self._watch.at_step())
        if self._limited_for and not any(sequence.finish_reason is None for sequence in self._limited_for):
            self._limited_for, self._scheduler.max_running = [], self._scheduler.max_batch_size
        named, error = profile_range("step", self.stats.steps), None
        try:
            with self.late.counted(), self._at_work(), named, torch.inference_mode():
                self._step()
        except Exception as raised:
            if self._lost is not Lost.NOTHING or self._watch.is_due:  # it could not be taken back; the model
                raise
            error = raised
        if error is not None or self._bisection is not None:
            self._bisect(error)

    def _bisect(self, error: Exception | None) -> None:
        """Go on behind a step that raised ``error``, or went well while faulty requests are looked for.

        Raises:
            Exception: the error is the engine's.
        """
        with self._at_work():
            bisection = self._bisection
            if bisection is None:
                assert error is not None
                more = 2 if self._loop is None else 1 + 2 * self._loop.steps_per_launch
                bisection = FaultBisection(self._in_step(), self.requests, more, error)
                self._bisection = bisection
            elif not bisection.stepped(error):
                return
            if bisection.group is None:
                self._bisection = None
            self.reset()  # the requests of the next group begin again
        if self._bisection is not None:
            return
        for sequence, again in bisection.faulty:
            if sequence.finish_reason is None:
                said = f"a step with this request alone raised {type(again).__name__}: {again}"
                with self._at_work():
                    self._acceptor.fail(sequence, said, again)
        if bisection.limit is not None:
            self._limited_for += bisection.candidates
            self._scheduler.max_running = min(self._scheduler.max_running, bisection.limit)
        if bisection.is_of_engine:
            raise bisection.error

    def _in_step(self) -> list[Sequence]:
        """The requests that the last step was to move; those that could have run, where it chose none."""
        plan, found = self._plan, list[Sequence]()
        if plan is not None:
            found = [*plan.decodes, *(sequence for sequence, _ in plan.chunks)]
        found = [sequence for sequence in found if sequence.finish_reason is None]
        return found or list(self.requests.values())[: self._scheduler.max_running]

    def require_cache(self) -> None:
        """Have the pools; what another engine wrote there meanwhile is not taken for this one's.

        Raises:
            TorchpagedError: another engine runs requests in the model's cache.
        """
        if self._owner.require():
            self.forget_prefixes("another Generator had the pools")

    def look(self, at: Callable[[ModelWatch], bool] = ModelWatch.look) -> None:
        """Forget what blocks hold if the model's weights changed, and refuse to replay graphs over another
        model.

        Args:
            at: `ModelWatch.look`, ``at_request`` or ``at_call``.

        Raises:
            ArgumentError: with the first thing that is not as the graphs were made with.
        """
        self._forget(at(self._watch))

    def _forget(self, changed: bool) -> None:
        if changed:
            self.forget_prefixes("the model changed")

    def require_unchanged(self) -> None:
        """Refuse a stream that would replay graphs over a model that changed."""
        self._watch.at_stream()

    def forget_prefixes(self, reason: str) -> None:
        """What blocks hold is of no use to requests that begin from now on."""
        with self._at_work():
            self._scheduler.blocks.forget_prefixes(reason)

    # ------------------------------------------------------------------------------------------- breaking off
    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self.reset()  # what was broken off while it was reset
        self._lost = Lost.BLOCKS
        try:
            yield
        except BaseException:
            self.reset()
            raise
        self._lost = Lost.NOTHING

    def reset(self) -> None:
        """Take every request back to its log after a step that broke off; nothing if none did. May itself
        break off, and be called again."""
        if self._lost is Lost.NOTHING:
            return
        with torch.inference_mode():
            self._model.session.reset()
            if self._loop is not None:
                self._loop.reset()
        for sequence in list(self.requests.values()):
            try:
                sequence.reset()
            except Exception as error:
                self._acceptor.lose(sequence, error)
            if sequence.finish_reason is not None:
                leave_arrival(sequence)  # or else its blocks, which others get, would be written yet
                sequence.inbox.live.pop(sequence, None)
                del self.requests[sequence.request_id]
                self._lost = Lost.BLOCKS  # the scheduler may have it still
        # What the device says late of a step may concern what that step wrote.
        self._scheduler.blocks.forget_prefixes("a step broke off")
        # Steps whose tokens are lost have written over what the last known one saw in rings, and have moved
        # states on.
        if self._lost is Lost.BLOCKS or self._scheduler.blocks.has_rings:
            self._scheduler.reset(self.requests.values())
            if self._bisection is not None:
                group = self._bisection.group or ()
                self._scheduler.reset([one for one in group if one.request_id in self.requests])
        self._lost = Lost.NOTHING

    # ------------------------------------------------------------------------------------------------ a step
    def _step(self) -> None:
        started, loop = time.perf_counter(), self._loop
        tokens_before, steps_before = self.stats.new_tokens, 0 if loop is None else loop.launches.steps_read
        self._acceptor.first_tokens = 0
        if loop is not None and loop.launches and self._scheduler.short_of_blocks():
            self._collect(loop, keep=0)  # a request may be preempted; read its tokens first
        with profile_range("admission", waiting=len(self._scheduler.waiting)):
            # Freed later: requests that ended with it have a list of their prompt's ids.
            self._plan_before, self._plan = self._plan, None
            self._plan = plan = self._scheduler.schedule()
        if loop is not None:
            for sequence in plan.put_back:
                loop.release(sequence)
        decode_seconds, read_before = None, 0 if loop is None else loop.launches.decoded
        if plan.decodes or plan.chunks:
            advance = self._advance if loop is None else partial(self._launch, loop)
            decode_seconds = advance(plan)
        elif loop is not None:
            self._collect(loop, keep=0)
        self._plan_before = None
        decoded = len(plan.decodes) if loop is None else loop.launches.decoded - read_before
        prefilled = sum(count for _, count in plan.chunks)
        now = time.perf_counter()
        seconds = now - started
        steps_read = 1 if loop is None else loop.launches.steps_read - steps_before
        tokens = self.stats.new_tokens - tokens_before
        self._times.note_tokens(now, tokens, self._acceptor.first_tokens, steps_read)
        self._times.note_wait(seconds, prefilled if plan.decodes else 0)
        if decoded or prefilled:
            self.stats.add_step(seconds, decode_seconds, decoded, prefilled)
            self.stats.preemptions, self.stats.swapped = self._scheduler.preemptions, self._scheduler.swapped
            self.stats.peak_blocks_used = self._scheduler.pool.peak_used

    def _launch(self, loop: DecodeLoop, plan: Schedule) -> float | None:
        """Start a pass over the chunks or a launch, or both, and read what was started before; returns the
        seconds of decodes, None where they are not known apart."""
        # First: a prefill that raises must not make the next launch go without.
        loop.blocks_added |= plan.blocks_added
        for sequence in plan.decodes:
            if sequence.row is None:
                loop.place(sequence)
        decoding, started = [], False
        if plan.chunks:
            self._lost = Lost.ROWS
            decoding = loop.decoding() if self._mixes else []
            started = self._prefill(loop, plan, decoding)
            self._lost = Lost.BLOCKS
        self._watch.in_step()
        between = time.perf_counter()
        self._lost = Lost.ROWS
        # A request that has just begun to decode does so in the pass over the next chunks, if there are any.
        if not decoding and not (started and self._mixes and self._scheduler.prefills_left):
            started = self._start(loop)
        self._plan_before = None
        self._collect(loop, keep=1 if started else 0)
        return None if decoding or self._launches_return_at_once else time.perf_counter() - between

    def _prefill(self, loop: DecodeLoop, plan: Schedule, decoding: list[Sequence]) -> bool:
        """One pass over the chunks and a token of each of ``decoding``; whether it gives tokens."""
        done = [sequence for sequence, count in plan.chunks if count == sequence.remaining]
        if not self._packed.replays(plan.chunks, decoding):
            self._watch.in_step()
        logits = self._packed.prefill(plan.chunks, decoding)
        self.stats.add_pass(bool(decoding))
        self._lost = Lost.BLOCKS
        for sequence, count in plan.chunks:
            sequence.num_computed += count
            self._scheduler.blocks.computed(sequence)
        self._lost = Lost.ROWS
        if decoding or done:
            loop.finish_packed([*decoding, *done], logits, self._packed.end)
        return bool(decoding or done)

    def _start(self, loop: DecodeLoop) -> bool:
        started = loop.launch()
        self.stats.passes += loop.steps_per_launch if started else 0
        return started

    def _collect(self, loop: DecodeLoop, keep: int) -> None:
        self._lost = Lost.ROWS
        results = loop.launches.collect(keep)
        self._lost = Lost.BLOCKS
        for sequence, tokens, logprobs in results:
            for index, token in enumerate(tokens):
                # What a row produced after a stop that only the host could see is dropped.
                if sequence.finish_reason is None:
                    sequence.num_computed = len(sequence.tokens)  # the step that drew it wrote the one before
                    self._acceptor.accept(sequence, token, None if logprobs is None else logprobs[index])

    def _advance(self, plan: Schedule) -> float | None:
        """Decode, prefill, sample and read: a step without graphs; returns as `_launch` does."""
        logits, drawn, started = [], [], time.perf_counter()
        self._lost = Lost.ROWS
        rows = [*plan.decodes, *(sequence for sequence, count in plan.chunks if count == sequence.remaining)]
        mixed = plan.decodes if self._mixes and plan.chunks else []
        if plan.decodes and not mixed:
            logits.append(self._packed.decode(plan.decodes))
            self.stats.add_pass()
        decode_seconds = None if mixed or self._launches_return_at_once else time.perf_counter() - started
        if plan.chunks:
            logits.append(self._packed.prefill(plan.chunks, mixed))
            self.stats.add_pass(bool(mixed))
        if rows:
            drawn = self._packed.sample(torch.cat(logits) if len(logits) > 1 else logits[0], rows)
        self._lost = Lost.BLOCKS
        for sequence in plan.decodes:
            sequence.num_computed += 1
        for sequence, count in plan.chunks:
            sequence.num_computed += count
            self._scheduler.blocks.computed(sequence)
        for sequence, (token, logprobs) in zip(rows, drawn, strict=True):
            self._acceptor.accept(sequence, token, logprobs)
        return decode_seconds
