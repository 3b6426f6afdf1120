"""o_proj_mlp of the cuda backend on a GPU: against float64, NaN in what it allocates, repeatable, captured and replayed, in a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.compose import compose_o_proj_mlp
from torchpaged.testing_layers import make_o_proj_mlp_inputs

pytestmark = pytest.mark.gpu
CUDA = BACKEND_OPS["cuda"]
SHAPES = {  # attention, hidden, intermediate
    "1b": (2048, 2048, 8192), "8b": (4096, 4096, 14336), "smollm2": (576, 576, 1536), "small": (512, 512, 1024), "uneven": (1024, 896, 4864),
    "ragged": (520, 584, 1096),
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu"}, "gelu_tanh": {"activation": "gelu_tanh"}, "offset": {"norm_offset": 1.0},
    "float32 norm": {"norm_dtype": torch.float32}, "no semaphore": {"semaphore": False},
}  # fmt: skip


def make(shape: str, tokens: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Any]:
    """The arguments of a call; around the rows of x and residual lies NaN."""
    attention, hidden, intermediate = SHAPES[shape]
    arguments = make_o_proj_mlp_inputs(
        tokens=tokens, attention=attention, hidden=hidden, intermediate=intermediate, dtype=dtype, device="cuda", **options
    )
    for name in ("x", "residual"):
        values = arguments[name]
        whole = torch.full((tokens + 4, values.shape[1] + 16), torch.nan, dtype=dtype, device="cuda")
        arguments[name] = whole[2 : tokens + 2, 8 : 8 + values.shape[1]]
        arguments[name].copy_(values)
    return arguments


def poison() -> None:
    """What is allocated next holds NaN, as 16-bit and as 32-bit numbers; as integers, no zero."""
    torch.cuda.empty_cache()
    megabyte = 1 << 19
    sizes = [megabyte] * 8 + [20 * megabyte, 128 * megabyte]
    held = [torch.full((size,), torch.nan, dtype=torch.bfloat16, device="cuda") for size in sizes]
    del held


def call(arguments: dict[str, Any]) -> Tensor:
    CUDA.o_proj_mlp(**arguments)
    return arguments["out"]


def composed(linear: Any, arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The call in three of ``linear``, every tensor in ``dtype``."""
    tensors = [arguments[name] for name in ("x", "residual", "o_weight", "norm_weight", "gate_up_weight", "down_weight", "out")]
    if dtype == torch.float64:
        tensors = [tensor.double() for tensor in tensors]
    tensors[-1] = torch.empty_like(tensors[-1])
    compose_o_proj_mlp(linear, *tensors, 1e-6, arguments["norm_offset"], arguments["activation"])
    return tensors[-1]


def check(arguments: dict[str, Any], beside: int | None = None) -> None:
    """No worse than twice the unfused ops' error in the same dtype, by norm, and four times by the worst element, column ``beside`` apart."""
    exact = composed(BACKEND_OPS["reference"].linear, arguments, torch.float64)
    peer = composed(CUDA.linear, arguments, arguments["x"].dtype).double() - exact
    poison()
    out = call(arguments).double()
    error = out - exact
    assert torch.isfinite(out).all()
    if beside is not None:
        torch.testing.assert_close(out[:, beside], exact[:, beside], rtol=2e-2, atol=0)
        error[:, beside] = peer[:, beside] = 0
    assert error.norm() <= 2 * peer.norm(), (float(error.norm() / exact.norm()), float(peer.norm() / exact.norm()))
    assert error.abs().max() <= 4 * peer.abs().max(), (float(error.abs().max()), float(peer.abs().max()))
    assert arguments["semaphore"] is None or not arguments["semaphore"].any()


