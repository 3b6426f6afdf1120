"""Files and folders that appear whole or not at all: their modes, and what killed processes left."""

import os
import stat
from pathlib import Path

import pytest

from torchpaged.custom_ops.whole_files import replacing


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_modes_are_those_of_the_umask(tmp_path: Path, umask: int, file: int, folder: int) -> None:
    """A shared cache folder can be read by those whom the umask lets."""
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "file") as path:
            path.write_text("x")
        with replacing(tmp_path / "folder") as path:
            path.mkdir()
    finally:
        os.umask(before)
    assert (mode(tmp_path / "file"), mode(tmp_path / "folder")) == (file, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(target) as path:
        path.write_text("new")
        raise KeyboardInterrupt
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_what_a_killed_process_left_goes_in_time(tmp_path: Path) -> None:
    """Not what another process may be writing now, and nothing of others."""
    for name in (".torchpaged-old", ".torchpaged-new", ".others-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    for name in (".torchpaged-old", ".others-old"):
        os.utime(tmp_path / name, (0, 0))
    with replacing(tmp_path / "file") as path:
        path.write_text("x")
    assert sorted(file.name for file in tmp_path.iterdir()) == [".others-old", ".torchpaged-new", "file"]


def test_a_folder_that_another_process_made_stays(tmp_path: Path) -> None:
    with replacing(tmp_path / "folder") as path:
        path.mkdir()
        (path / "mine").touch()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "theirs").touch()
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["theirs"]


def test_a_folder_where_the_file_shall_be(tmp_path: Path) -> None:
    """Nothing is lost in silence: the caller would look for its file there."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"), replacing(tmp_path / "folder") as path:
        path.write_text("x")
    assert [*tmp_path.iterdir()] == [tmp_path / "folder"]


def test_pipes_and_devices_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="Neither a file"), replacing(tmp_path / "pipe") as path:
        path.write_text("x")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
