"""Barriers read from PTX: which ones a compiled kernel waits at, and which of them can't be relied on.

Two barriers that some threads meet in one order and others in the other never open. Within one kernel Triton
keeps one order only for the barriers that it places itself: barrier 0, for all threads of the CTA. Where it
places them is the scheduler's choice, another one per dtype, layout and version; so no other barrier may
stand in a kernel, whatever the code around it looks like. `complaints` finds them, and says where a CTA
barrier already lies between a named barrier's wait and its arrival: that kernel hangs.

Grammar: PTX ISA, "Parallel Synchronization and Communication Instructions": bar and barrier.
"""

import re
from typing import NamedTuple

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_DEBUG = re.compile(r"\.section\s+\.\w+\s*\{[^{}]*\}")  # data, not statements
_LINE_DIRECTIVE = re.compile(  # ends with its line, without a semicolon
    r"^[ \t]*\.(?:loc|file|version|target|address_size|reqntid|maxntid|minnctapersm|maxnreg|"
    r"noreturn|explicitcluster|reqnctapercluster"
    r"|maxclusterrank)\b[^\n;{]*",
    re.MULTILINE,
)
_FUNCTION = re.compile(r"\.(?:entry|func)\b")
_LABEL = re.compile(r"[$%A-Za-z_][\w$]*")
_INSTRUCTION = re.compile(
    r"(?:@(?P<guard>!?%?[\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.DOTALL
)


class Instruction(NamedTuple):
    """``line``: of the PTX text, from 1; ``guard``: the predicate's name with its ``!``, or an
    empty string."""

    line: int
    guard: str
    opcode: str
    operands: tuple[str, ...]


def instructions(ptx: str) -> list[Instruction]:
    """All instructions of all functions, in the order of the text. Inline assembly is code like any other.

    Raises:
        ValueError: the text is cut off, holds no function, or holds what is no statement.
    """

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    text = ptx
    for pattern in (_STRING, _COMMENT, _DEBUG, _LINE_DIRECTIVE):
        text = pattern.sub(blank, text)
    found: list[Instruction] = []
    functions = scopes = vectors = begin = counted = 0
    # of the character at ``counted``: counted on from there, since a text of a megabyte has 25,000 statements
    line = 1
    for token in re.finditer(r"[;{}]|:(?!:)", text):
        at, char = token.start(), token[0]
        statement = text[begin:at].strip()
        if char == ":":
            if not vectors and _LABEL.fullmatch(statement):
                begin = at + 1
        elif char == ";":
            if vectors:
                raise ValueError(f"not PTX: a statement ends inside braces: {statement[:80]!r}")
            if scopes and statement and not statement.startswith("."):
                start = at - len(text[begin:at].lstrip())
                line, counted = line + text.count("\n", counted, start), start
                found.append(_instruction(statement, line))
            begin = at + 1
        elif char == "{" and (not statement or _FUNCTION.search(statement)) and not vectors:
            functions += bool(statement)
            scopes, begin = scopes + 1, at + 1
        elif char == "{":
            vectors += 1
        elif vectors:
            vectors -= 1
        else:
            if statement:
                raise ValueError(f"not PTX: a scope ends inside a statement: {statement[:80]!r}")
            scopes, begin = scopes - 1, at + 1
    if scopes or vectors or not functions or text[begin:].strip():
        raise ValueError(
            f"not PTX: {functions} functions, {scopes + vectors} braces left open, left over: "
            f"{text[begin:].strip()[:80]!r}"
        )
    return found


def _instruction(statement: str, line: int) -> Instruction:
    match = _INSTRUCTION.fullmatch(statement)
    if not match:
        raise ValueError(f"not PTX, line {line}: {statement[:80]!r}")
    operands = tuple(part.strip() for part in match["operands"].split(",")) if match["operands"] else ()
    return Instruction(line, match["guard"] or "", match["opcode"], operands)


class Barrier(NamedTuple):
    """``kind``: 'sync', 'arrive', 'red' of a barrier of the CTA, or 'cluster'; ``name``: its number or
    register, as written.

    ``threads``: how many take part, as written; empty: all of the CTA.
    """

    line: int
    guard: str
    kind: str
    name: str
    threads: str = ""

    def __str__(self) -> str:
        return (
            f"line {self.line}: {'@' + self.guard + ' ' if self.guard else ''}{self.kind} "
            f"{self.name}{', ' + self.threads if self.threads else ''}"
        )

    @property
    def is_whole_cta(self) -> bool:
        """Barrier 0, waited at by every thread of the CTA: what Triton itself places."""
        return self.kind in ("sync", "red") and self.name == "0" and not self.threads and not self.guard


def barriers(ptx: str) -> list[Barrier]:
    """Barriers of CTAs and clusters in the order of the text; ``bar.warp`` and mbarriers are none."""
    found = []
    for line, guard, opcode, operands in instructions(ptx):
        base, *parts = opcode.split(".")
        if base not in ("bar", "barrier") or "warp" in parts:
            continue
        if "cluster" in parts:
            found.append(Barrier(line, guard, "cluster", ".".join(parts[1:])))
            continue
        kind = next(part for part in parts if part in ("sync", "arrive", "red"))
        if kind == "red":  # red.popc d, a{, b}, p; red.and/or p, a{, b}, q
            name, threads = operands[1], operands[2] if len(operands) == 4 else ""
        else:
            name, threads = operands[0], operands[1] if len(operands) == 2 else ""
        found.append(Barrier(line, guard, kind, name, threads))
    return found


def crossed(ptx: str) -> list[tuple[Barrier, Barrier, Barrier]]:
    """``(wait, CTA barrier, arrival)``: a CTA barrier between a named barrier's wait and the arrival behind
    it: threads that wait at the one never come to the other, which others wait at."""
    all_of_them = barriers(ptx)
    found = []
    for i, arrival in enumerate(all_of_them):
        if arrival.kind != "arrive":
            continue
        before = [
            j for j in range(i) if all_of_them[j].kind == "sync" and all_of_them[j].name == arrival.name
        ]
        if before:
            found += [
                (all_of_them[before[-1]], b, arrival)
                for b in all_of_them[before[-1] + 1 : i]
                if b.name == "0"
            ]
    return found


def complaints(ptx: str) -> list[str]:
    """What makes a kernel's order of barriers depend on the compiler's schedule, in words; empty if
    nothing does."""
    found = [
        f"{barrier}: not a barrier of the whole CTA, placed by Triton"
        for barrier in barriers(ptx)
        if not barrier.is_whole_cta
    ]
    return found + [f"hangs: ({wait}) ... ({cta}) ... ({arrival})" for wait, cta, arrival in crossed(ptx)]
