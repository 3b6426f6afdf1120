"""Argument checks of the attention ops, shared by the reference, the Triton launchers and the public functions; pieces: checks.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import (
    check_apart,
    check_device,
    check_dims,
    check_dtype,
    check_last_dim,
    is_int,
    is_latent,
    overlap,
    pools_meet,
    reads_values,
    shape_of,
)
from torchpaged.custom_ops.errors import ArgumentError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INF = float("inf")
_FEW = 256  # numbers: so many Python has looked at before a dozen ops of torch have begun


def check_pools(k_cache: Tensor, v_cache: Tensor, *, stores: bool = False) -> None:
    """A pair of pools ``[num_blocks, block_size, num_kv_heads, head_dim(_v)]`` fits together and shares no element.

    Values that are the first columns of the keys (`is_latent`) are let through unless the op ``stores`` tokens.
    """
    if k_cache.dim() != 4:
        raise ArgumentError("k_cache", "shape [num_blocks, block_size, num_kv_heads, head_dim]", shape_of(k_cache))
    check_dims("v_cache", v_cache, k_cache.shape[0], k_cache.shape[1], k_cache.shape[2], None)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if min(cache.shape) < 1:
            raise ArgumentError(name, "at least one block, token per block, head and column", shape_of(cache))
    if k_cache.dtype not in FLOATS + FP8:
        raise ArgumentError("k_cache", "a floating point dtype of 16, 32 or 64 bits, float8_e4m3fn or float8_e5m2", str(k_cache.dtype))
    check_dtype("v_cache", v_cache, k_cache.dtype)
    check_device(k_cache.device, v_cache=v_cache)
    check_last_dim(k_cache=k_cache, v_cache=v_cache)
    if pools_meet(k_cache, v_cache) and (stores or not is_latent(k_cache, v_cache)):
        raise ArgumentError("v_cache", "memory apart from k_cache's", "pools that share memory", "allocate one pool for each")


def check_write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
                   k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> None:  # fmt: skip
    """Every argument of ``write_kv``; raises `ArgumentError` before anything is written."""
    check_pools(k_cache, v_cache, stores=True)
    check_dims("slot_mapping", slot_mapping, None)
    check_dims("k", k, slot_mapping.shape[0], k_cache.shape[2], k_cache.shape[3])
    check_dims("v", v, slot_mapping.shape[0], v_cache.shape[2], v_cache.shape[3])
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_dtype("k", k, *FLOATS)
    check_dtype("v", v, k.dtype)
    check_device(k_cache.device, k=k, v=v, slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale)
    check_last_dim(k=k, v=v)
    _check_cache_dtype(k, k_cache, k_scale, v_scale)
    check_apart({"k_cache": k_cache, "v_cache": v_cache}, {"k": k, "v": v}, "pass a copy: .clone()")
    if slot_mapping.numel() and reads_values(k_cache.device) and not _are_few_good_slots(slot_mapping, k_cache):
        low, high = (int(x) for x in torch.aminmax(slot_mapping))
        num_slots = k_cache.shape[0] * k_cache.shape[1]
        if low < -1 or high >= num_slots:
            raise ArgumentError("slot_mapping", f"slots in [-1, {num_slots})", f"values in [{low}, {high}]",
                                "the pool is too small or the block table wrong")  # fmt: skip
        _check_distinct_slots(slot_mapping, k_cache.shape[1])


def _are_few_good_slots(slot_mapping: Tensor, k_cache: Tensor) -> bool:
    """Whether these slots are so few that Python can look at them, and all right; if not, the ops of torch say what is wrong."""
    if slot_mapping.shape[0] > _FEW or slot_mapping.device.type != "cpu":
        return False
    num_blocks, block_size = k_cache.shape[:2]
    slots = slot_mapping.tolist()
    own = [slot for slot in slots if slot >= block_size]
    return min(slots) >= -1 and max(slots) < num_blocks * block_size and len(set(own)) == len(own)


def _check_distinct_slots(slot_mapping: Tensor, block_size: int) -> None:
    """No two tokens have one slot, but for -1 and the slots of block 0, which hold nobody's tokens."""
    if slot_mapping.shape[0] < 2:
        return
    slots = slot_mapping.sort().values
    twice = (slots[1:] == slots[:-1]) & (slots[1:] >= block_size)
    if bool(twice.any()):
        slot = int(slots[1:][twice][0])
        raise ArgumentError("slot_mapping", "one token per slot", f"slot {slot} (block {slot // block_size}) several times",
                            "two requests share a block that is still written: give each its own")  # fmt: skip


