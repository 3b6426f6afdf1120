"""Links of a built site that lead nowhere. Those to other hosts are not looked at."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """What a page links to, and what can be linked in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        if tag in ("a", "img", "link", "script"):
            self.links += [link for name in ("href", "src") if (link := given.get(name))]


def broken_links(site: Path) -> list[str]:
    """Of all pages below ``site``: files that are not there, folders, and parts that a page does not have."""
    pages = {path.resolve(): _Page(path.read_text()) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            part_is_there = not parts.fragment or target not in pages or parts.fragment in pages[target].ids
            if not (target.is_file() and part_is_there):
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    return broken
