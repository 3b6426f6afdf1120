"""The state ops' Triton kernels in Triton's interpreter."""

from typing import Any

import pytest
import torch
from library_backends import stand_in
from op_inputs.delta_step import SIZES as STEP_SIZES
from op_inputs.delta_step import assert_delta_step_close, make_delta_step_inputs
from op_inputs.state import (
    FAMILIES,
    LONG_BATCHES,
    STATE_BATCHES,
    Rows,
    assert_state_close,
    exact_linear,
    make_conv_inputs,
    make_linear_inputs,
    with_nan_in_padding,
    with_odd_strides,
)

from torchpaged import ArgumentError
from torchpaged.backends import flashinfer_gdn
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.triton import chunks, linear_attention

TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]


def test_convolution_of_many_channels_and_a_width_of_eight() -> None:
    inputs = make_conv_inputs(STATE_BATCHES["chunks"], width=8, channels=300, dtype=torch.float16)
    assert_state_close(TRITON, REFERENCE, "causal_conv", inputs)


@pytest.mark.slow_cases(but_every=3)
@pytest.mark.parametrize("batch", STATE_BATCHES)
def test_heads_of_one_number(batch: str) -> None:
    """RG-LRU: a channel is a head."""
    sizes: dict[str, Any] = {"key_heads": 1, "heads": 5, "key_dim": 1, "value_dim": 1}
    inputs = make_linear_inputs(STATE_BATCHES[batch], delta=False, beta=False, **sizes)
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs)


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("calls", [1, 100])
def test_a_constant_decay_does_not_lose_by_its_rounding(calls: int, by_key: bool) -> None:
    """Of decays next to 1, those whose float32 is furthest off: 100 tokens in one row, or one by one."""
    rates = -torch.arange(1, 1000, dtype=torch.float64) * 1e-6
    off = (rates.float().double().exp().float() - rates.float().double().exp()).abs()
    g = rates[off.argsort()[-4:]].float()
    tokens = 100 // calls
    inputs = make_linear_inputs(Rows(((7, tokens),)), delta=False, beta=False, by_key=by_key)
    inputs["k"].zero_()
    inputs["g"] = g[None, :, None].repeat(tokens, 1, 16) if by_key else g.repeat(tokens, 1)
    state, slot = inputs["state"], int(inputs["state_slots"])
    state[slot] = torch.rand(state[slot].shape) + 1
    want = state[slot].double() * (100 * g.double()).exp()[:, None, None]
    for _ in range(calls):
        TRITON.linear_attention(**inputs)
    of_rounding = 100 * float(off.topk(4).values[-1])
    assert float((state[slot] - want).norm() / want.norm()) < 0.2 * of_rounding


