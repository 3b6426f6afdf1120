"""One plot per door in docs/pictures, drawn from the documents that docs/results.md has its tables from.

    python benchmarks/make_plots.py       # needs matplotlib: pip install ".[bench]"

Each file says in its metadata which data it shows (`digest`); tests/project/test_pictures.py compares,
without matplotlib.
"""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_tables import latest, load, short, times
from step_tables import step_times

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
#: Contender -> name, colour, marker; ours stand out.
STYLES = {
    "cuda": ("torchpaged, cuda", "#c2410c", "o"),
    "fa3": ("FlashAttention-3", "#2563eb", "s"),
    "flashinfer": ("FlashInfer", "#059669", "D"),
    "sdpa": ("SDPA, contiguous keys", "#6b7280", "^"),
}
STEPS = {
    "k1+fuse": ("torchpaged, engine", "#c2410c", "o"),
    "hf_cb": ("HuggingFace, continuous batching, FA3", "#2563eb", "s"),
    "hf_static": ("HuggingFace, static cache and torch.compile", "#059669", "D"),
}
#: Of p50 and p99, of each engine in turn.
LATENCIES = ("#c2410c", "#fdba74", "#1d4ed8", "#93c5fd")
RANGES = {
    "step": "#9ca3af",
    "admission": "#f59e0b",
    "decode": "#93c5fd",
    "replay": "#2563eb",
    "collect": "#059669",
}
WAYS = {"static cache": "#6b7280", "PagedCache": "#f59e0b", "accelerate": "#c2410c"}


def attention_data() -> dict[str, dict[str, dict[str, float]]]:
    """Suite -> case -> contender -> time over the ideal one."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for suite in ("decode", "prefill"):
        for row in latest(f"h200_suite_{suite}")["rows"]:
            measured: dict[str, float] = {}
            for name, time in times(row).items():
                name = name.split("-")[0]  # FlashInfer is the fastest of its three
                if name in STYLES:
                    measured[name] = min(measured.get(name, math.inf), time / row["ideal_us"])
            found.setdefault(suite, {})[short(row["case"])] = measured
    return found


def generate_data() -> dict[str, dict[str, float]]:
    """Way of calling ``generate()`` -> batch -> ms per token."""
    found: dict[str, dict[str, float]] = {}
    for row in load("h200_generate")["rows"]:
        found.setdefault(row["way"], {})[str(row["batch"])] = row["ms"]
    return found


def step_data() -> dict[str, dict[str, dict[str, float]]]:
    """Shape -> contender -> batch -> ms; "roofline" among the contenders."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for file in ("h200_step_peers_1b", "h200_step_peers_8b"):
        for (shape, batch, contender), row in sorted(step_times(file).items()):
            of_shape = found.setdefault(shape, {})
            of_shape.setdefault("roofline", {})[str(batch)] = row["roofline_ms"]
            if row.get("ms"):
                of_shape.setdefault(contender, {})[str(batch)] = row["ms"]
    return found


def timeline_data() -> dict[str, list[list[Any]]]:
    """Host ranges as [name, from, to] and the GPU's busy times as [from, to], microseconds."""
    timeline: dict[str, list[list[Any]]] = load("h200_nsys")["timeline"]
    return timeline


def serving_data() -> dict[str, dict[str, list[float]]]:
    """Latency -> percentile -> ms at 25, 50 and 75 % of what is served at once."""
    rows = sorted((row["share"], row) for row in load("h200_serving_3")["1b"] if "share" in row)
    return {
        name: {at: [row[name][at] * 1e3 for _, row in rows] for at in ("p50", "p99")}
        for name in ("first_token", "between_tokens")
    }


def serving_peers_data() -> dict[str, dict[str, list[float]]]:
    """The same of both engines, at the same requests per second."""
    rows = [row for row in load("h200_serving_peers")["rows"] if row["part"] == "rates"]
    rows.sort(key=lambda row: row["share"])
    return {
        name: {
            f"{words} {at}": [row[name][at] * 1e3 for row in rows if row["engine"] == engine]
            for engine, words in (("ours", "ours"), ("vllm", "vLLM"))
            for at in ("p50", "p99")
        }
        for name in ("first_token", "between_tokens")
    }


def digest(data: Any) -> str:
    """Of what a plot shows, to three digits."""
    rounded = json.loads(json.dumps(data), parse_float=lambda number: f"{float(number):.3g}")
    return hashlib.sha256(json.dumps(rounded, sort_keys=True).encode()).hexdigest()[:16]


