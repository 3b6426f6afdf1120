"""Benchmarks: ``attention`` against its peers (``torchpaged bench attention``).

    timing.py       graph replay on a GPU, contenders in turns; ceilings of the device
    conditions.py   what machine and versions a figure was taken on;
                    screen.py: progress, and a table at the end

Nothing in the library imports this package, and this package imports typer, rich, matplotlib and the peers
only when used.
"""
