"""A whole decode step of a model, ours against HuggingFace's: weights once and keys and values against what
the memory could do.

    # own contenders, both shapes
    PYTHONPATH=. python benchmarks/bench_step.py --bandwidth 4.35 --output step.json
    PYTHONPATH=. python benchmarks/bench_step.py --only '' --peers hf_static,hf_cb --output peers.json
    # seconds on any machine
    PYTHONPATH=. python benchmarks/bench_step.py --shapes tiny --device cpu --batches 1,2 --context 64

What it measures and how: benchmarks/README.md.
"""

from decode_step import main

if __name__ == "__main__":
    raise SystemExit(main())
