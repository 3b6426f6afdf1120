"""Builds the site of this version into a folder of its own, beside those of other versions.

    python docs/make_site.py [--output build/site]

Writes ``OUTPUT/VERSION/``, ``OUTPUT/versions.json`` (what the switcher in the sidebar shows: all folders
there) and ``OUTPUT/index.html``, which leads to the newest. Warnings are errors.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import torchpaged

DOCS = Path(__file__).parent


def newest_first(names: list[str]) -> list[str]:
    """Versions by their numbers: 0.10 is newer than 0.9."""
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=DOCS.parent / "build" / "site")
    output: Path = parser.parse_args().output
    target = output / torchpaged.__version__
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(target)]
    done = subprocess.run(command)
    if done.returncode:
        raise SystemExit(done.returncode)
    versions = newest_first([path.parent.name for path in output.glob("*/index.html")])
    (output / "versions.json").write_text(json.dumps(versions) + "\n")
    (output / "index.html").write_text(
        f'<meta http-equiv="refresh" content="0; url={versions[0]}/index.html">\n'
    )
    print(target / "index.html")


if __name__ == "__main__":
    main()
