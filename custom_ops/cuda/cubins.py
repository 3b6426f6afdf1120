"""Machine code on disk: whole, or as good as absent. The driver gets no length, so a cut file would be
read past its end.

A file holds a magic number, the SHA-256 of the code and the code. It is written under another name, flushed
to the disk and then renamed, so that of several processes that compile the same each leaves a whole file, and
the last one stays.
"""

import contextlib
import hashlib
import os
from pathlib import Path

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.whole_files import replacing

_MAGIC = b"torchpaged cubin 1\n"
_DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """Where machine code is kept; it need not exist."""
    return Path(variables.get("TORCHPAGED_CACHE")) / "cubin"


def load(name: str) -> bytes | None:
    """The code of file ``name``; None if it is absent, unreadable, cut or damaged: a cache costs time,
    not correctness."""
    try:
        path = folder() / name
        content = path.read_bytes() if path.is_file() else b""  # a FIFO would be waited for
    except OSError:  # no home directory, too
        return None
    head, digest = content[: len(_MAGIC)], content[len(_MAGIC) : len(_MAGIC) + _DIGEST]
    code = content[len(_MAGIC) + _DIGEST :]
    return code if code and head == _MAGIC and hashlib.sha256(code).digest() == digest else None


def store(name: str, code: bytes) -> None:
    """Keep ``code`` as file ``name``, over what may be there; nothing happens where nothing can
    be written."""
    with contextlib.suppress(OSError):
        target = folder() / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as path, path.open("wb") as file:
            file.write(_MAGIC + hashlib.sha256(code).digest() + code)
            file.flush()
            os.fsync(file.fileno())  # else a rename may outlive a power cut that the content does not
