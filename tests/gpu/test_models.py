"""HuggingFace models and the graph runner on a GPU: tokens equal eager's, one graph, no skipped
CUDA graphs."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu


@pytest.fixture
def model(make_llama: Callable[..., Any]) -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 3}
    return make_llama(vocab_size=199, **sizes, max_position_embeddings=512, eos_token_id=None).to("cuda")


def prompts() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 199, (3, 21), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "auto_compiled"])
def test_generate_equals_eager(model: Any, compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """generate() compiles the decode step on its own on a GPU (reduce-overhead), with its CUDA
    graphs kept."""
    import torchpaged.hf as hf

    inputs = prompts()
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.set_attn_implementation("eager")
    want = model.generate(**inputs, **options)
    model.set_attn_implementation("torchpaged")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # which a reset keeps
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for _ in range(2):
            cache = hf.PagedCache(model.config, 3, 64)
            got = model.generate(**inputs, **options, past_key_values=cache, disable_compile=not compiled)
            assert torch.equal(got, want)
    assert cache.choice.name == "cuda"
    assert "skipping cudagraphs" not in caplog.text
    if compiled:
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("compile", [False, True])
def test_runner_with_cuda_graphs(model: Any, compile: bool) -> None:
    """Real graphs: every bucket, every length, tokens equal eager generate()'s; replay does
    not synchronise."""
    import torchpaged.hf as hf
    from torchpaged.graphs import DecodeGraphRunner

    rows = [[5, 6, 7], [9], [11, 12, 13, 14, 15]]
    model.set_attn_implementation("eager")
    want = [
        model.generate(
            torch.tensor([r], device="cuda"), max_new_tokens=20, do_sample=False, eos_token_id=None
        )[0].tolist()
        for r in rows
    ]
    paged = hf.PagedModel(model, num_blocks=40, block_size=4)
    runner = DecodeGraphRunner(
        lambda ids, metadata: paged(ids, metadata),
        max_batch_size=4,
        max_blocks_per_req=8,
        block_size=4,
        num_blocks=40,
        buckets=[2, 4],
        device="cuda",
        compile=compile,
        debug=True,
        watch={"k_cache[0]": paged.kv_cache[0].k_cache},
    )
    runner.capture()
    before = paged.kv_cache[0].k_cache.clone()
    assert torch.equal(before, torch.zeros_like(before)), "capture wrote into the cache"
    tables = [list(range(1 + 8 * i, 9 + 8 * i)) for i in range(3)]
    tokens = [list(r) for r in rows]
    for step in range(25):
        live = [i for i in range(3) if step < len(want[i]) - 1]
        if not live:
            break
        logits = runner.run(
            [tokens[i][step] for i in live], [step + 1] * len(live), [tables[i] for i in live]
        )
        for row, i in enumerate(live):
            if step >= len(rows[i]) - 1:
                tokens[i].append(int(logits[row].argmax()))
    assert tokens == want
    assert all(report.hits for report in runner.report())
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.replay(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_that_synchronises_is_named() -> None:
    from torchpaged import CaptureError
    from torchpaged.graphs import DecodeGraphRunner

    runner = DecodeGraphRunner(
        lambda ids, metadata: ids * int(metadata.seq_lens.max()),
        max_batch_size=2,
        max_blocks_per_req=2,
        block_size=4,
        device="cuda",
        compile=False,
        warmup_iters=0,
    )
    stream = torch.cuda.current_stream()
    with pytest.raises(CaptureError, match="bucket 2"):
        runner.capture()
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    torch.empty(2**30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == held, "the allocator must survive a failed capture"
    assert runner.run_eager([7], [3], [[1]]).tolist() == [21]
    assert torch.randn(3, device="cuda").isfinite().all(), (
        "the default generator must survive a failed capture"
    )
