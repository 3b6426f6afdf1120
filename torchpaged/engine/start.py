"""The start of a Generator behind its model: kernels compiled side by side, graphs captured, every other kind
of step run once.

    report = start(model, options, decided, loop, prefill_graphs, max_blocks_per_req=132, clock=clock)
"""

import gc
import logging
from collections.abc import Iterator

import torch

from torchpaged.engine.decisions import Decisions
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.options import GeneratorOptions
from torchpaged.engine.start_report import StartClock, StartReport
from torchpaged.engine.step_graphs import PrefillGraphs
from torchpaged.engine.warm_up import WarmUp, step_forms
from torchpaged.graphs.bucketed import BucketedGraphs

_LOG = logging.getLogger("torchpaged.engine")


def start(
    model: PagedModelProtocol,
    options: GeneratorOptions,
    decided: Decisions,
    loop: DecodeLoop | None,
    prefill_graphs: PrefillGraphs | None,
    *,
    max_blocks_per_req: int,
    clock: StartClock,
) -> StartReport:
    """Do at once what ``decided`` says; returns what it took, with the phases that ``clock`` has already.

    Args:
        model: the paged model; none of its requests runs.
        options, decided: of the engine.
        loop, prefill_graphs: of its steps; None where there are none.
        max_blocks_per_req: columns of the block table.
        clock: of the start.

    Raises:
        CaptureError: a bucket could not be captured.
        Exception: what a step raised, with ``warm_up=True``; "auto" logs it and goes on.
    """
    device, progress = torch.device(model.device), options.progress

    on_gpu = device.type == "cuda"

    def steps() -> WarmUp:
        runner = prefill_graphs.runner if prefill_graphs is not None and decided.ahead else None
        forms = step_forms(
            options.max_batch_size,
            min(options.step_tokens, options.max_batch_size * max_blocks_per_req * model.kv_cache.block_size),
            max_blocks_per_req,
            model.kv_cache.block_size,
            captured=0 if runner is None else runner.buckets[-1],
            decodes=loop is None or not decided.ahead,
            one_prompt=options.batch_invariant,
            num_sms=torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 0,
        )
        return WarmUp(model, loop, forms, float32=options.processes_logits)

    if decided.warm_up and on_gpu:
        with clock.phase("kernels") as phase:
            graphs = _captured(loop, prefill_graphs) if decided.ahead else ()
            phase.count = steps().gather(graphs, progress)
    if loop is not None and decided.ahead:
        with clock.phase("decode graphs") as phase:
            loop.runner.capture()
            phase.count = _count(loop.runner) + _count(loop.runner.prefix_graphs)
        if prefill_graphs is not None:
            with clock.phase("prefill graphs") as phase:
                prefill_graphs.capture()
                phase.count = _count(prefill_graphs.runner)
    if not decided.warm_up:
        return clock.report(False, decided.warm_up_reason)
    try:
        with clock.phase("warm-up") as phase:
            phase.count = steps().run(progress)  # by the graphs that there are now
            gc.collect()  # else what compiling left is visited in the middle of the first requests: 0.3 s
    except Exception as error:
        if options.warm_up is True:
            raise
        reason = f"automatic: a step of padding failed: {type(error).__name__}: {error}"
        _LOG.warning("the start goes on without its warm-up: %s", reason)
        return clock.report(False, reason)
    return clock.report(True, decided.warm_up_reason)


def _captured(
    loop: DecodeLoop | None, prefill_graphs: PrefillGraphs | None
) -> Iterator[tuple[BucketedGraphs, int]]:
    """The graphs to come, and their buckets."""
    if loop is not None:
        runner, second = loop.runner, loop.runner.prefix_graphs
        yield from ((runner, bucket) for bucket in runner.buckets)
        if second is not None:
            yield from ((second, bucket) for bucket in second.can_pay(second.buckets))
    if prefill_graphs is not None and prefill_graphs.runner is not None:
        yield from ((prefill_graphs.runner, bucket) for bucket in prefill_graphs.runner.buckets)


def _count(graphs: BucketedGraphs | None) -> int:
    return 0 if graphs is None else sum(report.captured for report in graphs.report())
