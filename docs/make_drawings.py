"""The drawings of README.md and of the kernels' pages, as SVG: boxes, arrows and words, nothing else.

    python docs/make_drawings.py    # writes docs/pictures/*.svg; tests/project/test_pictures.py compares

Numbers in the drawings of kernels are those of the examples on their pages.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.sax.saxutils import escape

PICTURES = Path(__file__).parent / "pictures"
INK, FAINT = "#1f2937", "#6b7280"
#: Meaning -> fill and border.
COLOURS = {
    "ours": ("#ffedd5", "#c2410c"),
    "data": ("#dbeafe", "#2563eb"),
    "work": ("#dcfce7", "#059669"),
    "plain": ("#f3f4f6", "#9ca3af"),
    "idle": ("#ffffff", "#d1d5db"),
}
WIDTH = 760


class Drawing:
    """Shapes in order, over a white page that a dark theme leaves as it is."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self.shapes: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 13,
        colour: str = INK,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        """One line; ``x`` is its middle, or its begin for anchor "start"."""
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *words: str,
        kind: str = "plain",
        size: int = 13,
    ) -> None:
        """A box; its first line of words is bold if there are more."""
        fill, border = COLOURS[kind]
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" '
            f'stroke="{border}"/>'
        )
        step = size + 4
        top = y + height / 2 - step * (len(words) - 1) / 2 + size * 0.36
        for number, line in enumerate(words):
            last = number and len(words) > 1
            bold = not number and len(words) > 1
            self.text(
                x + width / 2, top + step * number, line, size - bool(last), FAINT if last else INK, bold=bold
            )

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line with a head at its end."""
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        self.shapes.append(f'<path d="M {path}" fill="none" stroke="{FAINT}" marker-end="url(#head)"/>')

    def label(self, y: float, words: str) -> None:
        """What a row is, at the left."""
        self.text(14, y, words, 13, FAINT, "start")

    def row(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        cells: list[str],
        kind: str,
        gap: float = 4,
        size: int = 12,
    ) -> list[float]:
        """Boxes side by side; the middles of them."""
        each = (width - gap * (len(cells) - 1)) / len(cells)
        places = [x + (each + gap) * n for n in range(len(cells))]
        for place, words in zip(places, cells, strict=True):
            self.box(place, y, each, height, words, kind="idle" if words == "" else kind, size=size)
        return [place + each / 2 for place in places]

    def svg(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img" font-family="system-ui, Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="{FAINT}"/></marker></defs>\n'
            f'<rect width="{WIDTH}" height="{self.height}" rx="6" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self.shapes) + "\n</svg>\n"


def overview() -> Drawing:
    """What the project is: doors over one set of ops over kernels, and the blocks that all of it reads."""
    d = Drawing(372, "Doors, ops and kernels of torchpaged over a paged cache")
    doors = (
        ("Your own model", "PagedAttention, an nn.Module"),
        ("A HuggingFace model", "generate(), unmodified"),
        ("The engine", "Generator: many requests"),
    )
    for n, (name, what) in enumerate(doors):
        d.box(20 + 245 * n, 16, 230, 56, name, what, kind="ours")
        d.arrow((135 + 245 * n, 72), (135 + 245 * n, 100))
    d.box(
        20, 102, 475, 52, "torch.ops.torchpaged", "traced whole by torch.compile, written into static buffers"
    )
    d.box(510, 102, 230, 52, "CUDA graphs", "whole steps, a graph per batch size")
    d.arrow((257, 154), (257, 182))
    d.arrow((510, 128), (497, 128))
    for n, name in enumerate(
        ("cuda: C++ on NVIDIA", "triton: NVIDIA, ROCm", "cpu: native C++", "FA3, FlashInfer, flex")
    ):
        d.box(20 + 182 * n, 184, 174, 34, name, kind="work", size=12)
        d.arrow((107 + 182 * n, 218), (107 + 182 * n, 244))
    d.text(20, 262, "keys and values in blocks; each request has a list of them", 12, FAINT, "start")
    owners = ("null", "A", "A", "B", "C", "A", "", "B", "C", "C", "", "B", "", "")
    for n, owner in enumerate(owners):
        kinds = {"A": "ours", "B": "data", "C": "work", "null": "plain", "": "idle"}
        d.box(20 + 51.7 * n, 272, 47, 34, owner or "free", kind=kinds[owner], size=12)
    d.text(20, 334, "block tables:", 12, FAINT, "start")
    for n, (name, blocks) in enumerate((("A", "1, 2, 5"), ("B", "3, 7, 11"), ("C", "4, 8, 9"))):
        d.box(
            110 + 130 * n,
            318,
            122,
            26,
            f"{name}: {blocks}",
            kind={"A": "ours", "B": "data", "C": "work"}[name],
            size=12,
        )
    d.text(510, 336, "a request grows block by block", 12, FAINT, "start")
    return d


def decode() -> Drawing:
    """From requests to warps, for the example of docs/kernels/decode.md."""
    d = Drawing(398, "How the decode kernel cuts 64 requests of 4096 keys into runs of teams")
    x, width = 100, 640
    d.label(40, "requests")
    d.row(x, 20, width, 32, ["r0", "r1", "r2", "r3", "...", "r63"], "data")
    d.label(100, "tiles")
    d.text(x + width / 2, 72, "one line of 4096 tiles, 64 keys each", 12, FAINT)
    d.row(x, 80, width, 30, ["0…63", "0…63", "0…63", "0…63", "...", "0…63"], "plain")
    d.label(158, "teams")
    d.text(x + width / 2, 130, "33 runs of 124 or 125 tiles: borders fall where they fall", 12, FAINT)
    cuts = (0, 206, 412, 526, width)
    for n, (a, b) in enumerate(itertools.pairwise(cuts)):
        d.box(x + a, 138, b - a - 4, 30, ("team 0", "team 1", "...", "team 32")[n], kind="work", size=12)
    d.arrow((x + 250, 168), (x + 200, 196))
    d.label(218, "CTAs")
    d.row(x, 198, width, 32, [f"kv head {n}" for n in range(8)], "ours")
    d.text(
        x + width / 2,
        248,
        "team 1 = 8 CTAs that read the same keys' tiles, each for its kv head; 2 CTAs per SM",
        12,
        FAINT,
    )
    d.arrow((x + 40, 230), (x + 40, 262))
    d.label(284, "warps")
    d.row(
        x,
        264,
        width,
        32,
        ["warp 0: 16 keys", "warp 1: 16 keys", "warp 2: 16 keys", "warp 3: 16 keys"],
        "ours",
    )
    d.arrow((x + 80, 296), (x + 80, 324))
    d.label(346, "ring")
    d.row(x, 326, 330, 32, ["stage 0", "stage 1", "stage 2"], "data")
    d.text(x + 345, 340, "8 KB each: 16 keys and 16 values,", 12, FAINT, "start")
    d.text(x + 345, 356, "copied by cp.async, 16 bytes per lane", 12, FAINT, "start")
    d.text(x, 382, "then Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ on the tensor cores, mma.m16n8k16", 12, FAINT, "start")
    return d


def prefill() -> Drawing:
    """From a prompt to warpgroups, and one step of two consumers."""
    d = Drawing(
        470, "How the prefill kernel cuts a prompt into work tiles, and how two warpgroups take turns"
    )
    x, width = 100, 640
    d.label(40, "prompt")
    d.box(x, 20, width, 32, "16,384 query tokens × 32 heads", kind="data", size=12)
    d.label(98, "work tiles")
    d.row(x, 78, width, 32, ["level 1", "level 2", "...", "level 127", "level 128"], "plain")
    d.text(
        x + width / 2,
        70,
        "32 tokens × 4 heads of a kv head; level: steps of 128 keys that a tile sees",
        12,
        FAINT,
    )
    d.label(158, "tickets")
    d.text(x + width / 2, 130, "the longest first, kv heads 0–3 before 4–7: their keys fit L2", 12, FAINT)
    d.row(x, 138, width, 32, ["CTA 0", "CTA 1", "CTA 2", "...", "CTA 131"], "work")
    d.arrow((x + 60, 170), (x + 60, 198))
    d.label(220, "a CTA")
    d.box(x, 200, 150, 44, "producer", "TMA, one warp", kind="ours", size=12)
    d.box(x + 480, 200, 160, 44, "consumers", "2 warpgroups", kind="ours", size=12)
    d.row(x + 170, 200, 290, 20, ["K", "K", "K"], "data", size=11)
    d.row(x + 170, 224, 290, 20, ["V", "V"], "data", size=11)
    d.arrow((x + 150, 222), (x + 168, 222))
    d.arrow((x + 462, 222), (x + 478, 222))
    d.text(x + 315, 262, "stages of 128 keys, 32 KB each: 8 blocks of 16 tokens = 8 boxes", 12, FAINT)
    d.label(300, "time →")
    for n, (name, y) in enumerate((("warpgroup 1", 310), ("warpgroup 2", 352))):
        d.text(14, y + 21, name, 12, FAINT, "start")
        place = x + 107 * n
        for _ in range(3 - n):
            d.box(place, y, 103, 32, "Q Kᵀ, P V", kind="work", size=12)
            d.box(place + 107, y, 103, 32, "softmax", kind="ours", size=12)
            place += 214
    d.text(
        x,
        408,
        "while one warpgroup has the tensor cores, the other takes exponentials: they hand on a turn.",
        12,
        FAINT,
        "start",
    )
    d.text(
        x,
        428,
        "Inside a warpgroup the scores of the next step are issued before the values of this one,",
        12,
        FAINT,
        "start",
    )
    d.text(x, 448, "so that its own softmax overlaps P V, too.", 12, FAINT, "start")
    return d


def linear() -> Drawing:
    """Up to 16 tokens, and 17 to 64 on Hopper."""
    d = Drawing(486, "How the linear kernels share out a weight matrix of 4096 rows and 4096 columns")
    x, width = 100, 640
    d.text(14, 28, "Up to 16 tokens: weight [4096, 4096], 8 tokens", 13, INK, "start", bold=True)
    d.label(64, "rows")
    d.row(x, 44, width, 30, ["16 rows", "16 rows", "16 rows", "...", "16 rows"], "data")
    d.text(x + width / 2, 92, "256 tiles, one per CTA, 2 CTAs per SM", 12, FAINT)
    d.arrow((x + 60, 74), (x + 60, 102))
    d.label(124, "k")
    d.row(x, 104, width, 30, [f"w{n % 8}" for n in range(16)], "ours", size=11)
    d.text(
        x + width / 2,
        152,
        "64 chunks of 64 numbers; warp w takes the chunks w, w + 8, w + 16 ..., each with a ring of 4 stages",
        12,
        FAINT,
    )
    d.arrow((x + 320, 160), (x + 320, 178))
    d.label(200, "sums")
    d.box(
        x,
        180,
        width,
        30,
        "8 partial tiles [8 tokens, 16 rows] meet once in shared memory, in the order of warps",
        kind="work",
        size=12,
    )
    d.text(14, 252, "17 to 64 tokens on Hopper: the same weight, 64 tokens", 13, INK, "start", bold=True)
    d.label(288, "rows")
    d.row(x, 268, width, 30, ["64 rows", "64 rows", "64 rows", "...", "64 rows"], "data")
    d.text(x + width / 2, 316, "64 tiles, one per cluster of 2 CTAs, one CTA per SM", 12, FAINT)
    d.arrow((x + 60, 298), (x + 60, 326))
    d.label(348, "k")
    for n, name in enumerate(("CTA 0: chunks 0…31", "CTA 1: chunks 32…63")):
        d.box(x + 322 * n, 328, 318, 30, name, kind="ours", size=12)
        d.box(x + 322 * n, 378, 72, 30, "TMA warp", kind="plain", size=11)
        d.row(x + 322 * n + 84, 378, 150, 30, ["ring of 10 stages"], "data", 2, 11)
        d.box(x + 322 * n + 246, 378, 72, 30, "4 warps", kind="ours", size=11)
        d.arrow((x + 322 * n + 72, 393), (x + 322 * n + 83, 393))
        d.arrow((x + 322 * n + 234, 393), (x + 322 * n + 245, 393))
    d.label(454, "sums")
    d.box(
        x,
        436,
        width,
        30,
        "each CTA finishes half of the tokens: warps send the other half across (st.async)",
        kind="work",
        size=12,
    )
    for side in (x + 282, x + 604):
        d.arrow((side, 408), (side, 434))
    return d


DRAWINGS = {"overview": overview, "decode": decode, "prefill": prefill, "linear": linear}


def main() -> None:
    """The command."""
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw().svg())
        print(PICTURES / f"{name}.svg")


if __name__ == "__main__":
    main()
