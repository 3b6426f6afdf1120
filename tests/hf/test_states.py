"""States of hybrids in the pools of a `PagedCache`: the tokens of transformers' own states every way, slots
that others left, rows that move, and what is refused."""

import copy
import functools
from typing import Any

import pytest
import torch
from many_threads import in_threads
from model_coverage.architectures import model_of
from model_coverage.checks import compiling
from model_coverage.hybrids import HYBRIDS, UNSERVED, poison, unserved
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, PreTrainedModel

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, attach, detach, fuse, paged
from torchpaged.hf.packed_mixers import is_packed, mixers_of
from torchpaged.hf.state_layer import StateLayer

GREEDY: dict[str, Any] = {
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "disable_compile": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams returned": {"num_beams": 3, "num_return_sequences": 2},
    "chunks of padding": {"prefill_chunk_size": 4},
    "tokens alone": {"prefill_chunk_size": 1},
}


def prompts(rows: int = 2, length: int = 11, padding: int = 6) -> dict[str, Tensor]:
    """The first row has ``padding`` tokens of left padding."""
    generator = torch.Generator().manual_seed(rows + length)
    ids = torch.randint(3, 97, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def alone(name: str, call: dict[str, Tensor], **options: Any) -> Tensor:
    """Each row by itself, without padding and without a cache."""
    model, found = model_of(name, "eager"), list[Tensor]()
    for ids, mask in zip(*call.values(), strict=True):
        outs = model.generate(ids[mask.bool()][None], **GREEDY, **options, use_cache=False)
        padding = ids[~mask.bool()].expand(outs.shape[0], -1)
        found.append(torch.cat((padding, outs), 1))
    return torch.cat(found)


@functools.cache
def eager(name: str, way: str = "greedy", **sizes: int) -> Tensor:
    """Tokens of transformers' own states and attention."""
    options = {key: value for key, value in WAYS[way].items() if key != "prefill_chunk_size"}
    if name == "recurrent_gemma":  # its own states are not a row's alone: padding and beams read others'
        return alone(name, prompts(**sizes), **options)
    if name == "minimax":  # beams do not reorder the states of its own cache
        options["use_cache"] = False
    return model_of(name, "eager").generate(**prompts(**sizes), **GREEDY, **options)


def cached(model: PreTrainedModel, **options: Any) -> PagedCache:
    return PagedCache(model.config, 6, 48, block_size=4, **options)


@pytest.mark.slow_cases(but=("qwen3_next-*", "bamba-beams", "bamba-chunks*", "lfm2-*", "nemotron_h-greedy"))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_way_gives_eager_tokens(name: str, way: str) -> None:
    """Twice through one cache, whose slots hold NaN of rows before the second time."""
    if name == "recurrent_gemma" and "prefill_chunk_size" in WAYS[way]:
        pytest.skip("generate() asks its outputs for a cache, which they do not have")
    want, model = eager(name, way), model_of(name)
    with paged(model):
        cache = cached(model)
        for _ in range(2):
            got = model.generate(**prompts(), **GREEDY, **WAYS[way], past_key_values=cache)
            assert torch.equal(got, want)
            assert cache.states
            poison(cache.states)
            cache.reset()


@pytest.mark.slow_cases("bamba", "olmo_hybrid")
@pytest.mark.parametrize(
    "name",
    ["qwen3_next", "bamba", "lfm2", "olmo_hybrid", "kimi_linear", "minimax", "mamba2", "recurrent_gemma"],
)
def test_decode_is_one_graph_for_every_cache(name: str) -> None:
    """Compiled by generate(), left-padded; another cache, rows in another order and a reset take the same."""
    model = attach(model_of(name))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    call = GREEDY | compiling(counter)
    caches = [cached(model), cached(model)]
    for cache in (*caches, caches[0]):
        cache.reset()
        assert torch.equal(model.generate(**prompts(), **call, past_key_values=cache), eager(name))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_a_conversation_goes_on(name: str) -> None:
    """Several tokens behind those that are cached: the states go on from there."""
    model, plain = attach(model_of(name)), model_of(name, "eager")
    cache, ids = cached(model), prompts(padding=0)["input_ids"]
    first = model.generate(ids, **GREEDY, past_key_values=cache)
    longer = torch.cat((first, prompts(2, 7, 0)["input_ids"]), dim=1)
    got = model.generate(longer, **GREEDY, past_key_values=cache)
    assert torch.equal(got, plain.generate(longer, **GREEDY))


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_no_token_is_taken_back(name: str) -> None:
    """Refused before anything changes: the rows go on as before."""
    model, plain = attach(model_of(name)), model_of(name, "eager")
    cache, ids = cached(model), prompts(padding=0)["input_ids"]
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        before = [x.clone() for x in cache.states[0].pools if x is not None]
        cache.crop(0)
        with pytest.raises(UnsupportedModelError, match=rf"^{name}: layer 0 keeps a state.*crop"):
            cache.crop(-2)
        now = [x for x in cache.states[0].pools if x is not None]
        assert all(map(torch.equal, now, before))
        assert not cache.is_croppable
        cache.activate_past_recording()
        model(ids[:, 5:8], past_key_values=cache)
        with pytest.raises(UnsupportedModelError, match=r"so that 3 tokens can be taken back.*and not 4"):
            cache.crop(-4)
        cache.crop(-3)
        got = model(ids[:, 8:], past_key_values=cache).logits
        theirs = DynamicCache(config=model.config)
        want = [plain(part, past_key_values=theirs).logits for part in (ids[:, :8], ids[:, 8:])][1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", "olmo_hybrid", "bamba", "lfm2", "kimi_linear", "minimax", "mamba2", "recurrent_gemma"],
)
def test_tokens_of_the_last_forward_are_taken_back(name: str) -> None:
    """Any number of five candidates, twice behind each other: what follows sees the others alone. In two
    rows, one of them padded; NaN in the slots of no row."""
    model, call = attach(model_of(name)), prompts()
    ids, mask = call["input_ids"], call["attention_mask"]
    more = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))

    def run(cache: PagedCache, tokens: Tensor, behind: int) -> Tensor:
        seen = torch.cat((mask, torch.ones(2, behind, dtype=mask.dtype)), 1)
        places = (seen.cumsum(1) - 1)[:, -tokens.shape[1] :]  # else Bamba counts from a layer without keys
        return model(tokens, attention_mask=seen, position_ids=places, past_key_values=cache).logits

    with torch.no_grad():
        for count in range(6):
            cache, plain = cached(model), cached(model)
            for one in (cache, plain):
                model(**call, past_key_values=one)
                poison(one.states, but=(1, 2))
            cache.activate_past_recording()
            kept = 5 - count
            for start in (0, kept):
                run(cache, torch.cat((more[:, start : start + kept], ids[:, :count]), 1), start + 5)
                cache.crop(-count)
                assert cache.get_seq_length() == ids.shape[1] + start + kept
            got = run(cache, more[:, 2 * kept :], 12)
            if kept:
                run(plain, more[:, : 2 * kept], 2 * kept)
            want = run(plain, more[:, 2 * kept :], 12)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_a_compiled_forward_leaves_no_past() -> None:
    """What an eager one before it recorded is of other tokens."""
    model = attach(model_of("lfm2"))
    cache, ids = cached(model), prompts(padding=0)["input_ids"]
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
        cache.activate_past_recording()
        model(ids[:, 6:9], past_key_values=cache)
        torch.compile(model, backend="eager", fullgraph=True)(ids[:, 9:], past_key_values=cache)
        with pytest.raises(UnsupportedModelError, match=r"so that 0 tokens can be taken back.*and not 1"):
            cache.crop(-1)


