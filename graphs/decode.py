"""DecodeGraphs: a decode step captured per batch bucket, and a second time for steps whose requests share
prefixes that are read once. `DecodeGraphRunner` loads batches from the host, the engine keeps its requests on
the device.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.graphs.bucketed import BucketedGraphs, BucketStep
from torchpaged.graphs.buckets import bucket_for, check_buckets, default_buckets, default_prefix_buckets
from torchpaged.graphs.capture import CaptureBackend, Captured
from torchpaged.graphs.step import StaticInputs, Step, decode_steps
from torchpaged.metadata import AttentionMetadata

T = TypeVar("T")


class StepInputs(StaticInputs, Protocol):
    """A decode step's own static inputs, ``(input_ids, metadata)``: `graphs.buffers.DecodeBuffers`, or
    rows kept on the device."""

    max_batch_size: int
    max_blocks_per_req: int
    block_size: int
    device: torch.device


class Prefixes(Protocol):
    """`torchpaged.prefixes.AutomaticPrefixes`: groups in tensors that never move."""

    def buffers(self, num_reqs: int, num_tokens: int, /) -> Any:
        """Those of batches of these sizes: an object with ``tensors()``, ``clear()``, and
        ``prepare(metadata)``, which gives the batch with them."""

    def update(
        self,
        num_reqs: int,
        num_tokens: int,
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        /,
    ) -> Any | None:
        """Write the groups of a batch into them; None where the batch is better off without."""


class DecodeGraphs(BucketedGraphs):
    """Graphs of a decode step.

    Args:
        inputs: its static inputs.
        step: ``step(input_ids [n] int64, metadata) -> [n, ...]``; must not read device values on the host.
        buckets: batch sizes to capture; None: `default_buckets`, and `default_prefix_buckets` of the second
            graphs.
        compile: run the step through ``torch.compile(fullgraph=True)``, once per bucket.
        prefixes: a `torchpaged.prefixes.AutomaticPrefixes`, for layers of `torchpaged.PagedAttention`, and no
            session that plans. None: one graph per bucket.
        options: as `BucketedGraphs` takes them.

    Attributes:
        prefix_graphs: the second graphs; None without ``prefixes``.
    """

    STEP, BUCKET = "decode step", "batch"

    def __init__(
        self,
        inputs: StepInputs,
        step: Step,
        *,
        buckets: Sequence[int] | None,
        compile: bool,
        capture: str | CaptureBackend = "auto",
        prefixes: Prefixes | None = None,
        **options: Any,
    ) -> None:
        session = options.get("session")
        if prefixes is not None and session is not None and session.plans:
            raise ArgumentError("prefixes", "None with a session that plans", "prefixes")
        most = inputs.max_batch_size
        sizes = check_buckets(default_buckets(most) if buckets is None else buckets, most)
        options |= {"buckets": sizes, "device": inputs.device}
        self._step = step
        steps = self._steps_of(step, sizes, compile, capture)
        super().__init__(
            inputs, steps, eager=functools.partial(self._whole, step), capture=capture, **options
        )
        self.prefix_graphs: PrefixGraphs | None = None
        if prefixes is not None:
            seconds = default_prefix_buckets(most) if buckets is None else sizes
            options |= {"buckets": seconds, "capture": self.capture_backend, "pool": self.pool}
            self.prefix_graphs = PrefixGraphs(self, prefixes, inputs, compile, **options)

    def _steps_of(
        self, step: Step, buckets: Sequence[int], compile: bool, capture: str | CaptureBackend
    ) -> Callable[[int], BucketStep]:
        steps = decode_steps(step, buckets, compile, capture)
        return lambda bucket: self._whole(steps(bucket), bucket)

    def _whole(self, step: Step, num_rows: int) -> BucketStep:
        """What a graph of ``num_rows`` rows holds."""
        return step

    def capture(self, buckets: Sequence[int] | None = None) -> None:
        """As `BucketedGraphs.capture`; then, of these buckets, the second graphs of those whose requests may
        come to share what pays."""
        super().capture(buckets)
        wanted = self.buckets if buckets is None else buckets
        self._use_second(lambda graphs: graphs.capture(graphs.can_pay(wanted)))

    def _use_second(self, use: "Callable[[PrefixGraphs], T]") -> T | None:
        """Use the second graphs, which captures some; None without them."""
        return None if self.prefix_graphs is None else use(self.prefix_graphs)

    def _graphs_for(
        self, bucket: int, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]
    ) -> BucketedGraphs:
        """The graphs to take for a batch of ``bucket``: the second ones, with its groups in their inputs,
        where that pays. Raises as `BucketedGraphs.capture` does."""
        pays = self._use_second(lambda graphs: graphs.find(bucket, block_tables, seq_lens))
        return self.prefix_graphs if pays and self.prefix_graphs is not None else self


class PrefixGraphs(BucketedGraphs):
    """The second graphs of a runner's buckets, captured when they can come to pay, or are first needed.

    Args:
        first: the runner; what is behind a replay, and a reset, is its business. Each of its buckets fits
            into one of these.
        prefixes: finds the groups.
        batch: the step's own inputs.
        compile, options: as for ``first``.
    """

    STEP, BUCKET = "decode step", "batch in groups"

    def __init__(
        self, first: DecodeGraphs, prefixes: Prefixes, batch: StepInputs, compile: bool, **options: Any
    ) -> None:
        step = first._step
        self._prefixes, self._batch, self.STILL_WORKS = prefixes, batch, first.STILL_WORKS

        def with_prefixes(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
            return step(input_ids, metadata.prefixes.prepare(metadata))

        steps = first._steps_of(with_prefixes, options["buckets"], compile, options["capture"])
        eager = functools.partial(first._whole, with_prefixes)
        super().__init__(_Inputs(batch, prefixes), steps, eager=eager, **options)
        self._first = first

    def _replay(self, graph: Captured) -> None:
        self._first._replay(graph)

    def can_pay(self, buckets: Sequence[int]) -> list[int]:
        """For the runner's ``buckets``, those in which it pays where all requests share all that they can
        hold: no other batch saves as much."""
        blocks = list(range(1, self._batch.max_blocks_per_req + 1))
        most = self._batch.max_blocks_per_req * self._batch.block_size
        sizes = sorted({bucket_for(self.buckets, n) for n in buckets})
        full = {n: self._prefixes.update(n, n, [blocks] * n, [1] * n, [most] * n) for n in sizes}
        return [n for n, groups in full.items() if groups is not None]

    def find(self, bucket: int, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]) -> bool:
        """Whether a batch of the runner's ``bucket`` is better off with these graphs, and its groups in their
        inputs then."""
        bucket = bucket_for(self.buckets, bucket)
        batch = bucket, bucket, block_tables, [1] * len(seq_lens), seq_lens
        if self._prefixes.update(*batch) is None:
            return False
        if not self.is_captured(bucket):
            self.capture_for(bucket)  # without groups
            self._prefixes.update(*batch)
        return True


class _Inputs:
    """`StaticInputs` of decode steps: ``(input_ids, metadata)``, with the groups as ``metadata.prefixes``."""

    def __init__(self, batch: StepInputs, prefixes: Prefixes) -> None:
        self._batch, self._prefixes = batch, prefixes
        self._seen: set[int] = set()
        self.reset = batch.reset

    def tensors(self) -> dict[str, Tensor]:
        """By name: those of the batch, and of the prefix groups of every size that was viewed."""
        found = dict(self._batch.tensors())
        for size in sorted(self._seen):
            groups = self._prefixes.buffers(size, size).tensors()
            found |= {f"prefixes[{size}].{name}": tensor for name, tensor in groups.items()}
        return found

    def view(self, bucket: int) -> tuple[Any, ...]:
        """The step's arguments."""
        self._seen.add(bucket)
        input_ids, metadata = self._batch.view(bucket)
        return input_ids, replace(metadata, prefixes=self._prefixes.buffers(bucket, bucket))

    @contextmanager
    def padding(self, bucket: int) -> Iterator[None]:
        """Padding is in no group; the groups are written anew afterwards, if the batch has any."""
        self._prefixes.buffers(bucket, bucket).clear()
        with self._batch.padding(bucket):
            yield
