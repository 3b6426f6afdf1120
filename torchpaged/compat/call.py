"""The one call below every function of this package: FlashAttention's conventions met with our op."""

from typing import Any

import torch
from torch import Tensor

from torchpaged.backends.choose.for_call import choose_ops
from torchpaged.backends.choose.kind import Kind
from torchpaged.compat.arguments import scale_of
from torchpaged.custom_ops.attention.check import check_paged_attention
from torchpaged.custom_ops.checks import check_sizes, reads_values, refuse_grad
from torchpaged.custom_ops.pools import FP8
from torchpaged.functional import paged_attention
from torchpaged.functional.arguments import attention_call

#: Of queries, keys and values.
Descales = tuple[Tensor | None, Tensor | None, Tensor | None]


class PackedCall:
    """Attention of packed queries over pools, in our words, with what FlashAttention knows besides.

    Args:
        q: ``[num_tokens, num_heads, head_dim]``, a float dtype, or float8_e4m3fn: computed and returned in
            bfloat16 then.
        pools: keys and values ``[num_blocks, block_size, num_kv_heads, head_dim(_v)]``.
        batch: block table ``[num_reqs, max_blocks_per_req]``, where block 0 is a block like any other,
            lengths ``[num_reqs]`` and query starts ``[num_reqs + 1]``, int32.
        max_query_len: host int, an upper bound.
        options: arguments of `torchpaged.paged_attention`: scale, causal, window_size, logits_soft_cap,
            alibi_slopes, sinks, chunk_size.
        descales: of queries, keys and values. The kernels don't take those of queries, nor those that differ
            between requests: keys' are multiplied into the queries, values' into the output; each is rounded
            once more to its dtype.
        same_lens: promises that no request has more queries than keys.

    Attributes:
        q_descale, k_descale, v_descale: float32 ``[num_reqs, num_kv_heads]``, that the kernels don't take.

    Raises:
        ArgumentError: a descale that does not fit, or one of queries that are not fp8.
    """

    def __init__(
        self,
        q: Tensor,
        pools: tuple[Tensor, Tensor],
        batch: tuple[Tensor, Tensor, Tensor],
        max_query_len: int,
        options: dict[str, Any],
        descales: Descales,
        same_lens: bool = False,
    ) -> None:
        self.q, (self.k_cache, self.v_cache), self.same_lens = q, pools, same_lens
        self.block_table, self.seq_lens, self.query_start_loc = batch
        sizes = self.seq_lens.shape[0], self.k_cache.shape[2]
        q_scale, self.q_descale = scale_of("q_descale", descales[0], *sizes, q)
        k_scale, self.k_descale = scale_of("k_descale", descales[1], *sizes, self.k_cache)
        v_scale, self.v_descale = scale_of("v_descale", descales[2], *sizes, self.v_cache)
        if q_scale is not None:  # the kernels have no scale of queries
            self.q_descale = q_scale.expand(*sizes)
        self.max_query_len = max(max_query_len, 1) if type(max_query_len) is int else max_query_len
        self.options = {**options, "k_scale": k_scale, "v_scale": v_scale}

    def run(self, out: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Attend. ``out``: ``[num_tokens, num_heads, head_dim_v]`` to write into. Returns it and the LSE
        ``[num_tokens, num_heads]``."""
        q = self._descaled_queries()
        got = paged_attention(
            *self._over(q), max_query_len=self.max_query_len, out=out, return_lse=return_lse, **self.options
        )
        result, lse = got if return_lse else (got, None)
        if self._may_overhang():
            self._attend_overhang(q, result, lse)
        if self.v_descale is not None:
            result.copy_(result.float() * self._per_token(self.v_descale))
        return result, lse

    def _over(self, q: Tensor) -> tuple[Tensor, ...]:
        return q, self.k_cache, self.v_cache, self.block_table, self.seq_lens, self.query_start_loc

    def check(self, out: Tensor | None, return_lse: bool) -> None:
        """Refuse now what `run` would refuse: before something is stored."""
        check_sizes(num_heads=self.q.shape[1])
        q, width = self.q.to(torch.bfloat16) if self.q.dtype in FP8 else self.q, self.v_cache.shape[3]
        refuse_grad(q=q, sinks=self.options["sinks"], alibi_slopes=self.options["alibi_slopes"])
        if out is None:
            out = q.new_empty(*q.shape[:2], width)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        call = attention_call(*self._over(q), out, lse, max_query_len=self.max_query_len, **self.options)
        check_paged_attention(call)
        choose_ops(Kind.of(call))

    def _descaled_queries(self) -> Tensor:
        q = self.q.to(torch.bfloat16) if self.q.dtype in FP8 else self.q
        for descale in (self.q_descale, self.k_descale):
            if descale is not None:
                q = (q.float() * self._per_token(descale)).to(q.dtype)
        return q

    def _request_of_tokens(self) -> Tensor:
        """``[num_tokens]`` int64; tokens behind the last request count as its own."""
        tokens = torch.arange(self.q.shape[0], dtype=torch.int32, device=self.q.device)
        return torch.searchsorted(self.query_start_loc[1:], tokens, right=True).clamp(
            max=self.seq_lens.shape[0] - 1
        )

    def _per_token(self, descale: Tensor) -> Tensor:
        """``[num_reqs, num_kv_heads]`` -> ``[num_tokens, num_heads, 1]``."""
        return (
            descale[self._request_of_tokens()]
            .repeat_interleave(self.q.shape[1] // self.k_cache.shape[2], dim=1)
            .unsqueeze(-1)
        )

    def _may_overhang(self) -> bool:
        """Whether a query may lie before the first key and see keys all the same: more queries than keys, and
        not causal."""
        if (
            self.options["causal"]
            or self.same_lens
            or (type(self.max_query_len) is int and self.max_query_len <= 1)
        ):
            return False
        if not torch.compiler.is_compiling() and reads_values(self.q.device):
            return bool((self.query_start_loc.diff() > self.seq_lens).any())
        return True

    def _attend_overhang(self, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Queries before the first key, which our op shows no key at all: each a request of its own, over the
        keys that its window leaves.

        Their positions are below 0, so that no window's left side bears on them: they see the first
        ``position + right + 1`` keys, or all.
        """
        tokens = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
        request = self._request_of_tokens()
        starts, ends = self.query_start_loc[:-1][request], self.query_start_loc[1:][request]
        lens, right = self.seq_lens[request], self.options["window_size"][1]
        position = lens - ends + tokens  # bottom right: the last query stands at the last key
        over = (position < 0) & (tokens >= starts) & (tokens < ends)
        seen = lens if right < 0 else torch.minimum((position + right + 1).clamp(min=0), lens)
        # such a request has fewer keys than queries, hence no more blocks than this
        width = min(self.block_table.shape[1], -(-self.max_query_len // self.k_cache.shape[1]))
        options = {**self.options, "window_size": (-1, -1)}
        own = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        batch = self.block_table[:, :width][request], torch.where(over, seen, 0), own
        options |= {"max_query_len": 1, "return_lse": lse is not None}
        got = paged_attention(q, self.k_cache, self.v_cache, *batch, **options)
        extra, extra_lse = got if lse is not None else (got, None)
        out.copy_(torch.where(over[:, None, None], extra, out))
        if lse is not None and extra_lse is not None:
            lse.copy_(torch.where(over[:, None], extra_lse, lse))
