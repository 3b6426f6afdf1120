"""The tables of docs/results/, each made from documents of benchmarks/results; what places them
is make_results.py."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
NAMES = {
    "fa3": "FA3",
    "flashinfer": "FlashInfer",
    "sdpa": "SDPA*",
    "flex": "Flex*",
    "cuda": "`cuda`",
    "triton": "`triton`",
}  # *: contiguous


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def latest(name: str) -> dict[str, Any]:
    """The document of that name, or of its last repetition: ``name_2``, ``name_3``."""
    again = sorted(RESULTS.glob(f"{name}_[2-9].json"))
    return load(again[-1].stem if again else name)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    line = lambda cells: f"| {' | '.join(cells)} |"  # noqa: E731
    return [line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]


def figure(x: float | None, digits: int = 1) -> str:
    """A number with so many digits behind the point, fewer from 1,000 on; a dash for none."""
    if x is None:
        return "–"
    return f"{x:,.0f}" if x >= 1000 else f"{x:.{digits}f}"


def ratio(x: float | None) -> str:
    """Best peer over own: below 1 own is slower, and the table says so."""
    return "–" if x is None else f"{x:.2f}" + (" lost" if round(x, 2) < 1 else "")


def best_bold(values: Sequence[float | None], digits: int = 1, least: bool = True) -> list[str]:
    """Figures, the best of them bold."""
    known = [x for x in values if x is not None]
    best = (min(known) if least else max(known)) if known else None
    return [f"**{figure(x, digits)}**" if x is not None and x == best else figure(x, digits) for x in values]


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def times(row: dict[str, Any], key: str = "us") -> dict[str, float]:
    """Of the contenders that were timed; FlashInfer by the faster of its two kernels."""
    timed = {name: entry for name, entry in row["contenders"].items() if entry["status"] == "timed"}
    if (
        "flashinfer-fa3" in timed
        and timed["flashinfer-fa3"]["us"] < timed.get("flashinfer", {"us": math.inf})["us"]
    ):
        timed["flashinfer"] = timed.pop("flashinfer-fa3")
    return {name: entry[key] for name, entry in timed.items()}


def short(case: str) -> str:
    """A case's name without what all cases of its table share."""
    return case.removeprefix("32/8/128 ").removesuffix(" b16").removesuffix(" whole")


# -------------------------------------------------------------------------------------------------- attention
def decode_since() -> list[str]:
    rows = load("h200_decode_before_after_2")["decode"]
    return table(
        ["case", "before", "after", "change"],
        (
            [
                r["case"],
                figure(r["before_us"], 2),
                figure(r["after_us"], 2),
                f"{r['after_us'] / r['before_us'] - 1:+.1%}",
            ]
            for r in rows
        ),
    )


def prefill_rows() -> list[dict[str, Any]]:
    return [row for row in load("h200_prefill_kernel")["results"] if row["part"] == "time"]


def prefill_kernel() -> list[str]:
    columns = {
        "native": "CUDA C++",
        "triton": "Triton",
        "fa3": "FA3",
        "sdpa": "SDPA*",
        "fa3 one block": "FA3*",
    }
    lines, ratios = [], []
    for row in prefill_rows():
        rates = row["tflops"]
        ratios.append(rates["native"] / rates["fa3"])
        cells = best_bold([rates.get(name) for name in columns], 0, least=False)
        lines.append(
            [
                row["case"],
                *cells,
                ratio(ratios[-1]),
                ratio(rates["native"] / max(rates["fa3 one block"], rates.get("sdpa", 0))),
            ]
        )
    header = ["case", *columns.values(), "× FA3", "× best of *"]
    return [
        *table(header, lines),
        "",
        f"Geometric mean of × FA3 over {len(ratios)} cases: **{geomean(ratios):.2f}**.",
    ]


