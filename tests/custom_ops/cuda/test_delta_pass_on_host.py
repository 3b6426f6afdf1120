"""The CUDA C++ kernels of long rows of gated delta nets and Kimi delta attention on the host, one behind the
other: their own sources, launched by their own launchers, against the float64 recurrence."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import check_no_spills, compiled, needs_gxx, needs_nvcc
from kernels_on_host import assert_no_races, host_map, launched_on_host, races
from op_inputs.state import LONG_BATCHES, Rows, clone, exact_linear, make_linear_inputs
from torch import Tensor

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.cuda import delta_chunks, delta_pass, key_chunks
from torchpaged.custom_ops.state.cuda.delta_pass import PassSpec
from torchpaged.custom_ops.state.triton.chunks import workspace
from torchpaged.custom_ops.state.triton.records import Chunks

BF16 = torch.bfloat16
SHORT = 16
BATCHES = LONG_BATCHES | {"stages_again": Rows(((5, 300),))}  # five chunks; there are three stages
SHAPES: dict[str, dict[str, Any]] = {
    "two heads a key head": {"key_heads": 1, "heads": 2, "value_dim": 128},
    "one": {"key_heads": 2, "heads": 2, "value_dim": 64, "state_dtype": BF16},
    "by key": {"key_heads": 1, "heads": 2, "value_dim": 128, "by_key": True},
    "by key, narrow": {"key_heads": 2, "heads": 2, "value_dim": 64, "by_key": True, "state_dtype": BF16},
}


def on_host(folder: Path, monkeypatch: pytest.MonkeyPatch, sms: int) -> None:
    monkeypatch.setattr(gpu, "num_sms", lambda _: sms)
    launched_on_host(monkeypatch, folder)
    monkeypatch.setattr(delta_pass, "_map", delta_pass._map.__wrapped__)
    monkeypatch.setattr(delta_pass, "tensor_map", lambda at, _, *sizes, swizzle: host_map(at, *sizes))


def first_kernel(call: LinearAttentionCall) -> Tensor | Chunks:
    """What it leaves, NaN where it writes nothing."""
    if call.g.dim() == 2:
        return delta_chunks.launch(call, SHORT)
    chunks = workspace(call, delta_chunks.CHUNK)
    for x in chunks:
        if x is not None:
            x.fill_(float("nan"))
    key_chunks.launch(call, chunks, SHORT)
    return chunks


def join(call: LinearAttentionCall, joined: Tensor, segment: int) -> None:
    """What `join_kernel` does: states at the segments' begins in place of what zeros become."""
    values = call.v.shape[2]
    for row, (begin, end) in enumerate(itertools.pairwise(call.query_start_loc.tolist())):
        count, slot = end - begin, int(call.state_slots[row])
        if count <= SHORT or not slot or int(call.seq_lens[row]) <= 0:
            continue
        state = call.state[slot].float().clone()
        if int(call.seq_lens[row]) <= count:
            state.zero_()
        place = begin // segment + row
        for part in range((count - 1) // segment + 1):
            here = joined[place + part]
            made, over = here[..., :values].clone(), here[..., values:].clone()
            here[..., :values] = state
            state = made + (over @ state if part else 0.0)


def check_long_rows(call: LinearAttentionCall, given: dict[str, Any]) -> None:
    exact_out, exact_state = exact_linear(given)
    for row, (begin, end) in enumerate(itertools.pairwise(call.query_start_loc.tolist())):
        if end - begin <= SHORT or not int(call.state_slots[row]):
            continue
        live = slice(begin + min(max(end - begin - int(call.seq_lens[row]), 0), end - begin), end)
        slot = int(call.state_slots[row])
        for got, want in ((call.out[live], exact_out[live]), (call.state[slot], exact_state[slot])):
            if len(want):
                error = float((got.double() - want).norm() / want.norm())
                assert error < 8e-3, (row, error)


@needs_gxx
@pytest.mark.slow_cases(but=("two heads a key head-None", "by key-None"))
@pytest.mark.parametrize("segment", [None, 64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(
    shape: str, segment: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a warpgroup of a CTA, and with two; nothing is written to padding."""
    on_host(tmp_path / "host", monkeypatch, sms=1)
    for name, batch in BATCHES.items():
        sizes = {"key_dim": 128, "dtype": BF16, "num_slots": 12} | SHAPES[shape]
        given = make_linear_inputs(batch, **sizes)
        monkeypatch.setattr(gpu, "num_sms", lambda _, n=1000 * (name == "void_row"): n)
        call = LinearAttentionCall(**clone(given))
        assert delta_pass.why_not(call, (9, 0)) is None
        made = first_kernel(call)
        if segment is None:
            delta_pass.launch(call, made, SHORT)
        else:
            places = len(call.state_slots) + call.v.shape[0] // segment
            width = call.v.shape[2] + 128
            joined = torch.full((places, call.v.shape[1], 128, width), float("nan"))
            delta_pass.launch(call, made, SHORT, joined, segment, ends=True)
            join(call, joined, segment)
            delta_pass.launch(call, made, SHORT, joined, segment)
        check_long_rows(call, given)


@needs_gxx
@pytest.mark.long
@pytest.mark.slow
def test_no_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LONG_BATCHES:
        monkeypatch.delitem(BATCHES, name)
    assert_no_races((), test_matches_the_oracle, "two heads a key head", None, tmp_path, monkeypatch)


@needs_gxx
@pytest.mark.slow
@pytest.mark.long
def test_a_stage_let_go_before_all_lanes_have_read_it_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LONG_BATCHES:
        monkeypatch.delitem(BATCHES, name)
    with races((), ("    __syncwarp();  // all lanes have read values and factors\n", "")) as watched:
        test_matches_the_oracle("two heads a key head", None, tmp_path, monkeypatch)
    assert any("read by a lane delta_pass.cu" in line for line in watched.found), watched.found


def test_which_calls_are_taken() -> None:
    given = make_linear_inputs(Rows(((0, 100),)), dtype=BF16, key_dim=128, value_dim=64)
    call = LinearAttentionCall(**given | {"normalize": True})
    assert delta_pass.why_not(call, (9, 0)) is None
    for other in (
        call._replace(normalize=False),
        call._replace(delta_rule=False),
        call._replace(v=call.v.float()),
        call._replace(q=call.q[..., :64]),
        call._replace(v=call.v[..., :48]),
        call._replace(out=call.out.float()),
        call._replace(state=call.state.half()),
    ):
        assert delta_pass.why_not(other, (9, 0))
    assert delta_pass.why_not(call, (8, 0))


SPECS = {
    "Qwen3-Next": PassSpec(128, 16, 2, 2, SHORT, True),
    "a warpgroup": PassSpec(128, 16, 2, 1, SHORT, False),
    "ends": PassSpec(128, 8, 4, 2, SHORT, True, True, True),
    "Kimi Linear": PassSpec(128, 32, 1, 2, SHORT, True, by_key=True),
    "Kimi Linear, ends": PassSpec(128, 32, 1, 2, SHORT, True, True, True, by_key=True),
}


@needs_nvcc
@pytest.mark.slow_cases(but=("Qwen3-Next",))
@pytest.mark.parametrize("name", SPECS)
def test_compiles_without_spills(name: str, tmp_path: Path) -> None:
    _, report = compiled(tmp_path, "delta_pass.cu", SPECS[name].config())
    check_no_spills(report)
    assert "serialized" not in report
