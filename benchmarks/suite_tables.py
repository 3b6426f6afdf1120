"""Tables of the attention suites against every peer, for docs/results/: each of one run (make_results.py).

A peer that failed or was wrong in a case makes the case void: no ratio is shown, none is counted, and the
reason stands below the table. Of FlashInfer's three ways the fastest one counts.
"""

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from result_tables import RESULTS, best_bold, figure, geomean, latest, load, ratio, short, table

PAGED = {"fa3": ("fa3",), "flashinfer": ("flashinfer", "flashinfer-no-graph", "flashinfer-fa3")}
COLUMNS = {
    "cuda": "`cuda`",
    "triton": "`triton`",
    "fa3": "FA3",
    "flashinfer": "FlashInfer",
    "sdpa": "SDPA*",
}  # *: contiguous keys
_FAULTS = ("wrong", "failed")


def fastest(row: dict[str, Any]) -> dict[str, float]:
    """Microseconds by column."""
    us = {name: e["us"] for name, e in row["contenders"].items() if e["status"] == "timed"}
    found = {name: us[name] for name in ("cuda", "triton", "sdpa") if name in us}
    for peer, ways in PAGED.items():
        timed = [us[way] for way in ways if way in us]
        if timed:
            found[peer] = min(timed)
    return found


def void(row: dict[str, Any]) -> dict[str, str]:
    """Paged peers that failed in every way they have for the case, and why."""
    found = {}
    for peer, ways in PAGED.items():
        entries = [row["contenders"][way] for way in ways if way in row["contenders"]]
        faults = [e["reason"] for e in entries if e["status"] in _FAULTS]
        if faults and not any(e["status"] == "timed" for e in entries):
            found[peer] = faults[0]
    return found


