"""Profiles on a GPU: every kernel of a replayed graph finds its module, and traces carry the
engine's ranges."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu

LAYERS = 3


@pytest.fixture
def model(make_llama: Callable[..., Any]) -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": LAYERS}
    model = make_llama(vocab_size=199, **sizes, max_position_embeddings=512, eos_token_id=None)
    return model.to("cuda", torch.bfloat16)


def make(model: Any, compile: bool, **options: Any) -> Any:
    from torchpaged.engine import Generator

    return Generator(model, max_batch_size=4, buckets=[4], max_seq_len=128, compile=compile, **options)


@pytest.mark.parametrize("steps_per_launch", [1, 2])
def test_all_kernels_of_a_replay_find_their_modules(model: Any, steps_per_launch: int) -> None:
    """Rows are idle: padding runs the same kernels."""
    from torchpaged.profiling.kernel_report import kernels_per_layer, layer_groups

    generator = make(model, False, steps_per_launch=steps_per_launch)
    runner = generator.runner
    report = kernels_per_layer(lambda: runner.launch_eager(4), model, lambda: runner.replay(4))
    assert report.kind == "kernel", (report.rows.unmatched, report.missing)
    assert report.is_complete, (report.rows.unmatched, report.missing)
    groups = [group for group in layer_groups(report) if group.indices]
    assert [group.name for group in groups] == [f"model.layers.0-{LAYERS - 1}"]
    modules = report.rows.modules
    for layer in range(LAYERS):
        assert modules[f"model.layers.{layer}.mlp.down_proj"].total.count >= steps_per_launch
        assert any("decode" in name or "paged" in name for name in modules[f"model.layers.{layer}.self_attn"])
    assert report.rows.total.total_us > 0


def test_a_compiled_replay_says_what_it_can_not_place(model: Any) -> None:
    """Inductor's fused kernels have no counterpart in the eager step; the attention kernels have."""
    from torchpaged.profiling.kernel_report import kernels_per_layer

    generator = make(model, True)
    runner = generator.runner
    eager = kernels_per_layer(lambda: runner.launch_eager(4), model)
    report = kernels_per_layer(lambda: runner.launch_eager(4), model, lambda: runner.replay(4))
    assert report.rows.unmatched
    assert report.missing
    assert report.rows.total.count < eager.rows.total.count
    modules = report.rows.modules
    assert all(modules[f"model.layers.{layer}.self_attn"].total.count >= 1 for layer in range(LAYERS))


def test_a_compiled_capture_has_the_ranges_of_attention(model: Any) -> None:
    """Twice while it warms up, once while it is captured, each layer by its index."""
    from torchpaged import profiling

    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        profiling.recorded(),
    ):
        generator = make(model, True, prefill_buckets=None)
        generator.runner.capture()
    events = [event for event in profiler.events() if event.name.startswith(("attention", "capture"))]
    (capture,) = (event.time_range for event in events if event.name == "capture padded=4")
    inside = sorted(
        (event.time_range.start, event.name)
        for event in events
        if event.name.startswith("attention")
        and capture.start <= event.time_range.start
        and event.time_range.end <= capture.end
    )
    assert [name for _, name in inside] == [f"attention layer={layer}" for layer in range(LAYERS)] * 3


@pytest.mark.parametrize("prefill_buckets", [None, [16]], ids=["prefill-from-python", "prefill-graph"])
def test_a_trace_of_a_generation(model: Any, tmp_path: Path, prefill_buckets: list[int] | None) -> None:
    """Ranges of the host, kernels of the graphs, all of them placed; attention ranges inside the steps that
    run as Python."""
    from torchpaged import profiling
    from torchpaged.engine import SamplingParams
    from torchpaged.profiling.kernel_report.attribute import kernels_of_generation
    from torchpaged.profiling.kernel_report.trace import module_ranges, read_trace

    generator = make(model, False, prefill_buckets=prefill_buckets)
    path = tmp_path / "out.json"
    with profiling.trace(path), module_ranges(model):
        generator.generate([[5, 6, 7], [9, 8]], SamplingParams(max_new_tokens=6))
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert ("attention layer=0" in names) == (prefill_buckets is None)
    assert any(name.startswith("replay batch=2 padded=4") for name in names)
    assert any(name.startswith("prefill batch=2 tokens=5 padded=16") for name in names) == (
        prefill_buckets is not None
    )

    def prefill(num_reqs: int, num_tokens: int) -> None:
        runners = (runner for runner in generator.prefill_runners if runner.fits(num_reqs, num_tokens))
        next(runners).launch_padding(num_tokens)

    reports = kernels_of_generation(read_trace(path), model, generator.runner.launch_eager, prefill)
    assert not reports["decode"].rows.unmatched, reports["decode"].rows.unmatched
    assert not reports["decode"].missing, reports["decode"].rows.unmatched
    assert not reports["prefill"].rows.unmatched
    assert "lm_head" in reports["prefill"].rows.modules
    replays = sum(name.startswith("replay") for name in names)
    decode = reports["decode"].rows.modules
    assert reports["decode"].steps == replays
    assert decode["model.layers.1.mlp.up_proj"].total.count % replays == 0
