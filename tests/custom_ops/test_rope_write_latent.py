"""rope_write_latent: the reference against the steps that it stands for, refusals, tracing."""

from typing import Any

import pytest
import torch
from kernels import Kernels, Values, over
from op_inputs.latent_writes import LATENT_WRITES, assert_latent_write_close, latents_of, make_latent_writes
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS

REFERENCE, DEFAULT = BACKEND_OPS["reference"], BACKEND_OPS["default"]


def rotated(x: Tensor, inputs: dict[str, Any]) -> Tensor:
    """``x [T, ..., rope]`` as complex numbers times exp(i angle)."""
    kind, (cos, sin) = inputs["rotation"], inputs["cos_sin"][inputs["positions"]].chunk(2, dim=-1)
    turn = torch.complex(cos, sin)
    turn = turn[:, None] if x.dim() == 3 else turn
    pairs = x.unflatten(-1, (2, -1)).mT if kind == "halves" else x.unflatten(-1, (-1, 2))
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.clone(memory_format=torch.contiguous_format)) * turn
    )
    return (turned if kind == "pairs" else turned.mT).flatten(-2)


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("case", LATENT_WRITES)
def test_reference_is_the_steps_one_by_one(case: str, fp8: bool) -> None:
    """Absorbed products, complex rotation, torch's RMSNorm and write_latent."""
    inputs = make_latent_writes(**LATENT_WRITES[case], fp8=fp8)
    pool, nope = inputs["kv_cache"].clone(), inputs["up_keys"].shape[1]
    REFERENCE.rope_write_latent(**inputs)
    latent, q = inputs["kv_c"], inputs["q"]
    if inputs["kv_norm"] is not None:
        latent = torch.nn.functional.rms_norm(latent, latent.shape[1:], inputs["kv_norm"], 1e-6)
    absorbed = torch.stack([q[:, h, :nope] @ up for h, up in enumerate(inputs["up_keys"])], dim=1)
    want = torch.cat((absorbed, rotated(q[..., nope:], inputs)), dim=-1)
    torch.testing.assert_close(inputs["q_out"], want, rtol=1e-5, atol=2e-5)
    REFERENCE.write_latent(latent, rotated(inputs["k_pe"], inputs), pool, inputs["slot_mapping"])
    if fp8:
        wrong = (pool.view(torch.uint8) != inputs["kv_cache"].view(torch.uint8)).float().mean()
        assert wrong < 0.01  # what rounds to another of its neighbours
    else:
        torch.testing.assert_close(inputs["kv_cache"], pool, equal_nan=True, rtol=1e-5, atol=2e-5)


#: Beside `LATENT_WRITES`.
MODELS: dict[str, dict[str, Any]] = {
    "v2_lite": {"num_heads": 16, "nope": 128, "rank": 512, "rope": 64, "rotation": "pairs", "normed": True},
    "v3": {"num_heads": 128, "nope": 128, "rank": 512, "rope": 64, "normed": True, "num_tokens": 33},
    "glm_flash": {"num_heads": 20, "nope": 192, "rank": 512, "rope": 64, "rotation": "pairs_to_halves"},
}
SIZES = {**LATENT_WRITES, **MODELS}


