"""The screen says which of our kernels Triton compiled: once, not when it came from the disk, and
no others."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launched
import pytest
import torch
import triton
import triton.language as tl
from command import printed
from op_inputs.sampling import make_accept_inputs
from triton import knobs

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.triton import launching, notice


@triton.jit
def foreign_kernel(out_ptr, num):
    """Not of torchpaged."""
    tl.store(out_ptr, num)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A terminal, an empty disk cache, and a listener of another package that was there first."""
    heard: list[tuple[str, bool]] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    machine = SimpleNamespace(stderr=Terminal())  # pytest puts its own stderr in place after this
    monkeypatch.setattr(notice, "sys", machine)
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, src, cache_hit, **_: heard.append((src.name, cache_hit))
    )
    notice.install.cache_clear()
    launching.require_launchable(torch.zeros(1, device="meta"))  # what every launch asks first
    yield machine, heard
    notice.install.cache_clear()


def compile_ours(target: str = "sm_90") -> None:
    given = make_accept_inputs()
    taken = ("sampled_token_ids", "block_table", "input_ids", "positions", "seq_lens", "slot_mapping")
    with launched.recorded(target) as launches:
        BACKEND_OPS["triton"].advance_step(*(given[name] for name in taken), block_size=4)
    launched.compile_launch(launches[0], target)


def test_a_kernel_of_ours_is_said_once(screen: Any) -> None:
    machine, heard = screen
    for _ in range(2):
        compile_ours()
    compile_ours("gfx942")
    lines = machine.stderr.getvalue().splitlines()
    assert len(lines) == 2, lines
    assert all(
        re.fullmatch(r"torchpaged: compiled advance_step_kernel for \w+ in \d+\.\d s", line) for line in lines
    ), lines
    assert "sm_90" in lines[0]
    assert "gfx942" in lines[1]
    assert [hit for _, hit in heard] == [False, True, False], (
        "another package's listener was there first and still hears"
    )


def test_none_of_others_and_nothing_where_there_is_no_screen(
    screen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, heard = screen
    arguments = {"out_ptr": torch.zeros(1, dtype=torch.int32), "num": 3}
    launched.compile_launch(launched.Launch(foreign_kernel, arguments, {"num_warps": 1}))
    screened = machine.stderr
    monkeypatch.setattr(screened, "isatty", lambda: False)
    compile_ours()
    machine.stderr = None
    compile_ours("sm_80")
    assert screened.getvalue() == ""
    assert len(heard) == 3


def test_a_process_that_needs_no_triton_does_not_import_it_for_the_notice() -> None:
    """Stored kernels are launched without Triton: its import would be most of their first call. When
    it is imported to compile, its compiles are reported."""
    code = (
        "import sys, torch\n"
        "from torchpaged.custom_ops.attention.triton import paged_attention\n"
        "from torchpaged.custom_ops.triton import launching\n"
        "launching.require_launchable(torch.zeros(1, device='meta'))\n"
        "print('triton' in sys.modules)\n"
        "paged_attention._DECODE.load()\n"
        "from triton import knobs\n"
        "print(getattr(knobs.compilation.listener, '__module__', None))\n"
    )
    assert printed("-c", code).split() == ["False", notice.__name__]
