"""Tile shapes and launch parameters of latent attention, from shapes and dtypes alone: the same for every
length, so that a graph serves all. Figures behind the choices: docs/log/latent_triton.md."""

from typing import NamedTuple

import torch

from torchpaged.custom_ops.triton import launching

#: The widest latents and rotated keys: their tiles fill the registers and the shared memory.
MAX_RANK, MAX_ROPE = 512, 128
#: Most parts of a request's context.
MAX_PARTS = 32
#: Fewest keys of a part: below, its merge costs more than it saves.
MIN_KEYS = 128


class Tiles(NamedTuple):
    """``rows`` (query tokens x heads) and ``keys`` per tile, Triton's launch options, programs that a
    multiprocessor runs at once."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1


def tiles(
    width: int,
    rows: int,
    itemsize: int,
    hopper: bool,
    fp8: bool = False,
    hip: bool = torch.version.hip is not None,
) -> Tiles:
    """Tiles for a pool of ``width`` columns.

    Args:
        width: columns of a latent and of a rotated key, each padded to a power of two.
        rows: query tokens times heads of a request, rounded up to powers of two.
        itemsize: bytes of a number.
        hopper: the device has compute capability 9.0: products of 64 rows, and 227 KiB of shared memory.
        fp8: the pool's rows are of fp8, whose conversion needs registers: tiles of 32 rows spill 500 bytes.
        hip: it is AMD's, with 64 KiB.
    """
    if itemsize == 4:  # plain FMAs, whose operands fill the registers
        return Tiles(16, 16, 4 if hip else 8, 1)
    if fp8 and hip:
        return Tiles(16, 16, 4, 1, 2)
    if rows <= 16 or hip or (fp8 and not hopper):
        return Tiles(16, 32, 4, 1 if hip else 3, 2)
    if not hopper or (rows <= 32 and not fp8):
        return Tiles(32, 32, 8 if width > 320 else 4, 2)
    return Tiles(64, 64 if width <= 576 else 32, 8, 2)  # three tiles: queries, and two of keys


def num_parts(programs: int, capacity: int, device: torch.device, chosen: Tiles) -> int:
    """Parts of each context, a power of two: as many as fill the device, of at least `MIN_KEYS` keys if
    the rows of the block table are full."""
    most = min(MAX_PARTS, max(1, capacity // MIN_KEYS))
    fits = chosen.programs_per_sm * launching.num_sms(device) // max(programs, 1)
    wanted = max(1, min(most, fits))
    return 1 << (wanted.bit_length() - 1)
