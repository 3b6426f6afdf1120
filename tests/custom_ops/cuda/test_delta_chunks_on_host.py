"""The CUDA C++ kernel of a gated delta net's chunks on the host (state_on_host.h): its own sources, launched
by its own launcher, against what the chunks' numbers mean, in float64."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import check_no_spills, compiled, needs_gxx, needs_nvcc, registers
from kernels_on_host import assert_no_races, launched_on_host
from op_inputs.state import LONG_BATCHES, STATE_BATCHES, assert_zeros, chunks_of, make_linear_inputs
from torch import Tensor

from torchpaged.custom_ops.state.call import NORM_EPS, LinearAttentionCall
from torchpaged.custom_ops.state.cuda import delta_chunks
from torchpaged.custom_ops.state.cuda.delta_chunks import CHUNK, ChunkSpec
from torchpaged.custom_ops.state.triton.records import Chunks

BF16, NAN = torch.bfloat16, float("nan")
SHORT = 16
SHAPES: dict[str, dict[str, Any]] = {
    "four heads a key head": {"key_heads": 1, "heads": 4},
    "two": {"key_heads": 2, "heads": 4},
    "one": {"key_heads": 2, "heads": 2, "beta": False},
    "three": {"key_heads": 1, "heads": 3, "value_dim": 64},
}
BATCHES = LONG_BATCHES | {"chunks": STATE_BATCHES["chunks"]}


def nothing(call: LinearAttentionCall) -> Chunks:
    """Of NaN."""
    tokens, heads, _ = call.v.shape
    squares = [torch.full((heads, tokens, CHUNK), NAN, dtype=torch.float64) for _ in range(2)]
    factors = [torch.full((heads, tokens), NAN, dtype=torch.float64) for _ in range(4)]
    return Chunks(squares[0], *factors[:3], solved=squares[1], seen=factors[3])


def opened(call: LinearAttentionCall, records: Tensor, want: Chunks) -> Chunks:
    """What records have of the tokens that ``want`` has."""
    chunks, starts = nothing(call), call.query_start_loc.tolist()
    squares = 10 * 512
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        for part in range(-(-(end - begin) // CHUNK)):
            tokens = torch.arange(begin + part * CHUNK, min(begin + (part + 1) * CHUNK, end))
            live = want.since[0, tokens].isfinite()
            for head in range(call.v.shape[1] if live.any() else 0):
                record = records[begin // CHUNK + row + part, head]
                solved, rest, scores = record.split([squares, len(record) - 2 * squares, squares])
                factors = rest.view(torch.float32)
                for square, packed in ((chunks.solved, solved), (chunks.scores, scores)):
                    square[head, tokens[live]] = square_of(packed)[: len(tokens)][live]
                seen, left, decay, _, since = factors.split([CHUNK, CHUNK, 1, 31, CHUNK])
                for factor, numbers in ((chunks.seen, seen), (chunks.left, left), (chunks.since, since)):
                    factor[head, tokens[live]] = numbers[: len(tokens)][live].double()
                chunks.decay[head, tokens[live]] = decay.double()
    return chunks


def square_of(packed: Tensor) -> Tensor:
    """Squares of 16 x 16, those of a column from the diagonal on, then of the next one; blocks of 8 x 8."""
    square = torch.zeros(CHUNK, CHUNK, dtype=torch.float64)
    places = [(row, column) for column in range(4) for row in range(column, 4)]
    for (row, column), x in zip(places, packed.view(BF16).view(-1, 2, 2, 8, 8), strict=True):
        whole = x.permute(0, 2, 1, 3).reshape(16, 16)
        square[row * 16 : (row + 1) * 16, column * 16 : (column + 1) * 16] = whole
    return square


def expected(call: LinearAttentionCall) -> Chunks:
    """What `Chunks` says, token by token; NaN where nothing is to be written."""
    chunks = nothing(call)
    for tokens, columns, _ in chunks_of(call, CHUNK, SHORT):
        for head in range(call.v.shape[1]):
            _of_chunk(call, chunks, tokens, columns, head)
    return chunks


def _of_chunk(call: LinearAttentionCall, chunks: Chunks, tokens: Tensor, columns: Tensor, head: int) -> None:
    key_head = head // (call.v.shape[1] // call.q.shape[1])
    q, k = (x[tokens, key_head].double() for x in (call.q, call.k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for x in (q, k))
    norms = (call.k[tokens, key_head].double().square().sum(-1) + NORM_EPS).rsqrt()
    norms_q = (call.q[tokens, key_head].double().square().sum(-1) + NORM_EPS).rsqrt() * call.scale
    total = call.g[tokens, head].double().clamp(min=-100.0).cumsum(0)
    beta = torch.ones_like(total) if call.beta is None else call.beta[tokens, head].double()
    decays = (total[:, None] - total[None, :]).exp()
    eye = torch.eye(len(tokens), dtype=torch.float64)
    scores = (call.scale * q @ k.T * decays).tril()
    solved = torch.linalg.inv(eye + (beta[:, None] * (k @ k.T) * decays).tril(-1)) * beta[None, :]
    for square, here in ((chunks.scores, scores), (chunks.solved, solved)):
        square[head, tokens] = 0.0
        square[head, tokens[:, None], columns[None, :]] = here
    chunks.since[head, tokens] = total.exp() * norms_q
    chunks.seen[head, tokens] = total.exp() * norms
    chunks.left[head, tokens] = (total[-1] - total).exp() * norms
    chunks.decay[head, tokens] = total[-1].exp()


@needs_gxx
@pytest.mark.slow_cases(but=("four heads a key head", "two"))
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_what_chunks_mean(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is written, and tokens that no state sees get zeros."""
    launched_on_host(monkeypatch, tmp_path / "host")
    found = 0
    for batch in BATCHES.values():
        sizes = {"key_dim": 128, "value_dim": 48, "dtype": BF16} | SHAPES[shape]
        call = LinearAttentionCall(**make_linear_inputs(batch, **sizes) | {"normalize": True})
        call.out.fill_(7.0)
        want = expected(call)
        chunks = opened(call, delta_chunks.launch(call, SHORT), want)
        for name, x, y in zip(Chunks._fields, chunks, want, strict=True):
            if x is not None:
                assert torch.equal(x.isnan(), y.isnan()), name
                torch.testing.assert_close(x, y, rtol=2**-7, atol=2e-3, equal_nan=True, msg=name)
        found += assert_zeros(call, want.since[0].isfinite(), SHORT)
    assert found


@needs_gxx
@pytest.mark.slow
@pytest.mark.long
def test_no_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_no_races((), test_matches_what_chunks_mean, "two", tmp_path, monkeypatch)


SPECS = {
    "Qwen3-Next": ChunkSpec(128, 8, 2, SHORT, 1),
    "Qwen3.5 397B": ChunkSpec(128, 16, 4, SHORT, 2),
    "one head a key head": ChunkSpec(64, 16, 1, SHORT, 0),
}


@needs_nvcc
@pytest.mark.slow_cases(but=("Qwen3.5 397B",))
@pytest.mark.parametrize("name", SPECS)
def test_compiles_without_spills(name: str, tmp_path: Path) -> None:
    said = {"RECORD_BYTES": delta_chunks.RECORD_BYTES}
    _, report = compiled(tmp_path, "delta_chunks.cu", SPECS[name].config(), constants=said)
    check_no_spills(report)
    assert registers(report) <= 128
