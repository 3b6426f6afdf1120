"""How benchmarks measure.

timing.py       graph replay on a GPU, contenders in turns; ceilings of the device
conditions.py   what machine and versions a figure was taken on
screen.py       progress, and a table at the end
"""


def split(names: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in names.split(",") if name.strip())