@pytest.mark.slow_cases("triton-cpu-*", but=("*-torch.bfloat16", "triton-cpu-many_tokens-torch.float32"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@over("default", "triton", case=Values(LATENT_WRITES, LATENT_WRITES, SIZES))
def test_within_the_error_budget(on: Kernels, case: str, dtype: torch.dtype) -> None:
    assert_latent_write_close(on.ops, make_latent_writes(**SIZES[case], dtype=dtype, device=on.device))


@over("triton", case=Values((), ("deepseek_v3", "without_norm"), ("v2_lite", "minicpm3")))
def test_rows_of_fp8(on: Kernels, case: str) -> None:
    """Within a step of e4m3 of what the reference stores; the rows that are skipped stay as they are."""
    if on.device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    inputs = make_latent_writes(**SIZES[case], fp8=True, device=on.device)
    want = {name: x.cpu().clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    on.ops.rope_write_latent(**inputs)
    REFERENCE.rope_write_latent(**want)
    if on.device == "cpu":
        torch.testing.assert_close(inputs["q_out"], want["q_out"])
    got, expected = latents_of(inputs).cpu(), latents_of(want)
    torch.testing.assert_close(got, expected, rtol=0.13, atol=0.02, equal_nan=True)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "kv_c, k_pe": ("kv_c, k_pe", {"k_pe": torch.zeros(7, 6)}),
    "odd": ("k_pe", {"k_pe": torch.zeros(7, 7), "kv_c": torch.zeros(7, 137)}),
    "other_rank": ("up_keys", {"up_keys": torch.zeros(3, 16, 128)}),
    "no_heads": ("up_keys", {"up_keys": torch.zeros(0, 16, 136)}),
    "up_keys_dtype": ("up_keys", {"up_keys": torch.zeros(3, 16, 136).half()}),
    "up_keys_strides": ("up_keys", {"up_keys": torch.zeros(3, 136, 16).mT}),
    "q_heads": ("q", {"q": torch.zeros(7, 4, 24)}),
    "q_width": ("q", {"q": torch.zeros(7, 3, 25)}),
    "q_dtype": ("q", {"q": torch.zeros(7, 3, 24).half()}),
    "q_out": ("q_out", {"q_out": torch.zeros(7, 3, 136)}),
    "q_out_once": ("q_out", {"q_out": torch.zeros(1, 3, 144).expand(7, 3, 144)}),
    "positions": ("positions", {"positions": torch.full((7,), 50)}),
    "positions_dtype": ("positions", {"positions": torch.zeros(7, dtype=torch.int32)}),
    "cos_sin": ("cos_sin", {"cos_sin": torch.zeros(50, 6)}),
    "slots": ("slot_mapping", {"slot_mapping": torch.full((7,), 10_000)}),
    "kv_norm": ("kv_norm", {"kv_norm": torch.zeros(8)}),
    "norm_eps": ("norm_eps", {"norm_eps": 0.0}),
    "rotation": ("rotation", {"rotation": "neox"}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_written(name: str) -> None:
    argument, change = BAD[name]
    inputs = make_latent_writes()
    q_out, pool = inputs["q_out"], inputs["kv_cache"]
    with pytest.raises(ArgumentError) as error:
        REFERENCE.rope_write_latent(**inputs | change)
    assert error.value.argument == argument
    assert q_out.isnan().all()
    assert pool.isnan().all()


def test_what_is_read_is_not_written() -> None:
    inputs = make_latent_writes(nope=136)
    with pytest.raises(ArgumentError, match="q_out"):
        REFERENCE.rope_write_latent(**inputs | {"q_out": inputs["q"]})


def test_one_compile_serves_every_batch_size() -> None:
    """Slices of a product, sizes unbacked: one frame, the eager result."""
    torch._dynamo.reset()  # another test's model may have made sizes dynamic
    inputs = make_latent_writes(normed=True)
    constant = {name: inputs[name] for name in ("cos_sin", "up_keys", "kv_norm")}

    def step(whole: Tensor, positions: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
        q, kv_c, k_pe = whole.split([72, 136, 8], dim=1)
        q = q.unflatten(1, (3, 24))
        out = q.new_empty(q.shape[0], 3, 144)
        DEFAULT.rope_write_latent(
            q, kv_c, k_pe, positions, slot_mapping=slots, q_out=out, kv_cache=pool, **constant
        )
        return out * 2

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    pools = [torch.zeros(8, 4, 1, 144) for _ in range(2)]
    for tokens in (5, 1, 17):
        batch = torch.randn(tokens, 216), torch.arange(tokens), torch.arange(tokens) + 4
        for tensor in batch:
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        with torch.no_grad():
            got, want = compiled(*batch, pools[0]), step(*batch, pools[1])
        torch.testing.assert_close(got, want)
        assert torch.equal(*pools)
    assert counter.frame_count == 1