def _check_cache_dtype(x: Tensor, cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    fp8 = cache.dtype in FP8
    if not fp8 and cache.dtype != x.dtype:
        raise ArgumentError("k_cache", f"the dtype of the tokens ({x.dtype}) or an fp8 dtype", str(cache.dtype))
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if not fp8:
            raise ArgumentError(name, f"None for a {cache.dtype} cache", "a tensor", "scales belong to fp8 caches")
        check_dtype(name, scale, torch.float32)
        if scale.dim() > 1 or scale.numel() not in (1, cache.shape[2]):
            raise ArgumentError(name, f"one scale or one per kv head ({cache.shape[2]})", shape_of(scale))
        if reads_values(scale.device) and not bool(((scale > 0) & (scale < INF)).all()):
            raise ArgumentError(name, "positive finite numbers", str(scale.tolist()))


def check_rope_write_kv(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, slot_mapping: Tensor, q_out: Tensor, k_cache: Tensor,
    v_cache: Tensor, *, q_norm: Tensor | None = None, k_norm: Tensor | None = None, norm_eps: float = 1e-6, norm_offset: float = 0.0,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Every argument of ``rope_write_kv``; raises `ArgumentError` before anything is written."""
    check_write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    check_dims("q", q, k.shape[0], None, k.shape[2])
    check_dims("q_out", q_out, *q.shape)
    check_dims("positions", positions, q.shape[0])
    check_dims("cos_sin", cos_sin, None, None)
    rotary_dim = cos_sin.shape[1]
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > q.shape[2]:
        raise ArgumentError("cos_sin", f"shape [max_position, rotary_dim] with an even rotary_dim in [2, {q.shape[2]}]", shape_of(cos_sin),
                            "it holds rotary_dim / 2 cosines, then as many sines")  # fmt: skip
    check_dtype("q", q, *FLOATS)
    check_dtype("k", k, q.dtype)
    if not q.shape[1]:
        raise ArgumentError("q", "at least one head", shape_of(q))
    check_dtype("q_out", q_out, q.dtype)
    check_dtype("positions", positions, torch.int64)
    check_dtype("cos_sin", cos_sin, torch.float32, q.dtype)
    check_last_dim(q=q, q_out=q_out, cos_sin=cos_sin)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_dims(name, weight, q.shape[2])
            check_dtype(name, weight, q.dtype, torch.float32)
            check_last_dim(**{name: weight})
    check_device(k_cache.device, q=q, positions=positions, cos_sin=cos_sin, q_out=q_out, q_norm=q_norm, k_norm=k_norm)
    if not 0 < norm_eps < INF:
        raise ArgumentError("norm_eps", "a positive finite number", str(norm_eps))
    if norm_offset - norm_offset != 0:
        raise ArgumentError("norm_offset", "a finite number", str(norm_offset))
    if norm_offset and q_norm is None and k_norm is None:
        raise ArgumentError("norm_offset", "0 without q_norm and k_norm", str(norm_offset), "give the weights of the norms")
    check_apart({"k_cache": k_cache, "v_cache": v_cache}, {"q": q, "q_out": q_out}, "pass a copy: .clone()")
    for name, source in (("q", q), ("k", k), ("v", v)):
        if overlap(q_out, source):
            raise ArgumentError("q_out", f"memory apart from {name}'s", "overlapping tensors", "allocate it with torch.empty_like(q)")
    if positions.numel() and reads_values(k_cache.device):
        low, high = (int(x) for x in torch.aminmax(positions))
        if low < 0 or high >= cos_sin.shape[0]:
            raise ArgumentError("positions", f"positions in [0, {cos_sin.shape[0]}), those of padding included", f"values in [{low}, {high}]",
                                "give cos_sin more rows")  # fmt: skip


def _check_semaphore(semaphore: Tensor, least: int, device: torch.device) -> None:
    check_dims("semaphore", semaphore, None)
    check_dtype("semaphore", semaphore, torch.int32)
    check_device(device, semaphore=semaphore)
    check_last_dim(semaphore=semaphore)
    if semaphore.shape[0] < least:
        raise ArgumentError("semaphore", f"at least num_reqs * num_kv_heads = {least} numbers", shape_of(semaphore))
    if reads_values(device) and bool(semaphore.any()):
        raise ArgumentError("semaphore", "zeros", "other values", "allocate with torch.zeros; calls that may overlap need one each")


def check_paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor,
    out: Tensor, lse: Tensor | None = None, *, max_query_len: int, scale: float, causal: bool = True,
    window_left: int = -1, window_right: int = -1, logits_soft_cap: float = 0.0, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, chunk_size: int = 0,
    semaphore: Tensor | None = None,
) -> None:  # fmt: skip
    """Every argument of ``paged_attention``; raises `ArgumentError` before anything is written."""
    check_pools(k_cache, v_cache)
    num_kv_heads = k_cache.shape[2]
    check_dims("q", q, None, None, k_cache.shape[3])
    if q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        raise ArgumentError("q", f"num_heads a multiple of num_kv_heads ({num_kv_heads})", f"{q.shape[1]} heads")
    check_dims("out", out, q.shape[0], q.shape[1], v_cache.shape[3])
    check_dtype("out", out, q.dtype)
    check_dims("block_table", block_table, None, None)
    check_dims("seq_lens", seq_lens, block_table.shape[0])
    check_dims("query_start_loc", query_start_loc, block_table.shape[0] + 1)
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        check_dtype(name, tensor, torch.int32)
        check_last_dim(**{name: tensor})
    check_last_dim(q=q, out=out)
    check_apart({"out": out}, {"q": q, "k_cache": k_cache, "v_cache": v_cache}, "allocate out with torch.empty")
    if lse is not None:
        check_dims("lse", lse, q.shape[0], q.shape[1])
        check_dtype("lse", lse, torch.float32)
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is not None:
            check_dims(name, per_head, q.shape[1])
            check_dtype(name, per_head, *FLOATS)
            check_last_dim(**{name: per_head})
    if alibi_slopes is not None:
        check_dtype("alibi_slopes", alibi_slopes, torch.float32)
    check_device(q.device, k_cache=k_cache, out=out, lse=lse, block_table=block_table, seq_lens=seq_lens,
                 query_start_loc=query_start_loc, alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_scale, v_scale=v_scale)  # fmt: skip
    _check_cache_dtype(q, k_cache, k_scale, v_scale)
    if max_query_len < 1:
        raise ArgumentError("max_query_len", "at least 1", str(max_query_len))
    if not 0 < scale < INF:
        raise ArgumentError("scale", "a positive finite number", str(scale))
    for name, size in (("window_left", window_left), ("window_right", window_right)):
        if size < -1:
            raise ArgumentError(name, "-1 (open) or a number of keys >= 0", str(size))
    if not 0 <= logits_soft_cap < INF:
        raise ArgumentError("logits_soft_cap", "0 (off) or a positive finite number", str(logits_soft_cap))
    if chunk_size < 0:
        raise ArgumentError("chunk_size", "0 (off) or a positive number of tokens", str(chunk_size))
    if semaphore is not None:
        _check_semaphore(semaphore, block_table.shape[0] * num_kv_heads, q.device)
    if reads_values(q.device):
        _check_batch_values(q.shape[0], k_cache, block_table, seq_lens, query_start_loc, max_query_len)


def _check_batch_values(num_tokens: int, k_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
                        query_start_loc: Tensor, max_query_len: int) -> None:  # fmt: skip
    num_blocks, block_size = k_cache.shape[:2]
    if block_table.numel() <= _FEW and block_table.shape[0] and block_table.device.type == "cpu":
        batch = block_table.tolist(), seq_lens.tolist(), query_start_loc.tolist()
        if _is_good_batch(*batch, num_tokens, num_blocks, block_size, max_query_len):
            return
    query_lens = query_start_loc.diff()
    if int(query_start_loc[0]) != 0 or bool((query_lens < 0).any()) or int(query_start_loc[-1]) > num_tokens:
        raise ArgumentError("query_start_loc", f"0 first, not decreasing, at most {num_tokens} tokens", str(query_start_loc.tolist()))
    if not block_table.shape[0]:
        return
    if int(query_lens.max()) > max_query_len:
        raise ArgumentError("max_query_len", f"at least the longest query ({int(query_lens.max())})", str(max_query_len))
    capacity = block_table.shape[1] * block_size
    if int(seq_lens.max()) > capacity:
        raise ArgumentError("seq_lens", f"at most {capacity} tokens ({block_table.shape[1]} blocks of {block_size} per request)",
                            str(int(seq_lens.max())), "give block_table more columns")  # fmt: skip
    used = (seq_lens.clamp_min(0)[:, None] + block_size - 1) // block_size > torch.arange(block_table.shape[1], device=seq_lens.device)
    bad = used & ((block_table < 0) | (block_table >= num_blocks))
    if bool(bad.any()):
        row, column = (int(x) for x in bad.nonzero()[0])
        raise ArgumentError(
            "block_table", f"block ids in [0, {num_blocks})", f"{int(block_table[row, column])} in row {row}, column {column}"
        )
    shown = torch.where(used, block_table, 0).sort(-1).values
    twice = (shown[:, 1:] == shown[:, :-1]) & (shown[:, 1:] > 0)
    if bool(twice.any()):
        row, column = (int(x) for x in twice.nonzero()[0])
        raise ArgumentError("block_table", "every block once per request (block 0, the null block, excepted)",
                            f"block {int(shown[row, column])} several times in row {row}")  # fmt: skip


def _is_good_batch(
    block_table: list[list[int]], seq_lens: list[int], query_start_loc: list[int], num_tokens: int, num_blocks: int, block_size: int,
    max_query_len: int,
) -> bool:  # fmt: skip
    """Whether all is right; if not, the ops of torch in `_check_batch_values` say what is wrong."""
    if query_start_loc[0] != 0 or query_start_loc[-1] > num_tokens:
        return False
    for begin, end in itertools.pairwise(query_start_loc):
        if not 0 <= end - begin <= max_query_len:
            return False
    for row, seq_len in zip(block_table, seq_lens, strict=True):
        if seq_len <= 0:
            continue
        used = row[: -(-seq_len // block_size)]
        if seq_len > len(row) * block_size or (used and (min(used) < 0 or max(used) >= num_blocks)):
            return False
        if len(set(used)) != len(used) and len(set(used)) - 1 + used.count(0) != len(used):  # block 0 may stand there several times
            return False
    return True


def check_merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
    """Every argument of ``merge_attn_states``."""
    if out_a.dim() != 3:
        raise ArgumentError("out_a", "shape [num_tokens, num_heads, head_dim]", shape_of(out_a))
    if min(out_a.shape[1:]) < 1:
        raise ArgumentError("out_a", "at least one head and one column", shape_of(out_a))
    check_dtype("out_a", out_a, *FLOATS)
    for name, tensor in (("out_b", out_b), ("out", out)):
        check_dims(name, tensor, *out_a.shape)
        check_dtype(name, tensor, out_a.dtype)
    for name, state in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if state is not None:
            check_dims(name, state, *out_a.shape[:2])
            check_dtype(name, state, torch.float32)
    check_device(out_a.device, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)
    check_last_dim(out_a=out_a, out_b=out_b, out=out)


def check_copy_blocks(k_cache: Tensor, v_cache: Tensor, block_mapping: Tensor) -> None:
    """Every argument of ``copy_blocks``."""
    check_pools(k_cache, v_cache)
    check_dims("block_mapping", block_mapping, None, 2)
    check_dtype("block_mapping", block_mapping, torch.int64)
    check_device(k_cache.device, block_mapping=block_mapping)
    if not reads_values(k_cache.device):
        return
    pairs = [(s, d) for s, d in block_mapping.tolist() if s >= 0 and d >= 0]
    sources, destinations = {s for s, _ in pairs}, [d for _, d in pairs]
    if any(x >= k_cache.shape[0] for pair in pairs for x in pair):
        raise ArgumentError("block_mapping", f"block ids below {k_cache.shape[0]}", str(pairs))
    if len(set(destinations)) < len(destinations) or sources & set(destinations) or 0 in destinations:
        raise ArgumentError("block_mapping", "distinct destinations, none of them a source or the null block 0", str(pairs))


def check_options(scale: float | None, window_size: object, logits_soft_cap: float | None, chunk_size: Any) -> tuple[int, int]:
    """The options of attention as a public function or a module takes them; returns the window's two sides."""
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or any(not is_int(side) or side < -1 for side in sides):
        raise ArgumentError("window_size", "a pair (left, right) of ints, numbers of keys or -1 (open)", repr(window_size))
    if scale is not None and not 0 < scale < INF:
        raise ArgumentError("scale", "a positive finite number", repr(scale))
    if logits_soft_cap is not None and not 0 <= logits_soft_cap < INF:
        raise ArgumentError("logits_soft_cap", "None or 0 (off), or a positive finite number", repr(logits_soft_cap))
    if chunk_size is not None and (not is_int(chunk_size) or chunk_size < 0):
        raise ArgumentError("chunk_size", "None or 0 (off), or a positive number of tokens", repr(chunk_size))
    return int(sides[0]), int(sides[1])


def check_advance_step(sampled_token_ids: Tensor, block_table: Tensor, input_ids: Tensor, positions: Tensor,
                       seq_lens: Tensor, slot_mapping: Tensor, *, block_size: int) -> None:  # fmt: skip
    """Every argument of ``advance_step``."""
    check_dims("block_table", block_table, None, None)
    check_dtype("block_table", block_table, torch.int32)
    num_reqs = block_table.shape[0]
    for name, tensor in (("sampled_token_ids", sampled_token_ids), ("input_ids", input_ids), ("positions", positions),
                         ("slot_mapping", slot_mapping)):  # fmt: skip
        check_dims(name, tensor, num_reqs)
        check_dtype(name, tensor, torch.int64)
    check_dims("seq_lens", seq_lens, num_reqs)
    check_dtype("seq_lens", seq_lens, torch.int32)
    for name, tensor in (("sampled_token_ids", sampled_token_ids), ("input_ids", input_ids), ("positions", positions),
                         ("slot_mapping", slot_mapping), ("seq_lens", seq_lens), ("block_table", block_table)):  # fmt: skip
        check_last_dim(**{name: tensor})
    check_device(input_ids.device, sampled_token_ids=sampled_token_ids, block_table=block_table, positions=positions,
                 seq_lens=seq_lens, slot_mapping=slot_mapping)  # fmt: skip
    if block_size < 1:
        raise ArgumentError("block_size", "at least 1 token", str(block_size))
