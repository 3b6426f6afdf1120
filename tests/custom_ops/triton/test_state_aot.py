"""The state ops' Triton kernels compile at models' sizes for GPUs that are not here."""

import re
from typing import Any

import aot
import launched
import pytest
import torch
from op_inputs.state import STATE_BATCHES, Rows, make_conv_inputs, make_linear_inputs, with_odd_strides
from op_inputs.state_gates import SIZES, make_gated_norm_inputs, make_gates_inputs

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.triton import chunks

BF16 = torch.bfloat16
#: A TP2 shard of Qwen3-Next; Bamba's Mamba 2, with states of float32; Granite 4's; Mamba 1 of Jamba; Kimi
#: Linear's; RecurrentGemma's RG-LRU.
LINEAR: dict[str, dict[str, Any]] = {
    "qwen3_next": {"key_heads": 8, "heads": 16, "key_dim": 128, "value_dim": 128, "state_dtype": BF16},
    "bamba": {"key_heads": 1, "heads": 16, "key_dim": 128, "value_dim": 64, "delta": False},
    "granite": {"key_heads": 1, "heads": 6, "key_dim": 256, "value_dim": 64, "delta": False},
    "jamba": {"key_heads": 1, "heads": 64, "key_dim": 16, "value_dim": 1, "delta": False, "by_key": True},
    "recurrent_gemma": {
        "key_heads": 1,
        "heads": 64,
        "key_dim": 1,
        "value_dim": 1,
        "delta": False,
        "beta": False,
    },
    "kimi": {"key_heads": 16, "heads": 16, "key_dim": 128, "value_dim": 128, "by_key": True},
}
#: Of Kimi Linear's chunks, by kernel, bytes outside of loops; of the others none. Of the recurrent kernel the
#: place of a thread's columns, stored ahead of the loop over tokens, loaded behind it: in other orders of its
#: statements sm_90 spills it, or takes more registers. Of the first kernel of chunks what it has ahead of its
#: loop for what follows it; of the second one, over segments, 8 under Triton 3.6.
SPILLED = {
    "sm_90": {"recurrent_kernel": 8, "key_chunk_kernel": 192, "pass_kernel": 8},
    "sm_100": {"recurrent_kernel": 8},
}


@pytest.mark.slow_cases(but=("sm_90-*-decode",))
@pytest.mark.parametrize("batch", ["decode", "chunks"])
@pytest.mark.parametrize("case", LINEAR)
@pytest.mark.parametrize("target", aot.TARGETS)
def test_linear_attention_compiles(target: str, case: str, batch: str) -> None:
    once = SPILLED.get(target, {}) if (case, batch) == ("kimi", "chunks") else {}
    inputs = make_linear_inputs(STATE_BATCHES[batch], dtype=BF16, **LINEAR[case])
    launched.check("linear_attention", inputs, target, **once)


@pytest.mark.parametrize(
    ("reqs", "tokens", "heads", "delta", "value", "stages"),
    [
        (1, 20, 8, True, 16, 3),
        (1, 20, 32, True, 32, 3),
        (2, 20, 32, True, 64, 3),
        (1, 1024, 80, False, 64, 3),
        (1, 1023, 80, False, 64, 2),
        (1, 2048, 20, True, 32, 3),
    ],
)
def test_tiles_of_chunks(reqs: int, tokens: int, heads: int, delta: bool, value: int, stages: int) -> None:
    """Of 64 columns, narrower while there are multiprocessors without a program (of 132)."""
    sizes = {"key_heads": 1, "heads": heads, "key_dim": 128, "value_dim": 128 if delta else 64}
    inputs = make_linear_inputs(Rows(((0, tokens),) * reqs), delta=delta, dtype=BF16, **sizes)
    with launched.recorded() as launches:
        BACKEND_OPS["triton"].linear_attention(**inputs)
    options = next(launch.arguments for launch in launches if launch.name == "pass_kernel")
    assert (options["SIZES"].tile, options["STAGES"]) == (value, stages)


