"""The options of a Generator: fused models, what is compiled and captured, and why; what is refused,
by name."""

import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import transformers

import torchpaged.hf as hf
from torchpaged import ArgumentError, BackendUnavailableError, UnsupportedModelError
from torchpaged.backends import AttentionSpec, select_backend
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.decisions import decide_compile, decide_graphs
from torchpaged.engine.outputs import GeneratorStats
from torchpaged.fuse import FusionReport
from torchpaged.fuse.fusible import PASSES
from torchpaged.graphs.capture import EagerCapture

PROMPTS = [[5, 6, 7], [9], list(range(11, 30))]
SAMPLING = SamplingParams(max_new_tokens=9)


@pytest.fixture()
def model(make_llama: Callable[..., Any]) -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96}
    return make_llama(**sizes, max_position_embeddings=128, eos_token_id=None)


@pytest.fixture()
def partly() -> Any:
    """The report of a model that `fuse` could not fuse everywhere."""
    report = FusionReport("Some", 2, PASSES)
    report.note("qkv", "layers.0", None)
    report.note("qkv", "layers.1", "has an adapter")
    return report


def tokens(generator: Generator) -> list[list[int]]:
    return [output.token_ids for output in generator.generate(PROMPTS, SAMPLING)]


@pytest.mark.parametrize(
    "options", [{"steps_per_launch": 1}, {"steps_per_launch": 4}, {"graphs": False}], ids=str
)
def test_fused_generator_gives_the_same_tokens(model: Any, options: dict[str, Any]) -> None:
    plain = Generator(model, block_size=4, max_batch_size=2)
    want = tokens(plain)
    assert plain.fusion_report is None
    assert hf.fusion_of(model) is None
    fused = Generator(model, block_size=4, max_batch_size=2, fuse=True, **options)
    assert tokens(fused) == want
    report = fused.fusion_report
    assert report is not None
    assert report is hf.fusion_of(model)
    assert report.complete
    assert report.replaced["qkv"] == ["layers.0", "layers.1"]
    again = Generator(model, block_size=4, max_batch_size=2, fuse=True)  # fused already: taken as it is
    assert again.fusion_report is report
    assert tokens(again) == want
    hf.unfuse(model)
    assert hf.fusion_of(model) is None


def test_an_engine_that_is_dropped_holds_no_fusion(model: Any) -> None:
    dropped, closed = (Generator(model, block_size=4, max_batch_size=2, fuse=True) for _ in range(2))
    tokens(dropped)
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None
    assert hf.fusion_of(model) is closed.fusion_report
    twin = copy.deepcopy(model)
    closed.close()
    assert hf.fusion_of(model) is None
    Generator(twin, block_size=4, max_batch_size=2, fuse=True).close()
    assert hf.fusion_of(twin) is not None, "it was fused before"


@pytest.mark.parametrize("value", [1, 0, numpy.True_, "x"], ids=repr)
def test_a_fuse_switch_that_is_no_bool(model: Any, value: Any) -> None:
    """`Generator`, `accelerate` and the ``count`` of `fuse`; nothing is done to the model."""
    with pytest.raises(ArgumentError, match="^fuse: expected True or False, got "):
        Generator(model, fuse=value)
    with pytest.raises(ArgumentError, match="^fuse: expected True, False or 'auto', got "):
        hf.accelerate(model, fuse=value)
    with pytest.raises(ArgumentError, match="^count: expected True or False, got "):
        hf.fuse(model, count=value)
    assert hf.fusion_of(model) is None
    assert model.config._attn_implementation != "torchpaged"


def test_passes_that_are_no_sequence(model: Any) -> None:
    for passes in (3, "qkv", [1], True):
        with pytest.raises(ArgumentError, match="^passes: expected a sequence of qkv"):
            hf.fuse(model, passes=passes)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("other", ["sdpa", "eager", "flex_attention"])
def test_another_attention_implementation_behind_a_generator(
    model: Any, fuse: bool, graphs: bool, other: str
) -> None:
    """It would take the pools for keys and values."""
    generator = Generator(model, max_batch_size=2, max_seq_len=64, fuse=fuse, graphs=graphs)
    want = tokens(generator)
    model.set_attn_implementation(other)
    words = f"^attn_implementation: expected 'torchpaged' .*, got '{other}'; call model.set_attn_impl"
    with pytest.raises(ArgumentError, match=words):
        generator.generate(PROMPTS, SAMPLING)
    model.set_attn_implementation("torchpaged")
    assert tokens(generator) == want


