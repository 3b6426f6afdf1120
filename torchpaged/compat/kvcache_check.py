"""The tokens of a call of `flash_attn_with_kvcache`: which request each belongs to, where it goes, rotary
embedding by position, and what the call asks of them beyond what the ops ask of theirs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.batch_values import check_starts
from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_dtype,
    check_tensors,
    is_int,
    reads_values,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.functional.arguments import given


class Tokens(NamedTuple):
    """Packed tokens: ``[num_tokens, heads, width]``, the request of each, its place among that request's, and
    how many each request has."""

    x: Tensor
    request: Tensor  # [num_tokens] int64
    place: Tensor  # [num_tokens] int32
    are_real: Tensor | None  # [num_tokens] bool; None: all
    counts: Tensor  # [num_reqs] int32
    starts: Tensor  # [num_reqs + 1] int32


def tokens_of(x: Tensor, starts: Tensor | None) -> Tokens:
    """Of ``x [num_reqs, tokens_each, heads, width]``, or ``[num_tokens, heads, width]`` with ``starts``."""
    if starts is None:
        num_reqs, each = x.shape[:2]
        index = torch.arange(num_reqs * each, device=x.device)
        counts = torch.full((num_reqs,), each, dtype=torch.int32, device=x.device)
        bounds = torch.arange(num_reqs + 1, dtype=torch.int32, device=x.device) * each
        return Tokens(x.flatten(0, 1), index // each, (index % each).to(torch.int32), None, counts, bounds)
    index = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    request = torch.searchsorted(starts[1:], index, right=True)
    are_real = index < starts[-1]
    request = request.clamp(max=starts.shape[0] - 2)
    return Tokens(x, request, index - starts[:-1][request], are_real, starts.diff(), starts)


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor, last: Tensor) -> None:
    """The tables fit heads of ``x`` and positions up to ``last``.

    Args:
        x: ``[num_tokens, heads, head_dim]``.
        cos, sin: ``[max_position, rotary_dim // 2]``.
        last: int64, the last position of each request.
    """
    check_tensors(rotary_cos=cos, rotary_sin=sin)
    check_dims("rotary_cos", cos, None, None)
    check_dims("rotary_sin", sin, *cos.shape)
    if not 1 <= cos.shape[1] <= x.shape[-1] // 2:
        raise ArgumentError(
            "rotary_cos",
            f"shape [max_position, rotary_dim / 2] with rotary_dim <= {x.shape[-1]}",
            str(list(cos.shape)),
        )
    check_device(x.device, rotary_cos=cos, rotary_sin=sin)
    if last.numel() and reads_values(x.device) and int(last.max()) >= cos.shape[0]:
        raise ArgumentError(
            "rotary_cos", f"a row for each position up to {int(last.max())}", f"{cos.shape[0]} rows"
        )


def rotated(
    tokens: Tokens, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool, all_first: bool
) -> Tensor:
    """The tokens turned by their positions, ``first`` of their request and onwards, or all by the first:
    ``(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)`` over the first columns of each head
    (arXiv:2104.09864), in float32, rounded once.

    Args:
        tokens: ``[num_tokens, heads, head_dim]``.
        cos, sin: ``[max_position, rotary_dim // 2]``; positions behind their end, which only padding has on
            a GPU, take the last row.
        first: ``[num_reqs]`` int32.
        interleaved: the pairs are columns ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim // 2)``.
        all_first: whether all of a request's tokens are turned by its first position.
    """
    x, half, positions = tokens.x, cos.shape[1], first[tokens.request]
    rows = (positions if all_first else positions + tokens.place).clamp(0, cos.shape[0] - 1)
    c, s = cos[rows].float()[:, None], sin[rows].float()[:, None]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    x1, x2 = (
        (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    )
    pair = (x1 * c - x2 * s, x2 * c + x1 * s)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def slots_of(new: Tokens, lens: Tensor, table: Tensor, block_size: int) -> Tensor:
    """``[num_tokens]`` int64: where each new token is stored; -1 of padding and of what has no place in the
    table, as behind a negative length or one that int32 can't hold, which are not read on a GPU."""
    position = lens[new.request] + new.place
    column = position // block_size
    block = table[new.request, column.clamp(0, table.shape[1] - 1)].long()
    has_place = (column >= 0) & (column < table.shape[1])
    if new.are_real is not None:
        has_place &= new.are_real
    return torch.where(has_place, block * block_size + position % block_size, -1)


@dataclass
class CacheTokens:
    """Queries, cached and new tokens, and where they lie: the function's arguments of these names."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    rotary_seqlens: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k_new: Tensor | None
    max_seqlen_q: int | None

    def check(self) -> None:
        """Shapes, dtypes and values that only this function knows; raises `ArgumentError`."""
        self._check_tensors()
        num_reqs = self._check_queries()
        self._check_rows(num_reqs)
        self._check_belongings()
        num_new = self._check_new(num_reqs) if self.k is not None else 0
        blocks = 1 if self.page_table is None else self.page_table.shape[1]
        _check_lens(self.cache_seqlens, num_new, self.k_cache.shape[1] * blocks)

    def _check_tensors(self) -> None:
        check_tensors(q=self.q, k_cache=self.k_cache, v_cache=self.v_cache)
        names = ("k", "v", "page_table", "cache_batch_idx", "rotary_seqlens", "cu_seqlens_q")
        tensors = given(**{name: getattr(self, name) for name in (*names, "cu_seqlens_k_new")})
        if isinstance(self.cache_seqlens, Tensor):
            tensors["cache_seqlens"] = self.cache_seqlens
        check_tensors(**tensors)
        check_device(self.q.device, k_cache=self.k_cache, v_cache=self.v_cache, **tensors)
        check_dims("k_cache", self.k_cache, None, None, None, None)
        check_dims("v_cache", self.v_cache, None, None, None, None)

    def _check_queries(self) -> int:
        """Returns the number of requests."""
        q, starts, longest = self.q, self.cu_seqlens_q, self.max_seqlen_q
        if starts is None:
            check_dims("q", q, None, None, None, None)
            if longest is not None and longest < q.shape[1]:
                raise ArgumentError(
                    "max_seqlen_q", f"None or at least seqlen_q ({q.shape[1]})", repr(longest)
                )
            return q.shape[0]
        check_dims("q", q, None, None, None)
        check_dims("cu_seqlens_q", starts, None)
        check_dtype("cu_seqlens_q", starts, torch.int32)
        if longest is None or not is_int(longest) or longest < 0:
            raise ArgumentError(
                "max_seqlen_q", "an int with cu_seqlens_q, an upper bound of the lengths", repr(longest)
            )
        return starts.shape[0] - 1

    def _check_rows(self, num_reqs: int) -> None:
        for name in ("cache_batch_idx", "rotary_seqlens", "cache_seqlens"):
            tensor = getattr(self, name)
            if isinstance(tensor, Tensor):
                check_dims(name, tensor, num_reqs)
                check_dtype(name, tensor, torch.int32)
        reads, first, rows = reads_values(self.q.device), self.rotary_seqlens, self.cache_batch_idx
        if first is not None and num_reqs and reads and int(first.min()) < 0:
            raise ArgumentError("rotary_seqlens", "positions of at least 0", str(first.tolist()[:64]))
        if rows is not None and self.page_table is not None:
            raise ArgumentError(
                "cache_batch_idx", "None with page_table, which has a row per request", "both"
            )
        if rows is not None and num_reqs and reads:
            low, high = (int(x) for x in torch.aminmax(rows))
            if low < 0 or high >= self.k_cache.shape[0]:
                raise ArgumentError(
                    "cache_batch_idx", f"rows in [0, {self.k_cache.shape[0]})", f"values in [{low}, {high}]"
                )

    def _check_belongings(self) -> None:
        """Arguments that come together."""
        cos, sin = self.rotary_cos, self.rotary_sin
        if (cos is None) != (sin is None) or (cos is not None and self.k is None):
            raise ArgumentError(
                "rotary_cos, rotary_sin", "both or neither, and with k and v only", "one of them, or no k"
            )
        if self.rotary_seqlens is not None and cos is None:
            raise ArgumentError("rotary_seqlens", "None without rotary_cos", "a tensor")
        if self.cu_seqlens_k_new is not None and self.k is None:
            raise ArgumentError("cu_seqlens_k_new", "None without k and v", "a tensor")
        if (self.k is None) != (self.v is None):
            raise ArgumentError("k, v", "both or neither", f"k {'None' if self.k is None else 'given'}")
        if self.k is not None and self.cache_seqlens is None:
            raise ArgumentError(
                "cache_seqlens", "the tokens that are in the cache, since new ones are stored", "None"
            )

    def _check_new(self, num_reqs: int) -> int | Tensor:
        """Returns the new tokens of each request, or of all."""
        k, v, starts = self.k, self.v, self.cu_seqlens_k_new
        assert k is not None and v is not None
        heads, width, width_v = self.k_cache.shape[2], self.k_cache.shape[3], self.v_cache.shape[3]
        if starts is None:
            check_dims("k", k, num_reqs, None, heads, width)
            check_dims("v", v, num_reqs, k.shape[1], heads, width_v)
            return k.shape[1]
        check_dims("k", k, None, heads, width)
        check_dims("v", v, k.shape[0], heads, width_v)
        check_dims("cu_seqlens_k_new", starts, num_reqs + 1)
        check_dtype("cu_seqlens_k_new", starts, torch.int32)
        if reads_values(k.device):
            check_starts("cu_seqlens_k_new", starts, k.shape[0])
        return starts.diff()


def _check_lens(cache_seqlens: int | Tensor | None, num_new: int | Tensor, capacity: int) -> None:
    """Cached and new tokens have room; of those on a GPU only what the host knows."""
    if cache_seqlens is None:
        return
    if isinstance(num_new, Tensor) and not reads_values(num_new.device):
        num_new = 0
    if isinstance(cache_seqlens, Tensor):
        if not cache_seqlens.numel() or not reads_values(cache_seqlens.device):
            return
        least, most = int(cache_seqlens.min()), int((cache_seqlens.long() + num_new).max())
    elif is_int(cache_seqlens):
        least, most = cache_seqlens, cache_seqlens
        most += max(num_new.tolist(), default=0) if isinstance(num_new, Tensor) else num_new
    else:
        raise ArgumentError("cache_seqlens", "None, an int or a tensor", repr(cache_seqlens))
    if least < 0 or most > capacity:
        raise ArgumentError(
            "cache_seqlens",
            f"0 to {capacity} tokens of a request, the new ones included",
            str(least if least < 0 else most),
            "" if least < 0 else "give each request more room, or store fewer",
        )
