"""Biases, log probabilities and a processor in CUDA graphs: the results of the engine without graphs, and no
synchronisation."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")
from torchpaged.engine import Generator, LogitsRows, SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 6, 7], [9], list(range(11, 240)), [50, 51, 52, 53], list(range(20, 60))]


def favour(logits: Tensor, rows: LogitsRows) -> Tensor:
    """Adds ``extra_args[0]`` to the token behind the newest one."""
    token = torch.arange(logits.shape[1], device=logits.device)
    return logits + rows.extra_args[:, :1] * (token == rows.last_token_ids[:, None] + 1)


def make(model: Any, **options: Any) -> Generator:
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 512, "compile": False}
    stage: dict[str, Any] = {"max_extra_args": 1, "max_logit_bias": 4, "max_logprobs": 3}
    return Generator(model, **sizes, **stage, logits_processor=favour, **options)


def requests() -> list[SamplingParams]:
    more: list[dict[str, Any]] = [
        {"logprobs": 3},
        {"extra_args": (1.0,), "temperature": 0.9},
        {"logit_bias": {40: 2.0, 7: float("-inf")}, "logprobs": 1},
        {"min_new_tokens": 30, "stop_token_ids": (60, 61, 62)},
        {"extra_args": (0.5,), "logprobs": 0, "temperature": 0.7},
    ]
    return [SamplingParams(max_new_tokens=40, seed=i, **given) for i, given in enumerate(more)]


@pytest.mark.parametrize("options", [{}, {"steps_per_launch": 4}, {"fuse": True}], ids=str)
def test_graphs_give_what_steps_without_them_give(model: Any, options: dict[str, Any]) -> None:
    want = make(model, graphs=False, **{k: v for k, v in options.items() if k == "fuse"})
    got = make(model, **options)
    assert got.stats.late_compiles == 0
    for a, b in zip(*(each.generate(PROMPTS, requests()) for each in (got, want)), strict=True):
        assert a.token_ids == b.token_ids
        assert (a.logprobs is None) == (b.logprobs is None)
        for mine, other in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert mine.keys() == other.keys()
            assert all(abs(mine[token] - other[token]) < 1e-3 for token in mine)


@pytest.mark.parametrize("steps", [1, 4])
def test_nothing_waits_for_the_device(model: Any, steps: int) -> None:
    generator = make(model, steps_per_launch=steps)
    generator.generate(PROMPTS, requests())  # kernels are loaded before the watch begins
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = generator.generate(PROMPTS, requests())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(o.token_ids) for o in outputs if o.logprobs is None] == [40, 40]
