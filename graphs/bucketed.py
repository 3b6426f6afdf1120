"""BucketedGraphs: a callable captured once per bucket over static inputs, and replayed for every batch
that fits.

    graphs = BucketedGraphs(inputs, lambda bucket: step, buckets=[1, 2, 4], device="cuda")
    graphs.capture()
    output = graphs.start(3).output     # the graph of bucket 4, over the inputs as they are

``inputs`` are any object of the shape of `StaticInputs`. What a step computes, how its inputs get their
values and what its output means is for its subclasses: `DecodeGraphRunner` and `PackedGraphRunner`
load batches from the host, the engine keeps its requests on the device.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import checks_device_values, switch
from torchpaged.custom_ops.errors import ArgumentError, CaptureError, NotCopied
from torchpaged.custom_ops.words import one_line, shortened
from torchpaged.graphs.addresses import CapturedAddresses, Watch
from torchpaged.graphs.buckets import bucket_for
from torchpaged.graphs.capture import CaptureBackend, Captured, HostCapture
from torchpaged.graphs.capture_bucket import capture_bucket
from torchpaged.graphs.capture_options import Progress, capture_backend_for, check_progress
from torchpaged.graphs.report import BucketReport, describe_bucket
from torchpaged.graphs.step import NoSession, Ranges, StaticInputs, StepSession, no_range
from torchpaged.metadata import HostLengths

BucketStep = Callable[..., Tensor]


class BucketedGraphs(NotCopied):
    """A graph per bucket.

    Args:
        inputs: the static inputs.
        steps: gives the callable that the graph of a bucket holds; it is called with ``inputs.view(bucket)``
            and gives a tensor.
        eager: the same uncompiled, to find the op that can't be captured; default: ``steps``.
        buckets: sizes to capture, ascending, see `check_buckets`.
        device: where the steps run.
        capture: "auto" (CUDA graphs on a GPU, eager elsewhere) or a `CaptureBackend`.
        pool: memory pool of ``capture`` to share with graphs whose replays never overlap with these; default:
            one of its own.
        warmup_iters: runs before each capture.
        warms_each: run the step ahead of each capture; False: ahead of the first one alone, and of one that
            fails without, since a kernel can't be loaded in it.
        progress: called with ``(done, total, text)`` after each bucket.
        watch: further tensors whose addresses the graphs rely on, such as KV pools, by name; or a function
            that gives them.
        debug: check every address at replay, and ``session`` behind it; default from ``TORCHPAGED_CHECK=1``.
        ranges: called as ``ranges("replay", batch=3, padded=4)`` around each capture and replay: gives a
            context manager.
        session: planned outside the graph, before a capture and, if it plans every step, before each replay;
            reset after what was interrupted. None: there is nothing to plan.

    Attributes:
        inputs, buckets, device, session, debug: as given.
        capture_backend: how steps become graphs.
        pool: the graphs' memory pool, for others of the same `capture_backend` whose replays never overlap
            with these.

    Raises:
        NotCopyableError: it is copied or pickled: its graphs are over its own inputs.
    """

    #: What a step and a bucket are called in errors and progress, and what still works where a
    #: capture failed.
    STEP, BUCKET, STILL_WORKS = "step", "bucket", ""
    #: Whether ``ranges`` are called around replays; False where a caller's own range says what it is.
    RANGES_REPLAYS = True

    def __init__(
        self,
        inputs: StaticInputs,
        steps: Callable[[int], BucketStep],
        *,
        buckets: Sequence[int],
        device: torch.device | str,
        eager: Callable[[int], BucketStep] | None = None,
        capture: str | CaptureBackend = "auto",
        pool: Any = None,
        warmup_iters: int = 2,
        warms_each: bool = True,
        progress: Progress | None = None,
        watch: Watch | None = None,
        debug: bool | None = None,
        ranges: Ranges | None = None,
        session: StepSession | None = None,
    ) -> None:
        check_progress(progress)
        switch("debug", debug, None)
        self.inputs, self.buckets, self.device = inputs, buckets, torch.device(device)
        self.capture_backend = capture_backend_for(capture, self.device)
        self.pool = self.capture_backend.new_pool() if pool is None else pool
        self._is_first_of_pool = pool is None
        self.session: StepSession = NoSession() if session is None else session
        self._plans_replays = self.session.plans_every_step
        self._steps, self._eager = steps, steps if eager is None else eager
        self._warmup_iters, self._warms_each, self._progress = warmup_iters, warms_each, progress
        self._addresses = CapturedAddresses(
            lambda: {**self.inputs.tensors(), **self.session.tensors()}, watch
        )
        self.debug = checks_device_values() if debug is None else debug
        self._ranges = no_range if ranges is None else ranges
        self._replay_ranges = self._ranges if self.RANGES_REPLAYS else no_range
        self._dirty = False  # inside a capture or a replay, or one of them did not come to its end
        self._first: BucketedGraphs = self  # whose note and reset that is: of graphs over the same inputs one
        self._graphs: dict[int, Captured] = {}
        self._views: dict[int, tuple[Any, ...]] = {}
        self._reports = {n: BucketReport(n) for n in buckets}
        self._seen: dict[int, int] = {}

    def _require_graphs(self, max_query_len: int) -> None:
        """Refuse a session whose backend declares less than graphs of such steps need. An eager capture runs
        Python again and a tape runs ops again, whole, so that what they make is none."""
        if not isinstance(self.capture_backend, HostCapture):
            self.session.require_graphs(max_query_len)

    # ----------------------------------------------------------------------------------------------- captures
    def capture(self, buckets: Sequence[int] | None = None) -> None:
        """Capture every bucket that is not captured yet, largest first, so that the smaller ones reuse
        its memory.

        Args:
            buckets: only these of them.

        Raises:
            ArgumentError: a bucket that there is not.
            CaptureError: names the bucket and the cause; what that capture took is freed, the others stay.
        """
        wanted = self.buckets if buckets is None else buckets
        if not isinstance(wanted, Sequence) or not set(wanted) <= set(self.buckets):
            raise ArgumentError("buckets", f"some of {shortened(self.buckets, 8)}", repr(buckets))
        todo = [n for n in reversed(wanted) if n not in self._graphs]
        if self._is_first_of_pool:  # others come behind it; a quarter of a second in a large process
            gc.collect()  # unused objects give their memory to the graphs
        for done, bucket in enumerate(todo):
            self._capture_one(bucket)
            if self._progress:
                self._progress(done + 1, len(todo), describe_bucket(bucket, self.device, self.BUCKET))

    def capture_for(self, num_rows: int) -> int:
        """The bucket of ``num_rows`` rows, captured unless it was; raises as `capture` does."""
        bucket = bucket_for(self.buckets, num_rows)
        if bucket not in self._graphs:
            self._capture_one(bucket)
        return bucket

    def is_captured(self, bucket: int) -> bool:
        """Whether ``bucket`` has its graph."""
        return bucket in self._graphs

    def _capture_one(self, bucket: int) -> None:
        if self._first._dirty:
            self._first.reset()
        arguments = self.view(bucket)
        step, eager = self._steps(bucket), self._eager(bucket)
        self._first._dirty = True
        with self._ranges("capture", padded=bucket), torch.inference_mode(), self.inputs.padding(bucket):
            self.session.reset()
            try:
                if self.session.plans:
                    self.session.plan(arguments[1])
                graph = capture_bucket(
                    lambda: step(*arguments),
                    self.capture_backend,
                    self.pool,
                    self._reports[bucket],
                    self.device,
                    warmup_iters=self._warmup_iters,
                    step=self.STEP,
                    eager=lambda: eager(*arguments),
                    advice=self.STILL_WORKS,
                    is_warm=bool(self._graphs) and not self._warms_each,
                )
            finally:
                self.session.reset()
        self._addresses.note(bucket)
        self._graphs[bucket] = graph
        self._first._dirty = False

    def __repr__(self) -> str:
        captured = [bucket for bucket in self.buckets if bucket in self._graphs]
        return one_line(
            self,
            f"buckets={shortened(self.buckets, 5)}",
            f"captured={shortened(captured, 5)}",
            f"device={str(self.device)!r}",
        )

    # ------------------------------------------------------------------------------------------------ steps
    def view(self, num_rows: int) -> tuple[Any, ...]:
        """``inputs.view``, one per number of rows: a session knows the batch that it planned by
        its identity."""
        if num_rows not in self._views:
            self._views[num_rows] = self.inputs.view(num_rows)
        return self._views[num_rows]

    def host_lengths(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], num_reqs: int
    ) -> HostLengths | None:
        """Lengths of the live requests, padded to the ``num_reqs`` of the captured batch; None, and no work,
        unless the session plans every step."""
        if not self._plans_replays:
            return None
        pad = [0] * (num_reqs - len(seq_lens))
        return HostLengths([*query_lens, *pad], [*seq_lens, *pad])

    def start(self, num_rows: int, *, capture: bool = False, host: HostLengths | None = None) -> Captured:
        """Replay the graph of ``num_rows`` rows over the inputs as they are.

        Args:
            num_rows: rows that count; those up to the bucket are padding.
            capture: capture the bucket first if it is not.
            host: lengths of the bucket's rows, where the host knows them, for a session that plans
                every step.

        Returns:
            The graph; its ``output`` is valid until the next replay of a graph of the pool.

        Raises:
            CaptureError: the bucket is not captured or can't be, or a captured address moved (debug mode).
            SemaphoreError: the session's semaphore is not zero behind the replay (debug mode): its results
                are wrong.
        """
        first = self._first
        if first._dirty:
            first.reset()
        bucket = bucket_for(self.buckets, num_rows)
        graph = self._graphs.get(bucket)
        if graph is None:
            if not capture:
                raise CaptureError(f"bucket {bucket}: not captured yet; call capture() or run() first")
            self._capture_one(bucket)
            graph = self._graphs[bucket]
        if self.debug:
            self._addresses.check(bucket)
        with self._replay_ranges("replay", batch=num_rows, padded=bucket):
            first._dirty = True
            if self._plans_replays:
                self.session.plan(self.view(bucket)[1], host)
            self._replay(graph)
        first._dirty = False
        report = self._reports[bucket]
        report.hits += 1
        self._seen[num_rows] = self._seen.get(num_rows, 0) + 1
        report.padded_rows += bucket - num_rows
        if self.debug:
            self.session.check(f"a replay of bucket {bucket}")
        return graph

    def _replay(self, graph: Captured) -> None:
        """Replay ``graph``; for callers that record what was started, to do it right around
        the replay."""
        graph.replay()

    def start_eager(self, num_rows: int, step: BucketStep, host: HostLengths | None = None) -> Tensor:
        """``step`` over the first ``num_rows`` rows, any number, without graph, padding or compilation."""
        if self._first._dirty:
            self._first.reset()
        with torch.inference_mode():
            self._first._dirty = True
            if self.session.plans:
                self.session.plan(self.view(num_rows)[1], host)
            output = step(*self.view(num_rows))
            self._first._dirty = False
        return output

    def launch_padding(self, bucket: int) -> Tensor:
        """The bucket's step on padding, without a graph or compilation: the kernels that a replay runs."""
        with torch.inference_mode(), self.inputs.padding(bucket):
            return self.start_eager(bucket, self._eager(bucket))

    # ------------------------------------------------------------------------------------------- breaking off
    def reset(self) -> None:
        """Make host and device agree again after a capture or replay that failed or was interrupted, and
        reset the session. Waits for the device.

        The next `start` or `start_eager` does it by itself.
        """
        with torch.inference_mode():
            self.inputs.reset()
            self.session.reset()
        self._dirty = False

    # ------------------------------------------------------------------------------------------------ figures
    def report(self) -> list[BucketReport]:
        """Per bucket: capture time, memory, replays and padded rows."""
        return [self._reports[bucket] for bucket in self.buckets]

    def histogram(self) -> dict[int, int]:
        """How often each number of rows was replayed: for `buckets_by_cost`."""
        return dict(sorted(self._seen.items()))