def _of(name: str) -> Any:
    """Models that the engine refuses once it has looked at their layers, and hybrids."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, dict[str, Any]] = {
        "Bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
        "Lfm2": {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
        "DeepseekV3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    }
    config = getattr(transformers, f"{name}Config")(**sizes, intermediate_size=64, **more[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _set(model: Any) -> Any:
    """What paging sets of a model."""
    implementation = model.config._attn_implementation
    return implementation, [module.training for module in model.modules()], hf.fusion_of(model)


@pytest.mark.parametrize("name", ["Bamba", "Lfm2", "DeepseekV3", "OPT"])
def test_a_refused_model_stays_as_it_was(name: str) -> None:
    model = _of(name)
    model.set_attn_implementation("eager")
    before = _set(model)
    doors: list[Any] = [
        lambda: hf.PagedModel(model, num_blocks=1),
        lambda: hf.PagedModel(model, num_blocks=8, backend="nope"),
        lambda: hf.accelerate(model, max_seq_len=32, lookahead=0, steps_per_launch=2, graphs=False),
        lambda: Generator(model, max_seq_len=32, fuse=True, steps_per_launch=2, graphs=False),
    ]
    for door in doors:
        with pytest.raises((ArgumentError, UnsupportedModelError, BackendUnavailableError)):
            door()
        assert _set(model) == before


def test_what_accelerate_sets_comes_back(model: Any) -> None:
    model.set_attn_implementation("eager")
    model.train()
    before = _set(model)
    hf.accelerate(model, max_seq_len=32, fuse=True)
    assert _set(model) != before
    assert hf.fusion_of(model) is not None
    hf.unaccelerate(model)
    assert _set(model) == before
    hf.fuse(model)
    hf.accelerate(model, max_seq_len=32, fuse=True)
    model.set_attn_implementation("sdpa")  # of the caller's own choice
    hf.unaccelerate(model)
    assert model.config._attn_implementation == "sdpa"
    assert hf.fusion_of(model) is not None


def test_a_paged_model_is_not_fused(model: Any) -> None:
    paged = hf.PagedModel(model, num_blocks=40, block_size=4)
    with pytest.raises(
        ArgumentError, match=r"fuse: expected False.*PagedModel.*torchpaged\.hf\.fuse\(model\)"
    ):
        Generator(paged, fuse=True)
    assert hf.fusion_of(model) is None
    report = hf.fuse(model, passes=("qkv",))
    generator = Generator(paged)
    assert generator.fusion_report is report
    assert not report.complete


def test_the_report_as_data(model: Any) -> None:
    import json

    data = json.loads(json.dumps(hf.fuse(model).to_dict()))
    assert data["complete"]
    assert data["replaced"]["lm_head"] == ["lm_head"]
    assert data["skipped"] == {}
    assert data["launches"]["after"]["layers"] == [6, 6]
    assert data["launches"]["before"]["layers"][0] > 20
    hf.unfuse(model)
    assert hf.fuse(model, count=False).to_dict()["launches"] == {"before": None, "after": None}


def test_what_is_compiled_and_why(model: Any, partly: Any) -> None:
    full = hf.fuse(model)

    def decide(compile: bool | str, on_gpu: bool = True, fusion: Any = None) -> tuple[bool, str]:
        return decide_compile(compile, on_gpu, True, "", fusion)

    assert decide("auto") == (True, "automatic: on a GPU")
    assert decide("auto", fusion=full)[0] is False
    assert "fully fused" in decide("auto", fusion=full)[1]
    assert decide("auto", fusion=partly)[0] is True
    assert "left parts" in decide("auto", fusion=partly)[1]
    assert decide("auto", on_gpu=False) == (False, "automatic: eager on a CPU")
    assert decide(True, fusion=full) == (True, "compile=True was given")
    assert decide(False)[0] is False
    assert decide_compile("auto", True, False, "", None)[0] is False
    assert Generator(model, block_size=4).compile_reason == "automatic: eager on a CPU"


def test_a_partial_choice_of_passes_is_not_complete(model: Any) -> None:
    assert not hf.fuse(model, passes=("qkv", "rope")).complete


def test_graphs_and_why() -> None:
    spec = AttentionSpec(
        device=torch.device("cpu"), dtype=torch.float32, head_dim=64, num_heads=4, num_kv_heads=2
    )
    never = select_backend(spec, "reference")
    assert decide_graphs("auto", never, on_gpu=False) == (True, "eager capture on a CPU")
    assert decide_graphs("auto", never, on_gpu=True) == (
        False,
        "backend 'reference' declares graph support NEVER",
    )
    assert decide_graphs(False, never, on_gpu=True) == (False, "switched off by graphs=False")
    with pytest.raises(BackendUnavailableError, match="graphs=True: backend 'reference'"):
        decide_graphs(True, never, on_gpu=True)


def test_capturing_ahead_or_on_first_need(model: Any) -> None:
    seen: list[tuple[int, int]] = []
    options: dict[str, Any] = {"block_size": 4, "max_batch_size": 4, "buckets": [1, 2, 4]}
    ahead = Generator(
        model, **options, capture_ahead=True, progress=lambda done, total, _: seen.append((done, total))
    )
    assert seen == [(1, 3), (2, 3), (3, 3)] and all(report.captured for report in ahead.runner.report())  # type: ignore[union-attr]
    for later in (Generator(model, **options, capture_ahead=False), Generator(model, **options)):
        assert not any(report.captured for report in later.runner.report())  # type: ignore[union-attr]
        assert tokens(later) == tokens(ahead)
        assert [report.captured for report in later.runner.report()] == [
            report.hits > 0 for report in later.runner.report()
        ]  # type: ignore[union-attr]


def bad_options() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"graphs": False, "compile": True}, "compile: expected False or 'auto' without graphs"
    yield (
        {"graphs": False, "steps_per_launch": 4},
        "steps_per_launch: expected 1 without graphs, got 4.*graphs=False",
    )
    yield {"graphs": False, "buckets": [8]}, r"buckets: expected None without graphs, got \[8\].*graphs=False"
    yield (
        {"graphs": False, "capture": EagerCapture()},
        "capture: expected 'auto' without graphs, got <.*graphs=False",
    )
    yield {"graphs": False, "capture_ahead": True}, "capture_ahead: expected 'auto' or False without graphs"
    yield {"block_size": 0}, "block_size: expected at least 1"
    yield {"max_seq_len": 500}, "max_seq_len: expected 2 to 128"
    yield {"max_seq_len": "64"}, "max_seq_len: expected None or an integer"
    for blocks in (9.5, 1, -1):
        yield {"num_blocks": blocks}, "num_blocks: expected None or an integer of at least 2"
    yield {"steps_per_launch": 129}, "steps_per_launch: expected at most max_seq_len, 128.* got 129"
    for graphs in ("auto", False):  # said, though nothing would be captured
        yield {"capture": 3, "graphs": graphs}, "capture: expected 'auto' or a CaptureBackend, got 3"
        yield (
            {"capture": "cuda", "graphs": graphs},
            "capture: expected 'auto' or a CaptureBackend, got 'cuda'",
        )
        yield {"progress": 3, "graphs": graphs}, r"progress: expected a function, .*total, text\), .* got 3"
    yield {"lookahead": -1}, "lookahead: expected at least 0, got -1"
    yield {"lookahead": 1.5}, "lookahead: expected an integer of at least 0, got 1.5"
    for tokenizer in (3, "gpt2", len):
        yield {"tokenizer": tokenizer}, "tokenizer: expected a tokenizer, .*, got "
    # 1 and 0 equal True and False, and are neither where code asks with ``is``
    for name in ("compile", "graphs", "capture_ahead", "share_prefixes", "prefix_cache", "rolling"):
        for value in (1, 0, numpy.bool_(True), None, "yes"):
            yield {name: value}, f"{name}: expected True, False or 'auto', got "
    for value in (1, 0, numpy.bool_(True), None, "auto"):
        yield {"cascade": value}, "cascade: expected True, False or CascadeCosts, got"
    for buckets in (3, "yes"):
        yield {"prefill_buckets": buckets}, "prefill_buckets: expected numbers of tokens, None or 'auto', got"
    for size in (3.5, 0, 65):
        given = {"prefill_buckets": [size], "prefill_chunk_size": 16}
        yield given, "prefill_buckets: expected numbers of tokens from 1 to 64, 4 x prefill_chunk_size"
    yield {"prefill_buckets": [8], "graphs": False}, "prefill_buckets: expected None or 'auto' without graphs"
    yield {"buckets": 3}, "buckets: expected batch sizes of at least 1, the largest 8 .* got 3"
    yield {"buckets": "8"}, "buckets: expected batch sizes"
    yield {"buckets": [1.5, 8]}, "buckets: expected batch sizes"
    yield {"checkpoint_every": 6}, "checkpoint_every: expected None, or a multiple of the block size, 16"
    yield {"buckets": [1, 2]}, "buckets: expected .* the largest 8"


def name(given: object) -> str:
    """Of a case: workers of a run must agree, so no addresses of objects."""
    return re.sub(r"<(\S+) object at 0x\w+>", r"\1", str(given))


@pytest.mark.parametrize(("options", "words"), list(bad_options()), ids=name)
def test_refusals(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Generator(model, **options)


def test_seconds_of_mixed_steps() -> None:
    stats = GeneratorStats(num_blocks=1)
    stats.add_step(2.0, None, decoded=4, prefilled=0)
    stats.add_step(3.0, None, decoded=0, prefilled=5)
    stats.add_step(10.0, None, decoded=1, prefilled=4)  # by tokens
    stats.add_step(10.0, 7.0, decoded=1, prefilled=4)  # as measured
    assert (stats.decode_seconds, stats.prefill_seconds) == (2.0 + 2.0 + 7.0, 3.0 + 8.0 + 3.0)
    assert (stats.decode_tokens, stats.prefill_tokens, stats.steps) == (6, 13, 4)


def test_an_unknown_option_is_refused_in_the_callers_words(model: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'") as refused:
        Generator(model, bogus=1)  # type: ignore[call-arg]
    assert "GeneratorOptions" not in str(refused.value)
