"""Which products go to cuBLASLt: shapes, dtypes, strides and addresses alone."""

from __future__ import annotations

import pytest
import torch

from torchpaged.custom_ops.layers.cuda import blaslt


def test_which_products_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = blaslt.MIN_TOKENS
    room = torch.empty(rows * 128 + 256, dtype=torch.bfloat16)
    start = -room.data_ptr() // 2 % 128  # of 256 bytes

    def at(place: int) -> torch.Tensor:
        return room[start + place : start + place + rows * 128].view(rows, 128)

    x = weight = out = at(0)
    monkeypatch.setattr(blaslt, "_library", lambda: None)
    assert not blaslt.takes(x, weight, out, None), "no library"
    monkeypatch.setattr(blaslt, "_library", lambda: blaslt)
    assert blaslt.takes(x, weight, out, None) and blaslt.takes(x, weight, out, x)
    assert not blaslt.takes(x[1:], weight, out[1:], None), "few tokens"
    assert not blaslt.takes(x.float(), weight.float(), out.float(), None), "float32"
    assert not blaslt.takes(x, weight, out, at(8)), "a residual that begins anywhere"
    assert not blaslt.takes(x, weight.t().contiguous().t(), out, None), "columns that lie apart"