@pytest.fixture(params=[(32, None), (64, None), (32, 32), (64, 128)], ids="chunks of {0[0]}, {0[1]}".format)
def in_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows go in chunks whatever their dtype and widths: of float32, nothing rounded hides an error.
    With the delta rule in segments, too."""
    long = lambda call: call.max_query_len > chunks.SHORT and (call.g.dim() == 2 or call.delta_rule)  # noqa: E731
    monkeypatch.setattr(linear_attention, "has_long_rows", long)
    chunk, segment = request.param

    def tiles(call: LinearAttentionCall) -> chunks.Tiles:
        return chunks.Tiles(chunk, 16, 1, "ieee", segment if call.delta_rule else None)

    monkeypatch.setattr(chunks, "tiles", tiles)


@pytest.mark.slow_cases(
    but=(
        "chunks of 64, None-void_row-delta",
        "chunks of 64, None-borders-delta",
        "chunks of 64, 128-long-delta",
        "chunks of 32, None-mixed_empty-ssd",
    )
)
@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", ["long", "mixed_empty", *LONG_BATCHES])
def test_long_rows_match_the_oracle(batch: str, family: str) -> None:
    rows = (STATE_BATCHES | LONG_BATCHES)[batch]
    inputs = make_linear_inputs(rows, **FAMILIES[family])
    # decays are differences of sums of float32; 6.7 were needed
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs, factor=8.0)


@pytest.mark.slow_cases(but=("chunks of 64, None-delta",))
@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_are_all_alike_and_decays_that_leave_nothing(family: str) -> None:
    """The system of a chunk is then as badly conditioned as it can be; infinite decays are subtracted."""
    alike, nothing = (make_linear_inputs(STATE_BATCHES["long"], **FAMILIES[family]) for _ in range(2))
    alike["k"].fill_(0.3)
    alike["g"].fill_(-1e-3)
    if alike["beta"] is not None:
        alike["beta"].fill_(1.0)
    nothing["g"][::7] = -300.0
    nothing["g"][3::11] = -torch.inf
    assert_state_close(TRITON, REFERENCE, "linear_attention", alike)
    # sums up to 1,500, whose float32 are 1.2e-4 apart; 259 were needed
    assert_state_close(TRITON, REFERENCE, "linear_attention", nothing, factor=300.0)


@pytest.mark.slow_cases(but=("chunks of 64, None-10.0",))
@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("factor", [3.0, 10.0, 40.0])
def test_decays_of_keys_that_are_too_far_apart_for_one_product(factor: float) -> None:
    """Sums of a chunk up to 128 times this: it is halved once, twice and down to single tokens."""
    inputs = make_linear_inputs(LONG_BATCHES["borders"], **FAMILIES["kda"])
    inputs["g"] *= factor
    # differences of sums that are as much larger
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs, factor=8.0 + 2 * factor)


@pytest.mark.slow_cases(but=("chunks of 32, None-delta", "chunks of 64, 128-kda"))
@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("family", ["delta", "kda"])
def test_bfloat16_hides_the_rounding_of_the_largest_sums(family: str) -> None:
    """Of a chunk's tokens most leave nothing, so that sums are up to 4,800; then decays are next to 1."""
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "out_dtype": torch.float32, "key_dim": 32}
    inputs = make_linear_inputs(Rows(((5, 128),)), **FAMILIES[family] | sizes)
    inputs["g"].mul_(0.05)
    inputs["g"][:48] = -300.0
    inputs["g"][64:112] = -torch.inf
    want = exact_linear(inputs)[0]
    TRITON.linear_attention(**inputs)
    assert float((inputs["out"] - want).norm() / want.norm()) < 1.5e-2


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("beta", [2.2, 4.0])
def test_a_beta_of_more_than_two_is_right_or_nan(beta: float) -> None:
    """Keys that are all alike: updates grow beyond float16, in which a chunk's system is inverted."""
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "out_dtype": torch.float32}
    inputs = make_linear_inputs(Rows(((5, 60),)), **sizes)
    inputs["k"].fill_(0.3)
    inputs["g"].mul_(0.01)
    inputs["beta"].fill_(beta)
    want = exact_linear(inputs)[0]
    TRITON.linear_attention(**inputs)
    out, large = inputs["out"], want.norm(dim=-1)
    assert bool(((out - want).norm(dim=-1) < 0.25 * large).logical_or(out.isnan().all(-1)).all())
    assert bool(out.isnan().any()) == (beta == 4.0)


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.parametrize("batch", ["chunks", "mixed_empty"])
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_rows_of_bfloat16(state_dtype: torch.dtype, batch: str) -> None:
    """At sizes that go in chunks by themselves."""
    dtypes: dict[str, Any] = {"dtype": torch.bfloat16, "state_dtype": state_dtype, "out_dtype": torch.float32}
    inputs = make_linear_inputs(STATE_BATCHES[batch], key_dim=128, value_dim=48, **dtypes)
    assert chunks.has_long_rows(LinearAttentionCall(**inputs))
    narrow = make_linear_inputs(STATE_BATCHES[batch], key_dim=64, value_dim=48, **dtypes)
    assert not chunks.has_long_rows(LinearAttentionCall(**narrow)), "not tried on a GPU"
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs, products=torch.bfloat16)


def test_long_rows_of_odd_strides() -> None:
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "key_dim": 128, "value_dim": 48}
    inputs = with_odd_strides(make_linear_inputs(STATE_BATCHES["chunks"], **sizes))
    assert chunks.has_long_rows(LinearAttentionCall(**inputs))
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs, products=torch.bfloat16)


