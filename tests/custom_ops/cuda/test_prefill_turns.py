"""Values on their side for fp8 products: the index functions of prefill_layout.cuh, compiled for the host,
between models of the instructions that they feed."""

from pathlib import Path

import pytest
import torch
from cuda_sources import HostProgram, needs_gxx
from specialisations import specialisation
from torch import Tensor

from torchpaged.custom_ops.attention.cuda import prefill_shape as prefill

pytestmark = needs_gxx

PROGRAM = """
#include <cstdio>
#include "prefill_layout.cuh"
int main() {
  printf("%d %d %d %d %d %d\\n", TILE_KV, DIM_V, TILE_KV / 16 * TURN_WIDE, V_LINE, V_SQUARE, TURNED_LINE);
  for (int group = 0; group < TILE_KV / 16; ++group)
    for (int wide = 0; wide < TURN_WIDE; ++wide)
      for (int lane = 0; lane < 32; ++lane) {
        const int from = turn_from(group, wide, lane), to = turn_to(group, wide, lane);
        // as the kernel comes to them
        if (from != turn_from_next(turn_from(group, 0, lane), wide)) return 1;
        if (to != turn_to(group, 0, lane) + wide * 32 * TURNED_LINE) return 1;
        printf("%d %d\\n", from, to);
      }
  for (int row = 0; row < DIM_V; ++row)
    for (int key = 0; key < TILE_KV; ++key) printf("%d\\n", turned_at(row, key));
}
"""
LANE = torch.arange(32)


def ldmatrix_trans(memory: Tensor, at: Tensor) -> Tensor:
    """``[32 lanes, 4 matrices, 4 bytes]``: of each matrix, whose lines of 16 bytes lie at ``at[8 * matrix +
    line]``, the 16-bit numbers of column lane / 4 in lines lane % 4 * 2 and the next."""
    lines = memory[at[:, None] + torch.arange(16)].view(4, 8, 8, 2)
    pairs = lines[:, (LANE % 4 * 2)[:, None] + torch.arange(2), (LANE // 4)[:, None]]
    return pairs.permute(1, 0, 2, 3).reshape(32, 4, 4)


def stmatrix(memory: Tensor, at: Tensor, words: Tensor) -> None:
    """Of each matrix, 4 bytes of each lane to line lane / 4, 4 * (lane % 4) bytes on."""
    for matrix in range(4):
        to = at[8 * matrix + LANE // 4] + 4 * (LANE % 4)
        memory[to[:, None] + torch.arange(4)] = words[:, matrix]


def arrived(values: Tensor, line: int, square: int) -> Tensor:
    """A step's values as the copy engine leaves them: squares of 8 tokens x ``line`` bytes, their 16-byte
    columns swizzled by bits 7 and up of the address."""
    memory = torch.empty(values.numel(), dtype=values.dtype)
    token, column = torch.meshgrid(*(torch.arange(n) for n in values.shape), indexing="ij")
    at = (token // 8 * (values.shape[1] // line) + column // line) * square + token % 8 * line + column % line
    memory[at ^ (at >> 3 & (line - 16))] = values
    return memory


def operand_b(memory: Tensor, keys: int, dim: int, line: int) -> Tensor:
    """``[k, n]`` as wgmma reads its second operand, K-major: k in lines of ``line`` bytes, swizzled; the
    kernel's descriptors step by ``dim * line`` bytes from one line of k to the next."""
    k, n = torch.meshgrid(torch.arange(keys), torch.arange(dim), indexing="ij")
    at = k // line * dim * line + n * line + k % line
    return memory[at ^ (at >> 3 & (line - 16))]


def operand_a(weights: Tensor) -> Tensor:
    """``[16 rows, k]`` of a warp as wgmma m64nNk32 reads its first operand from registers, which hold what
    `Softmax::convert` packs of the accumulators ``weights [16 rows, keys]``."""
    a = torch.full_like(weights, -1)
    for lane in range(32):
        quad, t = lane // 4, lane % 4
        # accumulator i of the thread: block i / 4 of 8 columns, row quad + 8 * (i / 2 % 2), column i % 2
        own = [
            weights[quad + 8 * (i // 2 % 2), i // 4 * 8 + t * 2 + i % 2] for i in range(weights.shape[1] // 2)
        ]
        words = []
        for i in range(0, len(own), 8):
            words += [
                [own[i], own[i + 1], own[i + 4], own[i + 5]],
                [own[i + 2], own[i + 3], own[i + 6], own[i + 7]],
            ]
        for index, word in enumerate(words):
            step, register = index // 4, index % 4
            for byte, x in enumerate(word):
                a[quad + register % 2 * 8, step * 32 + register // 2 * 16 + t * 4 + byte] = x
    assert (a >= 0).all(), "every k of every row has a weight"
    return a


@pytest.mark.parametrize(("dim", "keys"), [(128, 128), (128, 192), (64, 128), (256, 64)])
def test_products_of_turned_values(
    tmp_path: Path, dim: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values through ldmatrix, byte permutations and stmatrix, weights through registers: their product as
    wgmma forms it, its columns as they are stored, is weights @ values."""
    monkeypatch.setattr(
        prefill, "prefill_shape_fp8_queries", lambda *_: prefill.PrefillShape(2, keys, 2, 2, 1, 2)
    )
    config = prefill.prefill_config(specialisation(dim=dim, kv_dtype=torch.float8_e4m3fn, fp8_queries=True))
    said = HostProgram(tmp_path, PROGRAM, "prefill.cu", config)()
    numbers = torch.tensor([int(x) for x in said.split()])
    of_keys, of_dim, units, line, square, turned_line = numbers[:6].tolist()
    assert (of_keys, of_dim) == (keys, dim)
    ways = numbers[6 : 6 + units * 64].view(units, 32, 2)
    places = numbers[6 + units * 64 :].view(dim, keys)

    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 100, (keys, dim), generator=generator)
    memory, turned = arrived(values, line, square), torch.full((keys * dim,), -1)
    for unit in range(units):
        x = ldmatrix_trans(memory, ways[unit, :, 0])
        y = [
            torch.cat([x[:, m, h::2], x[:, m + 1, h::2]], 1) for m in (0, 2) for h in (0, 1)
        ]  # 0x6420, 0x7531
        stmatrix(turned, ways[unit, :, 1], torch.stack(y, 1))
        for at in ways[unit].T:  # eight lines of 16 bytes at a time, in banks of 4 bytes: each once
            assert all(len({int(b) % 128 // 16 for b in at[8 * m : 8 * m + 8]}) == 8 for m in range(4))
    assert (turned >= 0).all(), "every byte is written"

    # rows of what is turned are columns in the order of prefill_epilogue.cuh
    row = torch.arange(dim)
    column = row // 16 * 16 + row % 8 * 2 + row % 16 // 8
    assert torch.equal(turned[places], values[:, column].T), "where clear_values looks for a key"
    weights = torch.randint(0, 50, (16, keys), generator=generator)
    product = operand_a(weights) @ operand_b(turned, keys, dim, turned_line)
    assert torch.equal(product, (weights @ values)[:, column])
    # block 2 * n of 8 rows, column c of it and block 2 * n + 1: what a quad stores side by side
    pairs = product.view(16, dim // 16, 2, 8).transpose(2, 3).reshape(16, dim)
    assert torch.equal(pairs, weights @ values)
