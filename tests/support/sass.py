"""Control flow read from machine code: which spills stand in an inner loop, where each costs its time in
every round.

A spill outside of the inner loops is paid once per tile or request and is lost in the noise; one in the main
loop has cost a third of the speed. Grammar: what ``nvdisasm -c`` prints, see NVIDIA's "CUDA Binary
Utilities": instruction set reference, control instructions.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

_LINE = re.compile(
    r"\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>(?:@(?P<guard>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][A-Z0-9_.]*)\b\s*(?P<operands>[^;]*?))\s*;"
)
_LABEL = re.compile(r"\s*(?P<name>[.\w$]+):")
_TARGET = re.compile(r"`\((?P<name>[.\w$]+)\)")
_ENDS = {"EXIT", "RET", "KILL", "BPT"}
_UNKNOWN = {"BRX", "BRXU", "JMP", "JMX", "JMXU"}  # BREAK leaves a barrier; the BRA behind it jumps


class Instruction(NamedTuple):
    """``text``: as printed; ``opcode``: without its suffixes; ``successors``: what may run next, by place in
    the list."""

    text: str
    opcode: str
    successors: tuple[int, ...]


def machine_code(compiled: Any) -> str:
    """The instructions of a compiled kernel's cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def instructions(code: str) -> list[Instruction]:
    """All instructions with the edges between them. A call comes back; a predicated instruction may go
    either way.

    Raises:
        ValueError: no instruction, a branch to nowhere, or one whose target is computed: then nothing is
            known about loops.
    """
    labels: dict[str, int] = {}
    found: list[re.Match[str]] = []
    for line in code.splitlines():
        if match := _LINE.match(line):
            found.append(match)
        elif label := _LABEL.match(line):
            labels[label["name"]] = len(found)
    if not found:
        raise ValueError(f"not machine code: {code[:80]!r}")
    result = []
    for at, match in enumerate(found):
        opcode = match["opcode"].split(".")[0]
        if opcode in _UNKNOWN:
            raise ValueError(f"a branch whose target is not known: {match['text']}")
        target = _TARGET.search(match["operands"]) if opcode == "BRA" else None
        if opcode == "BRA" and (target is None or target["name"] not in labels):
            raise ValueError(f"a branch to nowhere: {match['text']}")
        conditional = (
            match["guard"] or (target and match["operands"] != target[0]) or ".DIV" in match["opcode"]
        )
        successors = [labels[target["name"]]] if target else []
        if conditional or (target is None and opcode not in _ENDS):
            successors.append(at + 1)
        result.append(Instruction(match["text"], opcode, tuple(s for s in successors if s < len(found))))
    return result


def loop_spills(code: str) -> list[str]:
    """Reads and writes of local memory in innermost loops, as printed: those over keys or tiles. Once per
    round of a loop around such loops, as that over requests, a spill costs as little as outside."""
    program = instructions(code)
    inside = set().union(*_innermost_loops(program, set(range(len(program)))))
    return [program[at].text for at in sorted(inside) if program[at].opcode in ("LDL", "STL")]


def _innermost_loops(program: list[Instruction], nodes: set[int]) -> list[set[int]]:
    """Cycles that hold no other once the instructions that they are entered by are taken away."""
    found: list[set[int]] = []
    for loop in _cycles(program, nodes):
        entered = {
            s for at in range(len(program)) if at not in loop for s in program[at].successors if s in loop
        } or {min(loop)}
        found += _innermost_loops(program, loop - entered) or [loop]
    return found


def _cycles(program: list[Instruction], nodes: set[int]) -> list[set[int]]:
    """The strongly connected parts of ``nodes`` that hold a cycle: what an instruction reaches and is
    reached from."""
    before: dict[int, list[int]] = {at: [] for at in nodes}
    after: dict[int, list[int]] = {at: [s for s in program[at].successors if s in nodes] for at in nodes}
    for at, successors in after.items():
        for s in successors:
            before[s].append(at)
    found: list[set[int]] = []
    done: set[int] = set()
    targets = {s for node in nodes for s in after[node] if s <= node}
    for at in sorted(targets):  # a cycle has an edge back, or to itself
        if at not in done:
            done |= (part := _reached(after, at) & _reached(before, at))
            found += [part] if part else []
    return found


def _reached(edges: dict[int, list[int]], start: int) -> set[int]:
    """By one edge or more."""
    seen: set[int] = set()
    ahead = list(edges[start])
    while ahead:
        at = ahead.pop()
        if at not in seen:
            seen.add(at)
            ahead += edges[at]
    return seen


def strange_descriptors(code: str) -> list[str]:
    """Warpgroup products whose matrix in shared memory is said to lie where a kernel's parameter or something
    loaded says: the compiler lost the place. Read from the first line to the last, as if nothing branched."""
    origins: dict[str, set[str]] = {}
    found = []
    for line in code.splitlines():
        if not (match := _LINE.match(line)):
            continue
        opcode, operands = match["opcode"], match["operands"]
        if opcode.startswith("HGMMA"):
            first = int(re.findall(r"gdesc\[UR(\d+)\]", operands)[-1]) + 2  # behind the other operand's
            if set().union(*(origins.get(f"UR{n}", {"nothing"}) for n in (first, first + 1))):
                found.append(match["text"])
            continue
        target, *sources = [operand.strip() for operand in operands.split(",")]
        words = {"64": 2, "128": 4}.get(opcode.rsplit(".", 1)[-1], 1)
        if spilled := re.match(
            r"\[R1(?:\+(0x[0-9a-f]+))?\]", sources[0] if opcode.startswith("LDL") else target
        ):
            data = sources[-1] if opcode.startswith("STL") else target
            held, slot = int(data[1:].replace("Z", "255")), int(spilled[1] or "0", 16)
            for n in range(words):  # what is put aside comes back as it was
                names = f"R{held + n}", f"stack {slot + 4 * n}"
                to, of = names if opcode.startswith("LDL") else names[::-1]
                origins[to] = origins.get(of, set())
            continue
        if not (register := re.match(r"(U?R)(\d+)", target)):
            continue
        origin = {name for name in sources if re.search(r"c\[0x0\]\[0x2[0-9a-f]{2}\]", name)}
        for name in re.findall(r"\bU?R\d+\b", " ".join(sources)):
            origin |= origins.get(name, set())
        if opcode.startswith(("LDG", "LDS", "LDL")):
            origin = {"memory"}
        if match["guard"]:
            origin |= origins.get(register[0], set())
        for n in range(2 if ".64" in opcode or ".WIDE" in opcode else 1):
            origins[f"{register[1]}{int(register[2]) + n}"] = origin
    return found
