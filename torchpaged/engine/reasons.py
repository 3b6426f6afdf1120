"""What a `Generator` decided at its start, and why."""

from torchpaged.engine.decisions import Decisions
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.device import WholeStepRunner
from torchpaged.engine.step_graphs import PrefillGraphs
from torchpaged.graphs import PackedGraphRunner


class Reasons:
    """What `Generator` has of it."""

    loop: DecodeLoop | None
    _decided: Decisions
    _prefill_graphs: PrefillGraphs | None

    @property
    def runner(self) -> WholeStepRunner | None:
        """The graph runner; None without graphs."""
        return None if self.loop is None else self.loop.runner

    @property
    def prefill_runner(self) -> PackedGraphRunner | None:
        """The graph runner of prefills; None without."""
        return None if self._prefill_graphs is None else self._prefill_graphs.runner

    @property
    def graph_reason(self) -> str:
        """Why decode steps have graphs or not."""
        return self._decided.graph_reason

    @property
    def compile_reason(self) -> str:
        """Whether decode steps are compiled, and why."""
        return self._decided.compile_reason

    @property
    def mixed_reason(self) -> str:
        """Whether decodes and chunks of prompts run in one pass, and why."""
        return self._decided.mixed_reason

    @property
    def prefill_graph_reason(self) -> str:
        """Why prefills have graphs or not."""
        return self._decided.prefill_reason if self._prefill_graphs is None else self._prefill_graphs.reason