@pytest.mark.parametrize(
    ("reqs", "tokens", "heads", "by_key", "segment"),
    [
        (1, 2048, 2, False, 512),
        (1, 8128, 8, False, 1024),
        (2, 4064, 8, False, 1024),
        (1, 8128, 11, True, 1408),
        (1, 2047, 2, False, None),
        (4, 2048, 16, False, None),
        (1, 8128, 12, True, None),
    ],
)
def test_few_heads_of_long_rows_are_cut(
    reqs: int, tokens: int, heads: int, by_key: bool, segment: int | None
) -> None:
    """Into as many segments as there are multiprocessors for two tiles of each head's values."""
    sizes = {"key_heads": heads, "heads": heads, "key_dim": 128, "value_dim": 128, "by_key": by_key}
    call = make_linear_inputs(Rows(((0, tokens),) * reqs), dtype=BF16, **sizes)
    with launched.recorded():
        assert chunks.tiles(LinearAttentionCall(**call)).segment == segment
        assert chunks.tiles(LinearAttentionCall(**call), tokens + 1).segment is None


def test_many_rows_are_not_cut() -> None:
    """Each would take memory for a segment's state."""
    sizes = {"key_heads": 2, "heads": 2, "key_dim": 128, "value_dim": 128, "dtype": BF16, "num_slots": 40}
    for rows, segment in ((31, 512), (32, None)):
        call = make_linear_inputs(Rows(((0, 2048), *[(9, 1)] * rows)), **sizes)
        with launched.recorded():
            assert chunks.tiles(LinearAttentionCall(**call)).segment == segment


def test_segments_compile() -> None:
    for case in ("qwen3_next", "kimi"):
        sizes = LINEAR[case] | {"heads": 4, "key_heads": 4}
        once = SPILLED["sm_90"] if case == "kimi" else {}
        inputs = make_linear_inputs(Rows(((0, 2048),)), dtype=BF16, **sizes)
        launched.check("linear_attention", inputs, "sm_90", **once)


def test_kernels_of_chunks_are_given_even_strides() -> None:
    """Whatever a call's are: the interpreter has them right, a GPU not."""
    sizes = {"dtype": BF16, "key_dim": 128, "value_dim": 64}
    inputs = with_odd_strides(make_linear_inputs(STATE_BATCHES["chunks"], **sizes))
    with launched.recorded() as launches:
        BACKEND_OPS["triton"].linear_attention(**inputs)
    in_chunks = [launch for launch in launches if launch.name in ("chunk_kernel", "pass_kernel")]
    assert len(in_chunks) == 2
    for launch in in_chunks:
        for tokens in (launch.arguments[name] for name in "qkv" if name in launch.arguments):
            assert tokens.ptr.data_ptr() % 16 == tokens.token % 16 == tokens.head % 16 == 0


@pytest.mark.slow_cases(but=("sm_90-*",))
@pytest.mark.parametrize("batch", ["decode", "chunks"])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_causal_conv_compiles(target: str, batch: str) -> None:
    launched.check("causal_conv", make_conv_inputs(STATE_BATCHES[batch], channels=4096, dtype=BF16), target)


@pytest.mark.slow_cases(but=("sm_90-decode",))
@pytest.mark.parametrize("batch", ["decode", "chunks"])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_gated_causal_conv_compiles(target: str, batch: str) -> None:
    """As LFM2's."""
    sizes = {"channels": 2048, "width": 3, "bias": False, "activation": "none", "gated": True}
    launched.check("causal_conv", make_conv_inputs(STATE_BATCHES[batch], **sizes, dtype=BF16), target)


@pytest.mark.slow_cases(but=("sm_90-qwen3_next",))
@pytest.mark.parametrize("size", ["qwen3_5", "qwen3_next", "granite", "kimi", "bailing"])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_gates_compile(target: str, size: str) -> None:
    launched.check("delta_gates", make_gates_inputs(**SIZES[size], dtype=BF16), target)
    launched.check("gated_rms_norm", make_gated_norm_inputs(**SIZES[size], dtype=BF16), target)


def test_gates_of_nan_are_nan() -> None:
    """PTX's plain min and max give the other operand for NaN, which the interpreter does not do."""
    with launched.recorded() as launches:
        for size in ("qwen3_5", "mamba2"):
            BACKEND_OPS["triton"].delta_gates(**make_gates_inputs(**SIZES[size], dtype=BF16))
    for launch in launches:
        ptx = launched.compile_launch(launch).asm["ptx"]
        assert "ex2.approx" in ptx
        assert not re.findall(r"\b(?:min|max)[.\w]*f32", ptx)
