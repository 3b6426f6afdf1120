"""rope_write_kv: the reference against complex arithmetic in float64 and against transformers, all kernels
within its error budget, refusals, tracing."""

from typing import Any

import pytest
import torch
from kernels import INTERPRETED, Kernels, over
from op_inputs.rope import ROPE_CASES, assert_rope_close, make_rope_inputs
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import torchpaged
from torchpaged.custom_ops import BACKEND_OPS

REFERENCE = BACKEND_OPS["reference"]
WRITTEN = ("q_out", "k_cache", "v_cache")


def call(inputs: dict[str, Any]) -> Tensor:
    """The public function on the inputs of an op call."""
    return torchpaged.rope_write_kv(**{name: x for name, x in inputs.items() if name != "q_out"})


def by_complex_numbers(x: Tensor, inputs: dict[str, Any], norm: str) -> Tensor:
    """Norm and rotation of ``x [T, H, D]`` written another way: each pair is a complex number times
    exp(i angle)."""
    x = x.double()
    if norm in inputs:
        x = (
            torch.nn.functional.normalize(x, dim=-1)
            * x.shape[-1] ** 0.5
            * (inputs["norm_offset"] + inputs[norm].double())
        )
    half = inputs["cos_sin"].shape[1] // 2
    angle = inputs["positions"][:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = (
        x.unflatten(-1, (half, 2)) if inputs["interleaved"] else x.unflatten(-1, (2, half)).transpose(-1, -2)
    )
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.view_as_real(turned)
    return torch.cat(
        [(pairs if inputs["interleaved"] else pairs.transpose(-1, -2)).flatten(-2), rest], dim=-1
    )


@pytest.mark.parametrize("case", ROPE_CASES)
def test_reference_equals_complex_arithmetic(case: str) -> None:
    inputs = make_rope_inputs(**ROPE_CASES[case], dtype=torch.float32)
    REFERENCE.rope_write_kv(**inputs)
    close = {"rtol": 1e-5, "atol": 2e-5}
    torch.testing.assert_close(
        inputs["q_out"], by_complex_numbers(inputs["q"], inputs, "q_norm").float(), **close
    )
    k = by_complex_numbers(inputs["k"], inputs, "k_norm").float()
    k_cache, v_cache = (torch.full_like(inputs[name], float("nan")) for name in WRITTEN[1:])
    for token, slot in enumerate(inputs["slot_mapping"].tolist()):
        if slot >= 0:
            where = divmod(slot, k_cache.shape[1])
            k_cache[where], v_cache[where] = k[token], inputs["v"][token]
    torch.testing.assert_close(inputs["k_cache"], k_cache, equal_nan=True, **close)
    torch.testing.assert_close(inputs["v_cache"], v_cache, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ROPE_CASES)
@over("default", "triton")
def test_within_the_error_budget(on: Kernels, case: str, dtype: torch.dtype) -> None:
    inputs = make_rope_inputs(**ROPE_CASES[case], dtype=dtype, device=on.device)
    assert_rope_close(on.ops, inputs)
    kept = inputs["slot_mapping"][inputs["slot_mapping"] >= 0]
    size = inputs["v_cache"].shape[1]
    stored = inputs["v_cache"][kept // size, kept % size]
    assert torch.equal(stored, inputs["v"][inputs["slot_mapping"] >= 0]), "values are copied as they are"


@pytest.mark.slow_cases("triton-cpu-tiles0")
@pytest.mark.parametrize("tiles", [(1, 1), (2, 1), (16, 4)])
@over("triton")
def test_other_tiles(on: Kernels, tiles: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of heads per program depends on the batch size; every choice gives the same."""
    from torchpaged.custom_ops.cache_write.triton import rope_write_kv

    monkeypatch.setattr(rope_write_kv, "head_tiles", lambda *_: tiles)
    for case in ("smollm2", "glm4", "heads_first"):
        inputs = make_rope_inputs(**ROPE_CASES[case], dtype=torch.bfloat16, device=on.device)
        assert_rope_close(on.ops, inputs)


@pytest.mark.parametrize("scales", [None, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@over("triton")
def test_fp8_pools_hold_the_references_bytes(on: Kernels, dtype: torch.dtype, scales: int | None) -> None:
    """Saturated and scaled; keys at most a rare step from the reference's.

    The interpreter loses the carry where a number is rounded up to a power of two (1.99 becomes 1) and
    truncates subnormals: bytes are compared where it can tell.
    """
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    shape: dict[str, Any] = {"cache_dtype": dtype, "norms": ("k_norm",)}
    shape |= {} if INTERPRETED else {"num_tokens": 40, "head_dim": 64, "dtype": torch.bfloat16}
    found = []
    for ops, device in ((on.ops, on.device), (REFERENCE, "cpu")):
        inputs = make_rope_inputs(**shape, device=device)
        inputs["v"].mul_(1e5)
        if scales:
            inputs |= {
                "k_scale": torch.linspace(0.5, 2.0, scales, device=device),
                "v_scale": torch.linspace(2.0, 0.25, scales, device=device),
            }
        ops.rope_write_kv(**inputs)
        found.append({name: inputs[name].cpu() for name in ("k_cache", "v_cache")})
    mantissa = 7 if dtype == torch.float8_e4m3fn else 3
    for name in ("k_cache", "v_cache"):
        got, want = (pools[name].view(torch.uint8) for pools in found)
        if INTERPRETED:  # the last: NaN, never written
            compared = ((want & mantissa) != 0) & ((want & 0x7F) > mantissa) & ((want & 0x7F) != 0x7F)
            assert int(compared.sum()) > 150, name
            assert torch.equal(got[compared], want[compared]), name
            continue
        assert float((got != want).float().mean()) < (0.01 if name == "k_cache" else 1e-9)
        pair = [pools[name].float() for pools in found]
        torch.testing.assert_close(*pair, rtol=0.26, atol=1e-2, equal_nan=True)
    assert float(found[0]["v_cache"].float().nan_to_num(0.0).abs().max()) == torch.finfo(dtype).max


def errors(got: Tensor, theirs: Tensor, exact: Tensor) -> tuple[float, float]:
    """Mean absolute error of ours and of theirs."""
    return float((got.double() - exact).abs().mean()), float((theirs.double() - exact).abs().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["none", "qwen3", "gemma3"])
def test_close_to_transformers_and_closer_to_the_truth(norm: str, dtype: torch.dtype) -> None:
    """Their modules, their rotation; in bfloat16 theirs rounds more often than ours."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import LlamaConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    inputs = make_rope_inputs(num_tokens=50, head_dim=64, dtype=dtype)
    q, positions = inputs["q"], inputs["positions"]
    normed = q
    if norm != "none":
        module: Any = (Qwen3RMSNorm if norm == "qwen3" else Gemma3RMSNorm)(64, eps=1e-6).to(dtype)
        torch.nn.init.normal_(module.weight)
        inputs |= {"q_norm": module.weight.detach(), "norm_offset": 1.0 if norm == "gemma3" else 0.0}
        normed = module(q).detach()
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=128)
    )
    cos, sin = rotary(q, positions[None])
    theirs = apply_rotary_pos_emb(normed[None], normed[None], cos, sin, unsqueeze_dim=2)[0][0]
    table_cos, table_sin = rotary(q.float(), torch.arange(128)[None])
    inputs["cos_sin"] = torch.cat([table_cos[0, :, :32], table_sin[0, :, :32]], dim=-1)
    got = call(inputs)
    torch.testing.assert_close(
        got, theirs, rtol=4 * torch.finfo(dtype).eps, atol=(1e-5 if dtype == torch.float32 else 0.06)
    )
    if dtype == torch.bfloat16:
        exact = by_complex_numbers(q, inputs, "q_norm")
        ours, hf = errors(got, theirs, exact)
        assert ours < hf, (ours, hf)


def test_interleaved_and_partial_as_glm() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb

    inputs = make_rope_inputs(head_dim=64, rotary_dim=32, interleaved=True)
    cos, sin = (x.repeat(1, 2)[inputs["positions"]][None] for x in inputs["cos_sin"].chunk(2, dim=-1))
    q, k = apply_rotary_pos_emb(inputs["q"][None], inputs["k"][None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(call(inputs), q[0])
    first = int(inputs["slot_mapping"][0])
    torch.testing.assert_close(inputs["k_cache"][first // 16, first % 16], k[0, 0])


@pytest.mark.parametrize("scales", [None, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_pools_hold_what_write_kv_would_store(dtype: torch.dtype, scales: int | None) -> None:
    """For float32 tokens: rotate first, then write_kv, gives the same bytes. Values beyond the
    range saturate."""
    inputs = make_rope_inputs(cache_dtype=dtype)
    inputs["v"].mul_(1e5)
    if scales:
        inputs |= {"k_scale": torch.rand(scales) + 0.5, "v_scale": torch.rand(scales) + 0.5}
    k_cache, v_cache = inputs["k_cache"].clone(), inputs["v_cache"].clone()
    rotated = make_rope_inputs(cache_dtype=torch.float32)
    rotated["v"].mul_(1e5)
    call(rotated)
    slots, kept = inputs["slot_mapping"], inputs["slot_mapping"] >= 0
    k = torch.zeros_like(inputs["k"])
    k[kept] = rotated["k_cache"].flatten(0, 1)[slots[kept]]
    call(inputs)
    torchpaged.write_kv(
        k, inputs["v"], k_cache, v_cache, slots, inputs.get("k_scale"), inputs.get("v_scale"), ops=REFERENCE
    )
    assert torch.equal(inputs["k_cache"].view(torch.uint8), k_cache.view(torch.uint8))
    assert torch.equal(inputs["v_cache"].view(torch.uint8), v_cache.view(torch.uint8))
    assert float(inputs["v_cache"].float().nan_to_num(0.0).abs().max()) == torch.finfo(dtype).max


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "position_high": ("positions", {"positions": torch.full((7,), 100)}),
    "position_negative": ("positions", {"positions": torch.full((7,), -1)}),
    "positions_dtype": ("positions", {"positions": torch.zeros(7, dtype=torch.int32)}),
    "positions_rows": ("positions", {"positions": torch.zeros(6, dtype=torch.int64)}),
    "odd_rotary_dim": ("cos_sin", {"cos_sin": torch.zeros(100, 7)}),
    "rotary_dim_wide": ("cos_sin", {"cos_sin": torch.zeros(100, 34)}),
    "cos_sin_dtype": ("cos_sin", {"cos_sin": torch.zeros(100, 32, dtype=torch.bfloat16)}),
    "cos_sin_strides": ("cos_sin", {"cos_sin": torch.zeros(32, 100).T}),
    "q_rows": ("q", {"q": torch.zeros(6, 4, 32)}),
    "q_head_dim": ("q", {"q": torch.zeros(7, 4, 16)}),
    "q_dtype": (
        "k",
        {
            "q": torch.zeros(7, 4, 32, dtype=torch.bfloat16),
            "q_out": torch.zeros(7, 4, 32, dtype=torch.bfloat16),
        },
    ),
    "q_out_shape": ("q_out", {"q_out": torch.zeros(7, 2, 32)}),
    "q_out_dtype": ("q_out", {"q_out": torch.zeros(7, 4, 32, dtype=torch.float64)}),
    "slots": ("slot_mapping", {"slot_mapping": torch.full((7,), 10_000)}),
    "norm_shape": ("q_norm", {"q_norm": torch.zeros(16)}),
    "norm_dtype": ("k_norm", {"k_norm": torch.zeros(32, dtype=torch.float16)}),
    "norm_eps": ("norm_eps", {"norm_eps": 0.0}),
    "offset_without_norm": ("norm_offset", {"norm_offset": 1.0}),
    "scale_of_float_pool": ("k_scale", {"k_scale": torch.ones(1)}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_written(name: str) -> None:
    argument, change = BAD[name]
    inputs = make_rope_inputs() | change
    before = {key: inputs[key].clone() for key in WRITTEN}
    with pytest.raises(torchpaged.ArgumentError) as error:
        REFERENCE.rope_write_kv(**inputs)
    assert error.value.argument == argument
    for key, old in before.items():
        assert torch.equal(inputs[key].nan_to_num(7.0), old.nan_to_num(7.0)), key


def test_queries_are_not_rotated_in_place() -> None:
    inputs = make_rope_inputs()
    with pytest.raises(torchpaged.ArgumentError, match="q_out"):
        REFERENCE.rope_write_kv(**inputs | {"q_out": inputs["q"]})


def test_the_function_refuses_grad_and_checks_values() -> None:
    inputs = make_rope_inputs()
    with pytest.raises(torchpaged.ArgumentError, match="inference"):
        call(inputs | {"k": inputs["k"].clone().requires_grad_()})
    with pytest.raises(torchpaged.ArgumentError, match="positions"):
        call(inputs | {"positions": inputs["positions"] + 1000})
    assert not bool(inputs["k_cache"].isfinite().any())


def test_no_tokens() -> None:
    inputs = make_rope_inputs(num_tokens=0)
    assert call(inputs).shape == (0, 4, 32)


def test_one_compile_serves_every_batch_size() -> None:
    """Fullgraph, slices of a fused projection, batch sizes unbacked: one frame, one op call, the
    eager result."""

    def step(
        qkv: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        q, k, v = qkv.unflatten(1, (8, 32)).split([4, 2, 2], dim=1)
        return torchpaged.rope_write_kv(q, k, v, positions, cos_sin, k_cache, v_cache, slots) * 2

    torch._dynamo.reset()  # another test's model may have made sizes dynamic
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    pools = [torch.zeros(4, 16, 2, 32) for _ in range(4)]
    cos_sin = make_rope_inputs()["cos_sin"]
    for tokens in (5, 1, 17):
        qkv, positions, slots = torch.randn(tokens, 256), torch.arange(tokens) + 9, torch.arange(tokens) + 16
        for tensor in (qkv, positions, slots):
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        with torch.no_grad():
            got, want = (
                compiled(qkv, positions, slots, cos_sin, *pools[:2]),
                step(qkv, positions, slots, cos_sin, *pools[2:]),
            )
        torch.testing.assert_close(got, want)
        assert torch.equal(pools[0], pools[2])
        assert torch.equal(pools[1], pools[3])
    assert counter.frame_count == 1, f"{counter.frame_count} compiles"
    names = [str(node.target) for node in counter.graphs[0].graph.nodes if "torchpaged" in str(node.target)]
    assert names == ["torchpaged.rope_write_kv.default"]
