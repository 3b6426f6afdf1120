"""The start of an engine on a GPU, with caches that are empty: all that random requests need is compiled
then."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu

#: Options, and the width of a model that no other test has, so that its kernels are new in this process.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "fused": ({"fuse": True}, 320),
    "fused, steps from Python": ({"fuse": True, "prefill_buckets": None, "mixed_steps": False}, 448),
    "fused, short graphs": ({"fuse": True, "prefill_buckets": [64]}, 576),
    "fused, no graphs": ({"fuse": True, "graphs": False}, 704),
    "parts of transformers": ({"compile": False}, 832),
    "triton": ({"fuse": True, "backend": "triton"}, 960),
}


def load(count: int) -> tuple[list[list[int]], list[Any]]:
    from torchpaged.engine import SamplingParams

    rng = random.Random(3)
    prompts = [[rng.randrange(199) for _ in range(rng.choice([2, 5, 30, 90, 300]))] for _ in range(count)]
    params = [
        SamplingParams(
            max_new_tokens=rng.randint(2, 40),
            temperature=rng.choice([0.0, 0.8]),
            top_k=rng.choice([0, 7]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            ignore_eos=True,
            seed=index,
        )
        for index in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_compiled_behind_the_start(
    make_llama: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torchpaged.engine import Generator

    monkeypatch.setenv("TORCHPAGED_CACHE", str(tmp_path / "torchpaged"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    options, width = CASES[name]
    shape = {"hidden_size": width, "intermediate_size": width * 2, "head_dim": 64}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // 64)
    model = make_llama(vocab_size=199, **shape, **heads, max_position_embeddings=512, eos_token_id=None)
    model.to("cuda", torch.bfloat16)
    sizes = {"max_batch_size": 40, "max_seq_len": 400, "prefill_chunk_size": 512}
    generator = Generator(model, **sizes, **options, warm_up=True)
    report = generator.start_report
    assert report.warmed_up
    assert report.compiled > 0
    outputs = generator.generate(*load(70))
    assert generator.stats.late_compiles == 0, str(report)
    assert all(output.finish_reason == "length" for output in outputs)
