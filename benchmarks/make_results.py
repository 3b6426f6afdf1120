"""Tables of README.md, docs/results.md, docs/results/ and docs/stream_order.md, made from
benchmarks/results/*.json and tests/support/stream_order.py.

    python benchmarks/make_results.py            # rewrite what stands between the markers of the pages
    python benchmarks/make_results.py --check    # exit code 1 if a page does not hold what the data says

A page holds ``<!-- made: NAME -->``, then what the function NAME of `TABLES` returns, then ``<!-- end -->``.
Needs the standard library alone.
"""

import importlib.util
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import result_tables as tables
import step_tables as steps
import suite_tables as suites
from result_tables import RESULTS, geomean, latest, load, prefill_rows, ratio, table
from step_tables import step_times

ROOT = Path(__file__).parents[1]
RESULTS_PAGE = "docs/results.md"
PAGES = (
    *("README.md", RESULTS_PAGE, "docs/stream_order.md"),
    *(f"docs/results/{path.name}" for path in sorted((ROOT / "docs" / "results").glob("*.md"))),
)
WIDTH = 110


def summary() -> list[str]:
    """The README's table: one row per question, wins and losses."""
    peers = "FA3, FlashInfer"
    decodes, prompts = (latest(f"h200_suite_{name}")["rows"] for name in ("decode", "prefill"))
    fp8 = [row for row in load("h200_suite_fp8")["rows"] if row["suite"] == "decode-fp8"]
    batches = [row for row in latest("h200_suite_mixed")["rows"] if " + " in row["case"]]
    lines = [
        suites.summary_line("decode attention", peers, decodes),
        suites.summary_line("decode attention, fp8 cache", "FlashInfer", fp8),
        suites.summary_line("prefill attention, CUDA C++ kernel", peers, prompts),
        suites.summary_line("mixed batches", peers, batches),
    ]
    rates = [row["tflops"] for row in prefill_rows()]
    triton = [of["triton"] / of["fa3"] for of in rates]
    dense = [of["native"] / of["fa3 one block"] for of in rates]
    dense += [x for row in (*decodes, *prompts) if (x := suites.ratios(row)[1]) is not None]
    for name, who, found in (
        (f"prefill attention, Triton kernel, {len(triton)} cases", "FA3", triton),
        (f"decode and prefill, peers on contiguous keys, {len(dense)} cases", "FA3, SDPA", dense),
    ):
        lines.append([name, who, ratio(geomean(found)), ratio(min(found))])
    for shape, file in (("1B", "h200_step_peers_1b"), ("8B", "h200_step_peers_8b")):
        rows, found = step_times(file), []
        for batch in sorted({key[1] for key in rows}):
            ms = {key[2]: row["ms"] for key, row in rows.items() if key[1] == batch and "ms" in row}
            found.append(min(ms[name] for name in ms if name.startswith("hf")) / ms["k1+fuse"])
        lines.append(
            [
                f"whole decode step, {shape}, batch 1 to 64",
                "HuggingFace, both fast paths",
                ratio(geomean(found)),
                ratio(min(found)),
            ]
        )
    return table(["one H200, bf16", "against the best of", "× faster, geometric mean", "worst case"], lines)


def others() -> list[str]:
    """The documents that no page names, and those that do not say how they were made."""
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md") if page != ROOT / RESULTS_PAGE)
    unnamed, no_command = [], []
    for path in sorted(RESULTS.glob("*.json")):
        document = load(path.stem)
        conditions = (
            document.get("conditions")
            or document.get("conditions_after")
            or next(iter(document.get("runs", [{}])), {}).get("conditions", {})
        )
        if f"results/{path.name}" not in pages:
            unnamed.append(f"`{path.stem}`")
        if not (conditions.get("command") or document.get("command")):
            no_command.append(f"`{path.stem}`")
    return [
        *wrapped(f"Earlier runs, fuzz, before and after a change: {', '.join(unnamed)}."),
        *wrapped(f"Without the command: {', '.join(no_command)}."),
    ]


def stream_order() -> list[str]:
    path = ROOT / "tests" / "support" / "stream_order.py"
    spec = importlib.util.spec_from_file_location("stream_order", path)
    assert spec and spec.loader
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)

    def named(tensors: Sequence[str]) -> str:
        """Tensors by their group's name where the whole group is there."""
        groups = [(name, group) for name, group in data.GROUPS.items() if set(group) <= set(tensors)]
        left = [tensor for tensor in tensors if not any(tensor in group for _, group in groups)]
        return ", ".join([*(f"*{name}*" for name, _ in groups), *left]) or "–"

    lines, reasons = [], []
    for op, launches in data.STREAM_ORDER.items():
        for launch in launches:
            name = f"`{op}`" + (f": {launch.case}" if launch.case else "")
            fence = "yes" if launch.fence else "–"
            early = named((*launch.reads_early, *launch.reads_of_ahead))
            lines.append([name, early, named(launch.writes), launch.waits, launch.triggers, fence])
            if launch.why:
                reasons += wrapped(f"{name}: {launch.why}.")
    legend = [
        line for name, group in data.GROUPS.items() for line in wrapped(f"*{name}*: {', '.join(group)}.")
    ]
    return [
        *table(["op", "reads early", "writes", "waits", "triggers", "fence"], lines),
        "",
        *legend,
        "",
        "Why:",
        "",
        *reasons,
    ]


def wrapped(text: str) -> list[str]:
    """A list's item in lines of the pages' width; links and paths stay whole."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


TABLES: dict[str, Callable[[], list[str]]] = {
    function.__name__: function
    for function in (
        suites.suite_decode,
        suites.suite_prefill,
        suites.suite_mixed,
        suites.suite_fp8_decode,
        suites.suite_fp8_prefill,
        suites.block_sparse,
        suites.h100_decode,
        suites.h100_prefill,
        suites.h100_mixed,
        suites.h100_step,
        suites.choice,
        suites.cascade_peers,
        suites.batched,
        tables.decode_since,
        tables.prefill_kernel,
        tables.prefill_parts,
        tables.prefill_fp8,
        tables.fp8_queries,
        tables.mixed_late,
        tables.routing,
        tables.plans,
        tables.cascade,
        tables.block_size,
        tables.write_kv,
        tables.cpu_decode,
        tables.cpu_engine,
        tables.cpu_states,
        steps.step,
        steps.step_variants,
        steps.idle,
        steps.host,
        steps.capture,
        steps.cold,
        steps.engine,
        steps.serving,
        steps.serving_steps,
        steps.serving_peers,
        steps.serving_latencies,
        steps.linear,
        steps.sampling,
        summary,
        others,
        stream_order,
    )
}


def made(text: str) -> str:
    """A page with what stands between its markers made anew."""

    def make(match: re.Match[str]) -> str:
        if match[1] not in TABLES:
            raise SystemExit(
                f"make_results: expected one of {', '.join(TABLES)} behind 'made:', got {match[1]!r}"
            )
        return "\n".join([f"<!-- made: {match[1]} -->", *TABLES[match[1]](), "<!-- end -->"])

    return re.sub(r"<!-- made: (\w+) -->.*?<!-- end -->", make, text, flags=re.DOTALL)


def main(check: bool) -> int:
    stale = [page for page in PAGES if made((ROOT / page).read_text()) != (ROOT / page).read_text()]
    if not check:
        for page in stale:
            (ROOT / page).write_text(made((ROOT / page).read_text()))
    print(
        "\n".join(f"{page}: {'does not hold what the data says' if check else 'rewritten'}" for page in stale)
        or "nothing to do",
        file=sys.stderr,
    )
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
