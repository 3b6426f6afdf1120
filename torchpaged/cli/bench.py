"""What ``torchpaged bench`` offers; the work is in ``torchpaged.bench``, imported when a benchmark runs."""

import json

import typer

from torchpaged.bench.options import Options
from torchpaged.cli.commands import command_of

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Benchmarks; JSON in the last line of stdout, all else on stderr.",
)


@app.callback()
def _group() -> None:
    """Keeps ``attention`` a subcommand while it is the only one."""


def attention(options: Options) -> None:
    """Paged attention on this machine, backends side by side: checked against a float32 oracle, then timed in
    turns. Against other libraries, in a checkout: benchmarks/bench_attention.py."""
    from torchpaged.bench.attention import exit_code, run

    document = run(options)
    print(json.dumps(document), flush=True)
    raise typer.Exit(exit_code(document))


app.command()(command_of(Options, attention))
