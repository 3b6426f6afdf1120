"""Tables of whole steps, captures, starts and single layers for docs/results/ (make_results.py)."""

import math
from typing import Any

from result_tables import best_bold, figure, load, ratio, table


def step_times(file: str) -> dict[tuple[str, int, str], dict[str, Any]]:
    return {(row["shape"], row["batch"], row["contender"]): row for row in load(file)["rows"]}


def step() -> list[str]:
    own, lines = step_times("h200_step"), []
    peers = step_times("h200_step_peers_1b") | step_times("h200_step_peers_8b")
    for shape, batch, _ in sorted(own, key=lambda key: (key[0], key[1])):
        row = own[shape, batch, "k1+fuse"]
        ms = [peers.get((shape, batch, name), {}).get("ms") for name in ("k1+fuse", "hf_static", "hf_cb")]
        goal = row["target_ms"]
        verdict = "–" if goal is None else f"{goal:.2f}" if row["ms"] <= goal else f"{goal:.2f} missed"
        known = [x for x in ms[1:] if x]
        lines.append(
            [
                shape,
                str(batch),
                figure(row["roofline_ms"], 2),
                f"**{row['ms']:.3f}**",
                verdict,
                *(figure(x, 3) for x in ms),
                ratio(min(known) / ms[0]) if known and ms[0] else "–",
            ]
        )
    return table(
        [
            "shape",
            "batch",
            "roofline",
            "own",
            "goal",
            "own, same run",
            "HF static + compile",
            "HF continuous",
            "×",
        ],
        lines,
    )


def step_variants() -> list[str]:
    rows = load("h200_step_variants")["rows"]
    ms = lambda row: f"{row['ms']:.3f}" if "ms" in row else row["status"]  # noqa: E731
    return table(
        ["case", "ms"],
        (
            [row["case"], ms(row)]
            for row in sorted(rows, key=lambda row: (row["batch"], row.get("ms", math.inf)))
        ),
    )


def idle() -> list[str]:
    rows = [row for file in ("h200_step_idle", "h200_step_idle_k1") for row in load(file)["rows"]]
    return table(
        ["case", "idle between launches", "with the gaps inside a graph"],
        (
            [row["case"], f"{row['idle_between_launches']:.2%}", f"{row['idle_between_kernels']:.2%}"]
            for row in rows
        ),
    )


def host() -> list[str]:
    rows = [
        row for file in ("h200_step", "h200_step_k4") for row in load(file)["rows"] if "host_launch_us" in row
    ]
    return table(
        ["case", "ms per step", "a replay alone, µs", "a launch of the loop, µs"],
        (
            [r["case"], f"{r['ms']:.3f}", figure(r["host_replay_us"]), figure(r["host_launch_us"])]
            for r in rows
        ),
    )


def capture() -> list[str]:
    document = load("h200_capture")
    records = [bucket["record_ms"] for bucket in document["captures"][0]["buckets"]]
    lines = [
        (
            f"{len(records)} buckets: {min(records):.0f} to {max(records):.0f} ms each, "
            f"{document['captures'][0]['reserved_mib']:.0f} MiB in all."
        ),
        "",
    ]
    lines += table(
        ["prompt tokens", "requests", "from Python, ms", "from a graph, ms"],
        (
            [str(r["tokens"]), str(r["requests"]), *best_bold([r["python_ms"], r["graph_ms"]])]
            for r in document["prefill"]
        ),
    )
    first = [[str(r["tokens"]), *best_bold([r["python_ms"], r["graph_ms"]])] for r in document["first_token"]]
    return [
        *lines,
        "",
        *table(
            ["prompt tokens", "first token through the engine, from Python, ms", "from a graph, ms"], first
        ),
    ]


def cold() -> list[str]:
    kind = lambda run: "warm" if run["options"]["load"] or "warm" in run["run"] else "cold"  # noqa: E731
    return table(
        ["run", "contender", "caches", "seconds to the first token"],
        (
            [r["run"], r["options"]["contender"], kind(r), f"{r['seconds']:.1f}"]
            for r in load("h200_cold_start")["runs"]
        ),
    )


def engine() -> list[str]:
    lines = []
    for row in load("h200_engine_smollm2")["rows"]:
        compiled, base = "yes" if row["compile"] else "no", row["hf_generate_tok_s"]
        for name in ("engine_batch1_tok_s", "engine_batch8_tok_s"):
            prompts = "1" if "batch1" in name else "8"
            lines.append(
                [compiled, prompts, figure(row[name], 0), figure(base, 1), f"{row[name] / base:.1f}"]
            )
    return table(["torch.compile", "prompts", "engine, tok/s", "`generate()`, 1 prompt, tok/s", "×"], lines)


def serving() -> list[str]:
    ms = lambda seconds: figure(1e3 * seconds, 1 if seconds < 0.1 else 0)  # noqa: E731
    lines = []
    for row in load("h200_serving")["runs"]:
        for name, run in zip(("first", "second"), row["runs"], strict=True):
            lines.append(
                [
                    f"{row['shape']}, {row['name']}",
                    f"{row['start']:.1f}",
                    name,
                    figure(run["tok_per_s"], 0),
                    " / ".join(ms(run["first_token"][share]) for share in ("p50", "p99")),
                    " / ".join(ms(run["between_tokens"][share]) for share in ("p50", "p99", "max")),
                    str(run["late_compiles"]),
                ]
            )
    return table(["engine", "start, s", "run", "tok/s", "first token, ms", "between two", "compiled"], lines)