def draw_attention(figure: Any, data: dict[str, dict[str, dict[str, float]]]) -> None:
    """A row per case: how far each is from what the memory or the tensor cores allow."""
    figure.set_size_inches(8.2, 8.4)
    heights = [len(cases) for cases in data.values()]
    for axes, (suite, cases) in zip(
        figure.subplots(len(data), 1, gridspec_kw={"height_ratios": heights}), data.items(), strict=True
    ):
        for contender, (name, colour, marker) in STYLES.items():
            points = [(of[contender], y) for y, of in enumerate(cases.values()) if contender in of]
            style = {"color": colour, "marker": marker, "linestyle": "", "markersize": 5.5}
            axes.plot(*zip(*points, strict=True), label=name, zorder=3 if contender == "cuda" else 2, **style)
        axes.axvline(1, color="#111827", linewidth=0.8)
        axes.set_yticks(range(len(cases)), list(cases), fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
        axes.set_title(f"{suite} attention: time over the ideal (left is better)", loc="left", fontsize=10)
    figure.axes[0].legend(fontsize=8, loc="lower right")


def draw_generate(figure: Any, data: dict[str, dict[str, float]]) -> None:
    """Bars by batch."""
    figure.set_size_inches(8.2, 3.2)
    axes, batches = figure.subplots(), sorted({b for of in data.values() for b in of}, key=int)
    for offset, (way, of) in enumerate(data.items()):
        places = [batches.index(batch) + 0.27 * (offset - 1) for batch in of]
        bars = axes.bar(places, list(of.values()), 0.25, color=WAYS[way], label=way)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_title("generate(): ms per token (lower is better)", loc="left", fontsize=10)
    axes.legend(fontsize=8, loc="upper left")
    axes.margins(y=0.15)


def draw_steps(figure: Any, data: dict[str, dict[str, dict[str, float]]]) -> None:
    """A panel per shape: ms by batch."""
    figure.set_size_inches(8.2, 3.8)
    for axes, (shape, of_shape) in zip(figure.subplots(1, len(data)), data.items(), strict=True):
        for contender, (name, colour, marker) in STEPS.items():
            of = of_shape[contender]
            axes.plot([int(b) for b in sorted(of, key=int)], [of[b] for b in sorted(of, key=int)])
            axes.lines[-1].set(color=colour, marker=marker, label=name)
        roofline = of_shape["roofline"]
        axes.plot(
            [int(b) for b in sorted(roofline, key=int)], [roofline[b] for b in sorted(roofline, key=int)]
        )
        axes.lines[-1].set(color="#111827", linestyle=":", label="weights and keys at full bandwidth")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([1, 8, 32, 64], ["1", "8", "32", "64"])
        low, high = axes.get_ylim()
        shown = [y for y in (0.5, 1, 2, 5, 10, 20, 50) if low <= y <= high]
        axes.set_yticks(shown, [f"{y:g}" for y in shown])
        axes.set_yticks([], minor=True)
        axes.set_xlabel("batch")
        axes.set_title(f"{shape}: ms per decode step", loc="left", fontsize=10)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8)


def draw_serving(figure: Any, data: dict[str, dict[str, list[float]]]) -> None:
    """A panel for each latency; of several engines by a logarithmic scale."""
    figure.set_size_inches(8.2, 2.8)
    panels = zip(figure.subplots(1, len(data)), data.items(), strict=True)
    for axes, (name, of) in panels:
        width = 0.76 / len(of)
        for place, (at, values) in enumerate(of.items()):
            places = [number + width * (place - (len(of) - 1) / 2) for number in range(len(values))]
            bars = axes.bar(places, values, 0.95 * width, color=LATENCIES[place], label=at)
            axes.bar_label(bars, fmt="%.1f", fontsize=8 if len(of) < 3 else 6)
        if len(of) > 2:
            axes.set_yscale("log")
        axes.set_xticks(range(3), ["25 %", "50 %", "75 %"])
        axes.set_xlabel("share of the requests per second served at once")
        axes.set_title(f"{name.replace('_', ' ')}: ms", loc="left", fontsize=10)
        axes.legend(fontsize=8, loc="upper left")
        axes.margins(y=0.2 if len(of) < 3 else 0.45)


def draw_timeline(figure: Any, data: dict[str, list[list[Any]]]) -> None:
    """A row for each kind of range, the GPU's below."""
    figure.set_size_inches(10, 2.6)
    axes = figure.subplots()
    rows = ["step", "admission", "decode", "replay", "collect"]
    for name, start, end in data["host"]:
        kind = name.split(" ")[0]
        axes.barh(rows.index(kind), end - start, left=start, height=0.7, color=RANGES[kind])
    for start, end in data["gpu"]:
        axes.barh(len(rows), end - start, left=start, height=0.7, color="#c2410c")
    axes.set_yticks(range(len(rows) + 1), [*rows, "GPU: kernels"])
    axes.set_xlim(0, max(end for *_, end in data["gpu"]))
    axes.invert_yaxis()
    axes.set_xlabel("microseconds")


#: File -> the data, how it is drawn.
PLOTS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], None]]] = {
    "results_attention": (attention_data, draw_attention),
    "results_generate": (generate_data, draw_generate),
    "results_step": (step_data, draw_steps),
    "results_serving": (serving_data, draw_serving),
    "results_serving_peers": (serving_peers_data, draw_serving),
    "nsys_timeline": (timeline_data, draw_timeline),
}


def main() -> None:
    """The command."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = {"svg.fonttype": "none", "svg.hashsalt": "torchpaged", "font.family": "sans-serif"}
    settings |= {
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e5e7eb",
    }
    for name, (make, draw) in PLOTS.items():
        data = make()
        with rc_context(settings):
            figure = Figure(layout="constrained")
            draw(figure, data)
            about = {"Date": None, "Creator": None, "Description": f"data {digest(data)}"}
            FigureCanvasSVG(figure).print_svg(PICTURES / f"{name}.svg", metadata=about)
        print(PICTURES / f"{name}.svg")


if __name__ == "__main__":
    main()
