"""Inductor's programmatic launches and our early reads do not go together: refused where a kernel of ours would start early."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch._inductor.config as inductor_config

from torchpaged import BackendUnavailableError
from torchpaged.custom_ops import early_launch


def test_inductors_option_is_where_we_look() -> None:
    """A private option: its place, its type, its default, and that the environment sets it."""
    assert sys.modules["torch._inductor.config"] is inductor_config
    assert inductor_config.triton.enable_pdl is (os.environ.get("TORCHINDUCTOR_ENABLE_PDL") == "1")
    code = "import torch._inductor.config as c; print(c.triton.enable_pdl)"
    environment = {**os.environ, "TORCHINDUCTOR_ENABLE_PDL": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_refused_while_it_is_on() -> None:
    with inductor_config.patch({"triton.enable_pdl": False}):
        early_launch.refuse_inductors()
    with inductor_config.patch({"triton.enable_pdl": True}), pytest.raises(BackendUnavailableError, match=r"enable_pdl.*got True; unset"):
        early_launch.refuse_inductors()


def test_every_early_launch_of_a_triton_kernel_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper; where nothing starts early, Inductor may do as it likes."""
    pytest.importorskip("triton", reason="triton is not installed")
    from torchpaged.custom_ops.triton import config

    hopper, ampere = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(config, "_capability", lambda index: ((9, 0), (8, 0))[index])
    monkeypatch.setattr(torch.version, "hip", None)
    tiles = config.decode_tiles(128, 8, 2, 2, hip=False)
    assert config.launches_early(hopper) and not config.launches_early(ampere)
    with inductor_config.patch({"triton.enable_pdl": True}):
        for launch in (config.launches_early, config.early_launch, lambda device: config.decode_options(device, tiles)):
            with pytest.raises(BackendUnavailableError, match="TORCHINDUCTOR_ENABLE_PDL"):
                launch(hopper)
        assert not config.launches_early(ampere) and config.early_launch(ampere) == {"PDL": False}


def test_nothing_is_imported_to_ask() -> None:
    code = "import sys, torch; from torchpaged.custom_ops import early_launch as e; e.refuse_inductors(); print('torch._inductor.config' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
