"""Encoder-decoder models: which halves may be paged, and what is refused instead of attending to the
wrong keys."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import build, close, logits_of, same
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from torchpaged import ArgumentError, BackendUnavailableError, NotCopyableError, UnsupportedModelError
from torchpaged.hf import PagedCache, PagedEncoderDecoderCache, attach
from torchpaged.hf import paged as attached
from torchpaged.hf.encoder_decoder import CrossPagedCache

HEAD = "ForConditionalGeneration"


def inputs(padded: bool = False) -> dict[str, torch.Tensor]:
    """Two sources of 12 tokens, the first one's last 5 padding if ``padded``, and a prompt of 9 tokens for
    the decoder."""
    generator = torch.Generator().manual_seed(1)
    ids, prompt = (torch.randint(3, 99, (2, length), generator=generator) for length in (12, 9))
    mask = torch.ones_like(ids)
    if padded:
        ids[0, -5:], mask[0, -5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": prompt}


def paged(model: PreTrainedModel, **options: Any) -> PagedCache:
    return PagedCache(model.config, 2, 32, block_size=4, **options)


CACHES: dict[str, Callable[[PreTrainedModel], EncoderDecoderCache]] = {
    "paged": lambda m: EncoderDecoderCache(paged(m), DynamicCache(config=m.config)),
    "dense": lambda m: EncoderDecoderCache(paged(m, dense=True), DynamicCache(config=m.config)),
    "paged, cross too": lambda m: EncoderDecoderCache(paged(m), paged(m)),
    "one": lambda m: PagedEncoderDecoderCache(m.config, 2, 32, block_size=4),
}


@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("stem", ["Bart", "BigBirdPegasus"])
def test_logits_equal_eager(stem: str, caches: str) -> None:
    model = build(stem, HEAD)
    same(model, inputs(), lambda: CACHES[caches](model))


@pytest.mark.parametrize("stem", ["T5", "UMT5"])
def test_position_bias_needs_dense(stem: str) -> None:
    """Their layers ask for their own length between the first layer's write and their own. The cache knows
    that of their type, and must be told to page all the same."""
    model = build(stem, HEAD)
    prompt = {**inputs(padded=True), "decoder_attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    for caches in ("dense", "paged"):
        same(model, prompt, lambda caches=caches: CACHES[caches](model))  # type: ignore[misc]
    with pytest.raises(
        UnsupportedModelError, match="(position bias|computes with its cached keys).*dense=True"
    ):
        logits_of(
            model, inputs(), EncoderDecoderCache(paged(model, dense=False), DynamicCache(config=model.config))
        )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("stem", "head"), [("BigBirdPegasus", HEAD), ("BigBirdPegasus", "ForCausalLM"), ("UMT5", HEAD)]
)
def test_causality_that_only_the_mask_carries_without_a_cache(stem: str, head: str, padded: bool) -> None:
    """Decoders that call themselves not causal (UMT5's in transformers 5.17), and an encoder that adds the
    mask to scores of its own: no mask may be left out, or be one of booleans."""
    assert not transformers.BigBirdPegasusPreTrainedModel._supports_sdpa
    given = inputs(padded)
    if head == "ForCausalLM":
        given = {"input_ids": given["decoder_input_ids"]}
    with torch.no_grad():
        want, got = (
            build(stem, head, name)(**given, use_cache=False).logits for name in ("eager", "torchpaged")
        )
    close(got, want)


def test_a_padded_source() -> None:
    model = build("Bart", HEAD)
    for caches in ("paged", "paged, cross too", "one"):
        same(model, inputs(padded=True), lambda caches=caches: CACHES[caches](model))  # type: ignore[misc]


@pytest.mark.parametrize("stem", ["Bart", "T5"])
def test_dense_cross_attention(stem: str) -> None:
    """Keys gathered to max_seq_len, behind a mask that ends with the source: refused before anything
    is written."""
    model = build(stem, HEAD, "torchpaged")
    cross = paged(model, dense=True)
    with pytest.raises(UnsupportedModelError, match="cross attention pass EncoderDecoderCache"):
        logits_of(model, inputs(), EncoderDecoderCache(paged(model, dense=True), cross))
    assert not any(layer.keys.any() for layer in cross.paged if layer.is_initialized)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("same_length", [False, True])
def test_a_plain_cache(layers: int, dense: bool, same_length: bool) -> None:
    """Both attentions would write to the same layers; with as many source tokens as target tokens no
    shape tells."""
    model = build("Bart", HEAD, "torchpaged", decoder_layers=layers, encoder_layers=layers)
    given = inputs()
    if same_length:
        given["input_ids"], given["attention_mask"] = (
            given["input_ids"][:, :9],
            given["attention_mask"][:, :9],
        )
    with pytest.raises(UnsupportedModelError, match="writes twice.*EncoderDecoderCache"), torch.no_grad():
        model(**given, past_key_values=paged(model, dense=dense), use_cache=True)


def test_a_plain_cache_that_is_asked_for_is_updated() -> None:
    with pytest.raises(UnsupportedModelError, match="EncoderDecoderCache"):
        _ = paged(build("Bart", HEAD)).is_updated


def test_t5gemma_makes_its_cross_cache_itself() -> None:
    """Of the class that it finds, and without sizes: the half that may be paged is the decoder's."""
    given, model = inputs(padded=True), build("T5Gemma", HEAD, "torchpaged")
    want = logits_of(build("T5Gemma", HEAD), given)
    for caches in ("paged", "dense"):
        close(logits_of(model, given, CACHES[caches](model)), want)
    with pytest.raises(
        UnsupportedModelError, match=r"t5_?gemma.*EncoderDecoderCache\(PagedCache\(\.\.\.\), DynamicCache"
    ):
        logits_of(model, inputs(), CACHES["paged, cross too"](model))
    with pytest.raises(TypeError, match="offloadings"):
        PagedCache(model.config, 1, 8, offloadings=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("stem", ["FSMT"])
def test_attention_of_its_own(stem: str) -> None:
    """Refused with a PagedCache; without one, and loaded under the implementation's name, their logits are
    their own."""
    head = {"FSMT": HEAD}.get(stem, HEAD)
    model = build(stem, head)
    with pytest.raises(UnsupportedModelError, match=f"{stem}.*attention interface"):
        paged(model)
    want = logits_of(model, inputs(padded=True))
    got = logits_of(build(stem, head, "torchpaged"), inputs(padded=True))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("stem", ["Mvp", "LED"])
def test_attention_of_its_own_that_is_known(stem: str) -> None:
    """The decoder's own keys paged, and the encoder's, behind a padded source; without a cache as it was."""
    given, model = inputs(padded=True), build(stem, HEAD)
    want = logits_of(model, given)
    with pytest.raises(ArgumentError, match=r"torchpaged.hf.attach\(model\)"):
        logits_of(model, given, CACHES["paged"](model))
    with attached(model):
        for cache in (*(CACHES[name](model) for name in ("paged", "paged, cross too", "one")), None):
            got = logits_of(model, given, cache)
            close(got, want)


def test_padding_of_leds_prompt_stays_masked() -> None:
    """transformers' steps of one token see it, its forwards without a cache do not, and neither do ours."""
    model, given = build("LED", HEAD), inputs()
    mask = torch.ones_like(given["decoder_input_ids"])
    mask[0, :4] = 0
    given["decoder_input_ids"][1, 0] = model.config.decoder_start_token_id  # else generate() puts it in front
    call = {**given, "decoder_attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    call |= {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    want = torch.stack(model.generate(**call, use_cache=False).logits)
    assert (torch.stack(model.generate(**call).logits) - want).abs().max() > 1e-3 * want.abs().max()
    with attached(model):
        got = torch.stack(model.generate(**call, past_key_values=CACHES["one"](model)).logits)
    close(got, want)


# -------------------------------------------------------------------------------------------- both of them
def short(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Sources of 5 tokens behind a decoder's prompt of 9."""
    given = inputs()
    return {**given, **{name: given[name][:, :5] for name in ("input_ids", "attention_mask")}}


@pytest.mark.parametrize("caches", ["paged, cross too", "one"])
def test_more_queries_than_keys(caches: str) -> None:
    model = build("Bart", HEAD)
    same(model, short(model), lambda: CACHES[caches](model))


def test_beams_share_a_source() -> None:
    """Their rows are reordered; the encoder's rows are copied once per beam before they are written."""
    model, given = build("Bart", HEAD), inputs(padded=True)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "disable_compile": True}
    want = model.generate(**given, **options)
    with attached(model):
        cache = PagedEncoderDecoderCache.for_inputs(model, **given, **options)
        got = model.generate(**given, **options, past_key_values=cache)
    assert torch.equal(got, want)
    assert len(want.unique(dim=0)) == 2
    assert cache.cross_attention_cache.rows.max_rows == 6


def test_one_cache_for_several_batches() -> None:
    """The first sizes the encoder's part; a shorter source fits behind `reset`, a longer one is refused."""
    model, given = build("Bart", HEAD, "torchpaged"), inputs(padded=True)
    cache = PagedEncoderDecoderCache(model.config, 2, 32, block_size=4)
    want = logits_of(model, given, cache)
    assert cache.cross_attention_cache.max_seq_len == 12
    assert "encoder: 7 blocks of 4" in cache.describe()
    cache.reset()
    eager = build("Bart", HEAD)
    close(logits_of(model, short(model), cache), logits_of(eager, short(eager)))
    cache.reset()
    torch.testing.assert_close(logits_of(model, given, cache), want)
    cache.reset()
    long = {**given, **{name: torch.cat([given[name]] * 2, 1) for name in ("input_ids", "attention_mask")}}
    with pytest.raises(ArgumentError, match="max_encoder_len: expected room for 24 tokens.*got 12"):
        logits_of(model, long, cache)


@pytest.mark.parametrize("stem", ["Bart", "T5"])
def test_another_source_without_a_reset(stem: str) -> None:
    """The keys are those of the first source, which the mask of another would cut; generate() begins its
    prompt anew, behind the cached one, unless a mask says that there is more of it."""
    model, given = build(stem, HEAD), inputs(padded=True)
    other = {**given, **{name: given[name][:, 1:] for name in ("input_ids", "attention_mask")}}
    with attached(model):
        cache = PagedEncoderDecoderCache(model.config, 2, 64, block_size=4)
        logits_of(model, given, cache)
        for source in (given, other):
            with pytest.raises(ArgumentError, match=r"decoder_attention_mask: expected .*cache.reset\(\)"):
                logits_of(model, source, cache)
        tokens = torch.randint(3, 99, (2, 17))
        ids = {"decoder_input_ids": tokens, "decoder_attention_mask": torch.ones_like(tokens)}
        with pytest.raises(
            ArgumentError, match=r"the 12 tokens of the encoder.*one over 11.*cache.reset\(\)"
        ):
            logits_of(model, {**other, **ids}, cache)
        cache.reset()
        got = logits_of(model, other, cache)
    torch.testing.assert_close(got, logits_of(model, other), rtol=1e-4, atol=1e-3)


def test_a_source_padded_on_the_left() -> None:
    model, given = build("Bart", HEAD, "torchpaged"), inputs()
    given["attention_mask"][0, :3] = 0
    with pytest.raises(ArgumentError, match="one with padding on the left.*on the right, or pass"):
        logits_of(model, given, PagedEncoderDecoderCache(model.config, 2, 32))


def test_the_states_of_a_source_that_is_all_padding() -> None:
    """T5's encoder, whose mask is one to add, averages such a row as eager attention does."""
    given = inputs()
    given["attention_mask"][1] = 0
    with torch.no_grad():
        want, got = (
            build("T5", HEAD, name).get_encoder()(given["input_ids"], attention_mask=given["attention_mask"])[
                0
            ]
            for name in ("eager", "torchpaged")
        )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stem", ["Bart", "T5"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_source_that_is_all_padding(compiled: bool, stem: str) -> None:
    """Eager attention averages such a row, SDPA and the kernels do otherwise: there is nothing to be right
    about."""
    model, given = attach(build(stem, HEAD)), inputs()
    cache = PagedEncoderDecoderCache(model.config, 2, 32, block_size=4)
    with torch.no_grad():
        encoded = model.get_encoder()(given["input_ids"])
    if not compiled:
        given["attention_mask"][1] = 0
        with pytest.raises(ArgumentError, match="at least one token in every row.*a row that is all padding"):
            logits_of(model, given, cache)
        return
    torch._dynamo.reset()
    given["attention_mask"][1, 5:] = 0
    step = {"encoder_outputs": encoded, "past_key_values": cache}
    with torch.no_grad():
        model(**step, decoder_input_ids=given["decoder_input_ids"], attention_mask=given["attention_mask"])
        run = torch.compile(model, fullgraph=True, backend="eager")
        more = {"decoder_input_ids": torch.full((2, 1), 5)}
        run(**step, **more, attention_mask=given["attention_mask"])
        given["attention_mask"][1] = 0
        with pytest.raises(RuntimeError, match="of at least one token in every row"):
            run(**step, **more, attention_mask=given["attention_mask"])


def test_a_mask_of_ones_own() -> None:
    model, given = build("Bart", HEAD, "torchpaged"), inputs()
    own = torch.ones(2, 1, 9, 12, dtype=torch.bool)
    encoded = model.get_encoder()(given["input_ids"])
    with pytest.raises(ArgumentError, match=r"another one of shape \[2, 1, 9, 12\]"), torch.no_grad():
        model(
            decoder_input_ids=given["decoder_input_ids"],
            encoder_outputs=encoded,
            attention_mask=own,
            past_key_values=PagedEncoderDecoderCache(model.config, 2, 32),
        )


@pytest.mark.parametrize("model_type", ["encoder-decoder", "moonshine", "t5"])
def test_prompt_lookup(model_type: str) -> None:
    """Tokens are taken back from the decoder's keys; of the encoder's there is nothing to take."""
    from model_coverage.encoder_decoders import inputs_of, model_of

    model = model_of(model_type)
    source = {name: x[:1] for name, x in inputs_of(model, model_type, 6).items()}
    call = {**source, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    want, call["prompt_lookup_num_tokens"] = model.generate(**call), 3
    with attached(model):
        cache, taken = PagedEncoderDecoderCache.for_inputs(model, **call), []
        crop = cache.self_attention_cache.crop
        cache.self_attention_cache.crop = lambda count: (taken.append(count), crop(count))  # type: ignore[method-assign]
        assert torch.equal(model.generate(**call, past_key_values=cache), want)
    assert min(taken) < 0


def test_several_sequences_of_whisper() -> None:
    """Each has its beams: it repeats its input ahead of them, where others return some of the beams."""
    from model_coverage.encoder_decoders import inputs_of, model_of

    model = model_of("whisper")
    call = {**inputs_of(model, "whisper"), "num_beams": 2, "num_return_sequences": 2}
    call |= {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(**call)
    with attached(model):
        cache = PagedEncoderDecoderCache.for_inputs(model, **call)
        assert torch.equal(model.generate(**call, past_key_values=cache), want)


def test_rows_of_both_halves() -> None:
    """Selected and repeated, as of any other cache."""
    model, given = build("Bart", HEAD, "torchpaged"), inputs(padded=True)
    step = {"decoder_input_ids": torch.full((2, 1), 7), "encoder_outputs": None}
    found = []
    with torch.no_grad():
        encoded = model.get_encoder()(given["input_ids"], attention_mask=given["attention_mask"])[0]
        for rows in ([0, 1], [1, 1]):
            cache = PagedEncoderDecoderCache(model.config, 4, 32, block_size=4)
            start = {**given, "input_ids": None, "encoder_outputs": (encoded,)}
            if rows == [0, 1]:
                model(**start, past_key_values=cache)
                cache.batch_repeat_interleave(2)
                cache.batch_select_indices(torch.tensor([2, 3]))
            else:
                start = {name: None if x is None else x[rows] for name, x in start.items() if name[0] != "e"}
                model(**start, encoder_outputs=(encoded[rows],), past_key_values=cache)
            mask = given["attention_mask"][[1, 1]]
            step["encoder_outputs"] = (encoded[[1, 1]],)
            found.append(model(**step, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


def test_sizes_of_a_call() -> None:
    model, given = build("Bart", HEAD), inputs()
    cache = PagedEncoderDecoderCache.for_inputs(model, **given, max_new_tokens=7)
    assert cache.self_attention_cache.max_seq_len == 17
    assert cache.self_attention_cache.rows.max_rows == 2
    del given["decoder_input_ids"]  # a start token, and one that generate() may force
    assert PagedEncoderDecoderCache.for_inputs(model, **given, max_new_tokens=7).get_max_length() == 9
    with pytest.raises(ArgumentError, match="input_ids: expected the encoder's input"):
        PagedEncoderDecoderCache.for_inputs(model, max_new_tokens=7)


def test_a_shallow_copy_is_refused() -> None:
    """It would share the rows of both caches with its original; a deep copy has its own."""
    cache = PagedEncoderDecoderCache.for_inputs(build("Bart", HEAD), **inputs(), max_new_tokens=7)
    with pytest.raises(NotCopyableError, match="deepcopy"):
        copy.copy(cache)
    assert copy.deepcopy(cache).self_attention_cache.rows is not cache.self_attention_cache.rows


def test_what_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedModelError, match="xglm attends to its encoder in modules of its own"):
        PagedEncoderDecoderCache(build("XGLM", "ForCausalLM").config, 2, 32)


def test_a_backend_that_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans for the queries of the batch; cross attention never tells it of any."""
    model = build("Bart", HEAD, "torchpaged")
    cache = PagedEncoderDecoderCache(model.config, 2, 32)
    logits_of(model, inputs(), cache)
    session = type(cache.cross_attention_cache.session)
    monkeypatch.setattr(session, "plans", property(lambda self: self is cache.cross_attention_cache.session))
    monkeypatch.setattr(session, "plan", lambda *_: None)
    cache.reset()
    with pytest.raises(BackendUnavailableError, match="cross attention comes without one"):
        logits_of(model, inputs(), cache)


@pytest.mark.slow_cases(but=("fsmt", "bart"))
@pytest.mark.parametrize("model_type", ["bart", "encoder-decoder", "fsmt", "t5", "whisper"])
def test_a_family(model_type: str) -> None:
    """As the committed table says: one graph for a decode step."""
    from model_coverage import encoder_decoders
    from test_coverage import committed_row

    row, want = encoder_decoders.examine(model_type), committed_row(model_type, "encoder-decoders")
    assert (row.mode, row.graphs, row.kind) == (want.mode, want.graphs, want.kind), row


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross attention that sees the source's padding."""
    from model_coverage import encoder_decoders

    from torchpaged.hf import cross

    plain = cross.cross_batch
    monkeypatch.setattr(cross, "cross_batch", lambda batch, mask, n, keys: plain(batch, None, n, keys))
    row = encoder_decoders.examine("bart", compiled=False)
    assert row.mode == "wrong", row
    assert row.checks["forward"] == "right", row


def test_one_mask_for_several_forwards() -> None:
    """A mask of ours that the caller keeps: it says how long the rows are, and not where they lie."""
    model, given = build("Bart", HEAD, "torchpaged"), inputs(padded=True)
    encoded = model.get_encoder()(given["input_ids"], attention_mask=given["attention_mask"])
    mask = create_bidirectional_mask(
        model.config, encoded[0][:, :9], given["attention_mask"], encoder_hidden_states=encoded[0]
    )
    call = {"decoder_input_ids": given["decoder_input_ids"], "encoder_outputs": encoded}
    found = []
    with torch.no_grad():
        for _ in range(2):
            cache = PagedEncoderDecoderCache(model.config, 2, 32, block_size=4)
            cache.cross_attention_cache = CrossPagedCache(model.config, 2, 12, block_size=4, num_blocks=30)
            cache.cross_attention_cache.pool.allocate(1 + 6 * len(found))
            found.append(model(**call, attention_mask=mask, past_key_values=cache).logits)
        want = model(**call, attention_mask=given["attention_mask"], use_cache=False).logits
    for got in found:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("option", ["sliding_step", "batch_invariant", "cascade", "dense"])
def test_options_that_a_cross_cache_has_not(option: str) -> None:
    """Another `PagedCache`'s options would be taken without a use."""
    config = build("Bart", HEAD).config
    with pytest.raises(TypeError, match=option):
        CrossPagedCache(config, 2, 12, **{option: 1})
