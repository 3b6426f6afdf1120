"""Shared memory that asynchronous products still read when the next rows are copied to it, found in a
compiled kernel's TTGIR.

Triton's pipeliner lets products of a loop on Hopper run on into the next round, and gives what they read one
more buffer for that. Triton 3.6 and 3.7.1 do so only for loads that have no other use: keys whose norms are
summed, too, are overwritten while a product reads them (docs/log/state_chunks.md). Which of the two comes
first is a matter of time: results are wrong now and then, and no tool of the GPU sees it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_FOR = re.compile(r"^(?P<indent> *)(?:%\S+ = )?scf\.for ")
_VIEW = re.compile(r"(?P<name>%[\w#]+) = ttg\.memdesc_\w+ (?P<of>%[\w#]+)")
_ALLOC = re.compile(r"(?P<name>%[\w#]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(?P<depth>\d+)x")
_COPY = re.compile(r"ttg\.async_copy_global_to_local \S+, (?P<to>%[\w#]+)")
_DOT = re.compile(r"ttng\.warp_group_dot (?P<a>%[\w#]+), (?P<b>%[\w#]+),.*isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (?P<pendings>\d+)")


class Product(NamedTuple):
    """An asynchronous product of a loop: its place among the loop's events, and what memory it reads."""

    at: int
    reads: frozenset[str]


class Memory:
    """Shared memory by its name in the text, where regions of the program use the same names again: how many
    buffers it has, its views, and how many copies to it stand ahead of a loop, by as many rounds its own
    run ahead."""

    def __init__(self) -> None:
        self.depths: dict[str, int] = {}
        self.roots: dict[str, str] = {}
        self.ahead: dict[str, int] = {}

    @classmethod
    def before(cls, lines: list[str]) -> Memory:
        """As it is behind some lines."""
        memory = cls()
        for line in lines:
            memory.read(line)
            if (m := _COPY.search(line)) and m["to"] in memory.roots:
                memory.ahead[memory.roots[m["to"]]] += 1
        return memory

    def read(self, line: str) -> None:
        """Take note of what a line defines."""
        if m := _ALLOC.search(line):
            self.depths[m["name"]], self.ahead[m["name"]] = int(m["depth"]), 0
            self.roots[m["name"]] = m["name"]
        elif m := _VIEW.search(line):
            self.roots.pop(m["name"], None)
            if m["of"] in self.roots:
                self.roots[m["name"]] = self.roots[m["of"]]


def overwritten(text: str) -> list[str]:
    """Copies to memory that a product of the same loop may still read, as printed.

    Raises:
        ValueError: not TTGIR.
    """
    if "#ttg" not in text and "ttg." not in text:
        raise ValueError(f"not TTGIR: {text[:80]!r}")
    lines = text.splitlines()
    found: list[str] = []
    for begin, line in enumerate(lines):
        if m := _FOR.match(line):
            end = next(n for n in range(begin + 1, len(lines)) if lines[n].startswith(m["indent"] + "}"))
            body = lines[begin + 1 : end]
            if not any(_FOR.match(inner) for inner in body):  # only these have their copies run ahead
                found += _of_loop(body, Memory.before(lines[:begin]))
    return found


def _of_loop(body: list[str], memory: Memory) -> list[str]:
    products, waits, copies = [], {}, {}
    for at, line in enumerate(body):
        memory.read(line)
        if m := _DOT.search(line):
            reads = (memory.roots.get(x) for x in (m["a"], m["b"]))
            products.append(Product(at, frozenset(x for x in reads if x is not None)))
        elif m := _WAIT.search(line):
            waits[at] = int(m["pendings"])
        elif (m := _COPY.search(line)) and m["to"] in memory.roots:
            copies[at] = memory.roots[m["to"]]
    found = []
    for copy, name in copies.items():
        for product in products:
            for rounds in range(3):  # of which ago the product is
                # the copy of a round is of rows `ahead` rounds later
                same = (memory.ahead[name] + rounds) % memory.depths[name] == 0
                earlier = product.at < copy or rounds > 0
                until = copy + rounds * len(body)
                if (
                    name in product.reads
                    and same
                    and earlier
                    and not _done(product.at, until, len(body), products, waits)
                ):
                    found.append(body[copy].strip())
    return sorted(set(found))


def _done(since: int, until: int, length: int, products: list[Product], waits: dict[int, int]) -> bool:
    """Whether a wait between two places, counted on over the rounds of a loop, is for the product at the
    first: for all but the ``pendings`` last ones."""
    issued = 0
    places = {product.at for product in products}
    for at in range(since + 1, until):
        issued += at % length in places
        if at % length in waits and waits[at % length] <= issued:
            return True
    return False
