"""A PNG of measured time against the roofline's time, one marker per case and contender, both
axes logarithmic.

A point on the diagonal runs at the device's ceiling; vertical distance is the factor lost. Needs matplotlib
(extra ``bench``).
"""

import importlib.util
from typing import Any

from torchpaged.custom_ops.errors import ArgumentError

_MARKERS = "osD^vPX*<>"


def require_matplotlib() -> None:
    """Raise `ArgumentError` if no plot can be made, before anything is measured for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(
            "plot", "matplotlib to draw with", "none installed", "pip install 'torchpaged[bench]'"
        )


def plot(document: dict[str, Any], path: str) -> None:
    """Draw the rows of a ``run`` document into the PNG file ``path``."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: no display, no global state
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in document["rows"]:
        for name, entry in row["contenders"].items():
            if entry["status"] == "timed":
                points.setdefault(name, []).append(
                    (row["ideal_us"], entry["us"], entry["p20_us"], entry["p80_us"])
                )
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, values) in enumerate(points.items()):
        ideal, us, p20, p80 = zip(*values, strict=True)
        spread = (
            [a - b for a, b in zip(us, p20, strict=True)],
            [b - a for a, b in zip(us, p80, strict=True)],
        )
        axes.errorbar(
            ideal,
            us,
            yerr=spread,
            fmt=_MARKERS[index % len(_MARKERS)],
            markersize=6,
            alpha=0.8,
            label=name,
            capsize=2,
        )
    flat = [value for values in points.values() for ideal, us, _, _ in values for value in (ideal, us)] or [
        1.0,
        10.0,
    ]
    ends = [min(flat) / 1.5, max(flat) * 1.5]
    axes.plot(ends, ends, color="black", linewidth=1, label="roofline")
    axes.plot(
        ends,
        [2 * end for end in ends],
        color="grey",
        linewidth=0.8,
        linestyle=":",
        label="twice the roofline",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        xlabel="roofline, us per call",
        ylabel="measured, us per call (median, p20 to p80)",
    )
    conditions, ceilings = document["conditions"], document["ceilings"]
    axes.set_title(
        f"Paged attention on {conditions.get('gpu') or conditions.get('cpu')}, torch {conditions['torch']}\n"
        f"ceilings {ceilings['bytes_per_s'] / 1e12:.2f} TB/s, {ceilings['flop_per_s'] / 1e12:.3g} TFLOP/s",
        fontsize=10,
    )
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, format="png")
