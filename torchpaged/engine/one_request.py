"""OneRequestGraphs: steps of one request in graphs, and behind each another that draws its first token.

    runner = OneRequestGraphs(model, rows, buckets=[16, 32], max_blocks_per_req=128, block_size=16)
    logits = runner.run_known(batch)
    rows.send_first(state)
    end = runner.end_of(16)
    end.replay(); token = end.output        # [1] int64

Launched from Python, a row and its sampling take the host as long as the device takes for most of the step.
"""

from typing import Any

import torch
from torch import Tensor

from torchpaged.engine.device import DecodeRows, RowState
from torchpaged.graphs import PackedGraphRunner
from torchpaged.graphs.capture import Captured
from torchpaged.graphs.capture_bucket import capture_bucket
from torchpaged.graphs.packed_runner import PackedStep
from torchpaged.graphs.report import BucketReport


class OneRequestGraphs(PackedGraphRunner):
    """`PackedGraphRunner` of one request. What both graphs of a bucket cost is in its report.

    Args:
        step: as of `PackedGraphRunner`.
        rows: whose first one the other graphs begin (`DecodeRows.begin_first`). Without them where its stage
            changes logits: steps with prompts call a logits processor each time.
        options: as of `PackedGraphRunner`.
    """

    def __init__(self, step: PackedStep, rows: DecodeRows, **options: Any) -> None:
        super().__init__(step, max_num_reqs=1, **options)
        self._rows, self._ends = rows, dict[int, Captured]()

    def end_of(self, bucket: int) -> Captured | None:
        """The graph that begins the first row with a token from the logits of a captured bucket's last
        replay; None: there is none."""
        return self._ends.get(bucket)

    def _capture_one(self, bucket: int) -> None:
        super()._capture_one(bucket)
        if self._rows.stage.processes:
            return
        graph, whole, own = self._graphs[bucket], self._reports[bucket], BucketReport(bucket)

        def begin() -> Tensor:
            return self._rows.begin_first(graph.output)  # another one behind each replay of an eager step

        try:
            with torch.inference_mode(), self._rows.padding(1):
                self._rows.send_first(RowState(0, 1, [1], seed=0, counter=0, remaining=1))
                self._ends[bucket] = capture_bucket(
                    begin,
                    self.capture_backend,
                    self.pool,
                    own,
                    self.device,
                    warmup_iters=1,
                    step="end of a prefill step",
                    eager=begin,
                    is_warm=bool(self._ends),
                )
        except BaseException:
            del self._graphs[bucket]
            whole.captured = False
            raise
        whole.capture_ms += own.capture_ms
        whole.record_ms += own.record_ms
        whole.num_bytes += own.num_bytes
