"""BatchSteps: the running requests of a continuous batch, moved on by one step.

With a `DecodeLoop`, a step starts a launch of whole decode steps for all running requests, or, where prompts
wait, one pass over a token of each of these and a chunk of the prompts; then it reads the tokens of the step
before. Without, it decodes and prefills in one pass, samples and reads. Tokens are the same.
"""

import time
from functools import partial

import torch

from torchpaged.engine.acceptor import Acceptor
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.model_watch import ModelWatch
from torchpaged.engine.outputs import GeneratorStats
from torchpaged.engine.packed_steps import PackedSteps
from torchpaged.engine.scheduler import Schedule, Scheduler
from torchpaged.engine.sequence import Sequence
from torchpaged.engine.step_times import StepTimes
from torchpaged.profiling import range as profile_range


class BatchSteps:
    """What one step does.

    Args:
        scheduler: which requests run, and with which blocks.
        loop: the decode loop; None to decode without graphs.
        packed: passes over prompts, and over decodes without a loop.
        acceptor: takes the tokens.
        watch: of the model.
        stats: counters.
        on_gpu: launches return at once.
        mixes: decodes and chunks run in one pass.

    Attributes:
        plan: of the last step; None: it did not come so far.
        times: how long steps take.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        loop: DecodeLoop | None,
        packed: PackedSteps,
        acceptor: Acceptor,
        watch: ModelWatch,
        stats: GeneratorStats,
        on_gpu: bool,
        mixes: bool,
    ) -> None:
        self._scheduler, self._loop, self._watch = scheduler, loop, watch
        self._stats, self._mixes = stats, mixes
        self._packed, self._acceptor, self._launches_return_at_once = packed, acceptor, on_gpu
        self.plan: Schedule | None = None
        self._plan_before: Schedule | None = None  # the one before, until the device has work
        self.times = StepTimes(stats, scheduler.budget, on_gpu and loop is not None)

    def step(self) -> None:
        """One step of the whole batch."""
        started, loop = time.perf_counter(), self._loop
        tokens_before, steps_before = self._stats.new_tokens, 0 if loop is None else loop.launches.steps_read
        self._acceptor.first_tokens = self._acceptor.decoded = 0
        asked = self._scheduler.ask()
        if loop is not None and loop.launches and self._scheduler.short_of_blocks(asked):
            self._collect(loop, keep=0)  # a request may be preempted; read its tokens first
            asked = self._scheduler.ask()
        with profile_range("admission", waiting=len(self._scheduler.waiting)):
            # Freed later: requests that ended with it have a list of their prompt's ids.
            self._plan_before, self.plan = self.plan, None
            self.plan = plan = self._scheduler.schedule(asked)
        if loop is not None:
            for sequence in plan.put_back:
                loop.release(sequence)
        decode_seconds = None
        if plan.decodes or plan.chunks:
            advance = self._advance if loop is None else partial(self._launch, loop)
            decode_seconds = advance(plan)
        elif loop is not None:
            self._collect(loop, keep=0)
        self._plan_before = None
        decoded = len(plan.decodes) if loop is None else self._acceptor.decoded
        prefilled = sum(count for _, count in plan.chunks)
        now = time.perf_counter()
        seconds = now - started
        steps_read = 1 if loop is None else loop.launches.steps_read - steps_before
        tokens = self._stats.new_tokens - tokens_before
        self.times.note_tokens(now, tokens, self._acceptor.first_tokens, steps_read)
        self.times.note_wait(seconds, prefilled if plan.decodes else 0)
        if decoded or prefilled:
            self._stats.add_step(seconds, decode_seconds, decoded, prefilled)
            self._stats.preemptions = self._scheduler.preemptions
            self._stats.swapped = self._scheduler.swapped
            self._stats.peak_blocks_used = self._scheduler.pool.peak_used

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
            decoding = loop.decoding() if self._mixes else []
            started = self._prefill(loop, plan, decoding)
        self._watch.in_step()
        between = time.perf_counter()
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
            self._watch.in_step(in_python=True)
        logits = self._packed.prefill(plan.chunks, decoding)
        self._stats.add_pass(bool(decoding))
        for sequence, count in plan.chunks:
            sequence.num_computed += count
            self._scheduler.blocks.computed(sequence)
        if decoding or done:
            loop.finish_packed([*decoding, *done], logits, self._packed.end)
        return bool(decoding or done)

    def _start(self, loop: DecodeLoop) -> bool:
        started = loop.launch()
        self._stats.passes += loop.steps_per_launch if started else 0
        return started

    def _collect(self, loop: DecodeLoop, keep: int) -> None:
        for launch, steps, records in loop.launches.collect(keep):
            self._acceptor.accept_launch(launch, steps, records)

    def _advance(self, plan: Schedule) -> float | None:
        """Decode, prefill, sample and read: a step without graphs; returns as `_launch` does."""
        logits, drawn, started = [], [], time.perf_counter()
        rows = [*plan.decodes, *(sequence for sequence, count in plan.chunks if count == sequence.remaining)]
        mixed = plan.decodes if self._mixes and plan.chunks else []
        if plan.decodes and not mixed:
            logits.append(self._packed.decode(plan.decodes))
            self._stats.add_pass()
        decode_seconds = None if mixed or self._launches_return_at_once else time.perf_counter() - started
        if plan.chunks:
            logits.append(self._packed.prefill(plan.chunks, mixed))
            self._stats.add_pass(bool(mixed))
        if rows:
            drawn = self._packed.sample(torch.cat(logits) if len(logits) > 1 else logits[0], rows)
        for sequence in plan.decodes:
            sequence.num_computed += 1
        for sequence, count in plan.chunks:
            sequence.num_computed += count
            self._scheduler.blocks.computed(sequence)
        for sequence, (token, logprobs) in zip(rows, drawn, strict=True):
            self._acceptor.accept(sequence, token, logprobs)
        return decode_seconds
