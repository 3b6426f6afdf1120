"""The command line, in this process or in one of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Done(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, seconds of imports long."""
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "torchpaged", *arguments],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run(*arguments: str, **environment: str) -> Done:
    """The entry point in this process, with what Python would print of an exception that leaves it."""
    from torchpaged.cli import main

    out, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setattr(sys, "argv", ["torchpaged", *arguments])
        for name, value in {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", **environment}.items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except Exception:
            traceback.print_exc()
            code = 1
    return Done(code, out.getvalue(), errors.getvalue())
