"""Speculative decoding with a tree of drafts: one step verifies every branch, and the tokens stay the model's
own.

The drafts come from the text so far: what followed each earlier occurrence of the last token (prompt lookup).
Where occurrences went on differently the tree branches. The last token is the tree's root; its logits, and
those of every draft, come out of one replay of one graph, whatever the tree looks like.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchpaged import PagedKVCache
from torchpaged.cache import BlockPool
from torchpaged.graphs import PackedGraphRunner
from torchpaged.hf import PagedModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, MOST_TOKENS, DEPTH = 4, 8, 4


def draft_tree(text: Sequence[int]) -> tuple[list[int], list[int]]:
    """``(tokens, parents)``: the last token, then what followed it before, the latest occurrence first."""
    tokens, parents = [text[-1]], [-1]
    for place in range(len(text) - 2, -1, -1):
        if text[place] != text[-1]:
            continue
        node = 0
        for token in text[place + 1 : place + 1 + DEPTH]:
            known = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == token]
            if not known and len(tokens) == MOST_TOKENS:
                break
            if not known:
                tokens.append(token)
                parents.append(node)
            node = known[0] if known else len(tokens) - 1
    return tokens, parents


def accept(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[list[int], int]:
    """``(path, next token)``: from the root down as long as a draft is what the model says; ``best``: of each
    node, the token that the model puts behind it."""
    path = [0]
    while True:
        token = best[path[-1]]
        drafts = [i for i, parent in enumerate(parents) if parent == path[-1] and tokens[i] == token]
        if not drafts:
            return path, token
        path.append(drafts[0])


def keep(kv_cache: PagedKVCache, blocks: Sequence[int], context: int, path: Sequence[int]) -> None:
    """Move the keys and values of an accepted path to where its positions belong: node ``path[d]`` was
    written behind the context as query token ``path[d]``, and is token ``d`` there."""
    to = torch.arange(context, context + len(path), device=DEVICE)
    of = torch.tensor([context + node for node in path], device=DEVICE)
    table = torch.tensor(blocks, device=DEVICE)
    for layer in kv_cache:
        for pool in (layer.k_cache, layer.v_cache):
            pool[table[to // BLOCK], to % BLOCK] = pool[table[of // BLOCK], of % BLOCK]


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().to(DEVICE)
    prompt = [5, 17, 3, 5, 17, 9, 5]
    inputs = torch.tensor([prompt], device=DEVICE)
    want = model.generate(inputs, max_new_tokens=40, do_sample=False)[0].tolist()

    paged = PagedModel(model, num_blocks=64, block_size=BLOCK)
    runner = PackedGraphRunner(
        paged,
        buckets=[MOST_TOKENS],
        max_num_reqs=MOST_TOKENS,  # as many logits of a step
        max_blocks_per_req=16,
        block_size=BLOCK,
        num_blocks=paged.kv_cache.num_blocks,
        max_query_len=MOST_TOKENS,
        trees=True,
        device=DEVICE,
    )
    runner.capture()
    blocks = BlockPool(paged.kv_cache.num_blocks).allocate(16)
    text, steps = list(prompt), 0
    # the prompt but its last token, which is the first tree's root
    runner.run(prompt[:-1], [len(prompt) - 1], [len(prompt) - 1], [blocks], [0])
    while len(text) < len(want):
        tokens, parents = draft_tree(text)
        context, nodes = len(text) - 1, range(len(tokens))
        logits = runner.run(
            tokens, [len(tokens)], [context + len(tokens)], [blocks], list(nodes), tree_parents=[parents]
        )
        path, token = accept(tokens, parents, logits.argmax(-1).tolist())
        keep(paged.kv_cache, blocks, context, path)
        text += [*(tokens[node] for node in path[1:]), token]
        steps += 1
    assert text[: len(want)] == want, "the model's own tokens"
    made = len(text) - len(prompt)
    assert steps < made, "some drafts were accepted"
    print(f"{made} tokens in {steps} steps of up to {MOST_TOKENS} tokens, one graph")


if __name__ == "__main__":
    main()
