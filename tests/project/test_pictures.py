"""The pictures of the pages: drawings are what their script draws, plots show what the results say."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import make_plots
import pytest
from command import script

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def drawings() -> Any:
    return script("docs/make_drawings.py")


@pytest.mark.parametrize("name", ["overview", "decode", "prefill", "linear"])
def test_a_drawing_is_what_its_script_draws(name: str, drawings: Any) -> None:
    again = drawings.DRAWINGS[name]().svg()
    assert (PICTURES / f"{name}.svg").read_text() == again, "python docs/make_drawings.py"


@pytest.mark.parametrize("name", ["overview", "decode", "prefill", "linear"])
def test_words_of_a_drawing_stay_inside(name: str, drawings: Any) -> None:
    """By a generous width of letters; a browser shows the rest."""
    tree = ElementTree.fromstring(drawings.DRAWINGS[name]().svg())
    for text in tree.iter("{http://www.w3.org/2000/svg}text"):
        x, size = float(text.attrib["x"]), float(text.attrib["font-size"])
        width = 0.55 * size * len(text.text or "")
        left = x if text.attrib["text-anchor"] == "start" else x - width / 2
        assert left >= 0, text.text
        assert left + width <= drawings.WIDTH, text.text


@pytest.mark.parametrize("name", make_plots.PLOTS)
def test_a_plot_shows_what_the_results_say(name: str) -> None:
    data = make_plots.PLOTS[name][0]()
    shown = re.findall(r"<dc:description>data (\w+)<", (PICTURES / f"{name}.svg").read_text())
    assert shown == [make_plots.digest(data)], "python benchmarks/make_plots.py"


def test_a_digest_notices_another_figure() -> None:
    assert make_plots.digest({"a": 1.0, "b": 2}) == make_plots.digest({"b": 2, "a": 1.0001})
    assert make_plots.digest({"a": 1.0}) != make_plots.digest({"a": 1.01})


def test_every_picture_is_on_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {Path(path).name for page in pages for path in re.findall(r"!\[.*\]\((.*)\)", page.read_text())}
    assert {path.name for path in PICTURES.iterdir()} <= shown
