"""``torchpaged tune``: which backend is fastest on this device, for the automatic choice.

score.py    what the rows of a measurement say: orders of backends
run.py      one measurement, from the plan to the file that `torchpaged.backends` reads
"""

from torchpaged.bench.tune.run import TuneOptions, plan, tune

__all__ = ["TuneOptions", "plan", "tune"]
