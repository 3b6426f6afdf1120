"""Two runs of the same work, kernel by kernel: which kernel of a graph's replay is which of the eager run.

A kernel in a replayed graph carries its name and nothing of where it came from. Pairs are therefore made by
order and name, and only where both runs leave no choice: a name that occurs as often here as there pairs
first with first, second with second, as long as no pair crosses another; between neighbouring pairs the same
is asked again of what lies between. Everything else stays open. That a replay dropped a kernel and gained
another of the same name at another place can't be seen from names.
"""

from collections.abc import Sequence


def match_kernels(eager: Sequence[str], replay: Sequence[str]) -> list[int | None]:
    """For each kernel of ``replay``, its index in ``eager``, or None if that can't be told.

    Args:
        eager: names of the kernels of the eager run, in order.
        replay: those of the replay.
    """
    partners: list[int | None] = [None] * len(replay)
    gaps = [(0, len(eager), 0, len(replay))]
    while gaps:
        start, end, first, last = gaps.pop()
        pairs = _certain(eager[start:end], replay[first:last])
        for here, there in pairs:
            partners[first + there] = start + here
        if pairs:
            before = [(-1, -1), *pairs]
            after = [*pairs, (end - start, last - first)]
            gaps += [
                (start + a + 1, start + b, first + x + 1, first + y)
                for (a, x), (b, y) in zip(before, after, strict=True)
                if b > a + 1 and y > x + 1
            ]
    return partners


def _certain(eager: Sequence[str], replay: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of names that occur equally often, without those that cross, in order."""
    places: dict[str, tuple[list[int], list[int]]] = {}
    for side, names in enumerate((eager, replay)):
        for index, name in enumerate(names):
            places.setdefault(name, ([], []))[side].append(index)
    equal = {name: sides for name, sides in places.items() if len(sides[0]) == len(sides[1])}
    pairs = sorted(
        ((b, a, name) for name, (here, there) in equal.items() for a, b in zip(here, there, strict=True))
    )
    crossing: set[str] = set()
    highest = -1
    for _, a, name in pairs:
        crossing |= {name} if a < highest else set()
        highest = max(highest, a)
    lowest = len(eager)
    for _, a, name in reversed(pairs):
        crossing |= {name} if a > lowest else set()
        lowest = min(lowest, a)
    return [(a, b) for b, a, name in pairs if name not in crossing]
