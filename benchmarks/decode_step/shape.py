"""One model shape of the decode-step benchmark: every contender and batch becomes a row, whatever happens
to it.

Order: own contenders whose model is changed (fused, or its layers compiled), each such group on a fresh model
with the same weights, then own
ones on the plain model, and peers on the same one: a run that is cut short in a peer has ours. Contenders of
a group share the KV pools.
"""

import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attention_peers.case import free_memory

from decode_step import trace as step_trace
from decode_step.cases import TARGETS_MS, ModelShape, build_model
from decode_step.gate import MAX_ROWS, Reference, make_reference
from decode_step.options import BLOCK_SIZE, DTYPES, Options
from decode_step.own import OwnStep, Variant, ours
from decode_step.peers import PEERS
from decode_step.screen import StepScreen

BURST_STEPS = 16  # timed between two resets of the requests' lengths
HOST_LAUNCHES = 20


class Shape:
    """A shape's rows, as they are measured. ``bandwidth``: bytes per second; ``started``: when the run began,
    for the time limit."""

    def __init__(
        self,
        shape: ModelShape,
        options: Options,
        variants: Sequence[Variant],
        device: torch.device,
        bandwidth: float,
        screen: StepScreen,
        started: float,
    ) -> None:
        self.shape, self.options, self.variants, self.device = shape, options, variants, device
        self.bandwidth, self.screen, self.started = bandwidth, screen, started
        self.batches, self.dtype = sorted(set(options.batches)), DTYPES[options.dtype]
        most_steps = max((variant.steps_per_launch for variant in variants), default=0)
        longest = (
            options.context + max(options.idle_steps, HOST_LAUNCHES * most_steps) + most_steps + BURST_STEPS
        )
        self.blocks_per_row = max(-(-longest // BLOCK_SIZE), 8)  # 8: for the gate

    # ------------------------------------------------------------------------------------------------ in turn
    def rows(self) -> Iterator[dict[str, Any]]:
        """A row per contender and batch."""
        groups: dict[tuple[bool, bool], list[Variant]] = {(False, False): []}
        for variant in self.variants:
            groups.setdefault((variant.fuse, variant.compile == "layers"), []).append(variant)
        peers = [name for name in self.options.peers if name not in self.options.skip]
        reference: Reference | None = None
        for (fused, layers), variants in sorted(groups.items(), reverse=True):
            plain = not fused and not layers
            try:
                self.screen.note(f"{self.shape.name}: making the weights")
                model = build_model(self.shape, self.device, self.dtype)
                if reference is None and self.variants:
                    self.screen.note(f"{self.shape.name}: float32 reference")
                    reference = make_reference(model, min(MAX_ROWS, max(self.batches)))
                free_memory(self.device)
            except Exception as error:
                yield from self._all_failed([v.name for v in variants] + (peers if plain else []), error)
                continue
            if variants and reference is not None:
                yield from self._own(model, variants, reference, fused, layers)
                torch.compiler.reset()  # compiled steps keep their pools alive
                free_memory(self.device)
            # the smallest and the largest batch first: minutes may pass in a peer's compiler, and a time
            # limit cuts the others
            for name, batch in itertools.product(
                peers if plain else [], sorted(self.batches, key=self.batches[1:-1].__contains__)
            ):
                yield self._peer(model, name, batch)
            del model
            free_memory(self.device)

    def _own(
        self, model: Any, variants: Sequence[Variant], reference: Reference, fused: bool, layers: bool
    ) -> Iterator[dict[str, Any]]:
        """The own contenders of one group, over one paged model."""
        begun = time.perf_counter()
        try:
            paged = self._paged(model, fused, layers)
        except Exception as error:
            yield from self._all_failed([variant.name for variant in variants], error)
            return
        prepared = time.perf_counter() - begun
        for variant in variants:
            yield from self._variant(paged, variant, reference, prepared)
            free_memory(self.device)

    def _paged(self, model: Any, fused: bool, layers: bool) -> Any:
        """``model`` changed as asked, over pools of random keys and values."""
        from torchpaged.fuse import fuse
        from torchpaged.hf import PagedModel, compile_layers

        if fused:
            fuse(model, count=False)
        if layers:
            compile_layers(model)
        num_blocks = max(self.batches) * self.blocks_per_row + 1
        paged = PagedModel(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, backend=self.options.backend)
        for pools in paged.kv_cache:
            for pool in pools[:2]:
                pool.normal_()
        return paged

    def _variant(
        self, paged: Any, variant: Variant, reference: Reference, prepare_s: float
    ) -> Iterator[dict[str, Any]]:
        """A contender: all batches captured, the largest first as the engine does it, then measured one
        by one."""
        entries: dict[int, dict[str, Any]] = {
            batch: self._row(variant.name, batch) | {"prepare_s": prepare_s} for batch in self.batches
        }
        own: OwnStep | None = None
        for batch in reversed(self.batches):
            entry = entries[batch]
            self.screen.note(f"{entry['case']}: capturing")
            if self._late(entry):
                continue
            try:
                if own is None:
                    own = ours(paged, variant, self.batches, self.blocks_per_row)
                entry |= {"backend": paged.choice.name, "steps_per_launch": own.steps} | own.capture(batch)
            except Exception as error:
                entry |= _failure(error)
        for batch, entry in entries.items():
            self.screen.step(f"{entry['case']}: timing")
            if own is not None and "status" not in entry and not self._late(entry):
                try:
                    self._measure(own, batch, entry, reference)
                except Exception as error:
                    entry |= _failure(error)
            yield entry

    def _measure(self, own: OwnStep, batch: int, entry: dict[str, Any], reference: Reference) -> None:
        """Fill in a row: gate, time per step, host, kernels, idle."""
        entry |= own.check(reference, batch)
        entry["status"] = "wrong" if "reason" in entry else "timed"
        if entry["status"] == "wrong" and not self.options.time_wrong:
            return
        entry |= self._time(own, batch)
        context, steps = self.options.context, own.steps
        self._load(own, batch)
        entry["host_replay_us"] = statistics.median(own.host_us(batch, HOST_LAUNCHES))
        entry["host_launch_us"] = statistics.median(own.run_loop(batch, context, HOST_LAUNCHES))
        entry["host_after_trace"] = step_trace.has_recorded()
        if not self.options.trace:
            return
        self._load(own, batch)
        entry |= step_trace.kernels_per_step(
            step_trace.record(lambda: own.replay(batch), self.device), self.shape.num_layers, steps
        )
        if self._wants_idle(own.variant.name, batch):
            launches = max(2, self.options.idle_steps // steps)
            if own.loop is None:
                self._load(own, batch)
            trace = step_trace.record(lambda: own.run_loop(batch, context, launches), self.device)
            entry |= step_trace.idle(trace) | {"idle_steps": launches * steps}

    def _wants_idle(self, name: str, batch: int) -> bool:
        names = self.options.idle_only or [variant.name for variant in self.variants[-1:]]
        batches = self.options.idle_batches or (self.batches[0], self.batches[-1])
        return (
            self.options.idle_steps > 0 and self.device.type == "cuda" and name in names and batch in batches
        )

    def _load(self, own: OwnStep, batch: int) -> None:
        own.load([1 + row for row in range(batch)], [self.options.context] * batch)

    def _time(self, own: OwnStep, batch: int) -> dict[str, Any]:
        """Milliseconds per step over bursts of replays queued back to back; the first replay of a burst is
        not counted."""
        launches, samples = max(1, BURST_STEPS // own.steps), []
        for _ in range(-(-self.options.repeats // (launches * own.steps))):
            self._load(own, batch)
            samples += _burst(lambda: own.replay(batch), launches, self.device)
        per_step = [ms / own.steps for ms in samples]
        cuts = statistics.quantiles(per_step, n=5, method="inclusive") if len(per_step) > 1 else per_step * 4
        return self._figures(batch, statistics.median(per_step)) | {
            "p20_ms": cuts[0],
            "p80_ms": cuts[3],
            "samples": len(per_step),
        }

    # ------------------------------------------------------------------------------------------------ rows
    def _row(self, contender: str, batch: int) -> dict[str, Any]:
        read = self.shape.bytes_read(batch, self.options.context, self.dtype.itemsize)
        return {
            "case": f"{self.shape.name} b{batch} {contender}",
            "shape": self.shape.name,
            "batch": batch,
            "context": self.options.context,
            "contender": contender,
            "own": contender not in PEERS,
            "roofline_ms": read / self.bandwidth * 1e3,
            "target_ms": TARGETS_MS.get((self.shape.name, batch))
            if (self.options.context, self.options.dtype) == (2048, "bf16")
            else None,
        }

    def _figures(self, batch: int, ms: float) -> dict[str, Any]:
        roofline = (
            self.shape.bytes_read(batch, self.options.context, self.dtype.itemsize) / self.bandwidth * 1e3
        )
        return {"ms": ms, "of_roofline": roofline / ms, "tokens_per_s": batch / ms * 1e3}

    def _peer(self, model: Any, name: str, batch: int) -> dict[str, Any]:
        entry = self._row(name, batch)
        self.screen.step(f"{entry['case']}: timing")
        if self._late(entry):
            return entry
        try:
            result = PEERS[name](model, batch, self.options.context, self.options.new_tokens)
            entry |= result | self._figures(batch, result["ms"]) | {"status": "timed"}
        except Exception as error:
            entry |= _failure(error)
        free_memory(self.device)
        return entry

    def _all_failed(self, names: Sequence[str], error: Exception) -> Iterator[dict[str, Any]]:
        for name, batch in itertools.product(names, self.batches):
            self.screen.step("")
            yield self._row(name, batch) | _failure(error)

    def _late(self, entry: dict[str, Any]) -> bool:
        """Whether the time limit is over; the row then says so."""
        limit = self.options.time_limit
        late = limit is not None and time.perf_counter() - self.started > limit
        if late:
            entry |= {"status": "skipped", "reason": f"the time limit of {limit} s was over"}
        return late


def _burst(replay: Callable[[], Any], launches: int, device: torch.device) -> list[float]:
    """Milliseconds of each of ``launches`` replays behind an untimed one."""
    replay()
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(launches + 1)]
        marks[0].record()
        for mark in marks[1:]:
            replay()
            mark.record()
        torch.cuda.synchronize(device)
        return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
    times = [time.perf_counter()]
    for _ in range(launches):
        replay()
        times.append(time.perf_counter())
    return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]


def _failure(error: Exception) -> dict[str, Any]:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "status": "failed",
        "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:400]} "
        f"({where.name}:{where.lineno})",
    }
