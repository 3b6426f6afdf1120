"""Our engine beside vLLM in one run on one GPU: the same shapes and loads, each engine in a process of its
own, in turn.

    PYTHONPATH=. python benchmarks/bench_serving_peers.py --output peers.json [--plan PLAN] [--seconds 550]
        [--engines vllm,ours] [--require-first] [--peer-path FOLDER:FOLDER] [--caches FOLDER]

``PLAN``: shapes and their parts in order of worth, `llama-1b:uniform,prompts;qwen3-0.6b:uniform`. Parts:
``uniform``: 256 requests of 100 to 1,024 tokens of prompt and of output, at once, twice; ``prompts``: 8 and
64 prompts of 2,048 tokens with one token of output, twice each; ``sharegpt``: 1,024 requests of log-normal
lengths, at once; ``rates``: such requests by a Poisson process at 25, 50 and 75 % of the requests per second
that the first engine served in ``sharegpt``, so that both get the same load.

Every engine and shape starts with empty folders for kernels, unless an earlier entry had that pair, and all
sizes are those of `serving.cases.Case`. vLLM is looked for behind ``--peer-path`` too, which our processes
do not see. ``--seconds`` ends the run: the process that is busy then is killed, with what it started, and
what is written stays; ``--require-first`` ends it if its first process fails. A process that fails leaves
the end of what it printed. The document has all rows, and is written anew after each process; its path is
printed. Seconds, and tokens or requests per second.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import conditions
from serving.cases import PARTS, Case, measure

PLAN = (
    "llama-1b:uniform,prompts;llama-8b:uniform,prompts,sharegpt;qwen3-0.6b:uniform,prompts;"
    "llama-1b:sharegpt,rates"
)
#: Of our engine, by shape: a step of 8B is long enough for more tokens.
OPTIONS = {("ours", "llama-8b"): {"prefill_chunk_size": 4096}}
#: Of a row, printed at the end.
SHOWN = ("ready_s", "start_s", "seconds", "tok_per_s", "prompt_tok_per_s")
#: A process that would have less is not started.
LEAST_SECONDS = 40


def plan_of(text: str) -> list[tuple[str, tuple[str, ...]]]:
    entries = []
    for entry in text.split(";"):
        shape, _, parts = entry.partition(":")
        entries.append((shape, tuple(parts.split(","))))
        if unknown := set(entries[-1][1]) - set(PARTS):
            raise SystemExit(f"--plan: expected parts of {', '.join(PARTS)}, got {', '.join(unknown)}")
    return entries


def environment(args: argparse.Namespace, engine: str, shape: str) -> dict[str, str]:
    """Of a process: folders for kernels of its own, and the peer's path for the peer alone."""
    caches = Path(args.caches) / f"{engine}-{shape}"
    names = ("TORCHPAGED_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
    paths = args.peer_path.split(":") if engine == "vllm" and args.peer_path else []
    here = str(Path(__file__).parent)
    return {
        **os.environ,
        **{name: str(caches / name.lower()) for name in names},
        "PYTHONPATH": ":".join([*paths, here, str(Path(here).parent), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def run(args: argparse.Namespace, case: Case, seconds: float) -> str | None:
    """One process, ended with all that it started when ``seconds`` are over; why it failed."""
    log = Path(args.output).with_suffix(f".{case.engine}-{case.shape}.log")
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, "--case", json.dumps(dataclasses.asdict(case))],
            env=environment(args, case.engine, case.shape),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"the time of {seconds:.0f} s was over"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return None if process.returncode == 0 else f"exit {process.returncode}: {log.read_text()[-2000:]}"


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def served_by(rows: list[dict[str, Any]], shape: str) -> float:
    """Requests per second of the first "sharegpt" of ``shape``; 0: there is none."""
    found = [row["requests_per_s"] for row in rows if (row["part"], row["shape"]) == ("sharegpt", shape)]
    return found[0] if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plan", type=plan_of, default=PLAN)
    parser.add_argument("--seconds", type=float, default=550)
    parser.add_argument("--engines", default="vllm,ours")
    parser.add_argument("--require-first", action="store_true")
    parser.add_argument("--peer-path", default="")
    parser.add_argument("--caches", default="")
    parser.add_argument("--sizes", type=json.loads, default={}, help="fields of Case, as JSON")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        measure(Case(**args.case))
        return
    args.caches = args.caches or tempfile.mkdtemp()
    started, rows_file = time.monotonic(), Path(args.output).with_suffix(".jsonl")
    ended: list[dict[str, Any]] = []
    for shape, parts in args.plan:
        for engine in args.engines.split(","):
            left = args.seconds - (time.monotonic() - started)
            entry: dict[str, Any] = {"engine": engine, "shape": shape, "parts": parts}
            if left < LEAST_SECONDS:
                ended.append(entry | {"failed": f"{left:.0f} s were left"})
                continue
            served = served_by(rows_of(rows_file), shape) if "rates" in parts else 0.0
            options = OPTIONS.get((engine, shape), {})
            fields = {"options": options, "served": served, **args.sizes}
            case = Case(engine, shape, parts, str(rows_file.resolve()), time.time(), **fields)
            begun = time.monotonic()
            failed = run(args, case, left)
            ended.append(entry | {"seconds": time.monotonic() - begun, "failed": failed})
            document = {"benchmark": "serving_peers", "rows": rows_of(rows_file), "processes": ended}
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            document["conditions"] = conditions.collect(device)
            args.output.write_text(json.dumps(document, indent=1) + "\n")
            print(json.dumps(ended[-1]), flush=True)
            if failed and args.require_first and len(ended) == 1:
                raise SystemExit(f"{engine} at {shape}: {failed}")
    for row in rows_of(rows_file):
        figures = {name: round(row[name], 4) for name in SHOWN if name in row}
        print(row["engine"], row["shape"], row["part"], row.get("run", row.get("share", "")), figures)
    print(args.output)


if __name__ == "__main__":
    main()
