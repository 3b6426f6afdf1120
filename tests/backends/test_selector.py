"""Order of choice, explanations, refusals; the package's public face."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import python

import torchpaged
from torchpaged.backends import (
    AttentionSpec,
    Backend,
    Capabilities,
    GraphSupport,
    attention_spec,
    get_backend,
    list_backends,
    register_backend,
    select_backend,
    use_backend,
)
from torchpaged.backends.choose import names as names_module
from torchpaged.backends.choose import select as select_module
from torchpaged.custom_ops import BACKEND_OPS

ROOT = Path(__file__).parents[2]
SPEC = AttentionSpec(
    device=torch.device("cpu"), dtype=torch.float32, head_dim=64, num_heads=4, num_kv_heads=2
)


def test_order_of_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPAGED_BACKEND", "reference")
    assert select_backend(SPEC).reason == "TORCHPAGED_BACKEND=reference is set"
    with use_backend("auto"):
        assert "automatic" in select_backend(SPEC).reason
    monkeypatch.setenv("TORCHPAGED_BACKEND", "triton")
    with use_backend("reference"):
        assert select_backend(SPEC).name == "reference"
        assert "use_backend" in select_backend(SPEC).reason
        with pytest.raises(torchpaged.BackendUnavailableError, match="triton"):
            select_backend(SPEC, "triton")


def test_a_named_backend_is_never_swapped() -> None:
    with pytest.raises(torchpaged.BackendUnavailableError, match="device cpu is not one of cuda"):
        select_backend(SPEC, "triton")
    with pytest.raises(
        torchpaged.BackendUnavailableError, match="expected one of auto, .*reference, .*got 'nope'"
    ):
        select_backend(SPEC, "nope")
    with pytest.raises(torchpaged.BackendUnavailableError, match="nope"), use_backend("nope"):
        pass
    for none in (3, torch):
        with pytest.raises(torchpaged.ArgumentError, match="^backend: expected a name"), use_backend(none):
            pass


def test_an_unknown_name_says_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPAGED_BACKEND", "nope")
    for ask in (
        lambda: select_backend(SPEC),
        lambda: torchpaged.PagedAttention(4, 64),
        lambda: names_module.requested_name("cpu"),
        lambda: names_module.check_backend(None),
    ):
        with pytest.raises(
            torchpaged.BackendUnavailableError, match="got 'nope'; TORCHPAGED_BACKEND=nope is set"
        ):
            ask()


def test_an_attention_has_heads_and_columns() -> None:
    for name in ("num_heads", "num_kv_heads", "head_dim"):
        sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8} | {name: 0}
        with pytest.raises(torchpaged.ArgumentError, match=f"^{name}: expected an int of at least 1, got 0"):
            attention_spec(device=torch.device("cpu"), dtype=torch.float32, **sizes)


def test_every_rejection_has_its_reason() -> None:
    none = Capabilities(
        device_types=("cuda",),
        dtypes=(torch.bfloat16,),
        kv_dtypes=(torch.bfloat16,),
        graph_support=GraphSupport.NEVER,
        head_dims=(128,),
        max_head_dim=32,
        block_sizes=(64,),
        different_head_dim_v=False,
        features=frozenset(),
    )
    wanted = AttentionSpec(
        device=torch.device("cpu"),
        dtype=torch.float32,
        head_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim_v=80,
        causal=False,
        window_size=(7, -1),
        logits_soft_cap=5.0,
        chunk_size=12,
        uses=frozenset({"alibi", "sinks", "lse"}),
        graphs=GraphSupport.ALWAYS,
    )
    assert len(none.reject(wanted)) == 15
    assert (
        get_backend("reference").reject(wanted.__class__(**{**vars(wanted), "graphs": GraphSupport.NEVER}))
        == []
    )


def test_the_reason_says_which_kernel_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of backend cuda on Hopper: its own where the numbers fit it, else Triton's and why; layers that differ
    say so each."""
    from torchpaged.backends import cuda

    monkeypatch.setattr(cuda.torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(
        select_module, "_reject", lambda backend, specs: [] if backend.name == "cuda" else ["no"]
    )
    spec = AttentionSpec(
        device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=128, num_heads=32, num_kv_heads=8
    )
    fp8, narrow = replace(spec, kv_dtype=torch.float8_e4m3fn), replace(spec, head_dim=72)
    for asked in ("cuda", None):
        for taken in (spec, fp8, [spec, fp8]):
            assert select_backend(taken, asked).reason.endswith("; prefill in CUDA C++")
        both = "; prefill in CUDA C++; prefill by Triton: head_dim 72/72"
        assert both in select_backend([spec, narrow, narrow], asked).reason
        assert select_backend(narrow, asked).reason.endswith("; prefill by Triton: head_dim 72/72")
    monkeypatch.setenv("TORCHPAGED_CUDA_PREFILL", "0")
    assert select_backend(spec, "cuda").reason.endswith("; prefill by Triton: TORCHPAGED_CUDA_PREFILL=0")


def test_register_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "REGISTERED", {})
    monkeypatch.setattr(names_module, "AUTOMATIC", list(names_module.AUTOMATIC))
    mine = Backend("mine", get_backend("reference").capabilities, BACKEND_OPS["reference"], lambda: None)
    register_backend(mine, automatic=True)
    assert select_backend(SPEC).name == "mine"
    assert list_backends()[0] == "mine"
    with pytest.raises(torchpaged.ArgumentError, match="built in"):
        register_backend(Backend("cpu", mine.capabilities, mine.ops, lambda: None))


def test_public_names() -> None:
    assert set(torchpaged.__all__) == {name for name in torchpaged.__all__ if hasattr(torchpaged, name)}
    assert sorted(torchpaged.__all__) == torchpaged.__all__


def test_bare_imports_are_refused() -> None:
    for package in ("custom_ops", "graphs"):
        done = python("-c", f"import {package}")
        assert done.returncode
        assert f"torchpaged.{package}" in done.stderr