@pytest.mark.slow_cases(but=("chunks of 64, None-1-33", "chunks of 32, 32-72-40"))
@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize(("key_dim", "value_dim"), [(72, 40), (1, 33)])
def test_long_rows_of_odd_widths(key_dim: int, value_dim: int) -> None:
    inputs = make_linear_inputs(STATE_BATCHES["chunks"], key_dim=key_dim, value_dim=value_dim)
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs)


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.parametrize("state_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (1, 33), (40, 1)])
def test_shapes_and_dtypes(key_dim: int, value_dim: int, state_dtype: torch.dtype) -> None:
    inputs = make_linear_inputs(
        STATE_BATCHES["verify"],
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=torch.float16,
        state_dtype=state_dtype,
        out_dtype=torch.float32,
    )
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs)


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("batch", ["decode", "chunks"])
def test_pools_of_strides_are_written_in_place(batch: str) -> None:
    """A pool that is a part of a larger tensor; nothing beside it is touched."""
    inputs = make_linear_inputs(STATE_BATCHES[batch], key_dim=8, value_dim=8)
    big = torch.full((9, 2, 4, 10, 16), float("nan"))
    big[:, 1, :, 1:9, 4:12] = inputs["state"]
    inputs["state"] = big[:, 1, :, 1:9, 4:12]
    assert_state_close(TRITON, REFERENCE, "linear_attention", inputs)
    assert int(big.isfinite().sum()) == len(STATE_BATCHES[batch].rows) * 4 * 8 * 8


def test_keys_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ArgumentError, match="^q: expected keys of at most 512"):
        TRITON.linear_attention(**make_linear_inputs(STATE_BATCHES["decode"], key_dim=513, value_dim=2))


def test_no_rows_give_zeros() -> None:
    conv, linear = (make(STATE_BATCHES["decode"]) for make in (make_conv_inputs, make_linear_inputs))
    for op, given in (("causal_conv", conv), ("linear_attention", linear)):
        given |= {name: given[name][:0] for name in ("state_slots", "seq_lens")}
        given["query_start_loc"] = given["query_start_loc"][:1]
        getattr(TRITON, op)(**given)
        assert not given["out"].any()


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("batch", ["long", "borders", "void_row"])
def test_rows_for_a_library_match_the_oracle(
    batch: str, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in takes what FlashInfer takes; NaN in the pool, in padding, beside the rows."""
    monkeypatch.setattr(flashinfer_gdn, "splits_rows", lambda *_: splits)
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "key_dim": 128, "value_dim": 128, "key_heads": 1}
    inputs = make_linear_inputs((STATE_BATCHES | LONG_BATCHES)[batch], heads=2, **sizes)
    inputs = with_nan_in_padding(with_odd_strides(inputs))
    assert flashinfer_gdn.why_own(LinearAttentionCall(**inputs)) is None
    with stand_in("flashinfer_gdn") as backend:
        assert_state_close(backend.ops, REFERENCE, "linear_attention", inputs, torch.bfloat16)


@pytest.mark.slow_cases(but=("void_row-qwen3_5-whole", "borders-qwen3_next-split"))
@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("size", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("batch", ["long", "borders", "void_row"])
def test_steps_for_a_library_match_the_oracle(
    batch: str, size: str, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The convolution gives q, k and v apart and normalised, with zeros in padding that holds NaN."""
    monkeypatch.setattr(flashinfer_gdn, "splits_rows", lambda *_: splits)
    sizes = STEP_SIZES[size] | {"heads": 2, "key_heads": 1 + (size == "qwen3_5"), "groups": 1}
    rows = (STATE_BATCHES | LONG_BATCHES)[batch]
    inputs = make_delta_step_inputs(rows, dtype=torch.bfloat16, weight_dtype=torch.float32, **sizes)
    copies: list[int] = []
    with stand_in("flashinfer_gdn") as backend:
        monkeypatch.setattr(flashinfer_gdn, "_attend", copies.append)
        assert_delta_step_close(backend.ops, REFERENCE, inputs)
    assert not copies


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("gap", [0, 8], ids=["odd address", "gaps"])
def test_results_that_a_library_cannot_write_are_zeros_behind_the_last_row(
    gap: int, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_gdn, "splits_rows", lambda *_: splits)
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(float("nan"))
    )
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "key_dim": 128, "value_dim": 128, "key_heads": 1}
    inputs = make_linear_inputs(Rows(((0, 70),), padded_tokens=40), heads=2, **sizes)
    whole = inputs["out"].new_full((110 * (256 + gap) + 1,), float("nan"))[1:].view(110, 256 + gap)
    inputs["out"] = whole[:, :256].unflatten(-1, (2, 128))
    with stand_in("flashinfer_gdn") as backend:
        backend.ops.linear_attention(**inputs)
    assert inputs["out"][:70].isfinite().all()
    assert not inputs["out"][70:].any()
    assert whole[:, 256:].isnan().all()
