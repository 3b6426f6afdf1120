"""The own contenders of the decode-step benchmark: a paged model captured per batch, with whole steps in the
graph or without.

A contender's name says what runs: ``k4+fuse+compile`` is four whole steps per launch (model, sampling,
bookkeeping) of the fused model through torch.compile; ``logits`` is the model alone, one step per launch,
without sampling. `ours` builds one.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode_step.gate import STEPS, Reference, verdict
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.decode_loop import DecodeLoop, decode_rows
from torchpaged.engine.device import RowState, WholeStepRunner
from torchpaged.engine.outputs import TextStream
from torchpaged.engine.sampling import SamplingParams
from torchpaged.engine.sequence import Sequence as Request
from torchpaged.graphs import DecodeGraphRunner
from torchpaged.graphs.buffers import DecodeBatch
from torchpaged.metadata import AttentionMetadata

_NAME = re.compile(r"(logits|k[1-9][0-9]*)(\+fuse)?(\+compile|\+layers)?")


@dataclass(frozen=True)
class Variant:
    """What a contender's name says.

    Attributes:
        name: ``logits`` or ``k1``, ``k2`` ..., then ``+fuse``, then ``+compile`` or ``+layers``.
        steps_per_launch: whole steps per launch; 0 = the model alone, without sampling.
        fuse: whether the model went through `torchpaged.hf.fuse`.
        compile: "" = as it is, "compile" = torch.compile of the whole step, "layers"
            = `torchpaged.hf.compile_layers`.
    """

    name: str
    steps_per_launch: int
    fuse: bool
    compile: str

    @classmethod
    def parse(cls, name: str) -> Variant:
        """The variant of that name; raises ArgumentError."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ArgumentError(
                "only", "names such as logits, k1, k4+fuse, k1+fuse+compile, k1+layers", repr(name)
            )
        kind, fuse, how = match.groups()
        return cls(name, 0 if kind == "logits" else int(kind[1:]), fuse is not None, (how or "").lstrip("+"))