def serving_steps() -> list[str]:
    """Runs of today, and how near their steps were to the least that each can take."""
    lines = []
    documents = [load(name) for name in ("h200_serving_sampler", "h200_serving_steps")]
    for engine in [engine for document in documents for engine in document["engines"]]:
        for run in engine["runs"]:
            spent, least = (sum(kind[name] for kind in run["by_kind"]) for name in ("s", "least_s"))
            first, between = (
                " / ".join(figure(1e3 * run[name][at]) for at in ("p50", "p99") if at in run[name]) or "–"
                for name in ("first_token", "between_tokens")
            )
            names = f"{engine['shape']}, {engine['options']['max_batch_size']} rows"
            load_ = f"{run['requests']} {run['lengths']}"
            rates = (figure(run[name], 0) for name in ("tok_per_s", "prompt_tok_per_s"))
            start = f"{engine['start_s']:.1f}"
            lines.append([names, start, load_, *rates, f"{100 * least / spent:.0f} %", first, between])
    header = [
        "engine",
        "start, s",
        "requests",
        "tok/s",
        "prompt tok/s",
        "of the least",
        "first token, ms",
        "between two",
    ]
    return table(header, lines)


#: Parts of a run beside vLLM: how a row is named, and its figure.
PEER_PARTS: dict[str, tuple[str, str]] = {
    "start": ("start, {kernels} stored, s", "start_s"),
    "uniform": ("256 requests of 100 to 1,024 tokens, {run} run", "tok_per_s"),
    "sharegpt": ("1,024 requests like ShareGPT's", "tok_per_s"),
    "prompts": ("{requests} prompts of 2,048 tokens, {run} run, prompt tok/s", "prompt_tok_per_s"),
}


def serving_peers() -> list[str]:
    """Output tokens per second, where nothing else is said."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in load("h200_serving_peers")["rows"]:
        if row["part"] in PEER_PARTS:
            name, key = PEER_PARTS[row["part"]]
            words = name.format(kernels="kernels" if row.get("stored") else "nothing", **row)
            found.setdefault((row["shape"], words), {})[row["engine"]] = row[key]
    lines = []
    for (shape, words), by in found.items():
        ahead = by["ours"] / by["vllm"] if "start" not in words else by["vllm"] / by["ours"]
        lines.append([shape, words, figure(by["ours"]), figure(by["vllm"]), f"{ahead:.2f}"])
    return table(["shape", "load", "ours", "vLLM", "×"], lines)


def serving_latencies() -> list[str]:
    """Of the rows at a rate, ours behind vLLM's, and 8B's, of which vLLM's are missing: milliseconds."""
    rows = [row for row in load("h200_serving_peers")["rows"] if row["part"] == "rates"]
    rows += [{"shape": "llama-8b", "engine": "ours", **row} for row in load("h200_serving_sampler")["rates"]]
    lines = []
    for row in sorted(rows, key=lambda row: (row["shape"], row["share"], row["engine"])):
        ms = (
            " / ".join(figure(1e3 * row[name][at]) for at in ("p50", "p99", "max"))
            for name in ("first_token", "between_tokens")
        )
        engine = {"ours": "ours", "vllm": "vLLM"}[row["engine"]]
        lines.append([row["shape"], f"{100 * row['share']:.0f} %", f"{row['rate']:.1f}", engine, *ms])
    return table(["shape", "load", "requests/s", "engine", "first token", "between two"], lines)


def linear() -> list[str]:
    document, lines = load("h200_linear"), []
    for key, peer in (("layers", "cublas"), ("chains", "composed")):
        groups: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        for row in document[key]:
            groups.setdefault((row["model"], row.get("layer", "four layers in a chain")), {})[
                row["tokens"]
            ] = row
        for (model, layer), by_tokens in groups.items():
            cells = [
                figure(by_tokens[n][who]["median_us"]) for n in (1, 8, 16, 32, 64) for who in (peer, "cuda")
            ]
            lines.append(
                [f"{model} {layer}", *(f"{cells[i]} → {cells[i + 1]}" for i in range(0, len(cells), 2))]
            )
    return table(["layer", "1 token", "8", "16", "32", "64"], lines)


def sampling() -> list[str]:
    groups: dict[str, dict[int, dict[str, float]]] = {}
    for row in load("h200_sampling")["rows"]:
        groups.setdefault(row["case"], {})[row["rows"]] = {
            name: timing["median_us"] for name, timing in row["timings"].items()
        }
    cells = lambda us: " / ".join(  # noqa: E731
        best_bold([us.get("sample_tokens", us.get("accept_tokens")), us.get("torch.argmax", us.get("sort"))])
    )
    return table(
        ["case", "1 row: own / torch", "8 rows", "64 rows"],
        ([case, *(cells(by[n]) for n in (1, 8, 64))] for case, by in groups.items()),
    )
