"""Triton kernels compiled for GPUs that are not here (launched.py compiles them): registers, spills and
shared memory."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import sass
import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TUNED = triton.__version__.startswith(("3.6.", "3.7."))
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


def resources(compiled: Any) -> dict[str, int]:
    """Registers, spilled bytes (NVIDIA) or registers (AMD), and shared memory."""
    found: dict[str, int] = {"shared": compiled.metadata.shared}
    if "cubin" in compiled.asm:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            text = subprocess.run(
                [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        match = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert match, text
        found |= {"registers": int(match[1]), "spilled": int(match[2])}
    else:
        for key, name in (("vgpr_count", "registers"), ("vgpr_spill_count", "spilled")):
            match = re.search(rf"\.{key}:?\s+(\d+)", compiled.asm["amdgcn"])
            assert match, key
            found[name] = int(match[1])
    return found


def check_spills(compiled: Any, once: int = 0) -> None:
    """None at all with the Tritons that the kernels were tuned on, but ``once`` bytes outside of loops. With
    others, too, none in a loop, where each costs its time every round."""
    spilled = resources(compiled)["spilled"]
    if TUNED or "cubin" not in compiled.asm:
        assert spilled <= once, f"{spilled} bytes or registers under Triton {triton.__version__}"
    if spilled:
        assert sass.loop_spills(sass.machine_code(compiled)) == []
