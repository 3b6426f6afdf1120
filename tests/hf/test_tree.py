"""Trees of draft tokens through HuggingFace models: logits of each node as behind its branch alone."""

from typing import Any

import pytest
import torch
from models import tiny

from torchpaged import AttentionMetadata, BackendUnavailableError
from torchpaged.hf import PagedModel

PROMPT = [5, 17, 3, 41, 8, 60, 2, 33, 7, 19, 4]
TOKENS, PARENTS = [11, 30, 31, 12, 40, 13], [-1, 0, 0, 1, 2, 4]
BLOCKS = [3, 7, 2, 9, 5]


def _logits(paged: Any, tokens: list[int], seq_len: int, parents: list[int] | None = None) -> torch.Tensor:
    metadata = AttentionMetadata.from_lists(
        [len(tokens)], [seq_len], [BLOCKS], block_size=4, tree_parents=None if parents is None else [parents]
    )
    with torch.inference_mode():
        logits: torch.Tensor = paged(torch.tensor(tokens), metadata)
    return logits


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_each_node_is_what_its_branch_alone_is(name: str) -> None:
    """With windows that are shorter than the prompt."""
    paged = PagedModel(tiny(name), num_blocks=16, block_size=4)
    _logits(paged, PROMPT, len(PROMPT))
    tree = _logits(paged, TOKENS, len(PROMPT) + len(TOKENS), PARENTS)
    for node in range(len(TOKENS)):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        text = PROMPT + [TOKENS[i] for i in path]
        alone = _logits(paged, text, len(text))[-1]
        torch.testing.assert_close(tree[node], alone, rtol=1e-4, atol=1e-4)


def test_backends_without_trees_are_refused() -> None:
    paged = PagedModel(tiny("Llama"), num_blocks=16, block_size=4, backend="torch_sdpa")
    with pytest.raises(BackendUnavailableError, match="'torch_sdpa' cannot run this attention: tree_mask"):
        _logits(paged, TOKENS, len(TOKENS), PARENTS)
