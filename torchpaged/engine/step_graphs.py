"""What an engine captures: launches of decode steps, and prefills in the same memory.

loop, prefill_graphs = make_step_graphs(model, rows, options, decided)
"""

import gc
from collections.abc import Sequence as Seq
from typing import Any

import torch

from torchpaged.custom_ops.errors import CaptureError
from torchpaged.engine.decisions import Decisions
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.device import DecodeRows
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.one_request import OneRequestGraphs
from torchpaged.engine.options import GeneratorOptions
from torchpaged.graphs import PackedGraphRunner
from torchpaged.graphs.buckets import bucket_for
from torchpaged.graphs.capture import EagerCapture
from torchpaged.prefixes import AutomaticPrefixes
from torchpaged.profiling import range as profile_range

#: Steps of one request alone have graphs of their own up to so many tokens: attention needs no second launch
#: for short queries then, and the first one begins before the kernels ahead have ended. Of more tokens the
#: other kernels take so long that this is little.
MOST_ALONE = 256


class PrefillGraphs:
    """Prefill steps of ``model`` in graphs, as long as they can be had.

        graphs = PrefillGraphs(model, rows, [64, 512], required=False, reason="automatic")
        graphs.capture()                                        # or each bucket at its first step
        if found := graphs.runner_for(num_reqs=2, num_tokens=37): logits = found[0].run_known(...)

    With ``required=False`` an engine whose prefill can't be captured goes on with the graphs of at most
    ``needed`` tokens, which take less memory, or without any, and ``reason`` says why.

    Args:
        model: the paged model.
        rows: of the decode loop, as of `OneRequestGraphs`.
        buckets: numbers of tokens to capture.
        needed: tokens of most steps; larger buckets are given up first.
        required: raise where a bucket can't be captured; False: go on without it.
        reason: why there are these graphs.
        options: further arguments of `PackedGraphRunner`.

    Attributes:
        buckets: of ``runners``, ascending; fewer once one could not be captured.
        runners: the graph runners, in the order in which they are asked for a step: of one request with few
            tokens, then of any.
        reason: why there are graphs, or why not any more.
    """

    def __init__(
        self,
        model: PagedModelProtocol,
        rows: DecodeRows,
        buckets: Seq[int],
        *,
        needed: int,
        required: bool,
        reason: str,
        **options: Any,
    ) -> None:
        cache = model.kv_cache
        options |= {
            "max_blocks_per_req": rows.max_blocks_per_req,
            "block_size": cache.block_size,
            "num_blocks": cache.num_blocks,
            "device": torch.device(model.device),
            "ranges": profile_range,
            "session": model.session,
        }
        self.buckets, self._needed, self.reason, self._required = [*buckets], needed, reason, required
        self._model, self._rows, self._options = model, rows, options
        self.runners = self._make_runners()

    def _make_runners(self) -> list[PackedGraphRunner]:
        model, rows, options = self._model, self._rows, self._options
        few = [bucket for bucket in self.buckets if bucket <= MOST_ALONE]
        runners: list[PackedGraphRunner] = []
        if few and rows.max_batch_size > 1:
            runners.append(OneRequestGraphs(model, rows, buckets=few, **options))
        if self.buckets:
            most = rows.max_batch_size
            runners.append(PackedGraphRunner(model, buckets=self.buckets, max_num_reqs=most, **options))
        return runners

    def capture(self) -> None:
        """Capture all buckets now.

        Raises:
            CaptureError: with ``required``, a bucket can't be captured; names it and the op.
        """
        try:
            for runner in reversed(self.runners):  # the largest buckets first
                runner.capture()
            return
        except CaptureError as error:
            self._give_up(error)
        del runner  # it, and the error, held the memory of what was captured so far
        gc.collect()
        self.capture()

    def replays(self, num_reqs: int, num_tokens: int) -> bool:
        """Whether a step of these sizes has its graph by now, at whose replay no Python runs."""
        runner = self._runner_for(num_reqs, num_tokens)
        if runner is None or isinstance(runner.capture_backend, EagerCapture):
            return False
        return runner.is_captured(bucket_for(runner.buckets, num_tokens))

    def runner_for(self, num_reqs: int, num_tokens: int) -> tuple[PackedGraphRunner, int] | None:
        """Whose graph a step of these sizes replays, and its bucket, captured; None if Python has to launch
        it.

        Raises:
            CaptureError: with ``required``, the bucket can't be captured.
        """
        runner = self._runner_for(num_reqs, num_tokens)
        if runner is None:
            return None
        try:
            return runner, runner.capture_for(num_tokens)
        except CaptureError as error:
            self._give_up(error)
        del runner  # as in `capture`
        gc.collect()
        return self.runner_for(num_reqs, num_tokens)

    def _runner_for(self, num_reqs: int, num_tokens: int) -> PackedGraphRunner | None:
        return next((runner for runner in self.runners if runner.fits(num_reqs, num_tokens)), None)

    def _give_up(self, error: CaptureError) -> None:
        if self._required:
            raise error
        fewer = [bucket for bucket in self.buckets if bucket <= self._needed]
        self.buckets[:] = fewer if len(fewer) < len(self.buckets) else []  # the scheduler has this list, too
        self.runners, more = [], f"of more than {self.buckets[-1]} tokens " if self.buckets else ""
        self.reason = f"automatic: {error}; prefills {more}are launched from Python"
        self.runners = self._make_runners()


def make_step_graphs(
    model: PagedModelProtocol,
    rows: DecodeRows,
    options: GeneratorOptions,
    decided: Decisions,
    prefixes: AutomaticPrefixes | None = None,
) -> tuple[DecodeLoop, PrefillGraphs | None]:
    """The decode loop, and the graphs of prefills, or None where there are none; nothing is captured yet.

    Args:
        model: the paged model.
        rows: of the engine.
        options, decided: of the engine.
        prefixes: of decode steps, as in `WholeStepRunner`.
    """
    shared: dict[str, Any] = {
        "progress": options.progress,
        "watch": model.kv_cache.tensors(),
        # What torch.compile makes may take a second run to settle. The ops' kernels take none where the start
        # has gathered them, and few of them are of one bucket alone.
        "warmup_iters": 2 if decided.compile else 1,
        "warms_each": decided.compile,
    }
    loop = DecodeLoop(
        model,
        rows,
        capture=options.capture,
        compile=decided.compile,
        buckets=decided.buckets,
        prefixes=prefixes,
        **shared,
    )
    if not decided.prefill_buckets:
        return loop, None
    return loop, PrefillGraphs(
        model,
        rows,
        decided.prefill_buckets,
        needed=options.prefill_chunk_size,
        required=options.prefill_buckets != "auto",
        reason=decided.prefill_reason,
        capture=loop.runner.capture_backend,
        # A pool outlives a failed capture only if it holds another graph.
        pool=loop.runner.pool if decided.ahead else None,
        **shared,
    )