@pytest.mark.parametrize("tokens", [1, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, tokens: int) -> None:
    check(make(shape, tokens))


@pytest.mark.parametrize("tokens", [17, 64])
@pytest.mark.parametrize("shape", ["smollm2", "small"])
def test_float16(shape: str, tokens: int) -> None:
    check(make(shape, tokens, torch.float16))


@pytest.mark.parametrize("features", FEATURES)
def test_features(features: str) -> None:
    check(make("small", 24, **FEATURES[features]))


def test_every_number_of_tokens() -> None:
    for tokens in range(1, 66):
        check(make("small", tokens, seed=tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_channels_far_larger_than_the_rest(dtype: torch.dtype) -> None:
    """Models have such channels. Times the norm's weight, but not yet over the rms, they leave float16's range."""
    arguments = make("small", 33, dtype)
    arguments["residual"][:, 77] = 30000.0
    arguments["norm_weight"][77] = 4.0
    check(arguments, beside=77)


@pytest.mark.parametrize("case", ["no tokens", "float32", "unaligned x", "odd"])
def test_what_no_kernel_takes_is_composed(case: str) -> None:
    if case == "odd":
        arguments = make_o_proj_mlp_inputs(tokens=19, attention=100, hidden=202, intermediate=303, dtype=torch.bfloat16, device="cuda")
    else:
        arguments = make("small", 0 if case == "no tokens" else 20, torch.float32 if case == "float32" else torch.bfloat16)
    if case == "unaligned x":
        arguments["x"] = torch.randn(20, 513, device="cuda").to(torch.bfloat16)[:, 1:]
    exact = composed(BACKEND_OPS["reference"].linear, arguments, torch.float64)
    torch.testing.assert_close(call(arguments).double(), exact, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("shape", ["1b", "uneven"])
def test_nothing_beside_out_is_written(shape: str) -> None:
    arguments = make(shape, 41)
    hidden = SHAPES[shape][1]
    whole = torch.full((44, hidden + 24), torch.nan, dtype=torch.bfloat16, device="cuda")
    arguments["out"] = whole[1:42, 8 : 8 + hidden]
    check(arguments)
    arguments["out"].fill_(torch.nan)
    assert whole.isnan().all()


@pytest.mark.parametrize(("shape", "tokens"), [("1b", 17), ("1b", 64), ("8b", 33), ("uneven", 64)])
def test_bitwise_repeatable(shape: str, tokens: int) -> None:
    arguments = make(shape, tokens)
    first = call(arguments).clone()
    for repetition in range(20):
        arguments["out"].fill_(torch.nan)
        if repetition == 10:
            poison()
        assert torch.equal(call(arguments), first)
    assert not arguments["semaphore"].any()


def test_beside_other_work_on_the_device() -> None:
    """Another stream's kernels hold multiprocessors meanwhile."""
    arguments, other = make("1b", 64), torch.cuda.Stream()
    want, square = call(arguments).clone(), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(other):
            for _ in range(4):
                square @ square
        arguments["out"].fill_(torch.nan)
        assert torch.equal(call(arguments), want)
    torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [17, 64])
def test_captured_layers_follow_their_input(tokens: int) -> None:
    """linear and o_proj_mlp in turns, then two o_proj_mlp back to back: each is launched before the one in front has finished."""
    arguments = [make("1b", tokens, seed=seed) for seed in range(3)]
    semaphore, norm = arguments[0]["semaphore"], torch.ones(2048, dtype=torch.bfloat16, device="cuda")
    states = [torch.zeros(tokens, 2048, dtype=torch.bfloat16, device="cuda") for _ in range(5)]
    attended = [torch.empty_like(states[0]) for _ in range(4)]

    def layer(index: int, state: Tensor, between: Tensor, out: Tensor) -> None:
        a = arguments[index % 3]
        if index < 2:
            CUDA.linear(state, a["o_weight"], between, norm_weight=norm)
        CUDA.o_proj_mlp(**{**a, "x": between if index < 2 else state, "residual": state, "out": out, "semaphore": semaphore})

    def chain() -> None:
        for index in range(4):
            layer(index, states[index], attended[index], states[index + 1])

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for seed in range(6):
        generator = torch.Generator("cuda").manual_seed(seed)
        states[0].copy_(torch.randn(tokens, 2048, generator=generator, device="cuda"))
        graph.replay()
        replayed = [state.clone() for state in states]
        assert replayed[4].isfinite().all() and not semaphore.any()
        for index in range(4):
            out, between = torch.full_like(states[0], torch.nan), torch.full_like(states[0], torch.nan)
            torch.cuda.synchronize()
            layer(index, replayed[index], between, out)
            assert torch.equal(out, replayed[index + 1]), (seed, index)
    for _ in range(200):  # replays behind one another
        graph.replay()
    assert all(torch.equal(state, want) for state, want in zip(states, replayed, strict=True)) and not semaphore.any()


@pytest.mark.parametrize("rows", [24, 64])
def test_in_a_fused_model(rows: int) -> None:
    """Decode steps of many rows: mean and largest error against float64 at most 1.5 times the unfused model's."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import torchpaged.hf as hf

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4,
        max_position_embeddings=64, eos_token_id=None, pad_token_id=0, bos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    ids = torch.randint(3, 512, (rows, 12), device="cuda")
    model = transformers.LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)

    def logits(model: Any, cache: Any) -> Tensor:
        with torch.inference_mode():
            return torch.cat([model(part, past_key_values=cache).logits for part in ids.split([9, 1, 1, 1], dim=1)], dim=1).double()

    model.double().set_attn_implementation("eager")
    exact = logits(model, transformers.DynamicCache(config=config))
    unfused = (logits(model.to(torch.bfloat16), transformers.DynamicCache(config=config)) - exact).abs()
    report = hf.fuse(model)
    assert report.replaced["mlp"] == ["layers.0", "layers.1"]
    model.set_attn_implementation("torchpaged")
    fused = (logits(model, hf.PagedCache(config, rows, 16, backend="cuda")) - exact).abs()
    assert float(fused.mean()) <= 1.5 * float(unfused.mean()), (float(fused.mean()), float(unfused.mean()))
    assert float(fused.amax()) <= 1.5 * float(unfused.amax()), (float(fused.amax()), float(unfused.amax()))
