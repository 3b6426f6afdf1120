"""Stepper: the requests of a continuous batch, moved on one step at a time.

    stepper.add(sequence)
    while stepper.has_unfinished:
        for event in stepper.step(): ...

With a `DecodeLoop`, a step starts a launch of whole decode steps for all running requests, prefills a chunk of the waiting ones, and
reads the tokens of the launch before. Without, it decodes, prefills, samples and reads. Tokens are the same.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.packed_steps import PackedSteps
from torchpaged.engine.prefill_graphs import PrefillGraphs
from torchpaged.engine.scheduler import Scheduler, Step
from torchpaged.engine.sequence import Sequence, TokenEvent
from torchpaged.engine.stats import GeneratorStats
from torchpaged.profiling import range as profile_range


class Stepper:
    """Steps of one model.

    Args:
        model: the paged model.
        scheduler: who runs, and with which blocks.
        loop: the decode loop; None to decode without graphs.
        prefill_graphs: of prefills; None: all are launched from Python.

    Attributes:
        requests: by id, those that wait or run.
        stats: counters.
    """

    def __init__(
        self, model: PagedModelProtocol, scheduler: Scheduler, loop: DecodeLoop | None, prefill_graphs: PrefillGraphs | None = None
    ) -> None:
        self._model, self._scheduler, self._loop = model, scheduler, loop
        self._packed = PackedSteps(model, scheduler.max_batch_size, prefill_graphs)
        self._events: list[TokenEvent] = []  # of requests that ended between steps
        self._launches_return_at_once = torch.device(model.device).type == "cuda"
        self.requests: dict[int, Sequence] = {}
        self.stats = GeneratorStats(num_blocks=scheduler.pool.num_usable)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.waiting or self._scheduler.running or self._events)

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        self.requests[sequence.request_id] = sequence
        self._scheduler.add(sequence)
        self.stats.prompt_tokens += len(sequence.prompt)

    def withdraw(self, request_id: int) -> None:
        """Take back a request that no step has seen, as if it had not been added."""
        sequence = self.requests.pop(request_id)
        self._scheduler.remove(sequence)
        self.stats.prompt_tokens -= len(sequence.prompt)

    def cancel(self, request_id: int) -> None:
        """End a request now; the event comes with the next step."""
        sequence = self.requests.get(request_id)
        if sequence is None:
            raise ArgumentError("request_id", "a request that is waiting or running", str(request_id))
        self._events.append(self._finish(sequence, None, "cancelled"))

    def step(self) -> list[TokenEvent]:
        """One step of the whole batch; returns what happened."""
        with profile_range("step", self.stats.steps), torch.inference_mode():
            return self._step()

    def _step(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        started, loop = time.perf_counter(), self._loop
        if loop is not None and loop.in_flight and self._scheduler.short_of_blocks():
            events += self._collect(loop, keep=0)  # somebody may be put back: his tokens must be known
        with profile_range("admission", waiting=len(self._scheduler.waiting)):
            plan = self._scheduler.schedule()
        if loop is not None:
            for sequence in plan.put_back:
                loop.release(sequence)
        between, read_before = started, 0 if loop is None else loop.decoded
        if plan.decodes or plan.chunks:
            advance = self._advance if loop is None else partial(self._launch, loop)
            more, between = advance(plan)
            events += more
        elif loop is not None:
            events += self._collect(loop, keep=0)
        decoded, prefilled = len(plan.decodes) if loop is None else loop.decoded - read_before, sum(count for _, count in plan.chunks)
        if decoded or prefilled:
            decode_seconds = None if self._launches_return_at_once else between - started
            self.stats.add_step(time.perf_counter() - started, decode_seconds, decoded, prefilled)
            self.stats.preemptions, self.stats.peak_blocks_used = self._scheduler.preemptions, self._scheduler.pool.peak_used
        return events

    def _launch(self, loop: DecodeLoop, plan: Step) -> tuple[list[TokenEvent], float]:
        """Prefill, start a launch, read the one before."""
        loop.blocks_added |= plan.blocks_added  # first: a prefill that raises must not make the next launch go without
        for sequence in plan.decodes:
            if sequence.row is None:
                loop.place(sequence)
        if plan.chunks:
            done = [sequence for sequence, count in plan.chunks if count == sequence.remaining]
            logits = self._packed.prefill(plan.chunks)
            with loop.bookkeeping():
                for sequence, count in plan.chunks:
                    sequence.num_computed += count
                if done:
                    loop.finish_prefill(done, logits)
        between = time.perf_counter()
        launched = loop.launch()
        return self._collect(loop, keep=1 if launched else 0), between

    def _collect(self, loop: DecodeLoop, keep: int) -> list[TokenEvent]:
        events = []
        loop.wait(keep)
        with loop.bookkeeping():
            for sequence, tokens in loop.read(keep):
                for token in tokens:
                    if sequence.finish_reason is None:  # what a row produced after a stop that only the host could see is dropped
                        events.append(self._accept(sequence, token))
                        sequence.num_computed = len(sequence) - 1
        return events

    def _advance(self, plan: Step) -> tuple[list[TokenEvent], float]:
        """Decode, prefill, sample and read: a step without graphs."""
        logits, rows = [], []
        if plan.decodes:
            logits.append(self._packed.decode(plan.decodes))
            rows += plan.decodes
        between = time.perf_counter()
        if plan.chunks:
            rows += [sequence for sequence, count in plan.chunks if count == sequence.remaining]
            logits.append(self._packed.prefill(plan.chunks))
        for sequence, count in [*((s, 1) for s in plan.decodes), *plan.chunks]:
            sequence.num_computed += count
        if not rows:
            return [], between
        tokens = self._packed.sample(torch.cat(logits) if len(logits) > 1 else logits[0], rows)
        return [self._accept(sequence, token) for sequence, token in zip(rows, tokens, strict=True)], between

    def _accept(self, sequence: Sequence, token: int) -> TokenEvent:
        """Add a sampled token; end the request if it is its last."""
        sequence.output.append(token)
        self.stats.new_tokens += 1
        params = sequence.sampling
        if token in params.stop_token_ids or (token in self._model.eos_token_ids and not params.ignore_eos):
            return self._finish(sequence, token, "stop")
        text = sequence.stream.push(token)
        sequence.text += text
        if sequence.stream.stopped:
            return self._finish(sequence, token, "stop", text)
        if len(sequence) >= sequence.max_len:
            return self._finish(sequence, token, "length", text)
        return TokenEvent(sequence.request_id, token, text)

    def _finish(self, sequence: Sequence, token: int | None, reason: str, text: str = "") -> TokenEvent:
        rest = sequence.stream.flush()
        sequence.text += rest
        sequence.finish_reason = reason
        if self._loop is not None:
            self._loop.release(sequence)
        self._scheduler.remove(sequence)
        del self.requests[sequence.request_id]
        return TokenEvent(sequence.request_id, token, text + rest, reason)
