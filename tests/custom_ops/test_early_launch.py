"""Inductor's programmatic launches and our early reads do not go together: refused where a kernel of ours
would start early."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from command import printed

from torchpaged import BackendUnavailableError
from torchpaged.custom_ops import early_launch
from torchpaged.custom_ops.cuda import gpu


def test_inductors_option_is_where_we_look() -> None:
    """A private option: its place, its type, its default, and that the environment sets it."""
    assert sys.modules["torch._inductor.config"] is inductor_config
    assert inductor_config.triton.enable_pdl is (os.environ.get("TORCHINDUCTOR_ENABLE_PDL") == "1")
    code = "import torch._inductor.config as c; print(c.triton.enable_pdl)"
    assert printed("-c", code, TORCHINDUCTOR_ENABLE_PDL="1").strip() == "True"


def test_refused_while_it_is_on() -> None:
    with inductor_config.patch({"triton.enable_pdl": False}):
        early_launch.refuse_inductors()
    with (
        inductor_config.patch({"triton.enable_pdl": True}),
        pytest.raises(BackendUnavailableError, match=r"enable_pdl.*got True; unset"),
    ):
        early_launch.refuse_inductors()


def test_every_early_launch_of_a_triton_kernel_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper; where nothing starts early, Inductor may do as it likes."""
    pytest.importorskip("triton", reason="triton is not installed")
    from torchpaged.custom_ops.attention.triton import config
    from torchpaged.custom_ops.triton import launching

    gpu.launches_early.cache_clear()
    hopper, ampere = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(gpu, "capability", lambda index: ((9, 0), (8, 0))[index])
    monkeypatch.setattr(torch.version, "hip", None)
    tiles = config.decode_tiles(128, 8, 2, 2, hip=False)
    with inductor_config.patch({"triton.enable_pdl": True}):
        for launch in (
            launching.launches_early,
            launching.early_launch,
            lambda device: config.decode_options(device, tiles),
        ):
            with pytest.raises(BackendUnavailableError, match="TORCHINDUCTOR_ENABLE_PDL"):
                launch(hopper)
        assert not launching.launches_early(ampere)
        assert launching.early_launch(ampere) == {"PDL": False}
    try:
        assert launching.launches_early(hopper), "a refusal is not remembered"
    finally:
        gpu.launches_early.cache_clear()


def test_a_launch_does_not_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking torch takes microseconds, as long as a launch, several times per layer."""
    asked: list[object] = []
    monkeypatch.setattr(gpu, "refuse_inductors", lambda: asked.append(None))
    monkeypatch.setattr(gpu, "capability", lambda index: (9, 0))
    gpu.launches_early.cache_clear()
    try:
        assert gpu.launches_early(0)
        assert gpu.launches_early(0)
    finally:
        gpu.launches_early.cache_clear()
    assert len(asked) == 1


@pytest.mark.parametrize("compute", [(9, 0), (8, 0)])
def test_refused_while_a_graph_is_traced(monkeypatch: pytest.MonkeyPatch, compute: tuple[int, int]) -> None:
    """``torch.compile(options={"triton.enable_pdl": True})`` has the option on during the compilation alone:
    the fake kernels ask."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: compute)
    monkeypatch.setattr(torch.version, "hip", None)

    def attend() -> None:
        with FakeTensorMode():
            q, cache, lens = (
                torch.empty(size, device="cuda", dtype=dtype)
                for size, dtype in (
                    ((2, 4, 16), torch.bfloat16),
                    ((8, 4, 2, 16), torch.bfloat16),
                    ((2,), torch.int32),
                )
            )
            table, starts = (torch.empty(size, device="cuda", dtype=torch.int32) for size in ((2, 3), (3,)))
            torch.ops.torchpaged.paged_attention(
                q,
                cache,
                torch.empty_like(cache),
                table,
                lens,
                starts,
                torch.empty_like(q),
                None,
                max_query_len=1,
                scale=0.25,
            )

    attend()
    with inductor_config.patch({"triton.enable_pdl": True}):
        if compute == (9, 0):
            with pytest.raises(BackendUnavailableError, match="TORCHINDUCTOR_ENABLE_PDL"):
                attend()
        else:
            attend()


@pytest.mark.parametrize("op", early_launch.READS_EARLY)
def test_every_op_that_reads_early_what_a_step_writes_refuses_in_a_trace(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from op_inputs.opcheck import opcheck_cases
    from op_inputs.sampling import make_finish_inputs
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    cases = [*opcheck_cases().values(), ("finish_step", (), make_finish_inputs([{}]))]
    _, args, kwargs = next(case for case in cases if case[0] == op)

    def on_gpu(x: Any) -> Any:
        given = {"dtype": x.dtype, "device": "cuda"} if isinstance(x, torch.Tensor) else {}
        return torch.empty_strided(x.shape, x.stride(), **given) if given else x

    with inductor_config.patch({"triton.enable_pdl": True}), FakeTensorMode():
        given = {name: on_gpu(x) for name, x in kwargs.items()}
        with pytest.raises(BackendUnavailableError, match="TORCHINDUCTOR_ENABLE_PDL"):
            getattr(torch.ops.torchpaged, op)(*map(on_gpu, args), **given)


def test_options_of_a_compilation_reach_the_fake_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the test above relies on, with an op of a CPU: fake kernels run again while the options of
    ``torch.compile`` hold, ahead of the C++ compiler."""
    # a graph from the disk is not traced again; a refused one is not there
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library = torch.library.Library("torchpaged_test_options", "DEF")
    library.define("touch(Tensor(a!) x) -> ()")
    library.impl("touch", lambda x: None, "CPU")

    def fake(x: torch.Tensor) -> None:
        if inductor_config.triton.enable_pdl:
            raise RuntimeError("the option is seen")

    torch.library.register_fake("torchpaged_test_options::touch", fake, lib=library)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.ops.torchpaged_test_options.touch(y)
        return y * 2

    with pytest.raises(Exception, match="the option is seen"):
        torch.compile(step, options={"triton.enable_pdl": True}, fullgraph=True)(torch.ones(3))
    assert not inductor_config.triton.enable_pdl
