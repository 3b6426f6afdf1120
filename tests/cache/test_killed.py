"""A process that is killed in the middle of a write leaves nothing that a later one takes for whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiered_engine import TieredEngine

from torchpaged.cache.snapshots import load_prefixes, save_prefixes

pytestmark = pytest.mark.timeout(300)  # a hang is a failure
TEXTS = [list(range(100 * i, 100 * i + 17)) for i in range(6)]
#: Half of a write, a word to the parent, and no end.
HALF = """
import os, sys, time
from pathlib import Path
from tiered_engine import TieredEngine
from torchpaged.cache.snapshots import save_prefixes

texts, folder = [list(range(100 * i, 100 * i + 17)) for i in range(6)], sys.argv[1]

def stop():
    print("half", flush=True)
    time.sleep(600)
"""
CHILDREN = {
    "disk": """
engine, write = TieredEngine(8, 4, folder, 60), os.pwrite
os.pwrite = lambda file, data, place: (write(file, data[: len(data) // 2], place), stop())
for text in texts:
    engine.run(text)
time.sleep(600)  # the writer is a thread
""",
    "snapshot": """
engine, write = TieredEngine(40, 4), Path.write_bytes
engine.run(texts[0])
save_prefixes(f"{folder}/kept", engine.prefixes, engine.cache, {})
for text in texts:
    engine.run(text)
Path.write_bytes = lambda path, data: (write(path, data[: len(data) // 2]), stop())
save_prefixes(f"{folder}/kept", engine.prefixes, engine.cache, {})
""",
}


def killed(child: str, folder: Path) -> None:
    """Run a child until it is half through a write, and kill it there."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", HALF + CHILDREN[child], str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.kill()
    assert process.returncode < 0


def test_blocks_on_a_disk(tmp_path: Path) -> None:
    """Its file went with it; a later one in the same folder begins with nothing."""
    killed("disk", tmp_path)
    assert not list(tmp_path.iterdir())
    engine = TieredEngine(8, 4, tmp_path, 60)
    for turn in range(2):
        for text in TEXTS:
            found = engine.run(text)  # checks what it finds
            assert not (found and turn == 0)
            engine.host._settle_writes()  # type: ignore[attr-defined]
    assert engine.prefixes.stats.disk_tokens > 0


def test_a_snapshot(tmp_path: Path) -> None:
    """That of before is there; half a one goes with the next that is written, an hour later."""
    killed("snapshot", tmp_path)
    [left] = tmp_path.glob(".torchpaged-*")
    engine = TieredEngine(40, 4)
    assert load_prefixes(tmp_path / "kept", engine.prefixes, engine.cache, {}) == 16
    assert [engine.run(text) for text in TEXTS] == [4, 0, 0, 0, 0, 0]
    os.utime(left, (0, 0))
    save_prefixes(tmp_path / "kept", engine.prefixes, engine.cache, {})
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