def test_assisted_decoding() -> None:
    """lfm2 is the one that transformers itself assists; as its own states do here, not attached. The cache
    goes on without an assistant, and with one again."""
    model = model_of("lfm2")
    ids = prompts(padding=0)["input_ids"][:1].repeat(1, 3)
    call = {"input_ids": ids, **GREEDY, "max_new_tokens": 12, "prompt_lookup_num_tokens": 3}
    plain = {key: value for key, value in call.items() if key != "prompt_lookup_num_tokens"}
    want = model.generate(**plain)
    with paged(model):
        cache = cached(model)
        taken = []
        crop = cache.crop
        cache.crop = lambda count: (taken.append(-count), crop(count))  # type: ignore[method-assign]
        for one in (call, plain, call):
            assert torch.equal(model.generate(**one, past_key_values=cache), want)
            cache.reset()
        assert max(taken) > 0
    model.set_attn_implementation("torchpaged")
    assert torch.equal(model.generate(**call, past_key_values=cached(model)), want)


@pytest.mark.parametrize("at", [0, 2])
def test_a_forward_that_broke_off_is_not_continued(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers hold a token more than others then."""
    model = attach(model_of("qwen3_next"))
    cache, call = cached(model), prompts()
    with torch.no_grad():
        model(**call, past_key_values=cache)
        step = call["input_ids"][:, :1]
        mask = torch.cat((call["attention_mask"], torch.ones(2, 1, dtype=torch.int64)), 1)

        def raises(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[at].mlp, "forward", raises)
            with pytest.raises(KeyboardInterrupt):
                model(step, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ArgumentError, match=r"forwards all completed.*reset\(\)"):
            model(step, attention_mask=mask, past_key_values=cache)
    cache.reset()
    assert torch.equal(model.generate(**call, **GREEDY, past_key_values=cache), eager("qwen3_next"))


def test_other_rows_change_no_state() -> None:
    model = attach(model_of("qwen3_next"))
    cache, ids = cached(model), prompts(padding=0)["input_ids"]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        before = [layer.pools.state.clone() for layer in cache.states]
        for rows in (1, 3):
            with pytest.raises(ArgumentError, match=r"input_ids: expected 2 rows"):
                model(torch.ones(rows, 1, dtype=torch.int64), past_key_values=cache)
    for layer, kept in zip(cache.states, before, strict=True):
        assert torch.equal(layer.pools.state, kept)


def test_two_threads_with_a_cache_each() -> None:
    model = attach(model_of("lfm2"))
    found: dict[int, Tensor] = {}

    def run(rows: int) -> None:
        found[rows] = model.generate(**prompts(rows), **GREEDY, past_key_values=cached(model))

    in_threads([functools.partial(run, rows) for rows in (2, 3)])
    assert all(torch.equal(found[rows], eager("lfm2", rows=rows)) for rows in (2, 3))


def test_memory_is_that_of_the_rows() -> None:
    """A slot per row and the void one, whatever ``max_seq_len`` is; said by the cache."""
    model = attach(model_of("qwen3_next"))
    cache = cached(model)
    assert cache.describe().endswith("3 layers with a state per row, made with the first tokens")
    model.generate(**prompts(), **GREEDY, past_key_values=cache)
    assert {layer.pools.state.shape[0] for layer in cache.states} == {7}
    assert {layer.pools.state.dtype for layer in cache.states} == {torch.float32}
    size = sum(x.nbytes for layer in cache.states for x in layer.pools)
    assert sum(layer.num_bytes for layer in cache.states) == size
    assert cache.describe().endswith(f"3 layers with a state per row, {size / 1024:.2f} KiB")


def test_whose_states_a_cache_keeps() -> None:
    """Pools for an attached model; transformers' own for one that is not, or was not when the cache was made,
    or whose mixer another one changed."""
    model = model_of("lfm2")
    early = cached(model)
    model.set_attn_implementation("torchpaged")
    unattached = cached(model)
    assert torch.equal(model.generate(**prompts(), **GREEDY, past_key_values=unattached), eager("lfm2"))
    with paged(model):
        assert torch.equal(model.generate(**prompts(), **GREEDY, past_key_values=early), eager("lfm2"))
    mixer = mixers_of(model)[0]
    mixer.forward = lambda *args, **options: type(mixer).forward(mixer, *args, **options)
    with paged(model):
        changed = cached(model)
        assert torch.equal(model.generate(**prompts(), **GREEDY, past_key_values=changed), eager("lfm2"))
    for cache in (early, unattached, changed):
        assert {type(layer) for layer in cache.layers if isinstance(layer, StateLayer)} == {StateLayer}


@pytest.mark.parametrize("name", UNSERVED)
def test_convolutions_that_the_op_does_not_take(name: str) -> None:
    """Attached, states stay transformers' own; the engine refuses the model by its name."""
    plain, model = unserved(name), unserved(name, "torchpaged")
    with paged(model):
        cache = cached(model)
        got = model.generate(**prompts(), **GREEDY, past_key_values=cache)
    assert torch.equal(got, plain.generate(**prompts(), **GREEDY))
    assert not cache.states
    with pytest.raises(UnsupportedModelError, match=f"^{type(model).__name__}: .*convolution of another"):
        Generator(model, max_batch_size=2, max_seq_len=64, block_size=4)
    assert not any(map(is_packed, mixers_of(model)))


def test_states_of_another_dtype_are_refused_before_rows_begin() -> None:
    model, ids = attach(model_of("lfm2")), prompts(padding=0)["input_ids"]
    cache = cached(model)
    with torch.no_grad():
        want = model(ids, past_key_values=cache).logits
        cache.reset()
        with pytest.raises(ArgumentError, match=r"^x: .*float32 on cpu.*bfloat16.*make a new PagedCache"):
            model.to(torch.bfloat16)(ids, past_key_values=cache)
        assert cache.get_seq_length() == 0
        assert torch.equal(attach(model_of("lfm2"))(ids, past_key_values=cache).logits, want)


def test_a_detached_model_is_refused_its_pools() -> None:
    model = attach(model_of("lfm2"))
    cache = cached(model)
    detach(model)
    assert not any(is_packed(mixer) for mixer in mixers_of(model))
    model.set_attn_implementation("torchpaged")
    with (
        pytest.raises(UnsupportedModelError, match=r"^lfm2: layer 0 keeps states.*attach\(model\)"),
        torch.no_grad(),
    ):
        model(prompts()["input_ids"], past_key_values=cache)


@pytest.mark.parametrize("name", ["bamba", "lfm2"])
def test_the_engine_and_a_cache_over_one_attached_model(name: str) -> None:
    model = attach(model_of(name))
    model.generation_config.eos_token_id = None
    call, cache = prompts(padding=0), cached(model)
    want = model.generate(**call, **GREEDY, past_key_values=cache)
    assert torch.equal(want, eager(name, padding=0))
    generator = Generator(model, max_batch_size=2, max_seq_len=48, block_size=4)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    outputs = generator.generate(call["input_ids"].tolist(), sampling)
    assert [output.token_ids for output in outputs] == want[:, 11:].tolist()
    cache.reset()
    assert torch.equal(model.generate(**call, **GREEDY, past_key_values=cache), want)


def test_a_model_that_an_engine_runs_can_be_attached() -> None:
    """The engine's graphs go on with the forwards that they were made with, before and behind."""
    model, call, want = model_of("lfm2"), prompts(padding=0), eager("lfm2", padding=0)
    model.generation_config.eos_token_id = None
    generator = Generator(model, max_batch_size=2, max_seq_len=48, block_size=4)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)

    def tokens() -> list[list[int]]:
        outputs = generator.generate(call["input_ids"].tolist(), sampling)
        return [output.token_ids for output in outputs]

    with paged(model):
        assert tokens() == want[:, 11:].tolist()
        assert torch.equal(model.generate(**call, **GREEDY, past_key_values=cached(model)), want)
    assert tokens() == want[:, 11:].tolist()


