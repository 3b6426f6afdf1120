"""Files and folders that appear whole or not at all, with the modes that the umask gives."""

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".torchpaged-"
#: Nothing here takes so long: what is older was left by a process that was killed.
_SECONDS = 3600.0


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path to write a file or a folder to, which is renamed to ``target`` at a good end. A folder that
    another process has put there meanwhile stays. Its parent exists, and loses what killed processes left.

    Raises:
        OSError: a folder is where a file shall be, or a device, a pipe or a socket is there.
    """
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise FileExistsError(errno.EEXIST, "Neither a file nor a folder", str(target))
    for left in target.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _SECONDS:
                shutil.rmtree(left)
    # A folder of mode 0700; what is made in it is not.
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=target.parent) as work:
        path = Path(work) / target.name
        yield path
        try:
            os.replace(path, target)
        except OSError:
            if not (path.is_dir() and target.is_dir()):
                raise
