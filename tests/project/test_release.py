"""What a release states about itself, before anything is built: .ci/release.py builds and looks at it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from command import script

import torchpaged

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def release() -> Any:
    return script(".ci/release.py")


def test_one_version(release: Any) -> None:
    assert release.version() == torchpaged.__version__


def test_different_versions_are_refused(
    release: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("pyproject.toml", "torchpaged/version.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert release.version() == torchpaged.__version__
    (tmp_path / "torchpaged/version.py").write_text('__version__ = "9.9.9"\n')
    with pytest.raises(SystemExit, match="files state different versions: .*'9.9.9'"):
        release.version()


def test_what_must_be_in_the_archives_is_in_the_checkout(release: Any) -> None:
    for name in (*release.IN_WHEELS, *release.IN_SDIST):
        assert (ROOT / name).exists(), name


def test_no_person_is_named() -> None:
    assert PROJECT["authors"] == [{"name": "The torchpaged authors"}]


def test_classifiers_begin_with_the_oldest_python() -> None:
    prefix = "Programming Language :: Python :: 3."
    minors = [int(line.removeprefix(prefix)) for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert PROJECT["requires-python"] == f">=3.{minors[0]}"
    assert minors == list(range(minors[0], minors[0] + len(minors)))
