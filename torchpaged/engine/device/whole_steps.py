"""WholeStepRunner: whole decode steps in one graph per batch bucket, sampling and bookkeeping included,
several per launch.

    runner = WholeStepRunner(step, rows)
    runner.capture()
    runner.launch(num_rows); launch = rows.ring.take()      # the host goes on
    tokens = rows.ring.read(launch, num_rows)               # a launch later

A launch runs ``rows.steps_per_launch`` steps and takes nothing from the host: `DecodeRows` hold what
it needs.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar, Unpack

from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError, CaptureError
from torchpaged.engine.device.request_rows import DecodeRows
from torchpaged.graphs.bucketed import BucketedGraphs, BucketStep
from torchpaged.graphs.buckets import bucket_for
from torchpaged.graphs.capture import Captured
from torchpaged.graphs.capture_options import CaptureOptions
from torchpaged.graphs.decode import DecodeGraphs, Prefixes, PrefixGraphs
from torchpaged.graphs.step import Step
from torchpaged.metadata import AttentionMetadata

_LOG = logging.getLogger("torchpaged.engine")
T = TypeVar("T")


class WholeStepRunner(DecodeGraphs):
    """Captures whole steps over `DecodeRows` per bucket and replays them.

    Args:
        step: ``step(input_ids [n] int64, metadata) -> logits [n, vocab_size]``; must not read device values
            on the host.
        rows: the requests; their sampling and bookkeeping become part of the graph.
        buckets, compile, options: as in `torchpaged.graphs.DecodeGraphRunner`.
        prefixes: a `torchpaged.prefixes.AutomaticPrefixes`: after `find_groups` found some that pay, launches
            take a second graph of their bucket, over ``metadata.prefixes``. None: one graph per bucket.

    Attributes:
        rows: as given.
        prefix_graphs: the second graphs, for their `report`; None without ``prefixes``. If one of them can't
            be captured, which is logged, launches do without from then on.

    Raises:
        ArgumentError: several steps per launch with a session that plans every step on the host, or
            ``prefixes`` with one that plans.
    """

    STILL_WORKS = "; launch_eager() still works"

    def __init__(
        self,
        step: Step,
        rows: DecodeRows,
        *,
        buckets: Sequence[int] | None = None,
        compile: bool = True,
        prefixes: Prefixes | None = None,
        **options: Unpack[CaptureOptions],
    ) -> None:
        session = options.get("session")
        if session is not None and rows.steps_per_launch > 1 and session.plans_every_decode:
            raise ArgumentError(
                "rows",
                "steps_per_launch=1 with a backend that plans every step on the host",
                str(rows.steps_per_launch),
            )
        self.rows, self._without_groups, self._ring = rows, False, rows.ring  # captures can't make it
        super().__init__(rows, step, buckets=buckets, compile=compile, prefixes=prefixes, **options)
        self._now: BucketedGraphs = self  # whose graphs launches take

    def _whole(self, step: Step, num_rows: int) -> BucketStep:
        """What one launch does over the first ``num_rows`` rows."""

        def launch(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
            for index in range(self.rows.steps_per_launch):
                self.rows.finish_step(step(input_ids, metadata), num_rows, index)
            return self.rows.tokens_out

        return launch

    def _replay(self, graph: Captured) -> None:
        graph.replay()
        self._ring.count()

    def _use_second(self, use: Callable[[PrefixGraphs], T]) -> T | None:
        self._now = self  # where groups were made up for a capture, or can't be had
        if self._without_groups:
            return None
        try:
            return super()._use_second(use)
        except CaptureError as error:
            self._without_groups = True
            _LOG.warning("shared prefixes are read request by request from now on: %s", error)
            return None

    def find_groups(self, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]) -> bool:
        """Find which of the first rows share blocks, for all launches until the next call; needed whenever a
        row was written, cleared or moved. Host data only, but for the groups themselves.

        Args:
            block_tables: the blocks of each row, from row 0 on; of idle rows none.
            seq_lens: tokens that each row has at least, the next step's included; of idle rows 0.

        Returns:
            Whether launches read shared prefixes once.
        """
        bucket = bucket_for(self.buckets, len(seq_lens))
        self._now = self._graphs_for(bucket, block_tables, seq_lens)
        return self._now is not self

    def reset(self) -> None:
        """As `BucketedGraphs.reset`; launches read row by row until `find_groups` is called."""
        self._now = self
        super().reset()

    def _graphs_now(self) -> BucketedGraphs:
        """Whose graphs the next launch takes."""
        if self._dirty:
            self.reset()
        self._ring.check_room()
        return self._now

    def launch(self, num_rows: int) -> None:
        """Start ``rows.steps_per_launch`` steps of the first ``num_rows`` rows; their bucket is captured
        first if it is not.

        One that raises leaves the rows in no known state: `write <DecodeRows.write>` them again.

        Raises:
            RingFullError: ``rows.ring`` has no place for the tokens; nothing is launched then.
            CaptureError: the bucket can't be captured, or a captured address moved (debug mode).
            SemaphoreError: the session's semaphore is not zero behind the launch (debug mode): its results
                are wrong.
        """
        self._graphs_now().start(num_rows, capture=True)

    def replay(self, num_rows: int) -> Tensor:
        """`launch` of a bucket that is captured, and ``rows.tokens_out [steps_per_launch, num_rows]`` int64:
        a view costs as much as the launch.

        Raises:
            CaptureError: the bucket is not captured; otherwise as `launch`.
        """
        return self._graphs_now().start(num_rows).output[:, :num_rows]

    def launch_eager(self, num_rows: int) -> Tensor:
        """What `replay` does, without graph, padding or compilation."""
        self._ring.check_room()
        with self._ranges("run_eager", batch=num_rows):
            tokens = self.start_eager(num_rows, self._whole(self._step, num_rows))[:, :num_rows]
        self._ring.count()
        return tokens
