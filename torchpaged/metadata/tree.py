"""Trees of draft tokens for speculative verification: one word per query token, in which bit j says that
query token j of the same request is an ancestor.

    # 0 and 1 are drafts of the first token, 2 continues 0, 3 and 4 continue 2
    parents = torch.tensor([-1, -1, 0, 2, 2], dtype=torch.int32)
    tree_mask = tree_mask_from_parents(parents)                      # [1, 2, 5, 13, 21]

Attention over such a batch gives each token what it would get at the end of its branch, were the branch a
request of its own (tree attention of SpecInfer, arXiv:2305.09781).
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.check import MAX_TREE_TOKENS
from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_dtype,
    check_tensors,
    is_int,
    reads_values,
)
from torchpaged.custom_ops.errors import ArgumentError


def tree_mask_from_parents(parents: Tensor, query_start_loc: Tensor | None = None) -> Tensor:
    """The ``tree_mask`` of trees given by parents; on their device, without waiting for it.

    >>> tree_mask_from_parents(torch.tensor([-1, 0, 0, 1], dtype=torch.int32)).tolist()
    [1, 3, 5, 11]

    Args:
        parents: ``[num_tokens]`` int32: of each query token the one of its request, counted from 0, whose
            continuation it is; smaller than its own number. -1: it continues the context.
        query_start_loc: ``[num_reqs + 1]`` int32, first token of each request; None: one request has all.

    Returns:
        ``[num_tokens]`` int64; 0 for tokens past the last request.

    Raises:
        ArgumentError: shapes, dtypes or devices don't fit; where values are checked, also a parent that is no
            token before its child, and more than 64 tokens in one request.
    """
    check_tensors(parents=parents)
    check_dims("parents", parents, None)
    check_dtype("parents", parents, torch.int32)
    index, first, inside = _index_in_request(parents, query_start_loc)
    if reads_values(parents.device):
        _check_parents(parents, index, inside)
    token = torch.arange(parents.shape[0], device=parents.device)
    root = parents < 0
    # Each round doubles how far up a word and its pointer reach; a root points at itself, whose bits it has.
    above = torch.where(root | ~inside, token, first + parents)
    words = torch.where(inside, torch.ones_like(token) << index.clamp(0, MAX_TREE_TOKENS - 1), 0)
    for _ in range(MAX_TREE_TOKENS.bit_length() - 1):
        words = words | words[above]
        above = above[above]
    return words


def tree_token_positions(
    tree_mask: Tensor, seq_lens: Tensor, query_start_loc: Tensor | None = None
) -> Tensor:
    """Each query token's position in its branch: the context's length plus its depth, for position
    embeddings; on the device, without waiting for it.

    >>> mask = tree_mask_from_parents(torch.tensor([-1, 0, 0, 1], dtype=torch.int32))
    >>> tree_token_positions(mask, seq_lens=torch.tensor([14], dtype=torch.int32)).tolist()
    [10, 11, 11, 12]

    Args:
        tree_mask: ``[num_tokens]`` int64, as `tree_mask_from_parents` gives it.
        seq_lens: ``[num_reqs]`` int32, the query tokens included.
        query_start_loc: ``[num_reqs + 1]`` int32; None: one request has all tokens.

    Returns:
        ``[num_tokens]`` int64; 0 for tokens past the last request, and for those of a request of length 0.

    Raises:
        ArgumentError: shapes, dtypes or devices don't fit; where values are checked, also the tokens of
            ``query_start_loc``.
    """
    check_tensors(tree_mask=tree_mask, seq_lens=seq_lens)
    check_dims("tree_mask", tree_mask, None)
    check_dtype("tree_mask", tree_mask, torch.int64)
    index, first, inside = _index_in_request(tree_mask, query_start_loc)
    check_dims("seq_lens", seq_lens, 1 if query_start_loc is None else query_start_loc.shape[0] - 1)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_device(tree_mask.device, seq_lens=seq_lens)
    bits = torch.arange(MAX_TREE_TOKENS, device=tree_mask.device)
    depth = (((tree_mask[:, None] >> bits) & 1) * (bits < index[:, None])).sum(-1)
    # token of the batch -> its request: as many requests end at or before it
    ends = seq_lens.new_full((1,), tree_mask.shape[0]) if query_start_loc is None else query_start_loc[1:]
    token = torch.arange(tree_mask.shape[0], device=tree_mask.device)
    request = torch.searchsorted(ends.long(), token, right=True).clamp_max(seq_lens.shape[0] - 1)
    context = seq_lens.long()[request] - (ends.long()[request] - first)
    return torch.where(inside, (context + depth).clamp_min(0), 0)


def _index_in_request(per_token: Tensor, query_start_loc: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token: its number in its request, its request's first token, whether it is in any; ``[T]``."""
    token = torch.arange(per_token.shape[0], device=per_token.device)
    if query_start_loc is None:
        return token, torch.zeros_like(token), torch.ones_like(token, dtype=torch.bool)
    check_tensors(query_start_loc=query_start_loc)
    check_dims("query_start_loc", query_start_loc, None)
    check_dtype("query_start_loc", query_start_loc, torch.int32)
    check_device(per_token.device, query_start_loc=query_start_loc)
    if query_start_loc.shape[0] < 2:
        raise ArgumentError("query_start_loc", "at least one request", str(query_start_loc.shape[0] - 1))
    if reads_values(per_token.device):
        _check_starts(query_start_loc, per_token.shape[0])
    starts = query_start_loc.long()
    owner = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    first = starts[owner.clamp_max(starts.shape[0] - 2)]
    return token - first, first, owner < starts.shape[0] - 1


