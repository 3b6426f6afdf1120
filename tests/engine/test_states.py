"""The engine over hybrid models, whose layers keep a state per request: eager's tokens every way, slots that
are used again, and what is refused."""

import copy
import pickle
from typing import Any

import pytest
import torch
from engine_requests import interrupt_a_read
from model_coverage.architectures import model_of
from model_coverage.hybrids import HYBRIDS, poison

from torchpaged import ArgumentError, AttentionMetadata, UnsupportedModelError
from torchpaged.backends import Limits
from torchpaged.cache import StateLayerSpec
from torchpaged.cache.checkpoints import CheckpointedPrefixCache
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, PagedModel, accelerate, attach, detach, unaccelerate
from torchpaged.hf.families import family_of
from torchpaged.hf.packed_mixers import is_packed, mixers_of
from torchpaged.hf.packed_state import PackedState

PROMPTS = [[(7 * i + 3 * j) % 90 + 5 for j in range(length)] for i, length in enumerate((5, 23, 1, 40, 12))]
SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True)
KEPT: dict[str, Any] = {"num_checkpoints": 16, "checkpoint_every": 8}
SIZES: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 64, "block_size": 4}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "launches of 3": {"steps_per_launch": 3, "prefill_buckets": [12], "prefill_chunk_size": 12},
    "one by one": {"graphs": False, "prefill_chunk_size": 7},
    "passes apart": {"mixed_steps": False, "prefill_chunk_size": 12},
    "warmed up": {"warm_up": True, "capture_ahead": True},
    "tokens alone": {"prefill_chunk_size": 1},
    "short of blocks": {"num_blocks": 19},
    "fused": {"fuse": True},
    "compiled": {"compile": True, "buckets": [3]},
    "invariant": {"batch_invariant": True},
}
_want: dict[str, list[list[int]]] = {}


def make(name: str) -> Any:
    model = model_of(name).eval()
    model.generation_config.eos_token_id = None
    return attach(model) if family_of(name).caches_latents else model


def eager(name: str) -> list[list[int]]:
    """Greedy tokens of transformers' own states, one request at a time."""
    if name not in _want:
        model = make(name)
        if family_of(name).caches_latents:
            detach(model)
        options = {"max_new_tokens": SAMPLING.max_new_tokens, "do_sample": False, "pad_token_id": 0}
        outs = [model.generate(torch.tensor([prompt]), **options)[0] for prompt in PROMPTS]
        _want[name] = [out[len(prompt) :].tolist() for out, prompt in zip(outs, PROMPTS, strict=True)]
    return _want[name]


def tokens(generator: Generator) -> list[list[int]]:
    return [output.token_ids for output in generator.generate(PROMPTS, SAMPLING)]


def poison_free(generator: Generator) -> None:
    """NaN wherever no checkpoint is."""
    prefixes, kept = generator.prefix_cache, list[int]()
    if isinstance(prefixes, CheckpointedPrefixCache):
        kept = [SIZES["max_batch_size"] + 1 + place for place in prefixes.checkpoints.values()]
    poison(generator.model._cache.states, kept)


@pytest.mark.slow_cases("qwen3_next-compiled")
@pytest.mark.slow_cases(but=("*-graphs", "qwen3_next-*", "mamba-compiled", "bamba-short*", "lfm2-launches*"))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_way_gives_eager_tokens(name: str, way: str) -> None:
    """Prompts in chunks, more requests than rows, rows that move, requests that are put back, slots that
    others had."""
    if way == "invariant" and family_of(name).caches_latents:
        pytest.skip("no backend declares batch invariance over latents")
    generator = Generator(make(name), **SIZES | KEPT | WAYS[way])
    assert generator.model.rings is not None
    for _ in range(2):
        poison_free(generator)
        assert tokens(generator) == eager(name)
    assert generator.model.rings.num_used == 0
    assert bool(generator.stats.preemptions) == (way == "short of blocks")
    if way != "short of blocks":  # where those that a request finds when it begins again are not counted
        assert bool(generator.stats.shared_tokens) == (way != "invariant")


def test_nothing_of_a_prefix_is_shared_or_kept_without_checkpoints() -> None:
    """And why is said: blocks alone are not what a request left behind."""
    generator = Generator(make("lfm2"), **SIZES, num_checkpoints=0)
    assert generator.prefix_cache_reason == (
        "layers keep a state per request, which is that of its last token alone, and no copies of it "
        "(num_checkpoints=0)"
    )
    prompts = [PROMPTS[3], PROMPTS[3], PROMPTS[3][:30]]
    first = [output.token_ids for output in generator.generate(prompts, SAMPLING)]
    assert first[:2] == [eager("lfm2")[3]] * 2
    assert [output.token_ids for output in generator.generate(prompts, SAMPLING)] == first


