"""Stand-ins for the CUDA libraries that a torch wheel is linked with, so that it runs on a CPU without them:
0.5 GB to download instead of 5. Every function says that there is no device.

    python .ci/without_cuda.py FOLDER_WITH_TORCH OUTPUT

and then LD_LIBRARY_PATH=OUTPUT PYTHONPATH=FOLDER_WITH_TORCH.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LIBRARY = re.compile(r"lib(cu|nccl|nv)\w*\.so\.\d+")
FUNCTION = re.compile(r"(__)?(cu|nccl|nv)\w*")
TEXTS = ("cudaGetErrorString", "cudaGetErrorName")


def definition(name: str) -> str:
    """A function in C, whatever its arguments are; 100 is cudaErrorNoDevice."""
    if name in TEXTS:
        return f'const char *{name}(void) {{ return "no CUDA here"; }}\n'
    return f"int {name}(void) {{ return 100; }}\n"


def main(torch: Path, folder: Path) -> None:
    """Write a library for every one that the files of ``torch`` need."""
    files = [*(torch / "lib").glob("*.so"), *torch.glob("_C*.so")]
    command = ["readelf", "-dVW", "--dyn-syms", *map(str, files)]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = {name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", read) if LIBRARY.fullmatch(name)}
    owners: dict[str, str] = {}  # of each version of symbols, the library
    for library, versions in re.findall(r"File: (\S+) .*((?:\n.* Name: .*)+)", read):
        owners |= dict.fromkeys(re.findall(r"Name: (\S+)", versions), library)
    absent = {name.partition("@") for name in re.findall(r" UND (\S+)", read)}
    folder.mkdir(parents=True, exist_ok=True)
    for library in sorted(needed):
        script, source = "", ""
        # a symbol without a version may be in any library that has none
        for version in sorted(v for v, owner in owners.items() if owner == library) or [""]:
            names = sorted(name for name, _, v in absent if v == version and FUNCTION.fullmatch(name))
            script += f"{version} {{ global: {'; '.join(names)}; }};\n" if version and names else ""
            source += "".join(map(definition, names))
        (folder / "versions").write_text(script)
        options = ["-shared", "-w", "-fno-builtin", f"-Wl,-soname,{library}", "-o", str(folder / library)]
        options += [f"-Wl,--version-script={folder / 'versions'}"] if script else []
        subprocess.run(["cc", *options, "-x", "c", "-"], input=source, text=True, check=True)
    print(f"{len(needed)} libraries stood in for")


if __name__ == "__main__":
    main(Path(sys.argv[1], "torch"), Path(sys.argv[2]))