class OwnStep:
    """One contender over one paged model: ``capture`` a batch, ``load`` requests, ``replay``.

    Args:
        model: `torchpaged.hf.PagedModel`; its pools must hold ``max(batches)`` requests of ``blocks_per_row``
            blocks.
        variant: what to build. ``variant.fuse`` and "layers" are properties of ``model``, which the caller
            has prepared.
        batches: batch sizes, a bucket each.
        blocks_per_row: blocks of a request.
    """

    def __init__(self, model: Any, variant: Variant, batches: Sequence[int], blocks_per_row: int) -> None:
        self.model, self.device, self.variant = model, torch.device(model.device), variant
        self.steps = max(1, variant.steps_per_launch)
        most, compile = max(batches), variant.compile == "compile"
        blocks = random.Random(0).sample(range(1, model.kv_cache.num_blocks), most * blocks_per_row)
        self.tables = [blocks[row * blocks_per_row : (row + 1) * blocks_per_row] for row in range(most)]
        self.loop: DecodeLoop | None = None
        self._step: Callable[[Tensor, AttentionMetadata], Tensor] = lambda input_ids, metadata: model(
            input_ids, metadata, None
        )
        if variant.steps_per_launch:
            rows = decode_rows(model, most, blocks_per_row, self.steps)
            self.loop = DecodeLoop(model, rows, buckets=batches, compile=compile)
            self.runner: WholeStepRunner | DecodeGraphRunner = self.loop.runner
        else:
            self.runner = self._host_runner = DecodeGraphRunner(
                self._step,
                max_batch_size=most,
                max_blocks_per_req=blocks_per_row,
                block_size=model.kv_cache.block_size,
                num_blocks=model.kv_cache.num_blocks,
                buckets=batches,
                device=self.device,
                compile=compile,
            )

    # ------------------------------------------------------------------------------------------------ capture
    def capture(self, batch: int) -> dict[str, Any]:
        """Warm up, capture, replay once.

        Returns:
            ``ready_s``, seconds until the first replay was done, compilation included;
            ``warmup_and_capture_ms`` and ``capture_ms`` as the runner reports them; ``reserved_mib`` and
            ``device_mib``, what torch reserved and what the device had less of afterwards.
        """
        started = time.perf_counter()
        with torch.inference_mode(), self.runner.inputs.padding(batch):
            # loads kernels, which would count as the capture's memory otherwise
            self._step(*self.runner.inputs.view(batch))
        before = self._memory()
        self.runner.capture_for(batch)
        after = self._memory()
        report = next(report for report in self.runner.report() if report.bucket == batch)
        self.load([1] * batch, [1] * batch)
        self.replay(batch)
        self.synchronize()
        return {
            "ready_s": time.perf_counter() - started,
            "warmup_and_capture_ms": report.capture_ms,
            "capture_ms": report.record_ms,
            "reserved_mib": (after[0] - before[0]) / 2**20,
            "device_mib": (after[1] - before[1]) / 2**20,
        }

    def _memory(self) -> tuple[int, int]:
        """Bytes that torch has reserved, and bytes of the device in use."""
        if self.device.type != "cuda":
            return 0, 0
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(self.device)
        return torch.cuda.memory_reserved(self.device), total - free

    # ------------------------------------------------------------------------------------------------ steps
    def load(self, input_ids: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Requests into the first rows: newest token, and tokens with that one included. Greedy, without an
        end token."""
        if self.loop is not None:
            states = {
                row: RowState(token, length, self.tables[row], seed=row, counter=0, remaining=1 << 30)
                for row, (token, length) in enumerate(zip(input_ids, seq_lens, strict=True))
            }
            with torch.inference_mode():
                idle = [row for row in range(self.loop.rows.max_batch_size) if row not in states]
                self.loop.rows.clear(idle)
                self.loop.rows.write(states)
            return
        bucket = next(n for n in self.runner.buckets if n >= len(seq_lens))
        with torch.inference_mode():
            batch = DecodeBatch(input_ids, seq_lens, self.tables[: len(seq_lens)])
            self._host_runner.buffers.put(batch, bucket)

    def replay(self, batch: int) -> Tensor:
        """Start one launch of ``batch`` rows."""
        return self.runner.replay(batch)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ------------------------------------------------------------------------------------------------ gate
    @torch.inference_mode()
    def check(self, reference: Reference, batch: int) -> dict[str, Any]:
        """Prefill through the model, then teacher-forced launches of the captured
        graph: `decode_step.gate.verdict`.

        The graph's first token of each launch is checked; the logits are the graph's own, or, where the graph
        ends in a token, those of the same step run without it.
        """
        rows = min(batch, len(reference.prompt_lens))
        lens, tokens = reference.prompt_lens[:rows], reference.tokens[:rows]
        metadata = AttentionMetadata.from_lists(
            lens,
            lens,
            self.tables[:rows],
            block_size=self.model.kv_cache.block_size,
            num_blocks=self.model.kv_cache.num_blocks,
            device=self.device,
        )
        packed = torch.cat([tokens[row, :length] for row, length in enumerate(lens)])
        last = torch.tensor(lens).cumsum(0) - 1
        self.model(packed.to(self.device), metadata, last.to(self.device))
        logits, chosen = [], []
        for step in range(STEPS):
            self.load(
                [int(tokens[row, length + step]) for row, length in enumerate(lens)],
                [length + step + 1 for length in lens],
            )
            if self.loop is None:
                out = self.replay(batch)[:rows].clone()
                chosen.append(out.argmax(-1))
            else:
                out = self._step(*self.runner.inputs.view(batch))[:rows].clone()
                chosen.append(self.replay(batch)[0, :rows].clone())
            logits.append(out)
        return verdict(reference, torch.stack(logits, 1).float(), torch.stack(chosen, 1))

    # ------------------------------------------------------------------------------------------------ host
    def host_us(self, batch: int, launches: int) -> list[float]:
        """Host microseconds of each of ``launches`` replays. At most two are under way: a full launch queue
        would make the host wait."""
        times = []
        for launch in range(launches):
            if launch % 2 == 0:
                self.synchronize()
            start = time.perf_counter()
            self.replay(batch)
            times.append((time.perf_counter() - start) * 1e6)
        self.synchronize()
        return times

    def run_loop(self, batch: int, context: int, launches: int) -> list[float]:
        """``launches`` launches as the engine makes them: launch, then read the tokens of the launch before.

        Returns:
            Host microseconds of each launch call, the reading left out. Of ``logits`` contenders: `host_us`.
        """
        loop = self.loop
        if loop is None:
            return self.host_us(batch, launches)
        room = context + launches * self.steps + 1
        requests = [
            Request(
                row,
                [1] * context,
                SamplingParams(max_new_tokens=room, ignore_eos=True),
                row,
                TextStream(None, ()),
                room,
                blocks=blocks,
            )
            for row, blocks in enumerate(self.tables[:batch])
        ]
        for request in requests:
            loop.place(request)
        times = []
        with torch.inference_mode():
            for _ in range(launches):
                start = time.perf_counter()
                loop.launch()
                times.append((time.perf_counter() - start) * 1e6)
                for launch, tokens, _ in loop.launches.collect(keep=1):
                    for request, *column in zip(launch.columns, *tokens, strict=True):
                        if request is not None:
                            request.tokens.extend(column)
                            request.steps_read += launch.num_steps
            loop.launches.collect()
        for request in requests:
            loop.release(request)
        return times


def ours(model: Any, variant: Variant, batches: Sequence[int], blocks_per_row: int) -> OwnStep:
    """The contender of a variant: the one place that knows how the library runs a decode step."""
    return OwnStep(model, variant, batches, blocks_per_row)