def mixed_late() -> list[str]:
    """Mixed batches with prefill's CTAs before the decode launch, and with a third of them behind it."""
    document, lines, ratios = load("h200_prefill_late_fp8"), [], []
    for row in document["rows"]:
        if kept := document["kept"].get(row["case"]):
            us = row["us"]
            ratios.append(us["fa3"] / us[kept])
            cells = [figure(us[name]) for name in ("none late", "44 late", "66 late", "fa3")]
            lines.append([short(row["case"]), *cells, kept.removesuffix(" late"), ratio(ratios[-1])])
    return [
        *table(["batch", "none late", "44 late", "66 late", "FA3", "kept", "×"], lines),
        "",
        f"Geometric mean of × over {len(ratios)} batches: **{geomean(ratios):.2f}**.",
    ]


def prefill_parts() -> list[str]:
    """Short calls: before and since launches that begin early, in the second run."""
    document, lines = load("h200_prefill_early"), []
    for row in document["rows"]:
        if row["run"] == 2 and row["case"] in document["kept"] and "old" in row["us"]:
            us, name = row["us"], document["kept"][row["case"]]
            cells = [figure(x) for x in (us["old"], us[name], us["fa3"])]
            lines.append([short(row["case"]), *cells, ratio(us["fa3"] / us[name])])
    return table(["case", "before", "now", "FA3", "×"], lines)


def prefill_fp8() -> list[str]:
    lines = []
    for row in load("h200_prefill_late_fp8")["rows"]:
        if "float8" in row["case"]:
            us = row["us"]
            name = short(row["case"].replace(" b16", ""))
            lines.append([name, *best_bold([us["cuda"], us["triton"]]), ratio(us["triton"] / us["cuda"])])
    return table(["case", "`cuda`", "`triton`", "×"], lines)


def fp8_queries() -> list[str]:
    """TFLOP/s over visible keys, and relative errors with all rounding; × is against FA3 over the same
    blocks."""
    names = ("e4m3 queries", "bf16", "FA3 e4m3", "FA3 e4m3, contiguous")
    lines = []
    for row in load("h200_fp8_queries")["results"]:
        found = row["contenders"]
        rates = [found[name]["tflops"] for name in names]
        errors = [f"{found[name]['error_all']:.3f}" for name in (names[0], names[2], names[1])]
        paged, contiguous = ratio(rates[0] / rates[2]), ratio(rates[0] / rates[3])
        lines.append([row["case"], *best_bold(rates, 0, least=False), paged, contiguous, *errors])
    header = ["case", "e4m3 queries", "bf16", "FA3 e4m3", "FA3 e4m3*", "×", "× FA3*"]
    return table([*header, "error", "error of FA3", "error of bf16"], lines)


def routing() -> list[str]:
    """Each backend alone, a plan's share per layer included; × is the best other one's time over that of what
    the automatic choice runs."""
    document, lines = load("h200_routing"), []
    names = list(dict.fromkeys(document["decode"] + document["prefill"]))
    for row in document["rows"]:
        us = times(row, "us_with_plan")
        chosen = document["decode" if row["num_tokens"] == row["num_reqs"] else "prefill"][0]
        best = min(value for name, value in us.items() if name != chosen)
        lines.append([row["case"], *best_bold([us.get(name) for name in names]), ratio(best / us[chosen])])
    return table(["case", *(f"`{name}`" for name in names), "×"], lines)


def plans() -> list[str]:
    """Host microseconds of one plan, which all layers of a step share; next to it the step of 32 layers."""
    lines = []
    for row in load("h200_plans_prompts")["rows"]:
        case = f"{row['requests']} requests, {row['query_tokens']} on {row['keys']:,}"
        step = "–" if "replay" not in row else f"{row['replay']:,.0f}"
        lines.append(
            [
                f"`{row['backend']}`",
                case,
                *(f"{row[name]:,}" for name in ("first", "again", "lengths_read")),
                step,
            ]
        )
    head = [
        "backend",
        "batch",
        "first",
        "lengths advanced",
        "lengths read from the device",
        "32 calls, device",
    ]
    return table(head, lines)


