"""Control flow read from machine code: which spills stand in a loop, where each costs its time once per round.

A spill outside of every loop is paid once per tile and is lost in the noise; one in the main loop has cost a third of the speed.
Grammar: what ``nvdisasm -c`` prints, see NVIDIA's "CUDA Binary Utilities": instruction set reference, control instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

_LINE = re.compile(
    r"\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][A-Z0-9_.]*)\b\s*(?P<operands>[^;]*?))\s*;"
)
_LABEL = re.compile(r"\s*(?P<name>[.\w$]+):")
_TARGET = re.compile(r"`\((?P<name>[.\w$]+)\)")
_ENDS = {"EXIT", "RET", "KILL", "BPT"}
_UNKNOWN = {"BRX", "BRXU", "JMP", "JMX", "JMXU", "BREAK"}


class Instruction(NamedTuple):
    """``text``: as printed; ``opcode``: without its suffixes; ``successors``: what may run next, by place in the list."""

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
    """All instructions with the edges between them. A call comes back; a predicated instruction may go either way.

    Raises:
        ValueError: no instruction, a branch to nowhere, or one whose target is computed: then nothing is known about loops.
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
        conditional = match["guard"] or (target and match["operands"] != target[0]) or ".DIV" in match["opcode"]
        successors = [labels[target["name"]]] if target else []
        if conditional or (target is None and opcode not in _ENDS):
            successors.append(at + 1)
        result.append(Instruction(match["text"], opcode, tuple(s for s in successors if s < len(found))))
    return result


def loop_spills(code: str) -> list[str]:
    """Reads and writes of local memory that can run again after themselves, as printed."""
    program = instructions(code)
    return [i.text for at, i in enumerate(program) if i.opcode in ("LDL", "STL") and _comes_back(program, at)]


def _comes_back(program: list[Instruction], start: int) -> bool:
    seen: set[int] = set()
    ahead = list(program[start].successors)
    while ahead:
        at = ahead.pop()
        if at == start:
            return True
        if at not in seen:
            seen.add(at)
            ahead += program[at].successors
    return False
