"""Which products go to cuBLASLt: shapes, dtypes, strides and addresses alone."""

import pytest
import torch

from torchpaged.custom_ops.layers.cuda import blaslt
from torchpaged.custom_ops.layers.cuda import linear as linear_op

ROWS = blaslt.MIN_TOKENS


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Memory that begins at a multiple of 256 bytes; a library that is there."""
    monkeypatch.setattr(blaslt, "_library", lambda: blaslt)
    room = torch.zeros(ROWS * 128 + 256, dtype=torch.bfloat16)
    return room[-room.data_ptr() // 2 % 128 :]


def at(room: torch.Tensor, place: int) -> torch.Tensor:
    return room[place : place + ROWS * 128].view(ROWS, 128)


def test_which_products_are_taken(room: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    x = weight = out = at(room, 0)
    assert blaslt.takes(x, weight, out, None)
    assert blaslt.takes(x, weight, out, x)
    assert not blaslt.takes(x[1:], weight, out[1:], None), "few tokens"
    assert not blaslt.takes(x.float(), weight.float(), out.float(), None), "float32"
    assert not blaslt.takes(x, weight, out, at(room, 8)), "a residual that begins anywhere"
    assert not blaslt.takes(x, weight.t().contiguous().t(), out, None), "columns that lie apart"
    monkeypatch.setattr(blaslt, "_library", lambda: None)
    assert not blaslt.takes(x, weight, out, None), "no library"


def test_lines_that_cublaslt_has_no_layout_for_are_left_to_torch(room: torch.Tensor) -> None:
    """Expanded rows, rows that overlap, and no columns at all."""
    x = weight = out = at(room, 0)
    line = x[:1].expand(ROWS, -1)
    assert not blaslt.takes(x, weight, out, line), "an expanded residual"
    assert not blaslt.takes(line, weight, out, None), "expanded tokens"
    assert not blaslt.takes(x, x.as_strided((8, 128), (8, 1)), out, None), "overlapping lines"
    assert not blaslt.takes(x[:, :0], weight[:, :0], out, None), "nothing to add up"


def test_a_product_without_an_algorithm_is_torchs(
    room: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blaslt, "_call", lambda *sizes: None)
    x, weight, out = at(room, 0), torch.eye(128, dtype=torch.bfloat16), torch.empty(ROWS, 128).bfloat16()
    x.fill_(3)
    monkeypatch.setattr(blaslt, "takes", lambda *tensors: True)
    linear_op._cublas(x, weight, out, None, x)
    assert torch.equal(out, torch.full_like(out, 6))


class NothingProposed:
    """A library whose calls succeed and that knows no algorithm."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: self.status if name.endswith("GetHeuristic") else 0


@pytest.mark.parametrize("status", [0, 15])
def test_no_proposal_is_no_error(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = NothingProposed(status)
    monkeypatch.setattr(blaslt, "_library", lambda: library)
    monkeypatch.setattr(blaslt, "_handle", lambda index: None)
    assert blaslt._call.__wrapped__(0, 14, 1024, 128, 128, (128,) * 4) is None
