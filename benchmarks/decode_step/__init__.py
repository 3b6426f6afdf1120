"""A whole decode step of a model: ours in its variants against HuggingFace's.

cases.py, options.py   what is measured;  own.py, peers.py: who;
                       gate.py: what must be right before anything is timed
shape.py               one shape;  run.py: one run;
                       trace.py, screen.py: what a reader sees
"""

from decode_step.run import exit_code, main, run

__all__ = ["exit_code", "main", "run"]
