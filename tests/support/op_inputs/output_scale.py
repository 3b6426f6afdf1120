"""Calls of attention that write e4m3, and what is right for them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_inputs.opcheck import opcheck_cases
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import Batch, BatchSpec, run_paged_attention

E4M3 = torch.float8_e4m3fn
#: Batches of a GPU: decodes in several parts, a mixed batch, a prompt's last chunk.
LONG = BatchSpec("long", (2000, 3, 700, 0), (1, 1, 1, 1), padded_tokens=1)
CHUNKS = BatchSpec("chunks", (600, 90, 3, 41, 0), (200, 1, 3, 40, 0), padded_tokens=2)
ONE_PROMPT = BatchSpec("one_prompt", (3000,), (64,))


def run_e4m3(
    ops: Any, batch: Batch, scale: float, padding: tuple[int, int, int] = (0, 0, 0), **options: Any
) -> tuple[Tensor, Tensor]:
    """``out``, which starts as NaN, its gaps too, and ``lse``. ``padding``: numbers between tokens of out,
    between heads, and before the first."""
    (tokens, heads), width = batch.q.shape[:2], batch.v_cache.shape[3]
    head = width + padding[1]
    row = heads * head + padding[0]
    memory = torch.full((tokens * row + padding[2],), 0x7F, dtype=torch.uint8, device=batch.q.device)
    out = memory.view(E4M3).as_strided((tokens, heads, width), (row, head, 1), padding[2])
    lse = torch.full((tokens, heads), float("nan"), device=batch.q.device)
    tensors, named = batch.arguments(out, lse, **options)
    ops.paged_attention(*tensors, **named, output_scale=torch.tensor([scale], device=batch.q.device))
    return out, lse


def opcheck_e4m3(ops: Any, device: str = "cpu") -> None:
    """``torch.library.opcheck`` of the ops that write e4m3, but for its ``test_schema``, since torch has no
    comparison of e4m3 numbers for it. In its place: no argument but ``out`` changes."""
    cases = opcheck_cases(device, torch.bfloat16)
    for case in ("attention_full", "merge", "cascade"):
        op, args, kwargs = cases[case]
        kwargs = {**kwargs, "output_scale": torch.full((1,), 0.02, device=device)}
        at = {"attention_full": 6, "merge": 4, "cascade": 11}[case]
        args = (*args[:at], torch.zeros_like(args[at], dtype=E4M3), *args[at + 1 :])
        handle = getattr(ops, op)
        before = [x.clone() for x in args]
        torch.library.opcheck(
            handle,
            args,
            kwargs,
            test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
        handle(*args, **kwargs)
        assert args[at].float().any()
        for index, (x, y) in enumerate(zip(before, args, strict=True)):
            assert index == at or (case == "merge" and index == 5) or torch.equal(x, y), (case, index)


def assert_e4m3(out: Tensor, lse: Tensor | None, batch: Batch, scale: float, **options: Any) -> None:
    """``out`` is e4m3's nearest to the float64 oracle over the scale, or would be were the oracle off by what
    numbers of the batch's dtype err: twice its same-dtype reference's error. Saturated, never NaN; zeros
    where nothing is seen."""
    cpu = batch.to("cpu")
    reference = BACKEND_OPS["reference"]
    wide = {"q": cpu.q.double()}
    wide |= {n: x.double() for n in ("k_cache", "v_cache") if (x := getattr(cpu, n)).dtype.itemsize > 1}
    exact, exact_lse = run_paged_attention(reference, replace(cpu, **wide), **options)
    same, _ = run_paged_attention(reference, cpu, **options)
    slack = 2 * float((same.double() - exact).abs().max()) + 1e-6
    low, high = (
        ((exact + side) / scale).clamp(-448, 448).to(torch.float32).to(E4M3).double()
        for side in (-slack, slack)
    )
    found = out.cpu().double()
    assert out.dtype == E4M3
    assert not found.isnan().any()
    wrong = (found < low) | (found > high)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, first at {wrong.nonzero()[0].tolist()}"
    unseen = exact_lse == -float("inf")
    assert not found[unseen].any()
    if lse is not None:
        torch.testing.assert_close(lse.cpu().double(), exact_lse.double(), rtol=2e-2, atol=2e-2)
