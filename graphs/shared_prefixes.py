"""Decode steps of requests that share blocks: their static inputs, and what a runner asks of whoever finds
the groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from torchpaged.metadata import AttentionMetadata


class StepInputs(Protocol):
    """A decode step's own static inputs: `torchpaged.graphs.DecodeBuffers`, or rows kept on the device."""

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""

    def view(self, bucket: int, /) -> tuple[Tensor, AttentionMetadata]:
        """``(input_ids, metadata)`` of ``bucket`` rows."""

    def padding(self, bucket: int, /) -> AbstractContextManager[None]:
        """The first ``bucket`` rows are padding inside the block."""

    def reset(self) -> None:
        """Make host and device agree after what was cut short."""


class Prefixes(Protocol):
    """`torchpaged.cascade.AutomaticPrefixes`: groups in tensors that never move."""

    def buffers(self, num_reqs: int, num_tokens: int, /) -> Any:
        """Those of batches of these sizes: an object with ``tensors()``, ``clear()``, and ``of(metadata)``,
        which gives the batch with them."""

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


def buckets_in_groups(
    prefixes: Prefixes, buckets: Sequence[int], max_blocks_per_req: int, block_size: int
) -> list[int]:
    """The buckets of decode steps that may come to take their second graph: those in which it pays where all
    requests share all that they can hold. No other batch saves as much."""
    blocks, most = list(range(1, max_blocks_per_req + 1)), max_blocks_per_req * block_size
    return [n for n in buckets if prefixes.update(n, n, [blocks] * n, [1] * n, [most] * n) is not None]


class StepsInGroups:
    """`StaticInputs` of decode steps: ``(input_ids, metadata)``, with the groups as ``metadata.prefixes``.

    Args:
        batch: the step's own inputs.
        prefixes: who has the groups.
    """

    def __init__(self, batch: StepInputs, prefixes: Prefixes) -> None:
        self._batch, self._prefixes = batch, prefixes
        self._seen: set[int] = set()

    def tensors(self) -> dict[str, Tensor]:
        """Of the batch, and of the groups of every size that was viewed."""
        found = self._batch.tensors()
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
        """Requests that are not there are in no group; whoever has groups writes them anew afterwards."""
        self._prefixes.buffers(bucket, bucket).clear()
        with self._batch.padding(bucket):
            yield

    def reset(self) -> None:
        """As the batch."""
        self._batch.reset()
