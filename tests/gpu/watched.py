"""Cases on a GPU in a process with a watchdog: a hang costs its test and the process, not the run."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worker_pool import WorkerPool


@contextmanager
def watched(target: str, launching: float) -> Iterator[Callable[..., None]]:
    """Gives a function that runs ``target``, ``"module:function"`` of this folder, for one case, and fails
    unless it ends well.

    Args:
        target: ``function(case, beat)``; it beats "launching" when it begins and "running" once all is
            launched.
        launching: seconds for the first, with all that is compiled.
    """
    folders = (Path(__file__).parent, Path(__file__).parents[2])
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    with WorkerPool(target, limits={"launching": launching}, environment=environment) as pool:

        def run(**case: Any) -> None:
            (outcome,) = pool.run([case])
            assert outcome.kind == "done", f"{case}: {outcome.kind} while {outcome.phase}: {outcome.message}"

        yield run
