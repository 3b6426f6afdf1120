"""Stepper: the requests of a continuous batch, moved on one step at a time.

    stepper.add(sequence)
    while stepper.requests:
        stepper.step()              # events are in the sequences' logs and inboxes

What a step does is `BatchSteps`'s. One that breaks off has lost its rows: `reset` takes every request back to
the events in its log, and the next step computes the rest again. After an error the next steps find the
requests that are faulty (`FaultBisection`): these end with it, and the others go on. `Calls` lets Ctrl-C wait
until the step is over.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from torchpaged.engine.acceptor import Acceptor
from torchpaged.engine.batch_steps import BatchSteps
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.device import DecodeRows
from torchpaged.engine.fault_bisection import FaultBisection
from torchpaged.engine.model import CacheOwner, PagedModelProtocol
from torchpaged.engine.model_watch import ModelWatch
from torchpaged.engine.outputs import GeneratorStats
from torchpaged.engine.packed_steps import PackedSteps
from torchpaged.engine.request_blocks import leave_arrival
from torchpaged.engine.scheduler import Scheduler
from torchpaged.engine.sequence import Sequence
from torchpaged.engine.start import LateCompiles
from torchpaged.engine.step_graphs import PrefillGraphs
from torchpaged.graphs.capture import EagerCapture
from torchpaged.prefixes import AutomaticPrefixes
from torchpaged.profiling import range as profile_range


class Stepper:
    """Steps of one model.

    Args:
        model: the paged model.
        scheduler: which requests run, and with which blocks.
        loop: the decode loop; None to decode without graphs.
        watch: of the model, as it was before ``loop`` was captured.
        rows: of the engine.
        prefill_graphs: of prefills; None: all are launched from Python.
        prefixes: finds the groups of decode steps without a loop; None: no groups.
        mixes: decodes and chunks run in one pass.

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
        rows: DecodeRows,
        prefill_graphs: PrefillGraphs | None = None,
        prefixes: AutomaticPrefixes | None = None,
        mixes: bool = False,
    ) -> None:
        self._model, self._scheduler, self._loop, self._watch = model, scheduler, loop, watch
        watch.each_step = loop is None or isinstance(loop.runner.capture_backend, EagerCapture)
        self.requests: dict[int, Sequence] = {}
        self._bisection: FaultBisection | None = None  # after a step that raised
        self._is_at_work = False  # what breaks off now is lost: rows, tokens in flight, blocks
        self._limited_for: list[Sequence] = []  # while one of them lives, steps take fewer requests
        self._owner = CacheOwner(model.kv_cache, self.requests)
        self.stats = GeneratorStats(scheduler.pool.num_usable, queue=scheduler.queue)
        if scheduler.prefixes is not None:
            self.stats.prefix_cache = scheduler.prefixes.stats
            if scheduler.prefixes.host is not None:
                scheduler.prefixes.host.recompute_seconds = self.stats.prefill_seconds_per_token
        self._packed = PackedSteps(model, rows, prefill_graphs, prefixes, from_rows=loop is not None)
        self._acceptor = Acceptor(self.requests, scheduler, loop, self.stats)
        parts = self._packed, self._acceptor, watch, self.stats
        on_gpu = torch.device(model.device).type == "cuda"
        self._steps = BatchSteps(scheduler, loop, *parts, on_gpu, mixes)
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
            self._steps.times.begin(sequence.submitted)  # none waited for tokens before
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
                and a request came since the last step, or this one runs the model's Python.
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
                self._steps.step()
        except Exception as raised:
            if self._is_at_work or self._watch.is_due:
                raise  # it could not be taken back, or it is about the model
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
        plan, found = self._steps.plan, list[Sequence]()
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
        self._is_at_work = True
        try:
            yield
        except BaseException:
            self.reset()
            raise
        self._is_at_work = False

    def reset(self) -> None:
        """Take every request back to its log after a step that broke off; nothing if none did. May itself
        break off, and be called again."""
        if not self._is_at_work:
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
        # What the device says late of a step may concern what that step wrote.
        self._scheduler.blocks.forget_prefixes("a step broke off")
        self._scheduler.reset(self.requests.values())
        if self._bisection is not None:
            group = self._bisection.group or ()
            self._scheduler.reset([one for one in group if one.request_id in self.requests])
        self._is_at_work = False
