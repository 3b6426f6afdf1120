"""Many architectures, each in a worker process, which a hang or a crash costs only that one."""

from collections.abc import Iterable, Iterator
from typing import Any

from worker_pool import Outcome, WorkerPool

from model_coverage.checks import Row, without_folders

#: Seconds that a phase may take before its worker is ended.
LIMITS = {
    **dict.fromkeys(("building", "eager", "generate", "window", "forward", "prompt", "uncached"), 120.0),
    **dict.fromkeys(("even", "right", "left"), 120.0),
    "compiling": 400.0,
}


def _row(outcome: Outcome) -> Row:
    if outcome.kind == "done" and outcome.result is not None:
        return Row(**outcome.result)
    last = [line for line in outcome.message.splitlines() if line.strip()][-1:]
    reason = (
        f"{outcome.kind} while {outcome.phase or 'starting'} after {outcome.seconds:.0f} s: "
        f"{without_folders(' '.join(last))}"
    )
    return Row(
        outcome.case["model_type"], mode="broken", reason=reason[:300], seconds=round(outcome.seconds, 1)
    )


def cover(
    model_types: Iterable[str],
    *,
    workers: int = 1,
    compiled: bool = True,
    seconds: float | None = None,
    kind: str = "decoder",
) -> Iterator[Row]:
    """Examine architectures; their rows come in the order in which they end.

    Args:
        model_types: which.
        workers: processes at a time.
        compiled: whether to run the compiled check, which takes most of the time.
        seconds: after which no further one begins; those that run then get another minute. None: no limit.
        kind: of `kinds.KINDS`.
    """
    cases: Iterable[dict[str, Any]] = (
        {"model_type": name, "kind": kind, "compiled": compiled} for name in model_types
    )
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    limit = None if seconds is None else seconds + 60
    with WorkerPool(
        "model_coverage.kinds:run_case", workers=workers, limits=LIMITS, environment=environment
    ) as pool:
        for outcome in pool.run(cases, seconds=limit, reserve=0.0 if seconds is None else 60.0):
            if outcome.kind != "cut":
                yield _row(outcome)