def ratios(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """Of the best paged peer's time over the best own one's; of SDPA's over contiguous keys. None: void, or
    not there."""
    us = fastest(row)
    own = min(us["cuda"], us["triton"])
    peers = [us[name] for name in PAGED if name in us]
    paged = None if void(row) or not peers else min(peers) / own
    return paged, us["sdpa"] / own if "sdpa" in us else None


def summary_line(what: str, peers: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line of the README's table: geometric mean and worst case against paged peers, over the cases that
    have one. A void case counts nowhere."""
    known = [x for row in rows if (x := ratios(row)[0]) is not None]
    return [f"{what}, {len(known)} cases", peers, ratio(geomean(known)), ratio(min(known))]


def mean(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The lines below a table: both geometric means, and what was void."""
    rows = list(rows)
    parts = []
    for index, against in ((0, "the best paged peer"), (1, "SDPA over contiguous keys")):
        known = [(x, row["case"]) for row in rows if (x := ratios(row)[index]) is not None]
        if known:
            worst, case = min(known)
            parts.append(
                f"Against {against}, geometric mean over {len(known)} cases: "
                f"**{geomean([x for x, _ in known]):.2f}**, worst {worst:.2f} ({short(case)})."
            )
    for row in rows:
        for peer, reason in void(row).items():
            parts.append(f"{short(row['case'])} is void: {COLUMNS[peer]}: {reason.split('.')[0]}.")
    return textwrap.wrap(" ".join(parts), 110, break_long_words=False, break_on_hyphens=False)


def suite(name: str, *suites: str) -> list[str]:
    """One row per case, of some suites of the run: microseconds, and both ratios."""
    rows, lines = [row for row in latest(name)["rows"] if not suites or row["suite"] in suites], []
    for row in rows:
        us, (paged, dense) = fastest(row), ratios(row)
        cells = best_bold([us.get(column) for column in COLUMNS])
        shown = "void" if void(row) else ratio(paged)
        lines.append([short(row["case"]), figure(row["ideal_us"]), *cells, shown, ratio(dense)])
    header = ["case", "ideal", *COLUMNS.values(), "×", "× SDPA*"]
    return [*table(header, lines), "", *mean(rows)]


def mixed(name: str) -> list[str]:
    """Batches of decodes and chunks: microseconds, and of our kernels in two calls, one after the other."""
    rows = [row for row in latest(name)["rows"] if " + " in row["case"]]
    columns, lines = [column for column in COLUMNS if column != "sdpa"], []
    for row in rows:
        us, turns = fastest(row), row["contenders"]["cuda-in-parts"].get("us")
        shown = "void" if void(row) else ratio(ratios(row)[0])
        cells = best_bold([us.get(column) for column in columns])
        lines.append([short(row["case"]), *cells, shown, figure(turns)])
    header = ["batch", *(COLUMNS[column] for column in columns), "×", "`cuda` in two calls"]
    return [*table(header, lines), "", *mean(rows)]


def suite_decode() -> list[str]:
    return suite("h200_suite_decode")


def suite_prefill() -> list[str]:
    return suite("h200_suite_prefill")


def suite_fp8_decode() -> list[str]:
    """fp8 caches, and 4 query tokens per request."""
    return suite("h200_suite_fp8", "decode-fp8", "speculative")


def suite_fp8_prefill() -> list[str]:
    return suite("h200_suite_fp8", "prefill-fp8")


def block_sparse() -> list[str]:
    """Masks that hide blocks, beside the dense case of the same lengths."""
    rows = [row for row in load("h200_block_sparse")["rows"] if row["num_tokens"] <= row["num_reqs"]]
    rows += load("h200_block_sparse_prefill")["rows"]
    names, lines = ("cuda", "triton"), []
    header = ["case", "mask", "ideal", *(COLUMNS[name] for name in names), "× dense"]
    dense: dict[str, float] = {}
    for row in rows:
        what, _, mask = row["case"].partition(" sparse ")
        us = fastest(row)
        best = min(us[name] for name in names if name in us)
        dense.setdefault(what, best)  # which comes first
        cells = [figure(us.get(name)) for name in names]
        lines.append(
            [short(what), mask or "dense", figure(row["ideal_us"]), *cells, ratio(dense[what] / best)]
        )
    return table(header, lines)


def suite_mixed() -> list[str]:
    return mixed("h200_suite_mixed")


def h100_decode() -> list[str]:
    return suite("h100_suite_decode")


def h100_prefill() -> list[str]:
    return suite("h100_suite_prefill")


def h100_mixed() -> list[str]:
    return mixed("h100_suite_mixed")


def h100_step() -> list[str]:
    """The whole decode step on an H100."""
    lines = [
        [row["shape"], str(row["batch"]), figure(row["roofline_ms"], 2), figure(row["ms"], 3), _share(row)]
        for row in load("h100_step")["rows"]
        if row["status"] == "timed"
    ]
    return table(["shape", "batch", "roofline", "ms", "of the roofline"], lines)


def _share(row: dict[str, Any]) -> str:
    return f"{row['roofline_ms'] / row['ms']:.0%}"


def choice() -> list[str]:
    """By how much what runs by itself, `cuda`, is slower than the fastest paged contender."""
    lines = []
    for name in ("decode", "mixed", "prefill"):
        rows = [
            row for row in latest(f"h200_suite_{name}")["rows"] if name != "mixed" or " + " in row["case"]
        ]
        found = []
        for row in rows:
            us = fastest(row)
            best = min((x, who) for who, x in us.items() if who != "sdpa")
            found.append((us["cuda"] / best[0], short(row["case"]), COLUMNS[best[1]]))
        loss, case, who = max(found)
        slower = sum(round(x, 3) > 1 for x, _, _ in found)
        worst = f"{loss - 1:.1%}: {case}, to {who}" if slower else "–"
        lines.append([name, str(len(found)), str(slower), worst])
    return table(["suite", "cases", "slower in", "most"], lines)


def cascade_peers() -> list[str]:
    """Ours against FlashInfer's cascade, over the same blocks."""
    lines = []
    for row in latest("h200_cascade_flashinfer")["rows"]:
        us = row["us"]
        names = ("plain", "cascade", "flashinfer", "flashinfer by hand")
        peers = [us[name] for name in names[2:] if name in us]
        lines.append(
            [
                f"{'/'.join(map(str, row['heads']))}, {row['shared']:,} shared + {row['own']:,}, "
                f"× {row['requests']}",
                *best_bold([us.get(name) for name in names]),
                ratio(min(peers) / us["cascade"]) if peers else "–",
            ]
        )
    header = ["tokens × requests", "plain", "cascade", "FlashInfer's wrapper", "its parts by hand", "×"]
    return table(header, lines)


def batched() -> list[str]:
    """Steps of generate_batch by attention, of the newest of the documents."""
    names = ("h200_generate_batch", "h200_generate_batch_busy")
    name = next(name for name in names if (RESULTS / f"{name}.json").exists())
    document = load(name)
    rows = document["rows"]
    batches = sorted({row["batch"] for row in rows})
    ms = {(row["way"], row["batch"]): row.get("ms") for row in rows}
    peer = "flash_attention_3"

    def cells(way: str) -> Iterator[str]:
        for batch in batches:
            own, theirs = ms.get((way, batch)), ms.get((peer, batch))
            yield figure(own, 2)
            yield ratio(theirs / own) if own and theirs and way != peer else "–"

    header = ["`paged\\|…`", *(text for n in batches for text in (f"batch {n}, ms", "×"))]
    lines = [[way, *cells(way)] for way in dict.fromkeys(row["way"] for row in rows)]
    source = f"From [the document](../../benchmarks/results/{name}.json): {document['note']}."
    return [*table(header, lines), "", *textwrap.wrap(source, 110, break_long_words=False)]
