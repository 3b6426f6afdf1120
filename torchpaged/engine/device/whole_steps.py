"""WholeStepRunner: whole decode steps in one graph per batch bucket, sampling and bookkeeping included,
several per launch.

    runner = WholeStepRunner(step, rows)
    runner.capture()
    runner.launch(num_rows); launch = rows.ring.take()      # the host goes on
    tokens = rows.ring.read(launch, num_rows)               # a launch later

A launch runs ``rows.steps_per_launch`` steps and takes nothing from the host: `DecodeRows` hold what
it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError, CaptureError
from torchpaged.engine.device.request_rows import DecodeRows
from torchpaged.graphs.bucketed import BucketedGraphs, BucketStep, StaticInputs
from torchpaged.graphs.buckets import bucket_for, check_buckets, default_buckets
from torchpaged.graphs.capture import CaptureBackend, Captured
from torchpaged.graphs.prefixes import Prefixes, PrefixGraphs, require_no_plans
from torchpaged.graphs.step import Step, StepSession, decode_steps
from torchpaged.metadata import AttentionMetadata

_LOG = logging.getLogger("torchpaged.engine")


class _Launches(BucketedGraphs):
    """Graphs of launches over the rows, each counted in the ring's books."""

    STEP, BUCKET, STILL_WORKS = "decode step", "batch", "; launch_eager() still works"

    def __init__(
        self,
        inputs: StaticInputs,
        rows: DecodeRows,
        step: Step,
        buckets: Sequence[int],
        *,
        capture: str | CaptureBackend,
        compile: bool,
        **options: Any,
    ) -> None:
        self.rows, self._step = rows, step
        steps = decode_steps(step, buckets, compile, capture)
        super().__init__(
            inputs,
            lambda bucket: self._whole(steps(bucket), bucket),
            eager=lambda bucket: self._whole(step, bucket),
            buckets=buckets,
            device=rows.device,
            capture=capture,
            **options,
        )

    def _whole(self, step: Step, num_rows: int) -> BucketStep:
        """What one launch does over the first ``num_rows`` rows."""

        def launch(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
            for index in range(self.rows.steps_per_launch):
                self.rows.finish_step(step(input_ids, metadata), num_rows, index)
            return self.rows.tokens_out

        return launch

    def _replay(self, graph: Captured) -> None:
        graph.replay()
        self.rows.ring.count()


class WholeStepRunner(_Launches):
    """Captures whole steps over `DecodeRows` per bucket and replays them.

    Args:
        step: ``step(input_ids [n] int64, metadata) -> logits [n, vocab_size]``; must not read device values
            on the host.
        rows: the requests; their sampling and bookkeeping become part of the graph.
        buckets: batch sizes to capture; default `torchpaged.graphs.default_buckets`.
        capture: "auto" (CUDA graphs on a GPU, eager elsewhere) or a `CaptureBackend`.
        compile: run the step through ``torch.compile(fullgraph=True)``, once per bucket.
        session: the `torchpaged.Session` that the step's layers share, as
            in `torchpaged.graphs.DecodeGraphRunner`.
        prefixes: a `torchpaged.prefixes.AutomaticPrefixes`: after `find_groups` found some that pay, launches
            take a second graph of their bucket, over ``metadata.prefixes``. None: one graph per bucket.
        options: ``warmup_iters``, ``progress``, ``watch``, ``debug`` and ``ranges``, as there.

    Attributes:
        rows: as given.
        prefix_graphs: the second graphs, for their `report`; None without ``prefixes``.

    Raises:
        ArgumentError: several steps per launch with a session that plans every step on the host, or
            ``prefixes`` with one that plans.
    """

    def __init__(
        self,
        step: Step,
        rows: DecodeRows,
        *,
        buckets: Sequence[int] | None = None,
        capture: str | CaptureBackend = "auto",
        compile: bool = True,
        session: StepSession | None = None,
        prefixes: Prefixes | None = None,
        **options: Any,
    ) -> None:
        if session is not None and rows.steps_per_launch > 1 and session.plans_every_decode:
            raise ArgumentError(
                "rows",
                "steps_per_launch=1 with a backend that plans every step on the host",
                str(rows.steps_per_launch),
            )
        require_no_plans(prefixes, session)
        most = rows.max_batch_size
        sizes = check_buckets(default_buckets(most) if buckets is None else buckets, most)
        options |= {"compile": compile, "session": session}
        super().__init__(rows, rows, step, sizes, capture=capture, **options)
        self.prefix_graphs: BucketedGraphs | None = None
        self._with_prefixes: PrefixGraphs | None = None
        self._now: BucketedGraphs = self  # whose graphs launches take
        options |= {"capture": self.capture_backend, "pool": self.pool}
        if prefixes is not None:
            self._with_prefixes = PrefixGraphs(
                prefixes, rows, step, lambda inputs, step: _Launches(inputs, rows, step, sizes, **options)
            )
            self.prefix_graphs = self._with_prefixes.graphs
            self.prefix_graphs.BUCKET = "batch in groups"

    def capture(self, buckets: Sequence[int] | None = None) -> None:
        """As `BucketedGraphs.capture`; then, of these buckets, the second graphs of those whose requests may
        come to share what pays. If one of them can't be captured, launches do without."""
        super().capture(buckets)
        wanted = self.buckets if buckets is None else buckets
        self._if_captured(lambda graphs: graphs.capture(wanted))
        self._now = self  # the groups were made up

    def _if_captured(self, use: Callable[[PrefixGraphs], BucketedGraphs | None]) -> BucketedGraphs | None:
        """Use the second graphs, which captures some; launches do without from now on if one can't be."""
        if self._with_prefixes is None:
            return None
        try:
            return use(self._with_prefixes)
        except CaptureError as error:
            self._with_prefixes = None
            _LOG.warning("shared prefixes are read request by request from now on: %s", error)
            return None

    def find_groups(self, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]) -> bool:
        """Find which of the first rows share blocks, for all launches until the next call; needed whenever a
        row was written, cleared or moved. Host data only, but for the groups themselves.

        Args:
            block_tables: the blocks of each row, from row 0 on; of idle rows none.
            seq_lens: tokens that each row has at least, the next step's included; of idle rows 0.

        Returns:
            Whether launches read shared prefixes once. Never again after a second graph that could not be
            captured, which is logged.
        """
        self._now = self
        bucket = bucket_for(self.buckets, len(seq_lens))
        found = self._if_captured(lambda graphs: graphs.find(bucket, block_tables, seq_lens))
        self._now = self if found is None else found
        return found is not None

    def recover(self) -> None:
        """As `BucketedGraphs.recover`, of both graphs: they have one ring."""
        super().recover()
        if self.prefix_graphs is not None:
            self.prefix_graphs.recover()

    def reset(self) -> None:
        """As `BucketedGraphs.reset`; launches read row by row until `find_groups` is called."""
        self._now = self
        super().reset()
        if self.prefix_graphs is not None:
            self.prefix_graphs.reset()

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
        self.recover()
        self.rows.ring.check_room()
        self._now.start(num_rows, capture=True)

    def replay(self, num_rows: int) -> Tensor:
        """`launch` of a bucket that is captured, and ``rows.tokens_out [steps_per_launch, num_rows]`` int64:
        a view costs as much as the launch.

        Raises:
            CaptureError: the bucket is not captured; otherwise as `launch`.
        """
        self.recover()
        self.rows.ring.check_room()
        return self._now.start(num_rows).output[:, :num_rows]

    def launch_eager(self, num_rows: int) -> Tensor:
        """What `replay` does, without graph, padding or compilation."""
        self.recover()
        self.rows.ring.check_room()
        with self._ranges("run_eager", batch=num_rows):
            tokens = self.start_eager(num_rows, self._whole(self._step, num_rows))[:, :num_rows]
        self.rows.ring.count()
        return tokens
