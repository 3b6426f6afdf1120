"""The second graphs of a runner's buckets: of decode steps whose requests share prefixes that are read
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.graphs.bucketed import BucketedGraphs, StaticInputs
from torchpaged.graphs.step import Step, StepSession
from torchpaged.metadata import AttentionMetadata


class StepInputs(StaticInputs, Protocol):
    """A decode step's own static inputs, ``(input_ids, metadata)``: `graphs.buffers.DecodeBuffers`, or
    rows kept on the device."""

    max_blocks_per_req: int
    block_size: int


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


class PrefixGraphs:
    """Captured when they can come to pay, or are first needed, and taken for the steps in which they do.

    Args:
        prefixes: finds the groups.
        batch: the step's own inputs.
        step: the step.
        make: ``make(inputs, step)`` gives the graphs of a step over further inputs.

    Attributes:
        graphs: one per bucket.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        batch: StepInputs,
        step: Step,
        make: Callable[[StaticInputs, Step], BucketedGraphs],
    ) -> None:
        self._prefixes, self._batch = prefixes, batch

        def with_prefixes(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
            return step(input_ids, metadata.prefixes.prepare(metadata))

        self.graphs = make(_Inputs(batch, prefixes), with_prefixes)

    def capture(self, buckets: Sequence[int]) -> None:
        """Capture those of ``buckets`` in which it pays where all requests share all that they can hold: no
        other batch saves as much."""
        blocks = list(range(1, self._batch.max_blocks_per_req + 1))
        most = self._batch.max_blocks_per_req * self._batch.block_size
        full = {n: self._prefixes.update(n, n, [blocks] * n, [1] * n, [most] * n) for n in buckets}
        self.graphs.capture([n for n, groups in full.items() if groups is not None])

    def find(
        self, bucket: int, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]
    ) -> BucketedGraphs | None:
        """The graphs to take for a step of ``bucket``, with its groups in their inputs; None: the plain ones.
        Raises as `BucketedGraphs.capture` does."""
        batch = bucket, bucket, block_tables, [1] * len(seq_lens), seq_lens
        if self._prefixes.update(*batch) is None:
            return None
        if not self.graphs.is_captured(bucket):
            self.graphs.capture_for(bucket)  # without groups
            self._prefixes.update(*batch)
        return self.graphs


def require_no_plans(prefixes: Prefixes | None, session: StepSession | None) -> None:
    """Refuse ``prefixes`` with a session whose plans know nothing of the groups."""
    if prefixes is not None and session is not None and session.plans:
        raise ArgumentError("prefixes", "None with a session that plans", "prefixes")


class _Inputs:
    """`StaticInputs` of decode steps: ``(input_ids, metadata)``, with the groups as ``metadata.prefixes``."""

    def __init__(self, batch: StepInputs, prefixes: Prefixes) -> None:
        self._batch, self._prefixes = batch, prefixes
        self._seen: set[int] = set()

    def tensors(self) -> dict[str, Tensor]:
        """Of the batch, and of the groups of every size that was viewed."""
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

    def reset(self) -> None:
        """As the batch."""
        self._batch.reset()
