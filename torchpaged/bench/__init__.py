"""What an installed package measures: ``attention`` (``torchpaged bench attention``). All other benchmarks
are a checkout's, in benchmarks/.

    timing.py       graph replay on a GPU, contenders in turns; ceilings of the device
    conditions.py   what machine and versions a figure was taken on;
                    screen.py: progress, and a table at the end

Nothing in the library imports this package, and this package imports typer and rich only when used.
"""
