"""Paged attention against its peers, without typer: the same as ``torchpaged bench attention``.

    PYTHONPATH=. python benchmarks/bench_attention.py --suite decode --bandwidth 4.35 --output results.json \\
        --plot results.png

What it measures and how: benchmarks/README.md.
"""

from __future__ import annotations

from torchpaged.bench.attention import main

if __name__ == "__main__":
    raise SystemExit(main())
