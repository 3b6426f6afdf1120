"""A case's tensors on the GPU, what the kernels make of them, and what float64 does."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from prefill_kernel.cases import Case
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.cuda.prefill import prefill
from torchpaged.custom_ops.attention.mask import Mask


def make_pools(case: Case, blocks: int, dim: int, dim_v: int, device: torch.device) -> list[Tensor]:
    """Keys' and values' pools ``[blocks, block_size, num_kv_heads, width]``, NaN all over, laid out as the
    case says."""
    slots, heads = case.block_size, case.heads[1]
    if case.layout == "both":
        pair = torch.full((blocks, 2, slots, heads, dim), torch.nan, dtype=case.dtype, device=device)
        return [pair[:, 0], pair[:, 1]]
    inner = (heads, slots) if case.layout == "HND" else (slots, heads)
    pools = [
        torch.full((blocks, *inner, width), torch.nan, dtype=case.dtype, device=device)
        for width in (dim, dim_v)
    ]
    return [pool.transpose(1, 2) if case.layout == "HND" else pool for pool in pools]


class Inputs:
    """A case's tensors on the GPU; blocks in shuffled order, NaN wherever no token lies and in the block that
    unused table entries name."""

    def __init__(self, case: Case, *, capacity: int = 0) -> None:
        self.case = case
        device, generator = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
        heads, kv_heads = case.heads
        dim_v = case.dim_v or case.dim
        columns = max(1, -(-max(capacity, *case.seq_lens) // case.block_size))
        used = [-(-max(capacity, length, 0) // case.block_size) for length in case.seq_lens]
        ids = (torch.randperm(sum(used), generator=generator, device=device) + 1).int()
        self.table = torch.zeros(len(used), columns, dtype=torch.int32, device=device)
        self.k_cache, self.v_cache = make_pools(case, sum(used) + 1, case.dim, dim_v, device)
        self.keys, self.values = [], []
        for request, (count, own) in enumerate(zip(used, ids.split(used), strict=True)):
            length = max(capacity, case.seq_lens[request], 0)
            self.table[request, :count] = own
            for cache, kept in ((self.k_cache, self.keys), (self.v_cache, self.values)):
                new = torch.randn(
                    length, kv_heads, cache.shape[3], generator=generator, device=device, dtype=case.dtype
                )
                kept.append(new)
                at = torch.arange(length, device=device)
                cache[own[at // case.block_size].long(), at % case.block_size] = new
        for request, count in enumerate(case.query_lens):  # blocks that no query sees any more are given back
            if case.window_left >= 0 and count:
                dropped = max(0, case.seq_lens[request] - count - case.window_left) // case.block_size
                self.k_cache[self.table[request, :dropped].long()] = torch.nan
                self.v_cache[self.table[request, :dropped].long()] = torch.nan
                self.table[request, :dropped] = 0
        self.num_tokens = sum(case.query_lens) + case.padding
        self.q = torch.randn(
            self.num_tokens, heads, case.dim, generator=generator, device=device, dtype=case.dtype
        )
        self.seq_lens, self.starts = (
            torch.empty(len(used), dtype=torch.int32, device=device),
            torch.empty(len(used) + 1, dtype=torch.int32, device=device),
        )
        self.set_lengths(case.query_lens, case.seq_lens)
        self.out = torch.full((*self.q.shape[:2], dim_v), torch.nan, dtype=case.dtype, device=device)
        self.lse = torch.full(self.q.shape[:2], torch.nan, device=device) if case.lse else None
        self.tickets = torch.zeros(2, dtype=torch.int32, device=device)
        self.scale = case.dim**-0.5
        self.slopes = torch.linspace(0.02, 0.5, heads, device=device) if case.alibi else None
        self.sinks = (
            torch.randn(heads, generator=generator, device=device, dtype=case.dtype) * 3
            if case.sinks
            else None
        )

    def set_lengths(self, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Other lengths in the same tensors."""
        self.case = dataclasses.replace(self.case, query_lens=query_lens, seq_lens=seq_lens)
        self.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        self.starts.copy_(torch.tensor([0, *query_lens]).cumsum(0).int())

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the op by place and by name."""
        lengths = (self.table, self.seq_lens, self.starts)
        named = {"alibi_slopes": self.slopes, "sinks": self.sinks, "logits_soft_cap": self.case.soft_cap}
        named |= {"causal": self.case.causal, "scale": self.scale, **self.case.masks()}
        named["max_query_len"] = max(self.case.query_lens)
        return (self.q, self.k_cache, self.v_cache, *lengths, self.out, self.lse), named

    def native(self) -> None:
        tensors, named = self.call()
        call = AttentionCall(*tensors, **named, semaphore=self.tickets).for_launch()
        prefill(call, Specialisation.of(call))

    def triton(self) -> None:
        tensors, named = self.call()
        BACKEND_OPS["triton"].paged_attention(*tensors, **named)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Out and LSE in float64."""
        group = self.case.heads[0] // self.case.heads[1]
        out = torch.zeros(self.out.shape, dtype=torch.float64, device="cuda")
        lse = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float64, device="cuda")
        case, start = self.case, 0
        for request, (count, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
            rows = slice(start, start + count)
            start += count
            if length <= 0 or not count:
                continue
            position = torch.arange(length - count, length, device="cuda")[:, None]
            mask = Mask(case.causal, case.window_left, case.window_right, case.chunk)
            seen = mask.sees(position, torch.arange(length, device="cuda")) & (position >= 0)
            sees, distance = seen.any(-1)[None], torch.arange(length, device="cuda") - position
            for head in range(case.heads[1]):
                heads = slice(head * group, (head + 1) * group)
                q = self.q[rows, heads].double().transpose(0, 1)
                k, v = (kept[request][:length, head].double() for kept in (self.keys, self.values))
                scores = q @ k.t() * self.scale
                if case.soft_cap:
                    scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
                if self.slopes is not None:
                    scores = scores + self.slopes[heads].double()[:, None, None] * distance
                scores = scores.masked_fill(~seen, -torch.inf)
                total = scores.logsumexp(-1)
                if self.sinks is not None:
                    total = torch.where(
                        sees, torch.logaddexp(total, self.sinks[heads].double()[:, None]), total
                    )
                lse[rows, heads] = total.t()
                out[rows, heads] = ((scores - total[..., None]).exp().nan_to_num(0.0) @ v).transpose(0, 1)
        return out, lse

    def visible(self) -> int:
        """Keys that queries see, all queries together."""
        case, pairs = self.case, 0
        for count, length in zip(case.query_lens, case.seq_lens, strict=True):
            for position in range(length - count, length):
                pairs += (position + 1 if case.causal else length) - (
                    max(0, position - case.window_left) if case.window_left >= 0 else 0
                )
        return pairs


def compare(inputs: Inputs) -> dict[str, Any]:
    """What is wrong with ``inputs.out`` and ``inputs.lse``; ``ok``: nothing."""
    out, lse = inputs.expected()
    got = inputs.out.double()
    difference = (got - out).abs()
    result: dict[str, Any] = {
        "relative_error": float((got - out).norm() / out.norm().clamp(min=1e-30)),
        "largest_error": float(difference.max()),
        "nan": int(got.isnan().any(-1).sum()),
        "lse_error": 0.0,
    }
    empty = lse == -torch.inf
    ok = (
        result["relative_error"] < 6e-3
        and result["largest_error"] < 0.04
        and bool((inputs.out[empty] == 0).all())
    )
    if inputs.lse is not None:
        result["lse_error"] = (
            float((inputs.lse.double() - lse)[~empty].abs().max()) if (~empty).any() else 0.0
        )
        ok = ok and result["lse_error"] < 1e-3 and bool((inputs.lse[empty] == -torch.inf).all())
    if not ok:
        wrong = ((difference > 0.04) | got.isnan()).any(-1).nonzero().tolist()
        result["wrong_rows"] = len(wrong)
        result["first_wrong"] = wrong[:6]
    return result | {"ok": ok}
