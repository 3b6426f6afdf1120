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

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.device.request_rows import DecodeRows
from torchpaged.graphs.bucketed import BucketedGraphs, BucketStep
from torchpaged.graphs.buckets import check_buckets, default_buckets
from torchpaged.graphs.capture import CaptureBackend, Captured, EagerCapture
from torchpaged.graphs.step import Step, StepSession, decode_steps
from torchpaged.metadata import AttentionMetadata


class WholeStepRunner(BucketedGraphs):
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
        options: ``warmup_iters``, ``progress``, ``watch``, ``debug`` and ``ranges``, as there.

    Attributes:
        rows: as given.

    Raises:
        ArgumentError: several steps per launch with a session that plans every step on the host.
    """

    STEP, BUCKET, ADVICE = "decode step", "batch", "; launch_eager() still works"

    def __init__(
        self,
        step: Step,
        rows: DecodeRows,
        *,
        buckets: Sequence[int] | None = None,
        capture: str | CaptureBackend = "auto",
        compile: bool = True,
        session: StepSession | None = None,
        **options: Any,
    ) -> None:
        if session is not None and rows.steps_per_launch > 1 and session.plans_every_decode:
            raise ArgumentError(
                "rows",
                "steps_per_launch=1 with a backend that plans every step on the host",
                str(rows.steps_per_launch),
            )
        self.rows, self._step, most = rows, step, rows.max_batch_size
        sizes = check_buckets(default_buckets(most) if buckets is None else buckets, most)
        steps = decode_steps(step, sizes, compile, capture)
        super().__init__(
            rows,
            lambda bucket: self._whole(steps(bucket), bucket),
            eager=lambda bucket: self._whole(step, bucket),
            buckets=sizes,
            device=rows.device,
            capture=capture,
            session=session,
            **options,
        )
        # Python at each replay, which may be interrupted between steps.
        self._stepwise = isinstance(self.capture_backend, EagerCapture)

    def _whole(self, step: Step, num_rows: int) -> BucketStep:
        """What one launch does over the first ``num_rows`` rows."""

        def launch(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
            for index in range(self.rows.steps_per_launch):
                self.rows.finish_step(step(input_ids, metadata), num_rows, index)
            return self.rows.tokens_out

        return launch

    def launch(self, num_rows: int) -> None:
        """Start ``rows.steps_per_launch`` steps of the first ``num_rows`` rows; their bucket is captured
        first if it is not.

        Raises:
            RingFullError: ``rows.ring`` has no place for the tokens; nothing is launched then.
            CaptureError: the bucket can't be captured, or a captured address moved (debug mode).
            SemaphoreError: the session's semaphore is not zero behind the launch (debug mode): its results
                are wrong.
        """
        self.recover()
        self.rows.ring.check_room()
        self.start(num_rows, capture=True)

    def replay(self, num_rows: int) -> Tensor:
        """`launch` of a bucket that is captured, and ``rows.tokens_out [steps_per_launch, num_rows]`` int64:
        a view costs as much as the launch.

        Raises:
            CaptureError: the bucket is not captured; otherwise as `launch`.
        """
        self.recover()
        self.rows.ring.check_room()
        return self.start(num_rows).output[:, :num_rows]

    def _replay(self, graph: Captured) -> None:
        ring = self.rows.ring
        ring.begin()
        if self._stepwise:
            with self.rows.whole():
                graph.replay()
        else:
            graph.replay()
        ring.count()

    def launch_eager(self, num_rows: int) -> Tensor:
        """What `replay` does, without graph, padding or compilation.

        If it is interrupted between its steps, the rows are as before it on a CPU, and of no known state on a
        GPU: write them again.
        """
        self.recover()
        self.rows.ring.check_room()
        with self._ranges("run_eager", batch=num_rows):
            return self.start_eager(num_rows, self._counted(self._whole(self._step, num_rows)))[:, :num_rows]

    def _counted(self, launch: Callable[..., Tensor]) -> BucketStep:
        """``launch`` in the ring's books."""

        def counted(*arguments: Any) -> Tensor:
            self.rows.ring.begin()
            # Its copies are no part of the step.
            with self.rows.whole() if self.device.type == "cpu" else contextlib.nullcontext():
                tokens = launch(*arguments)
            self.rows.ring.count()
            return tokens

        return counted