def _check_starts(query_start_loc: Tensor, num_tokens: int) -> None:
    first, last = int(query_start_loc[0]), int(query_start_loc[-1])
    if first != 0 or last > num_tokens or bool((query_start_loc.diff() < 0).any()):
        raise ArgumentError(
            "query_start_loc",
            f"0 first, not decreasing, at most {num_tokens} tokens",
            str(query_start_loc.tolist()),
        )


def _check_parents(parents: Tensor, index: Tensor, inside: Tensor) -> None:
    bad = inside & ((parents < -1) | (parents >= index))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise ArgumentError(
            "parents",
            f"-1, or a token before it in its request, for query token {int(index[at])}",
            f"{int(parents[at])} in row {at}",
        )
    if bool((inside & (index >= MAX_TREE_TOKENS)).any()):
        raise ArgumentError(
            "parents",
            f"at most {MAX_TREE_TOKENS} query tokens per request, which a word has bits for",
            str(int(torch.where(inside, index, 0).max()) + 1),
        )


def _ints_of(parents: Sequence[int], row: int) -> list[int]:
    """One request's parents, none of them rounded."""
    given = parents.tolist() if hasattr(parents, "tolist") else parents
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not all(is_int(parent) and abs(parent) < 2**31 for parent in given):
        raise ArgumentError(
            "tree_parents", f"a list of ints, or None, for the query tokens of row {row}", repr(parents)
        )
    return [int(parent) for parent in given]


def tree_numbers(
    tree_parents: Sequence[Sequence[int] | None], query_lens: Sequence[int], seq_lens: Sequence[int]
) -> dict[str, list[int]]:
    """What a batch of trees has in place of a chain's numbers, by name; where None was given, of a chain.

    Raises:
        ArgumentError: not one tree per request, one that is no list of ints or of another number of tokens,
            a sequence shorter than its query tokens, or what `tree_mask_from_parents` refuses.
    """
    if len(tree_parents) != len(query_lens):
        raise ArgumentError("tree_parents", f"a tree per request ({len(query_lens)})", str(len(tree_parents)))
    every: list[int] = []
    for row, (parents, query_len, seq_len) in enumerate(zip(tree_parents, query_lens, seq_lens, strict=True)):
        tree = list(range(-1, query_len - 1)) if parents is None else _ints_of(parents, row)
        if len(tree) != query_len or seq_len < query_len:
            raise ArgumentError(
                "tree_parents",
                f"a parent for each of the {query_len} query tokens of row {row}, which its {seq_len} tokens "
                "include",
                str(len(tree)),
            )
        every += tree
    if not every:
        return {"positions": [], "tree_mask": []}
    starts = [0, *itertools.accumulate(query_lens)]
    of_tokens, lens, bounds = (
        torch.tensor(numbers, dtype=torch.int32, device="cpu") for numbers in (every, seq_lens, starts)
    )
    mask = tree_mask_from_parents(of_tokens, bounds)
    return {"positions": tree_token_positions(mask, lens, bounds).tolist(), "tree_mask": mask.tolist()}
