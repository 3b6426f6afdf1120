"""Prompts from a file or from stdin, and outputs into a file that a later run goes on with.

    torchpaged generate --input prompts.jsonl --output out.jsonl

A line of the input is an object with "prompt", text, and "id", by default the number of its line. Each
request that ends is a line of the output at once: "id", "prompt", "text", "token_ids", "finish_reason", and
"error" where it failed. Ids that the output has are skipped.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from torchpaged.cli.generation_report import begun, grown
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine import Generator, RequestOutput
from torchpaged.engine.numbers import shown
from torchpaged.profiling.ranges import check_writable

#: How each line of an output begins.
_ROW = b'{"id": '
#: Characters of a line. Files such as /dev/zero are one line without an end.
_LONGEST = 1 << 26


def read_lines(path: str, name: str) -> Iterator[str]:
    """Of a file, an argument of that name; "-": of stdin."""
    try:
        if path == "-" and sys.stdin is None:
            raise ArgumentError(name, "an open one", "a closed one", "redirect a file of prompts to it")
        with contextlib.nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8") as file:
            for number, line in enumerate(iter(functools.partial(file.readline, _LONGEST), "")):
                if len(line) == _LONGEST:
                    expected, got = (
                        f"lines of less than {_LONGEST:,} characters",
                        f"line {number + 1} is longer",
                    )
                    raise ArgumentError(name, expected, got, "give text, a line for each prompt")
                yield line if number else line.removeprefix("\ufeff")  # a mark that a text is in UTF-8
    except OSError as error:
        raise ArgumentError(name, "a file that can be read", f"{path!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        wrong, encoding = error.object[error.start : error.end], error.encoding.upper()
        fix = "convert it first" + ("" if encoding == "UTF-8" else ", or set PYTHONIOENCODING=utf-8")
        raise ArgumentError(name, f"text in {encoding}", f"bytes such as {wrong!r}", fix) from error


def lines_of_stdin() -> list[str]:
    """Each line that is not empty, a prompt.

    Raises:
        ArgumentError: stdin is no text.
    """
    return [line.rstrip("\r\n") for line in read_lines("-", "stdin") if line.strip()]


def _id_of(line: bytes, where: str) -> Any:
    """Of a line that this command wrote."""
    try:
        row = json.loads(line)
        name, _ = row["id"], row["finish_reason"]
        hash(name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        expected = "a file that this command wrote, or none"
        raise ArgumentError("--output", expected, f"{where}: {error}") from error
    return name


def _is_cut(line: bytes) -> bool:
    """Whether a line without an end is the beginning of one that this command writes."""
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(line)
        return False
    return _ROW.startswith(line[: len(_ROW)])


def _done(path: str) -> set[Any]:
    """Ids that an output has. A last line that was not written to its end is cut off, and one that lacks
    nothing but its end gets it, once all others are known to be lines of an output."""
    if not Path(path).is_file():  # nor a pipe or a device, whose end may never come
        return set()
    content = Path(path).read_bytes()
    whole, newline, rest = content.rpartition(b"\n")
    cut = bool(rest) and _is_cut(rest)
    lines = [*whole.splitlines(), *([rest] if rest and not cut else [])]
    done = {_id_of(line, f"line {number} of {path}") for number, line in enumerate(lines, 1)}
    if cut:
        with open(path, "r+b") as file:
            file.truncate(len(whole) + len(newline))
    elif rest:
        with open(path, "ab") as file:
            file.write(b"\n")
    return done


@contextlib.contextmanager
def sole_writer(path: str) -> Iterator[None]:
    """Inside, no other run of this command writes to the output ``path``: each would compute the prompts of
    the other, and take a line that is being written for one that was broken off. Not on systems without
    `fcntl`, nor on file systems that do not lock.

    Raises:
        ArgumentError: another run does, or the file can't be written.
    """
    check_writable(path, "--output")
    if Path(path).exists() and not Path(path).is_file():  # a pipe or a device is not ours to replace
        yield
        return
    with contextlib.ExitStack() as stack:
        while True:
            is_new = not Path(path).exists()
            file = stack.enter_context(open(path, "ab"))
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                expected = "a file that no other run writes to"
                raise ArgumentError("--output", expected, repr(path), "wait for its end") from None
            except (ImportError, OSError):
                pass
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    break
            file.close()  # a run that wrote nothing took it away
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                if is_new and not os.path.getsize(path):
                    os.unlink(path)


def read_prompts(source: str, output: str) -> dict[int | str, str]:
    """Prompts by their ids, those left out that ``output`` has.

    Raises:
        ArgumentError: a file that can't be read, bytes that are no text, a line that is no such object, an id
            that occurs twice, or as the output another file.
    """
    found: dict[int | str, str] = {}
    for number, line in enumerate(read_lines(source, "--input"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ArgumentError("--input", "a JSON object per line", f"line {number}: {error}") from error
        known = isinstance(row, dict) and not set(row) - {"id", "prompt"}
        if not known or not isinstance(row.get("prompt"), str):
            got = f"{shown(row)} in line {number}"
            raise ArgumentError("--input", '{"prompt": TEXT}, and "id" if wanted, per line', got)
        name = row.get("id", number)
        if not isinstance(name, (int, str)) or isinstance(name, bool) or name in found:
            raise ArgumentError(
                "--input", "ids that are text or integers, each once", f"{name!r} in line {number}"
            )
        found[name] = row["prompt"]
    done = _done(output)
    return {name: prompt for name, prompt in found.items() if name not in done}


def write_outputs(
    generator: Generator, names: dict[int, tuple[int | str, str]], path: str, console: Console, quiet: bool
) -> dict[int, RequestOutput]:
    """Run all submitted requests, and append each that ends to ``path``.

    Args:
        generator: of the requests.
        names: id in the file, and prompt, by request.
        path: of the output.
        console, quiet: of the progress bar; none where quiet, or off a terminal.

    Returns:
        What came out, by request.
    """
    outputs = {request: begun(request) for request in names}
    columns = TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with (
        open(path, "a", encoding="utf-8") as file,
        Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=len(names))
        for event in generator.stream():
            output = outputs[event.request_id] = grown(outputs[event.request_id], event)
            if event.finish_reason is None:
                continue
            name, prompt = names[event.request_id]
            row = {"id": name, "prompt": prompt, "text": output.text, "token_ids": output.token_ids}
            row |= {"finish_reason": output.finish_reason}
            row |= {"error": output.error.reason} if output.error else {}
            file.write(json.dumps(row) + "\n")
            file.flush()
            bar.advance(task)
    return outputs
