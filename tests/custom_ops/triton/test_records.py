"""Records of Triton kernels hold what their fields say. A launch passes them by place, a few of one kind at
most: results differ when two of them change places, as the tests in the interpreter would see."""

import itertools
from typing import Any

import torch
from op_inputs.sampling import make_accept_inputs, make_sampling_inputs
from torch import Tensor

from torchpaged.custom_ops.state.triton.records import State, Window
from torchpaged.custom_ops.step_end.call import AcceptCall, SampleCall
from torchpaged.custom_ops.step_end.triton.accept_tokens import Ring, Rows
from torchpaged.custom_ops.step_end.triton.sample_rows import LogitRows
from torchpaged.custom_ops.triton.records import KeyPool, Matrix, Pool, Results, Tokens

_extra = itertools.count(3)


def spread(tensor: Tensor, last: int = 1) -> Tensor:
    """The same values with strides that no other tensor has; ``last``: of the last dimension."""
    strides, extent = [last], tensor.shape[-1] * last
    for size in reversed(tensor.shape[:-1]):
        strides.insert(0, extent + next(_extra))
        extent = strides[0] * size
    return tensor.new_empty(extent + 1).as_strided(tensor.shape, strides).copy_(tensor)


def strides(tensor: Tensor, *names: str) -> dict[str, int]:
    return dict(zip(names, tensor.stride(), strict=False))


def is_record(record: Any, **fields: Any) -> bool:
    return bool(record._asdict() == fields)


def test_tensors_and_their_strides() -> None:
    q, lse, cache = (
        spread(torch.rand(3, 6, 64)),
        spread(torch.zeros(3, 6), 7),
        spread(torch.rand(9, 16, 2, 64)),
    )
    scales, keys, of_keys = (
        spread(torch.ones(2), 11),
        spread(torch.rand(9, 16, 1, 64)),
        spread(torch.ones(9, 16)),
    )
    assert is_record(Matrix.of(lse), ptr=lse, row=lse.stride(0))
    assert is_record(Matrix.of(None), ptr=None, row=0)
    assert is_record(Tokens.of(q), ptr=q, **strides(q, "token", "head"))
    in_blocks = strides(cache, "block", "slot", "head")
    assert is_record(Pool.of(cache, scales), ptr=cache, **in_blocks, scale=scales, scale_head=11)
    results = {**strides(q, "o_token", "o_head"), **strides(lse, "l_token", "l_head")}
    assert is_record(Results.of_tensors(q, lse, scales), out=q, lse=lse, **results, scale=scales)
    scaled = {"scale": of_keys, **strides(of_keys, "scale_block", "scale_slot")}
    assert is_record(KeyPool.of(keys, of_keys), ptr=keys, **strides(keys, "block", "slot"), **scaled)
    assert is_record(State.of(cache), ptr=cache, **strides(cache, "slot", "head", "row"))
    assert is_record(Window.of(q), ptr=q, **strides(q, "slot", "row"))


def test_rows_of_calls() -> None:
    """Tensors are under the names that the op gives them."""
    drawn = {name: spread(x) for name, x in make_sampling_inputs([{}, {}, {}], vocab_size=300).items()}
    sizes = {
        "vocab_size": 300,
        **strides(drawn["logits"], "logits_row"),
        **strides(drawn["seen"], "seen_row"),
    }
    call = SampleCall(**drawn)
    del drawn["out"]
    assert is_record(LogitRows.of(call), **drawn, **sizes)
    given = make_accept_inputs(5, vocab_size=900, num_stops=21, launch=2, step=1)
    given = {name: spread(x) if isinstance(x, Tensor) else x for name, x in given.items()}
    buffers = {name: given[name] for name in Rows._fields if name in given}
    assert len(buffers) == 10
    sizes = {"num_stops": 21, "num_words": 29, "capacity": 12}
    for name, stride in (("block_table", "table_row"), ("stop_token_ids", "stop_row"), ("seen", "seen_row")):
        sizes |= strides(buffers[name], stride)
    assert is_record(Rows.of(AcceptCall(**given)), **buffers, **sizes)
    ring = {"ptr": given["ring"], "launches": given["launches"], **strides(given["ring"], "slot", "step")}
    assert is_record(Ring.of(AcceptCall(**given)), **ring, num_slots=3)
