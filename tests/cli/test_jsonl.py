"""``torchpaged generate --input --output``: each prompt once, however often the command is broken off; and
prompts from stdin."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from command import Done, run

from torchpaged.custom_ops.errors import ArgumentError


def generate(folder: str, *arguments: str, stdin: str | bytes = "") -> Done:
    bytes_of_it = stdin if isinstance(stdin, bytes) else stdin.encode()
    with pytest.MonkeyPatch.context() as patch:
        # as Python opens it, which leaves the ends of lines as they are
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(bytes_of_it), "utf-8", newline="\n"))
        return run("generate", *arguments, "--model", folder, "--max-new-tokens", "4", "--ignore-eos")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_was_broken_off_goes_on(folder: str, tmp_path: Path) -> None:
    """Its last line was not written to the end; ids that are there are not computed again."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = {"first": "hello", "second": "a longer prompt", 3: "bye"}
    source.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in prompts.items()))
    arguments = ("--input", str(source), "--output", str(output))
    done = generate(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert all(done.stderr.splitlines())  # no line is left empty in the place of a progress bar
    found = {row["id"]: row for row in rows(output)}
    assert {name: row["prompt"] for name, row in found.items()} == prompts
    assert all(len(row["token_ids"]) == 4 and row["finish_reason"] == "length" for row in found.values())

    kept = json.dumps(found["second"] | {"text": "kept"}) + "\n"
    output.write_text(kept + json.dumps(found["first"])[:20])
    assert generate(folder, *arguments).returncode == 0
    assert output.read_text().startswith(kept)
    again = {row["id"]: row for row in rows(output)}
    assert len(rows(output)) == 3
    assert again == found | {"second": again["second"]}

    output.write_text(output.read_text().rstrip("\n"))  # its last line is whole
    done = generate(folder, *arguments)
    assert done.returncode == 0
    assert {row["id"]: row for row in rows(output)} == again

    before = output.read_text()
    done = generate(folder, *arguments)
    assert done.returncode == 0
    assert "nothing to do" in done.stderr
    assert output.read_text() == before


def test_a_disk_that_is_full_loses_no_row(folder: str, tmp_path: Path) -> None:
    """The second row comes to its middle; the next run makes the rest."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("hello", "a longer prompt", "bye")))
    arguments = ("--input", str(source), "--output", str(output))

    class Full(io.TextIOWrapper):
        room = 1

        def write(self, text: str) -> int:
            if not Full.room:
                super().write(text[:9])
                self.flush()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            Full.room -= 1
            return super().write(text)

    def opened(path: str, mode: str = "r", encoding: str | None = None) -> Any:
        return Full(open(path, "ab"), encoding) if mode == "a" else open(path, mode, encoding=encoding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchpaged.cli.jsonl.open", opened, raising=False)
        done = generate(folder, *arguments)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    first, cut = output.read_text().splitlines()
    assert len(cut) == 9
    assert generate(folder, *arguments).returncode == 0
    assert output.read_text().startswith(first + "\n")
    assert sorted(row["id"] for row in rows(output)) == [1, 2, 3]


def test_two_runs_with_one_output(folder: str, tmp_path: Path) -> None:
    """The second one is refused, and leaves the line alone that the first one is writing."""
    pytest.importorskip("fcntl", reason="this system has no fcntl")
    from torchpaged.cli.jsonl import sole_writer  # typer and rich are optional

    output = tmp_path / "out.jsonl"
    arguments = ("--input", "-", "--output", str(output))
    with sole_writer(str(output)):
        output.write_text('{"id": 1, "pro')
        done = generate(folder, *arguments, stdin='{"prompt": "hello"}')
    assert done.returncode == 2
    assert "--output: expected a file that no other run writes to" in done.stderr
    assert output.read_text() == '{"id": 1, "pro'
    assert generate(folder, *arguments, stdin='{"prompt": "hello"}').returncode == 0
    assert [row["id"] for row in rows(output)] == [1]


def test_an_output_that_goes_while_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that wrote nothing takes its file away; another has opened that file by then, and locks it."""
    fcntl = pytest.importorskip("fcntl", reason="this system has no fcntl")
    from torchpaged.cli.jsonl import sole_writer  # typer and rich are optional

    output, lock, gone = tmp_path / "out.jsonl", fcntl.flock, []

    def late(*arguments: Any) -> None:
        if not gone:
            gone.append(output.unlink())
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with sole_writer(str(output)):
        with pytest.raises(ArgumentError, match="no other run"), sole_writer(str(output)):
            pytest.fail("two at once")
        output.write_text("1")
    assert output.read_text() == "1"


def test_a_prompt_that_is_refused_leaves_the_others(folder: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    lines = json.dumps({"prompt": ""}) + "\n\n" + json.dumps({"prompt": "hello"}) + "\n"
    done = generate(folder, "--input", "-", "--output", str(output), stdin=lines)
    assert done.returncode == 2
    assert "error: prompt 1" in done.stderr
    assert [row["id"] for row in rows(output)] == [3]  # the number of its line


def test_prompts_from_stdin(folder: str) -> None:
    done = generate(folder, "-", "--json", stdin="hello\n\na longer prompt\n")
    assert done.returncode == 0, done.stderr
    assert [o["prompt"] for o in json.loads(done.stdout)["outputs"]] == ["hello", "a longer prompt"]


def test_lines_as_windows_writes_them(folder: str, tmp_path: Path) -> None:
    """The mark in front of a text in UTF-8, and what ends a line, are no part of a prompt."""
    done = generate(folder, "-", "--json", stdin=b"\xef\xbb\xbfhello\r\n\r\nbye\r\n")
    assert [o["prompt"] for o in json.loads(done.stdout)["outputs"]] == ["hello", "bye"]
    lines, source = b'\xef\xbb\xbf{"prompt": "hello"}\r\n{"prompt": "bye"}\r\n', tmp_path / "in.jsonl"
    source.write_bytes(lines)
    for name in (str(source), "-"):
        output = tmp_path / f"out of {Path(name).stem}.jsonl"
        done = generate(folder, "--input", name, "--output", str(output), stdin=lines)
        assert done.returncode == 0, done.stderr
        assert {row["id"]: row["prompt"] for row in rows(output)} == {1: "hello", 2: "bye"}


BAD: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("hello", "line 1"),
    "no object": ("[1]", "line 1"),
    "another field": ('{"prompt": "hello", "temperature": 1}', "line 1"),
    "no text": ('{"prompt": [1, 2]}', "got {'prompt': [1, 2]} in line 1"),
    "an id twice": ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "1 in line 2"),
    "too deep": ("[" * 100_000, "line 1"),
    "no UTF-8": (b'{"prompt": "\xff"}', "UTF-8"),
    "no id": ('{"id": null, "prompt": "a"}', "None in line 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(folder: str, tmp_path: Path, case: str) -> None:
    lines, where = BAD[case]
    output = tmp_path / "out.jsonl"
    done = generate(folder, "--input", "-", "--output", str(output), stdin=lines)
    assert done.returncode == 2
    assert "--input" in done.stderr
    assert where in done.stderr
    assert not output.exists()


def test_an_input_that_is_not_there(folder: str, tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        done = generate(folder, "--input", str(path), "--output", str(tmp_path / "out.jsonl"))
        assert done.returncode == 2
        assert f"--input: expected a file that can be read, got '{path}': " in done.stderr
        assert not (tmp_path / "out.jsonl").exists()


def test_stdin_that_is_no_text(folder: str) -> None:
    done = generate(folder, "-", stdin=b"hello\n\xff\xfe\n")
    assert done.returncode == 2
    assert "stdin: expected text in UTF-8, got bytes such as b'\\xff'" in done.stderr


def test_a_line_without_an_end(folder: str, tmp_path: Path) -> None:
    """The device would be read until there is no memory left."""
    done = generate(folder, "--input", "/dev/zero", "--output", str(tmp_path / "out.jsonl"))
    assert done.returncode == 2
    assert "--input: expected lines of less than 67,108,864 characters, got line 1 is longer" in done.stderr


def test_stdin_of_another_encoding(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names what stdin is read as: these bytes are UTF-8."""
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xc3\xa9\n"), encoding="ascii")
    monkeypatch.setattr("sys.stdin", stdin)
    done = run("generate", "-", "--model", folder)
    assert done.returncode == 2
    assert "stdin: expected text in ASCII, got bytes such as b'\\xc3'" in done.stderr
    assert "PYTHONIOENCODING=utf-8" in done.stderr


def test_stdin_that_is_closed(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    for arguments in (["-"], ["--input", "-", "--output", str(tmp_path / "out.jsonl")]):
        done = run("generate", *arguments, "--model", folder)
        assert done.returncode == 2
        assert "expected an open one, got a closed one" in done.stderr


def test_an_output_that_cannot_be_written(folder: str, tmp_path: Path) -> None:
    """Said before a model is loaded."""
    for output in (tmp_path / "none" / "out.jsonl", tmp_path):
        done = generate(folder, "--input", "-", "--output", str(output), stdin='{"prompt": "hello"}')
        assert done.returncode == 2
        assert "--output: expected a file" in done.stderr
        assert "model:" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_an_output_that_is_no_file_is_written_to_and_never_read(folder: str, tmp_path: Path) -> None:
    """Several runs at once may throw theirs away; a pipe has no end as long as this command holds it."""
    from torchpaged.cli.jsonl import sole_writer

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with sole_writer(os.devnull):
        for output in (os.devnull, str(pipe)):
            done = generate(folder, "--input", "-", "--output", output, stdin='{"prompt": "hello"}')
            assert done.returncode == 0, done.stderr
    written = os.read(reader, 1 << 16)
    os.close(reader)
    assert json.loads(written)["prompt"] == "hello"


@pytest.mark.parametrize(
    "content",
    [
        "mine\nand more",
        "a line",
        '{"id": 1, "prompt": "hello"}\n',
        '{"id": [1], "finish_reason": "stop"}\n',
        "[" * 100_000 + "\n",
    ],
    ids=lambda content: repr(content[:40]),
)
def test_what_is_not_an_output_is_left_alone(folder: str, tmp_path: Path, content: str) -> None:
    """Notes, a line without an end, an input, ids that are no ids."""
    output = tmp_path / "notes.txt"
    output.write_text(content)
    done = generate(folder, "--input", "-", "--output", str(output), stdin='{"prompt": "hello"}')
    assert done.returncode == 2
    assert "--output" in done.stderr
    assert output.read_text() == content


@pytest.mark.parametrize(
    "arguments",
    [("--input", "x"), ("--output", "x"), ("hello", "--input", "x", "--output", "y"), ()],
    ids=str,
)
def test_bad_options(folder: str, arguments: tuple[str, ...]) -> None:
    done = generate(folder, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
