"""Ops that consist of torch's own compute the same under whatever modes their caller has on."""

import copy
from typing import Any

import pytest
import torch
from op_inputs.opcheck import opcheck_cases
from torch import Tensor

from torchpaged import ArgumentError, paged_attention, use_backend
from torchpaged.testing.batches import BATCH_SPECS, make_batch


def written(overload: str, case: str, autocast: bool, inference: bool = False) -> list[Tensor]:
    """The tensors of a case after its op has run, NaN as a number."""
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        op, args, options = copy.deepcopy(opcheck_cases()[case])
    handle = getattr(getattr(torch.ops.torchpaged, op), overload)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        handle(*args, **options)
    tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
    return [x.double().nan_to_num(-7.0) for x in tensors]


@pytest.mark.parametrize("case", opcheck_cases())
@pytest.mark.parametrize("overload", ["reference", "default"])
def test_autocast_changes_no_bit(overload: str, case: str) -> None:
    """Products of float32 are not rounded to bfloat16."""
    want = written(overload, case, autocast=False)
    for got, expected in zip(written(overload, case, autocast=True), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("case", opcheck_cases())
@pytest.mark.parametrize("overload", ["reference", "default"])
def test_tensors_of_inference_mode_are_written_outside_of_it(overload: str, case: str) -> None:
    want = written(overload, case, autocast=False)
    for got, expected in zip(written(overload, case, False, inference=True), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ["torch_sdpa", "flex"])
def test_modes_around_a_backend_of_torch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPAGED_FLEX_COMPILER", "eager")
    batch = make_batch(BATCH_SPECS["mixed_padded"], dtype=torch.float32)
    for pool in (batch.k_cache, batch.v_cache):
        pool.nan_to_num_(0.5)

    def run(**options: Any) -> Any:
        numbers = {"max_query_len": batch.max_query_len, "scale": batch.scale}
        return paged_attention(*batch.tensors, **numbers, **options)

    with use_backend(backend), torch.no_grad():
        want = run()
        with torch.autocast("cpu", torch.bfloat16):
            got = run()
        with torch.inference_mode():
            out = torch.empty_like(want)
        run(out=out)
    assert got.dtype is torch.float32
    assert torch.equal(got, want)
    assert torch.equal(out, want)


@pytest.mark.parametrize("case", opcheck_cases())
def test_one_tensor_on_the_meta_device(case: str) -> None:
    """The dispatcher runs what a trace runs if one is there: the reference, which takes any device, left the
    others unread and unwritten."""
    op, args, options = opcheck_cases()[case]
    given: dict[Any, Any] = {**dict(enumerate(args)), **options}
    handle = getattr(torch.ops.torchpaged, op).reference

    def call(there: list[Any]) -> None:
        moved = {name: value.to("meta") if name in there else value for name, value in given.items()}
        handle(*[moved.pop(place) for place in range(len(args))], **moved)

    names = [name for name, value in given.items() if isinstance(value, Tensor)]
    for name in (names[0], names[-1]):
        with pytest.raises(
            ArgumentError, match=r"^\w+: expected device meta, where another tensor of the call"
        ):
            call([name])
    call(names)
