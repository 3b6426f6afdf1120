"""The kernel that packs blocks of several pools, in Triton's interpreter. Runs with TRITON_INTERPRET=1 only:
see test_run_interpreter.py."""

import torch

from torchpaged.custom_ops.block_ops.triton.pack_blocks import pack_blocks


def test_out_and_back() -> None:
    """Blocks below a tile, of one, and of several; whatever is not asked for stays."""
    widths = [8, 8 * 1024, 24, 8 * 2500]
    pools = [torch.randint(0, 256, (9, width), dtype=torch.uint8) for width in widths]
    want = [pool.clone() for pool in pools]
    bases = torch.tensor([pool.data_ptr() for pool in pools])
    places = [sum(widths[:i]) for i in range(len(widths))]
    sizes = torch.tensor([(w // 8, w // 8, place // 8) for w, place in zip(widths, places, strict=True)])
    rows = torch.full((5, sum(widths) // 8), -1)
    out, back = torch.tensor([7, 2, 5]), torch.tensor([1, 8, 2])
    pack_blocks(bases, sizes, out, rows[1:4])
    assert (rows[[0, 4]] == -1).all()
    assert torch.equal(rows[1:4].view(torch.uint8), torch.cat([pool[out] for pool in want], 1))
    pack_blocks(bases, sizes, back, rows[1:4], unpack=True)
    for pool, before in zip(pools, want, strict=True):
        before[back] = before[out]
        assert torch.equal(pool, before)
