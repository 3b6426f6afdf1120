"""Batches whose query tokens are trees, and the same branches as requests of their own.

batch = make_tree_batch(TREE_SPECS["tree_mixed"], dtype=torch.bfloat16)
branches, rows = branches_of(batch)
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.testing.batches import Batch, BatchSpec, make_batch, on_host

#: Kinds of trees that `random_parents` draws.
TREE_KINDS = ("random", "chain", "star", "deep")


def random_parents(count: int, seed: int, kind: str = "random") -> tuple[int, ...]:
    """Parents of a tree of ``count`` tokens.

    Args:
        count: at most 64.
        seed: of the draw.
        kind: "random", each token continues any before it or the context; "chain"; "star", all continue the
            context; "deep", each continues one of the last three.
    """
    r = random.Random(f"{kind}/{seed}/{count}")
    least = {"random": lambda i: -1, "chain": lambda i: i - 1, "star": lambda i: -1, "deep": lambda i: i - 3}
    if kind == "star":
        return (-1,) * count
    return tuple(r.randint(max(least[kind](i), -1), i - 1) for i in range(count))


def words_of(parents: Sequence[int]) -> list[int]:
    """The words of one request's tree, token by token, as signed 64-bit numbers."""
    words: list[int] = []
    for token, parent in enumerate(parents):
        words.append(1 << token | (words[parent] if parent >= 0 else 0))
    return [word - (1 << 64) if word >> 63 else word for word in words]


@dataclass(frozen=True)
class TreeSpec(BatchSpec):
    """A batch whose requests' query tokens are trees: ``parents`` of each request's."""

    parents: tuple[tuple[int, ...], ...] = ()


def tree_spec(name: str, contexts: tuple[int, ...], trees: tuple[Any, ...], **padding: int) -> TreeSpec:
    """The spec of these trees, each behind a context of so many tokens.

    Args:
        name: of the spec.
        contexts: of each request.
        trees: of each request its parents, or ``(count, seed, kind)`` for `random_parents`.
        padding: ``padded_tokens``, ``padded_reqs``.
    """
    parents = tuple(
        random_parents(*tree) if len(tree) == 3 and isinstance(tree[2], str) else tuple(tree)
        for tree in trees
    )
    lens = tuple(len(tree) for tree in parents)
    return TreeSpec(name, tuple(map(sum, zip(contexts, lens, strict=True))), lens, **padding, parents=parents)


_SPECS = (
    tree_spec("tree_small", (33, 12, 0), ((7, 0, "random"), (5, 1, "random"), (8, 2, "random"))),
    tree_spec("tree_chain", (20, 3), ((6, 0, "chain"), (4, 0, "star"))),
    tree_spec(
        "tree_mixed",
        (42, 31, 77, 0),
        ((8, 3, "random"), (-1,), (-1, -1, 0), (-1,)),
        padded_tokens=2,
        padded_reqs=1,
    ),
    tree_spec("tree_uneven", (50, 21, 130), ((17, 4, "random"), (3, 9, "random"), (33, 5, "deep"))),
    tree_spec("tree_full", (100, 5), ((64, 6, "random"), (64, 7, "deep"))),
)
TREE_SPECS: dict[str, TreeSpec] = {spec.name: spec for spec in _SPECS}


def make_tree_batch(spec: TreeSpec, **options: Any) -> Batch:
    """`make_batch` with the trees' ``tree_mask`` among the extras; padding tokens have words of garbage."""
    batch = make_batch(spec, **options)
    words = [word for parents in spec.parents for word in words_of(parents)]
    words += [0x5A5A5A5A5A5A5A5A] * spec.padded_tokens
    return replace(
        batch,
        extras=batch.extras | {"tree_mask": torch.tensor(words, dtype=torch.int64, device=batch.q.device)},
    )


@on_host()
def branches_of(batch: Batch) -> tuple[Batch, Tensor]:
    """Each query token's branch as a request of its own, without a tree.

    Args:
        batch: from `make_tree_batch`.

    Returns:
        A batch of one request per query token, which has the context and then the token and its ancestors in
        order, all of which are its query tokens; and of each token of ``batch`` the row of that batch which
        must come out like it, ``[num_tokens without padding]`` int64.
    """
    spec = batch.spec
    assert isinstance(spec, TreeSpec), "a batch of make_tree_batch"
    cpu = batch.to("cpu")
    size, pools = cpu.k_cache.shape[1], (cpu.k_cache, cpu.v_cache)
    paths: list[tuple[int, int, list[int]]] = []  # request, first token, the branch's tokens of it
    starts = cpu.query_start_loc.tolist()
    for request, parents in enumerate(spec.parents):
        for token in range(len(parents)):
            path = [token]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            paths.append((request, starts[request], path))
    contexts = [spec.seq_lens[r] - spec.query_lens[r] for r in range(len(spec.parents))]
    lens = tuple(contexts[request] + len(path) for request, _, path in paths)
    alone = make_batch(
        BatchSpec(f"{spec.name}_branches", lens, tuple(len(path) for *_, path in paths)),
        num_heads=cpu.q.shape[1],
        num_kv_heads=cpu.k_cache.shape[2],
        head_dim=cpu.q.shape[2],
        head_dim_v=cpu.v_cache.shape[3],
        block_size=size,
        dtype=cpu.q.dtype,
        kv_dtype=cpu.k_cache.dtype,
    )
    # numbers can't be put into an fp8 tensor by index
    own = tuple(pool.to(torch.float32, copy=True) for pool in (alone.k_cache, alone.v_cache))
    for row, (request, first, path) in enumerate(paths):
        keys = torch.tensor([*range(contexts[request]), *(contexts[request] + token for token in path)])
        at = torch.arange(len(keys))
        read = cpu.block_table[request].long()[keys // size], keys % size
        written = alone.block_table[row].long()[at // size], at % size
        for pool, copy in zip(pools, own, strict=True):
            copy[written] = pool[read].float()
        begin = int(alone.query_start_loc[row])
        alone.q[begin : begin + len(path)] = cpu.q[[first + token for token in path]]
    k_cache, v_cache = (copy.to(cpu.k_cache.dtype) for copy in own)
    kept = {name: value for name, value in cpu.extras.items() if name != "tree_mask"}
    rows = alone.query_start_loc[1 : len(paths) + 1].long() - 1
    branches = replace(alone, k_cache=k_cache, v_cache=v_cache, scale=cpu.scale, extras=kept)
    return branches.to(batch.q.device), rows.to(batch.q.device)