OPTIONS: dict[str, dict[str, Any]] = {
    "gathered keys": {"dense": True},
    "fp8 keys": {"kv_dtype": "fp8_e4m3", "backend": "reference"},
    "the reference": {"backend": "reference"},
    "rows that grow": {"num_blocks": 16},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_the_cache(case: str) -> None:
    """The tokens of a cache of transformers' own states with the same options."""
    model = model_of("bamba", "torchpaged")
    want = model.generate(**prompts(), **GREEDY, past_key_values=cached(model, **OPTIONS[case]))
    with paged(model):
        cache = cached(model, **OPTIONS[case])
        assert torch.equal(model.generate(**prompts(), **GREEDY, past_key_values=cache), want)
        assert bool(cache.states) != ("dense" in OPTIONS[case])


@pytest.mark.parametrize("name", ["granitemoehybrid", "olmo_hybrid"])
def test_left_padding_where_keys_are_gathered(name: str) -> None:
    """By larger weights, to which a state that read padding matters."""
    model = model_of(name, "eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.4 if weight.dim() > 1 else 1.0)
        want = model(**prompts(), use_cache=False).logits[:, -1]
        with paged(model):
            got = model(**prompts(), past_key_values=cached(model, dense=True)).logits[:, -1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3_5_text", torch.bfloat16),
        ("qwen3_5_text", torch.float64),
        ("bamba", torch.float64),
        ("jamba", torch.float64),
        ("kimi_linear", torch.float64),
        ("lfm2", torch.float64),
        ("minimax", torch.float64),
        ("recurrent_gemma", torch.float64),
    ],
    ids=str,
)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    """Logits of a prompt and a step, within what the dtype gives transformers' own states."""
    model, ids = model_of(name, "eager").to(dtype), prompts(padding=0)["input_ids"]
    exact, places = model_of(name, "eager"), torch.arange(ids.shape[1]).expand_as(ids)
    options = {"backend": "reference"} if dtype == torch.float64 else {}
    model.set_experts_implementation("eager")  # torch's grouped products know no float64
    with torch.no_grad():
        want, theirs = exact(ids).logits.double(), model(ids, use_cache=False).logits.double()
        with paged(model):
            cache = cached(model, **options)
            steps = [(ids[:, part], places[:, part]) for part in (slice(-1), slice(-1, None))]
            parts = [model(x, position_ids=at, past_key_values=cache).logits for x, at in steps]
            assert cache.states
    error = (torch.cat(parts, 1).double() - want).abs().max()
    assert error <= 2 * (theirs - want).abs().max() + 1e-5 * want.abs().max()


def test_autocast() -> None:
    model, ids = model_of("bamba", "eager"), prompts(padding=0)["input_ids"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(ids, use_cache=False).logits
        with paged(model):
            cache = cached(model)
            parts = [model(part, past_key_values=cache).logits for part in (ids[:, :-1], ids[:, -1:])]
    assert cache.states
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0.05, atol=0.05 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["lfm2", "minimax"])
def test_copies(name: str) -> None:
    """Of a cache: an unused one runs, a used one is refused. Of an attached model: as the model."""
    model = attach(model_of(name))
    cache = copy.deepcopy(cached(model))
    assert torch.equal(model.generate(**prompts(), **GREEDY, past_key_values=cache), eager(name))
    with pytest.raises(Exception, match="can't be copied"):
        copy.deepcopy(cache)
    copied = copy.deepcopy(model)
    got = copied.generate(**prompts(), **GREEDY, past_key_values=cached(copied))
    assert torch.equal(got, eager(name))


@pytest.mark.parametrize("attached", [False, True])
def test_gradients_are_refused_before_a_state_moves_on(attached: bool) -> None:
    """The same call goes through afterwards, as in a notebook's next cell."""
    model, ids = model_of("lfm2"), prompts(padding=0)["input_ids"]
    want = model(ids, use_cache=False).logits.detach()
    attach(model) if attached else model.set_attn_implementation("torchpaged")
    cache = cached(model)
    with pytest.raises(ArgumentError, match=r"no_grad"):
        model(ids, past_key_values=cache)
    with torch.no_grad():
        got = model(ids, past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "name", ["deepseek_v3", "falcon_h1", "lfm2", "minimax", "qwen3_next", "recurrent_gemma", "zamba2"]
)
def test_no_gradient_of_one_weight_is_dropped(name: str, fused: bool) -> None:
    """It is refused where an op would drop it, and comes through elsewhere."""
    model, ids = attach(model_of(name)).requires_grad_(False), prompts(padding=0)["input_ids"]
    if fused:
        fuse(model, count=False)
    refused, dropped = list[str](), list[str]()
    for weight, parameter in model.named_parameters():
        parameter.requires_grad_(True)
        try:
            if not model(input_ids=ids, past_key_values=cached(model)).logits.requires_grad:
                dropped.append(weight)
        except ArgumentError as error:
            assert "expected a tensor without grad" in str(error)
            refused.append(weight)
        parameter.requires_grad_(False)
    assert refused
    assert not dropped