def cascade() -> list[str]:
    """The plain path and the cascade, and which of them the rule takes."""
    lines = []
    for row in load("h200_cascade_op")["rows"]:
        us, heads = row["us"], "/".join(map(str, row["heads"]))
        if row["requests"] in (4, 16, 64, 256):
            lines.append(
                [
                    f"{heads}, {row['shared']:,} shared + {row['own']:,}, × {row['requests']}",
                    *best_bold([us["plain"], us["cascade"]]),
                    figure(us["plain"] / us["cascade"], 2),
                ]
            )
    return table(["tokens × requests", "plain", "cascade", "×"], lines)


def block_size() -> list[str]:
    rows = load("h200_attention_block_size")["rows"]
    return table(
        ["case", "`cuda`", "`triton`", "FA3"],
        ([r["case"], *best_bold([times(r).get(n) for n in ("cuda", "triton", "fa3")])] for r in rows),
    )


def write_kv() -> list[str]:
    lines = []
    for norm, file in (("no", "h200_write_kv"), ("yes", "h200_write_kv_norm")):
        for row in load(file)["rows"]:
            us = {name: timing["median_us"] for name, timing in row["timings"].items()}
            lines.append(
                [
                    str(row["num_tokens"]),
                    norm,
                    *(figure(us[name]) for name in ("empty", "write_kv", "rope_write_kv", "unfused")),
                ]
            )
    return table(
        [
            "tokens",
            "q/k norm",
            "empty kernel",
            "`write_kv`",
            "`rope_write_kv`",
            "compiled by torch + `write_kv`",
        ],
        lines,
    )


def cpu_decode() -> list[str]:
    """Milliseconds, the least of each, since other work ran on the machine."""
    documents = [load(f"cpu_decode{context}") for context in ("_1k", "", "_16k")]
    rows = [("keys and values", documents[1]["context"], row) for row in documents[1]["decode"]]
    rows += [("latents", document["context"], row) for document in documents for row in document["latents"]]
    lines = []
    for kind, context, row in rows:
        sizes = "/".join(str(row[name]) for name in ("heads", "kv_heads", "head_dim") if name in row)
        ms = {name: of["min_us"] / 1000 for name, of in row.items() if isinstance(of, dict)}
        line = [f"{kind} {sizes}, {row['reqs']} x {context}, {row['dtype']}", figure(ms["native"], 2)]
        for name in ("gather_sdpa", "products"):
            line += [figure(ms[name], 2), ratio(ms[name] / ms["native"])] if name in ms else ["–", "–"]
        lines.append(line)
    return table(["case", "native", "gathered, SDPA", "×", "gathered, products", "×"], lines)


def cpu_states() -> list[str]:
    """Microseconds of one layer's mixer without its projections, and milliseconds of whole steps: of each
    kind of layer its newest run."""
    lines, again = [], load("cpu_states_zen5")["rows"]
    since = {row["family"] for row in again}
    for row in [*(row for row in load("cpu_states")["rows"] if row["family"] not in since), *again]:
        op, step = row["op_us"], row["step_us"]
        figures = [figure(op["paged_cache"]), figure(op["transformers"]), ratio(row["op_ratio"])]
        figures += [ratio(row["mixer_ratio"]), figure(step["engine"] / 1000, 1)]
        figures += [figure(step["transformers"] / 1000, 1), ratio(row["step_ratio"])]
        lines.append([f"{row['family']}, {row['model']}, {row['batch']}", *figures])
    heads = ["layer, model, rows", "op, µs", "transformers", "×", "mixer ×", "step, ms", "transformers", "×"]
    return table(heads, lines)


def cpu_engine() -> list[str]:
    """Tokens a second."""
    of = load("cpu_engine")
    one, eight, other = (of[f"{name}_tok_s"] for name in ("engine_batch1", "engine_batch8", "hf_generate"))
    lines = [["1 prompt", figure(one), figure(other), ratio(one / other)]]
    lines.append(["8 prompts at once, against one by one", figure(eight), figure(one), ratio(eight / one)])
    return table(["SmolLM2 135M, fp32, tokens/s", "engine", "against", "×"], lines)
