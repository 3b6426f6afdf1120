"""What a `Generator` has besides single requests, from the start of its background loop to its end."""

import contextlib
import gc
import sys
import weakref
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Self

import torch

from torchpaged.cache.host_copies import free_retired
from torchpaged.custom_ops.errors import NotCopied, TorchpagedError
from torchpaged.engine.background import BackgroundLoop
from torchpaged.engine.calls import Calls
from torchpaged.engine.decisions import Decisions
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.device import WholeStepRunner
from torchpaged.engine.metrics import EngineMetrics, measured
from torchpaged.engine.outputs import GeneratorStats, TokenEvent
from torchpaged.engine.scheduler import Scheduler
from torchpaged.engine.step_graphs import PrefillGraphs
from torchpaged.graphs import PackedGraphRunner


class Lifecycle(NotCopied):
    """What `Generator` has of it."""

    _calls: Calls
    _decided: Decisions
    _prefill_graphs: PrefillGraphs | None
    device: torch.device
    loop: DecodeLoop | None
    scheduler: Scheduler
    stats: GeneratorStats

    @property
    def runner(self) -> WholeStepRunner | None:
        """The graph runner; None without graphs."""
        return None if self.loop is None else self.loop.runner

    @property
    def prefill_runners(self) -> list[PackedGraphRunner]:
        """The graph runners of prefills: first that of one request with few tokens; none without."""
        return [] if self._prefill_graphs is None else self._prefill_graphs.runners

    @property
    def prefill_graph_reason(self) -> str:
        """Why prefills have graphs or not."""
        return self._decided.prefill_reason if self._prefill_graphs is None else self._prefill_graphs.reason

    def start(self) -> Self:
        """Let a thread of its own make the steps, until `close`; nothing if one does.

        `submit`, `cancel`, `generate`, `stream` and `events` may be called from any thread, and requests go
        on whether or not a thread waits for them. `step` is refused meanwhile.

        After a step that raises, the next ones find out which request it is about, as `generate` says: that
        one ends with ``finish_reason`` "error", the others go on to the same tokens. An error that is about
        none, `SystemExit` or `KeyboardInterrupt` in the thread ends all requests: their callers get a
        `TorchpagedError` with the error as its ``__cause__``. Either way the thread goes on.

        Ctrl-C in a call that waits cancels the requests of that call alone. A program that ends without
        `close` waits for the step that runs, 10 seconds at most. A Generator that is dropped is closed, once
        its open streams are over. A process that is forked has no such thread: all calls are refused in
        it.

        Returns:
            The Generator itself.

        Raises:
            ClosedError: it is closed.
            TorchpagedError: it was started in another process, which this one was forked from.
        """
        calls = self._calls
        with calls.entered():
            if calls.background is None:
                calls.background = background = BackgroundLoop(calls, self.device)
                # The thread holds the pools, not the Generator: one that is dropped ends it.
                weakref.finalize(self, background.stop).atexit = False
        return self

    def events(self, request_id: int) -> AsyncIterator[TokenEvent]:
        """Events of one submitted request as they come, for asyncio.

            async for event in generator.events(generator.submit("Once upon a time")):
                print(event.text, end="")

        Tasks wait for events without a thread or a lock. `submit` waits for the step that runs; where that
        is too long for an event loop, or tasks are cancelled: `answer`.

        Args:
            request_id: the request; it belongs to this iteration from the first event asked for. An iteration
                that breaks off, or whose task is cancelled, cancels it.

        Raises:
            ArgumentError: an id that is unknown, finished, or another stream's.
            TorchpagedError: no background loop runs (`start`), or none in this process, or a step raised.
            ClosedError: the Generator is closed.
        """
        claim = partial(self._calls.claim, [request_id])
        return self._calls.loop_for("events()").events(lambda: claim, self)

    def metrics(self) -> EngineMetrics:
        """Load, memory and latencies as they are now; waits for the step that runs.

        Raises:
            ClosedError: it is closed.
        """
        with self._calls.entered():
            return measured(self.scheduler, self.stats)

    def close(self) -> None:
        """End everything: requests that wait or run are cancelled, the background loop stops, pools and
        graphs are freed, and every later call but this one is refused.

        A transformers model gets back what it had: attention implementations, training mode, the forwards of
        its mixers; and it is unfused if this Generator has fused it. A `PagedModel` of the caller's stays as
        it is, pools included. Streams and `generate` calls of other threads end with ``finish_reason``
        "cancelled". `stats`, `start_report` and the reasons of decisions stay readable. What
        the caller has frozen (`gc.freeze`) stays until `gc.unfreeze`, pools included.

        Raises:
            TorchpagedError: called from inside a step.
        """
        was_open = not self._calls.closed
        try:
            self._calls.close(self._free)
        finally:
            if was_open and self._calls.closed:
                # Models, caches and graphs know each other: pools would stay until the garbage collector
                # comes by itself, which the allocator of a GPU does not ask for.
                gc.collect()
                free_retired()

    def _free(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        """The last reference to it is gone: as `close`, but that memory may wait for the garbage collector.
        Not where that has found it, which may be in the middle of anybody's forward of the model, nor within
        a step, in a forked process, or at the interpreter's end."""
        # Set ahead of this call by the collector alone; tests/engine/test_close.py notices if that changes.
        if hasattr(self, "_calls") and not gc.is_finalized(self) and not sys.is_finalizing():
            with contextlib.suppress(TorchpagedError):
                self._calls.close(self._free)

    def __enter__(self) -> Self:
        """``with Generator(...) as generator``: closed at the end of the block, however it ends."""
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