def test_memory_is_that_of_the_requests() -> None:
    """A slot per request and the void one, in every layer that keeps states, in float32; and as many as
    there are checkpoints."""
    cache = Generator(make("qwen3_next"), **SIZES, num_checkpoints=5).model.kv_cache
    specs = [cache.layers[layer] for layer in cache.per_request]
    assert all(isinstance(spec, StateLayerSpec) for spec in specs)
    assert [pools.state.dtype for pools in cache if hasattr(pools, "state")] == [torch.float32] * len(specs)
    assert {pools.state.shape[0] for pools in cache if hasattr(pools, "state")} == {9}


def test_cancelled_requests_give_their_slots_back() -> None:
    generator = Generator(make("bamba"), **SIZES)
    requests = [generator.submit(prompt, SAMPLING) for prompt in PROMPTS]
    for _ in range(4):
        generator.step()
    assert generator.model.rings.num_used == 3
    for request in requests[:2]:
        generator.cancel(request)
    found: dict[int, list[int]] = {request: [] for request in requests}
    for event in generator.stream():
        if event.token_id is not None:
            found[event.request_id].append(event.token_id)
    assert generator.model.rings.num_used == 0
    assert [found[request] for request in requests[3:]] == eager("bamba")[3:]


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_lost_steps_are_not_continued(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that broke off have moved states on, and their tokens are lost: all is computed again."""
    generator = Generator(make(name), **SIZES, steps_per_launch=4)
    interrupt_a_read(generator, monkeypatch)
    requests = [generator.submit(prompt, SAMPLING) for prompt in PROMPTS]
    found: dict[int, list[int]] = {request: [] for request in requests}
    broken = 0
    while generator._requests:
        try:
            for event in generator.step():
                found[event.request_id] += [] if event.token_id is None else [event.token_id]
        except KeyboardInterrupt:
            broken += 1
    assert broken == 1
    assert list(found.values()) == eager(name)


def test_engines_in_turns_over_one_paged_model() -> None:
    limits = Limits(max_num_reqs=3, max_num_tokens=64, max_blocks_per_req=16)
    model = PagedModel(make("granitemoehybrid"), num_blocks=60, block_size=4, limits=limits)
    options: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 64, "prefill_chunk_size": 16}
    engines = [Generator(model, **options), Generator(model, **options, graphs=False)]
    for engine in (*engines, *engines):
        assert tokens(engine) == eager("granitemoehybrid")


def test_a_second_engine_over_a_model_leaves_the_first_its_forwards() -> None:
    """One that was refused, too."""
    model = make("bamba")
    first = Generator(model, **SIZES)
    with pytest.raises(ArgumentError, match="memory_budget"):
        Generator(model, **SIZES, kv_cache_memory=1000)
    second = Generator(model, **SIZES)
    for engine in (first, second, first):
        assert tokens(engine) == eager("bamba")


@pytest.mark.parametrize("name", ["lfm2", "minimax", "recurrent_gemma"])
def test_a_model_that_an_engine_holds_is_pickled(name: str) -> None:
    model, params = model_of(name).eval(), SamplingParams(max_new_tokens=3, ignore_eos=True)
    with Generator(model, max_batch_size=1, max_seq_len=32) as engine:
        want = engine.generate([[5, 9, 3]], params)[0].token_ids
        loaded = pickle.loads(pickle.dumps(model))
    for change in (lambda _: None, attach, detach):
        change(loaded)
        with Generator(loaded, max_batch_size=1, max_seq_len=32) as engine:
            assert all(map(is_packed, mixers_of(loaded)))
            assert engine.generate([[5, 9, 3]], params)[0].token_ids == want


def test_the_model_still_runs_as_transformers_has_it() -> None:
    """Beside an engine, with caches of transformers; in copies, too."""
    model = make("lfm2")
    engine = Generator(model, **SIZES)
    assert tokens(engine) == eager("lfm2")
    assert all(is_packed(mixer) for mixer in mixers_of(model))
    for one in (model, copy.deepcopy(model)):
        one.set_attn_implementation("eager")
        out = one.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert out[0, len(PROMPTS[1]) :].tolist() == eager("lfm2")[1]


def test_accelerate_runs_the_engine() -> None:
    model = make("qwen3_next")
    accelerate(model, max_seq_len=64)
    out = model.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert out[0, len(PROMPTS[1]) :].tolist() == eager("qwen3_next")[1]
    unaccelerate(model)
    assert not any(is_packed(mixer) for mixer in mixers_of(model))


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "shared prefixes": (
        ArgumentError,
        "^share_prefixes: .*state per request",
        {"share_prefixes": True, "num_checkpoints": 0},
    ),
    "kept prefixes": (
        ArgumentError,
        "^prefix_cache: .*state per request",
        {"prefix_cache": True, "num_checkpoints": 0},
    ),
    "uneven checkpoints": (
        ArgumentError,
        "^checkpoint_every: .*multiple of the block size, 4",
        {"checkpoint_every": 6},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    error, words, options = REFUSED[case]
    model = make("qwen3_next")
    with pytest.raises(error, match=words):
        Generator(model, **SIZES, **options)
    assert not any(is_packed(mixer) for mixer in mixers_of(model))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_keys_of_fp8(name: str, fuse: bool) -> None:
    """And states as they were: the tokens of generate() over such pools, with its scales."""
    model, prompt = attach(make(name)), torch.tensor([PROMPTS[1]])
    cache = PagedCache(model.config, 1, 64, block_size=4, kv_dtype="fp8_e4m3")
    options = {"max_new_tokens": SAMPLING.max_new_tokens, "do_sample": False, "pad_token_id": 0}
    want = model.generate(prompt, past_key_values=cache, disable_compile=True, **options)[0]
    kept = {"kv_dtype": "fp8_e4m3", "kv_scales": cache.kv_scales}
    generator = Generator(model, **SIZES, **kept, fuse=fuse)
    got = generator.generate([PROMPTS[1]], SAMPLING)[0]
    assert got.token_ids == want[prompt.shape[1] :].tolist()
    dtypes = {pool.dtype for pools in generator.model.kv_cache for pool in pools if pool is not None}
    assert dtypes == {torch.float8_e4m3fn, torch.float32}
    generator.close()
    found = Generator(model, **SIZES, kv_dtype="fp8_e4m3", fuse=fuse)
    assert len(found.generate([PROMPTS[1]], SAMPLING)[0].token_ids) == SAMPLING.max_new_tokens
    found.close()


@pytest.mark.parametrize("options", [{"graphs": False}, {"compile": False, "fuse": True}], ids=str)
@pytest.mark.parametrize("name", ["bamba", "mamba"])
def test_float64(name: str, options: dict[str, Any]) -> None:
    """Tokens are drawn from logits in float32."""
    with Generator(make(name).double(), **SIZES, **options) as generator:
        outs = generator.generate(PROMPTS, SAMPLING)
    assert [out.token_ids for out in outs] == eager(name)


def test_fp8_of_states_alone_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no layer keeps keys and values"):
        Generator(make("mamba"), **SIZES, kv_dtype="fp8_e4m3")


def test_a_paged_model_must_know_for_how_many_requests() -> None:
    with pytest.raises(ArgumentError, match=r"^limits: expected max_num_reqs"):
        PagedModel(make("bamba"), num_blocks=8)


def test_requests_without_a_slot_are_refused() -> None:
    """Their states would be lost; known to `rings`, they run."""
    limits = Limits(max_num_reqs=2, max_num_tokens=8, max_blocks_per_req=2)
    model = PagedModel(make("lfm2"), num_blocks=8, block_size=4, limits=limits)
    batch = AttentionMetadata.from_lists([3], [3], [[2]], block_size=4)
    ids = torch.tensor([7, 8, 9])
    with pytest.raises(ArgumentError, match=r"^metadata: expected requests that have rings"):
        model(ids, batch)
    assert model.rings is not None
    model.rings.take(2)
    with torch.inference_mode():
        assert bool(model(ids, batch).isfinite().all())


def test_trees_are_refused() -> None:
    """A state goes from token to token."""
    limits = Limits(max_num_reqs=2, max_num_tokens=8, max_blocks_per_req=2)
    model = PagedModel(make("lfm2"), num_blocks=8, block_size=4, limits=limits)
    assert model.rings is not None
    model.rings.take(2)
    batch = AttentionMetadata.from_lists([3], [3], [[2]], block_size=4, tree_parents=[[-1, 0, 0]])
    with pytest.raises(UnsupportedModelError, match="lfm2: layer 0 keeps a state"), torch.no_grad():
        model(torch.tensor([7, 8, 9]), batch)


def test_a_mixer_with_a_hook_of_its_own_is_refused() -> None:
    model = make("lfm2")
    mixer = mixers_of(model)[0]
    mixer.forward = lambda *args, **options: type(mixer).forward(mixer, *args, **options)
    with pytest.raises(
        UnsupportedModelError, match="a Lfm2ShortConv has a forward that another one replaced"
    ):
        Generator(model, **SIZES)


def test_layers_of_both_sorts_are_told_apart() -> None:
    layers = Generator(make("nemotron_h"), **SIZES).model._cache.layers
    assert [isinstance(layer, PackedState) for layer in layers] == [True, False, False, False]
