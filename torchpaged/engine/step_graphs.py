"""What an engine captures: launches of decode steps, and prefills in the same memory.

loop, prefill_graphs = make_step_graphs(model, max_batch_size=8, max_seq_len=2048, ahead=True, ...)
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.prefill_graphs import PrefillGraphs
from torchpaged.graphs import CaptureBackend
from torchpaged.prefixes import AutomaticPrefixes


def make_step_graphs(
    model: PagedModelProtocol,
    *,
    max_batch_size: int,
    max_seq_len: int,
    steps_per_launch: int,
    compile: bool,
    buckets: Seq[int] | None,
    prefill_buckets: Seq[int],
    prefill_required: bool,
    prefill_reason: str,
    capture: str | CaptureBackend,
    ahead: bool,
    progress: Callable[[int, int, str], None] | None,
    prefixes: AutomaticPrefixes | None = None,
) -> tuple[DecodeLoop, PrefillGraphs | None]:
    """The decode loop, and the graphs of prefills.

    Args:
        model: the paged model.
        max_batch_size, max_seq_len: requests at once, and tokens of each.
        steps_per_launch, compile: of decode steps, as in `DecodeLoop`.
        buckets: batch sizes of decode steps; None: the default ones.
        prefill_buckets: numbers of tokens of prefills; none: no such graphs, and None is given for them.
        prefill_required, prefill_reason: as in `PrefillGraphs`.
        capture: how steps become graphs.
        ahead: capture all of them now.
        progress: called with ``(done, total, text)`` while they are captured.
        prefixes: of decode steps, as in `WholeStepRunner`.

    Raises:
        CaptureError: a bucket could not be captured ahead.
    """
    shared: dict[str, Any] = {
        "max_batch_size": max_batch_size,
        "max_blocks_per_req": -(-max_seq_len // model.kv_cache.block_size),
        "progress": progress,
        "watch": model.kv_cache.tensors(),
    }
    loop = DecodeLoop(
        model,
        steps_per_launch=steps_per_launch,
        capture=capture,
        compile=compile,
        buckets=buckets,
        prefixes=prefixes,
        **shared,
    )
    if ahead:
        loop.runner.capture()
    if not prefill_buckets:
        return loop, None
    prefill_graphs = PrefillGraphs(
        model,
        prefill_buckets,
        required=prefill_required,
        reason=prefill_reason,
        capture=loop.runner.capture_backend,
        # A pool outlives a failed capture only if it holds another graph.
        pool=loop.runner.pool if ahead else None,
        **shared,
    )
    if ahead:
        prefill_graphs.capture()
    return loop, prefill_graphs
