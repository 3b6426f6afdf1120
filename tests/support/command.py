"""The command line, in this process or in one of its own."""

import importlib.util
import io
import os
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Done(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def python(*arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python ...`` in a process of its own, over this checkout, with further variables."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout)


def script(path: str) -> ModuleType:
    """A file of this checkout as a module, whichever folder it lies in."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(*arguments: str, **options: Any) -> str:
    """What such a process prints, once it has ended well."""
    done = python(*arguments, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, seconds of imports long."""
    return python("-m", "torchpaged", *arguments, HF_HUB_OFFLINE="1", COLUMNS="200")


class Captured(io.StringIO):
    """What `run` catches the command's output with: a pipe to it, unless `terminal` is set."""

    terminal = False

    def isatty(self) -> bool:
        """Whether the command is to take it for a terminal."""
        return self.terminal


def run(*arguments: str, **environment: str) -> Done:
    """The entry point in this process, with what Python would print of an exception that leaves it."""
    from torchpaged.cli import main

    out, errors, code = Captured(), Captured(), 0
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


def refused(words: str, *arguments: str, **environment: str) -> Done:
    """The command, which says so on stderr and nothing on stdout."""
    done = run(*arguments, **environment)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done
