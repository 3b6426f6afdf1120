"""The CUDA C++ kernel of Kimi delta attention's chunks on the host (state_on_host.h): its own sources,
launched by its own launcher, against what the chunks' numbers mean, in float64."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import compiled, needs_gxx, needs_nvcc, registers
from kernels_on_host import assert_no_races, launched_on_host
from op_inputs.state import LONG_BATCHES, STATE_BATCHES, assert_zeros, chunks_of, make_linear_inputs
from torch import Tensor

from torchpaged.custom_ops.state.call import NORM_EPS, LinearAttentionCall
from torchpaged.custom_ops.state.cuda import key_chunks
from torchpaged.custom_ops.state.cuda.delta_chunks import CHUNK
from torchpaged.custom_ops.state.cuda.key_chunks import KeyChunkSpec
from torchpaged.custom_ops.state.triton.chunks import workspace
from torchpaged.custom_ops.state.triton.records import Chunks

BF16, NAN = torch.bfloat16, float("nan")
SHORT = 16
#: Decays as made are at most 2. Times 5, some columns' sums of a strip are beyond what products take.
FACTORS = {"decays": 1.0, "large ones": 5.0}
SHAPES: dict[str, dict[str, Any]] = {
    "one head a key head": {"key_heads": 2, "heads": 2},
    "two, no beta": {"key_heads": 1, "heads": 2, "beta": False},
}
BATCHES = LONG_BATCHES | {"chunks": STATE_BATCHES["chunks"]}
NAMES = ("scores", "solved", "since", "left", "queries", "known", "keys")


def filled(call: LinearAttentionCall) -> Chunks:
    """Memory of NaN."""
    chunks = workspace(call, CHUNK)
    for x in chunks:
        if x is not None:
            x.fill_(NAN)
    return chunks


def expected(call: LinearAttentionCall) -> Chunks:
    """What `Chunks` says, token by token, in float64; NaN where nothing is to be written."""
    chunks = Chunks(*(None if x is None else x.double() for x in filled(call)))
    chunks = chunks._replace(seen=chunks.left)
    for tokens, columns, number in chunks_of(call, CHUNK, SHORT):
        for head in range(call.v.shape[1]):
            _of_chunk(call, chunks, tokens, columns, number, head)
    return chunks


def _of_chunk(
    call: LinearAttentionCall, chunks: Chunks, tokens: Tensor, columns: Tensor, number: int, head: int
) -> None:
    key_head = head // (call.v.shape[1] // call.q.shape[1])
    q, k = (x[tokens, key_head].double() for x in (call.q, call.k))
    norm_q = (q.square().sum(-1) + NORM_EPS).rsqrt() * call.scale
    norm_k = (k.square().sum(-1) + NORM_EPS).rsqrt()
    total = call.g[tokens, head].double().clamp(min=-100.0).cumsum(0)
    beta = torch.ones(len(tokens)).double() if call.beta is None else call.beta[tokens, head].double()
    decays = (total[:, None] - total[None, :]).clamp(max=0.0).exp()
    scores = torch.einsum("id,jd,ijd->ij", q * norm_q[:, None], k * norm_k[:, None], decays).tril()
    lower = torch.einsum("id,jd,ijd->ij", k * norm_k[:, None], k * norm_k[:, None], decays)
    eye = torch.eye(len(tokens), dtype=torch.float64)
    solved = torch.linalg.inv(eye + (beta[:, None] * lower).tril(-1)) * beta[None, :]
    for square, here in ((chunks.scores, scores), (chunks.solved, solved)):
        square[head, tokens] = 0.0
        square[head, tokens[:, None], columns[None, :]] = here
    chunks.since[head, tokens], chunks.left[head, tokens] = norm_q, norm_k
    chunks.queries[head, tokens], chunks.known[head, tokens] = q * total.exp(), k * total.exp()
    chunks.keys[head, tokens] = k * (total[-1] - total).exp()
    chunks.decay[number, head] = total[-1].exp()


@needs_gxx
@pytest.mark.slow_cases(but=("large ones-one head a key head",))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factor", FACTORS)
def test_matches_what_chunks_mean(
    factor: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is written, and tokens that no state sees get zeros."""
    launched_on_host(monkeypatch, tmp_path / "host")
    found = 0
    for batch in BATCHES.values():
        sizes = {"key_dim": 128, "value_dim": 48, "by_key": True, "dtype": BF16} | SHAPES[shape]
        call = LinearAttentionCall(**make_linear_inputs(batch, **sizes) | {"normalize": True})
        call.g.mul_(FACTORS[factor])
        call.out.fill_(7.0)
        want, chunks = expected(call), filled(call)
        key_chunks.launch(call, chunks, SHORT)
        for name in (*NAMES, "decay"):
            x, y = getattr(chunks, name).double(), getattr(want, name)
            assert torch.equal(x.isnan(), y.isnan()), name
            torch.testing.assert_close(x, y, rtol=2**-7, atol=3e-3, equal_nan=True, msg=name)
        found += assert_zeros(call, want.since[0].isfinite(), SHORT)
    assert found


@needs_gxx
@pytest.mark.slow
@pytest.mark.long
def test_no_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = "large ones", "one head a key head"
    assert_no_races((), test_matches_what_chunks_mean, *case, tmp_path, monkeypatch)


SPECS = {"Kimi Linear": KeyChunkSpec(128, 32, 1, SHORT, 2), "no beta": KeyChunkSpec(64, 8, 2, SHORT, 0)}


@needs_nvcc
@pytest.mark.slow_cases(but=("Kimi Linear",))
@pytest.mark.parametrize("name", SPECS)
def test_compiles_for_three_ctas(name: str, tmp_path: Path) -> None:
    """Of a multiprocessor; a few registers are spilled outside of loops."""
    _, report = compiled(tmp_path, "key_chunks.cu", SPECS[name].config())
    assert registers(report) <= 80
    assert [int(n) <= 64 for n in re.findall(r"(\d+) bytes spill stores", report)] == [True], report
