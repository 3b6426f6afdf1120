"""Rows of an fp8 pool of latents: ``rank`` numbers of e4m3, a float32 scale for each 128 of them, and the
rotated key in bfloat16. A row of 512 + 64 columns takes 656 bytes, where bfloat16 takes 1,152.

Source: DeepSeek's FlashMLA, whose kernels for DeepSeek-V3.2 read this row. Its scales are the largest number
of their 128 columns over 448, e4m3's largest.
"""

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.mla.call import LatentCall

#: What a pool of such rows is declared as: its last dimension counts bytes.
ROW_DTYPE = torch.float8_e4m3fn
#: Columns that share a scale, the last ones fewer; and the largest number of e4m3.
GROUP, LARGEST = 128, 448.0


def num_scales(rank: int) -> int:
    """Of a row."""
    return -(-rank // GROUP)


def row_bytes(rank: int, rope: int) -> int:
    """Of a row; sizes may be symbols."""
    return rank + 4 * num_scales(rank) + 2 * rope


def check_rows(kv_cache: Tensor, rank: int, rope: int) -> None:
    """``kv_cache`` has rows of these columns, whose scales and rotated keys are aligned; raises
    `ArgumentError`."""
    wanted, scales = row_bytes(rank, rope), num_scales(rank)
    if kv_cache.shape[3] != wanted:
        raise ArgumentError(
            "kv_cache",
            f"rows of {wanted} bytes in {ROW_DTYPE}: {rank} numbers, {scales} float32 scales, {rope} numbers "
            "of bfloat16",
            f"{kv_cache.shape[3]} bytes",
        )
    if rank % 4 or rope % 2 or any(stride % 4 for stride in (*kv_cache.stride()[:2], kv_cache.data_ptr())):
        raise ArgumentError(
            "kv_cache",
            f"in {ROW_DTYPE}, a rank that is a multiple of 4, an even number of rotated columns, and rows "
            "that begin at multiples of 4 bytes",
            f"{rank} + {rope} columns and strides {tuple(kv_cache.stride())}",
        )


def pack(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Rows ``[T, bytes]`` of latents ``[T, rank]`` and rotated keys ``[T, rope]``, at least one. A NaN or an
    infinity makes all numbers of its scale NaN."""
    (tokens, rank), count = kv_c.shape, num_scales(kv_c.shape[1])
    padded = kv_c.new_zeros(tokens, count * GROUP, dtype=torch.float32)
    padded[:, :rank] = kv_c
    groups = padded.view(tokens, count, GROUP)
    top = groups.abs().amax(-1)
    # by a tensor: on a GPU torch multiplies by the reciprocal of a number, which rounds otherwise
    scales = top / torch.full_like(top, LARGEST)
    scales = torch.where(scales == 0, 1.0, scales)
    numbers = (groups / scales[..., None]).clamp(-LARGEST, LARGEST).to(ROW_DTYPE)
    parts = numbers.flatten(1)[:, :rank], scales, k_pe.to(torch.bfloat16).contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1).view(ROW_DTYPE)


def unpack(rows: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Numbers ``[..., rank + rope]`` of ``dtype`` in rows ``[..., bytes]``."""
    behind = rank + 4 * num_scales(rank)
    wide = torch.promote_types(dtype, torch.float32)
    scales = rows[..., rank:behind].contiguous().view(torch.float32).to(wide)
    numbers = rows[..., :rank].to(wide) * scales.repeat_interleave(GROUP, dim=-1)[..., :rank]
    k_pe = rows[..., behind:].contiguous().view(torch.bfloat16)
    return torch.cat((numbers.to(dtype), k_pe.to(dtype)), dim=-1)


def rows_at(kv_cache: Tensor, *places: Tensor) -> Tensor:
    """``kv_cache[places]`` of any dtype: as bytes, since torch indexes fp8 nowhere but on some devices."""
    fp8 = kv_cache.dtype == ROW_DTYPE
    return kv_cache.view(torch.uint8)[places].view(ROW_DTYPE) if fp8 else kv_cache[places]


def store(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """``write_latent`` of a checked call into a pool of such rows."""
    written = slot_mapping >= 0
    slots, block_size = slot_mapping[written], kv_cache.shape[1]
    if not len(slots):
        return
    rows = pack(kv_c[written], k_pe[written])
    kv_cache.view(torch.uint8)[slots // block_size, slots % block_size, 0] = rows.view(torch.uint8)


def of_numbers(call: LatentCall) -> LatentCall:
    """A checked call over a pool of such rows as one over its requests' blocks, in the queries' dtype. The
    lengths are read on the host."""
    block_size = call.kv_cache.shape[1]
    longest = max([0, *call.seq_lens.tolist()])
    table = call.block_table[:, : -(-longest // block_size)]
    used = torch.arange(table.shape[1], device=table.device) * block_size < call.seq_lens[:, None]
    blocks = table.where(used, 0).flatten().long()
    blocks = torch.cat((blocks.new_zeros(1), blocks))  # a pool has at least one
    numbers = torch.arange(1, len(blocks), dtype=torch.int32, device=table.device).view(table.shape)
    pool = unpack(rows_at(call.kv_cache, blocks), call.rank, call.q.dtype)
    return call._replace(kv_cache=pool, block_table=numbers)
