"""Tokens taken back by transformers' rules, and forwards that raise between two layers: no cache goes on with
rows its layers disagree on."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from models import padded_prompts, paged, tiny
from transformers import Cache, DynamicCache, PreTrainedModel

from torchpaged import ArgumentError
from torchpaged.custom_ops.errors import NotCopyableError
from torchpaged.hf import PagedCache, attach, compile_layers, detach, fuse
from torchpaged.hf.attention import paged_attention_forward
from torchpaged.hf.call_mask import MaskRequest


def filled(
    model: PreTrainedModel, tokens: int = 8, rows: int = 1, **options: Any
) -> tuple[PagedCache, torch.Tensor]:
    """A cache after a forward over random tokens, and the tokens."""
    ids = torch.randint(3, 99, (rows, tokens))
    cache = PagedCache(model.config, rows, 32, block_size=4, **options)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache, ids


def test_a_cache_is_made_of_objects() -> None:
    """What transformers calls is on the cache, whose files are one line of classes, and all state in its
    parts, each of which stands alone."""
    from torchpaged.hf.owner import PagedOwner
    from torchpaged.hf.row_changes import RowChanges
    from torchpaged.hf.row_forwards import RowForwards
    from torchpaged.hf.step_cache import StepCache

    cache, _ = filled(paged())
    assert PagedCache.__mro__[1:5] == (RowForwards, RowChanges, PagedOwner, Cache)
    assert StepCache.__bases__ == (PagedOwner,)
    parts = (cache.rows, cache.masks, cache.backend, cache.order, cache.prefixes)
    assert all(type(part).__bases__ == (object,) for part in parts)
    held = {name for name, value in vars(cache).items() if isinstance(value, torch.Tensor)}
    assert held == {"_mask_token"}


def test_a_batch_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt once per forward, since its slots are others; of decode steps once."""
    model = paged()
    cache, ids = filled(model, rows=2)
    made, make = [], cache.rows._step

    def count(batch: int, query_len: int, rolls: bool) -> Any:
        made.append(query_len)
        return make(batch, query_len, rolls)

    monkeypatch.setattr(cache.rows, "_step", count)
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=theirs)
        for tokens in (8, 8, 1, 1, 3):
            more = torch.randint(3, 99, (2, tokens))
            got, want = (model(more, past_key_values=each).logits for each in (cache, theirs))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert made == [8, 8, 1, 3]


def test_eager_layers_behind_a_compiled_one_write_their_own_chunk() -> None:
    """It moves the rows on where the host does not see it, by as many tokens as the chunk before had."""
    model = paged()
    cache, ids = filled(model, tokens=5)
    torch.compiler.reset()
    model.model.layers[0].compile(backend="eager")
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=theirs)
        for _ in range(2):
            more = torch.randint(3, 99, (1, 5))
            got, want = (model(more, past_key_values=each).logits for each in (cache, theirs))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- crop
@pytest.mark.parametrize("removed", [0, -1, -5, -8, -9, -999])
def test_crop_is_what_transformers_does(removed: int) -> None:
    """Lengths and what follows, against a DynamicCache; more than there is takes everything."""
    model = paged()
    cache, ids = filled(model)
    theirs, more = DynamicCache(config=model.config), torch.randint(3, 99, (1, 3))
    with torch.no_grad():
        model(ids, past_key_values=theirs)
        for each in (cache, theirs):
            each.crop(removed)
        assert int(cache.get_seq_length()) == int(theirs.get_seq_length()) == max(8 + removed, 0)
        got, want = (model(more, past_key_values=each).logits for each in (cache, theirs))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [1, 5, 999, 2.5, "3", None])
def test_crop_refuses_what_is_no_number_of_tokens_to_take_back(bad: Any) -> None:
    """transformers from 5.18 on refuses positive numbers; they were lengths to keep."""
    cache, _ = filled(paged())
    with pytest.raises(ArgumentError, match="tokens_to_remove"):
        cache.crop(bad)
    assert int(cache.get_seq_length()) == 8
    assert cache.rows.seq_lens.tolist() == [8]


def test_crop_takes_a_tensor_and_an_empty_cache() -> None:
    cache, _ = filled(paged())
    cache.crop(torch.tensor(-3))
    assert int(cache.get_seq_length()) == 5
    empty = PagedCache(paged().config, 1, 32)
    empty.crop(-4)
    assert empty.get_seq_length() == 0


@pytest.mark.parametrize(("removed", "next_mask"), [(-4, None), (-16, [0, 1]), (-16, [0, 0]), (-20, [0, 1])])
@pytest.mark.parametrize("tokens", [1, 3])
def test_crop_of_rows_of_different_lengths(removed: int, next_mask: list[int] | None, tokens: int) -> None:
    """Left padding of 7 of 20 tokens in row 0: a cut inside the padding leaves a row without tokens, and the
    next mask says what is padding."""
    model, inputs = tiny("Llama"), padded_prompts()
    kept = 20 + removed
    ids = torch.cat([inputs["input_ids"][:, :kept], torch.randint(3, 99, (2, tokens))], 1)
    mask = torch.cat([inputs["attention_mask"][:, :kept], torch.ones(2, tokens, dtype=torch.int64)], 1)
    if next_mask is not None and next_mask[1] == 0:
        mask[0, kept] = 0  # row 0 is still padding where the new tokens begin
    cache = PagedCache(model.config, 2, 32, block_size=4)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, position_ids=positions).logits
        model.set_attn_implementation("torchpaged")
        model(
            **inputs,
            position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0),
            past_key_values=cache,
        )
        cache.crop(removed)
        assert int(cache.get_seq_length()) == kept
        assert cache.rows.seq_lens.tolist() == [max(kept - 7, 0), kept]
        got = model(
            ids[:, kept:], attention_mask=mask, position_ids=positions[:, kept:], past_key_values=cache
        ).logits
    real = mask[:, kept:].bool()
    torch.testing.assert_close(got[real], want[:, kept:][real], rtol=1e-4, atol=1e-4)


class OnADevice(torch.Tensor):
    """A mask whose `device` is a GPU's, as far as one asks; ``reads`` counts how often its numbers went to
    the host."""

    reads = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")

    def cpu(self) -> torch.Tensor:
        OnADevice.reads += 1
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("still_padding", [0, 2])
def test_a_cut_into_padding_is_asked_about_once(still_padding: int) -> None:
    """A decode step's mask is read until every row has a token: behind that it would only cost a
    synchronisation per step."""
    model, inputs = tiny("Llama"), padded_prompts()
    model.set_attn_implementation("torchpaged")
    cache, reads = PagedCache(model.config, 2, 32, block_size=4), []
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        cache.crop(-16)
        for new in range(1, 6):
            mask = torch.ones(2, 4 + new, dtype=torch.int64)
            mask[0, : 4 + min(new, still_padding)] = 0
            OnADevice.reads = 0
            for size in (None, 8):
                cache.masks.observe(MaskRequest(2, 1, 32, mask.as_subclass(OnADevice), None, size))
            reads.append(OnADevice.reads)
            model(torch.randint(3, 99, (2, 1)), past_key_values=cache)
    assert reads[still_padding + 1 :] == [0] * (4 - still_padding)
    assert all(reads[: still_padding + 1])
    assert cache.rows.seq_lens.tolist() == [5 - still_padding, 9]


@pytest.mark.parametrize("padded", [False, True])
def test_padding_told_late_is_refused_without_reading_it(padded: bool) -> None:
    """By an assertion on the device, where a decode step's mask is not read."""
    model, inputs = tiny("Llama"), padded_prompts()
    model.set_attn_implementation("torchpaged")
    if not padded:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    cache, mask = PagedCache(model.config, 2, 32, block_size=4), inputs["attention_mask"]
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    OnADevice.reads = 0
    mask = torch.cat((mask, mask[:, -1:]), dim=1)
    cache.masks.observe(MaskRequest(2, 1, 32, mask.as_subclass(OnADevice)))
    mask[1, :3] = 0
    with pytest.raises(RuntimeError, match="mask with other padding"):
        cache.masks.observe(MaskRequest(2, 1, 32, mask.as_subclass(OnADevice)))
    assert OnADevice.reads == 0


def test_rows_cut_to_nothing_take_a_padded_prompt() -> None:
    """No padding before, and so no word of any; another number of rows is still refused."""
    model, inputs = tiny("Llama"), padded_prompts()
    positions, real = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0), inputs["attention_mask"].bool()
    with torch.no_grad():
        want = model(**inputs, position_ids=positions).logits
        model.set_attn_implementation("torchpaged")
        cache, _ = filled(model, rows=2)
        cache.crop(-8)
        with pytest.raises(ArgumentError, match="input_ids: expected 2 rows"):
            model(inputs["input_ids"][:1], attention_mask=inputs["attention_mask"][:1], past_key_values=cache)
        got = model(**inputs, position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)


def test_a_recurrent_state_starts_over_and_can_not_be_taken_back() -> None:
    """Of a model with a recurrent state and attention in every layer."""
    model, ids = model_of("falcon_h1", "torchpaged"), torch.randint(3, 99, (2, 6))
    cache = PagedCache(model.config, 2, 32, block_size=4)
    with torch.no_grad():
        want = model(ids, past_key_values=cache).logits
        assert not cache.is_croppable
        with pytest.raises(RuntimeError, match="crop"):
            cache.crop(-2)
        assert int(cache.get_seq_length()) == 6
        cache.reset()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, want)


# --------------------------------------------------------------------------- a forward that does not complete
class Failure(Exception):
    pass


def failing(module: torch.nn.Module) -> Callable[[], None]:
    """Make a module raise before it runs; the return value undoes it."""

    def fail(*_: Any) -> None:
        raise Failure

    return module.register_forward_pre_hook(fail).remove


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_forward_that_raised_between_layers(when: str, fused: bool) -> None:
    """Every later use is refused until reset(); after it the tokens are right."""
    model = paged("Llama", num_hidden_layers=4)
    ids = torch.randint(3, 99, (2, 9))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        if fused:
            fuse(model, ["qkv", "rope"], count=False)
        cache = PagedCache(model.config, 2, 32, block_size=4)
        if when == "decode":
            model(ids[:, :5], past_key_values=cache)
        undo = failing(model.model.layers[2])
        with pytest.raises(Failure):
            model(ids[:, 5:6] if when == "decode" else ids[:, :5], past_key_values=cache)
        undo()
        uses: list[Callable[[], Any]] = [
            lambda: model(ids[:, 5:6], past_key_values=cache),
            lambda: model(ids[:, :5], past_key_values=cache),
            lambda: model.generate(torch.cat([ids, ids[:, :1]], 1), max_new_tokens=2, past_key_values=cache),
        ]
        if when == "decode":  # in a first forward the number of layers is not known yet
            uses += [
                lambda: cache.crop(-1),
                lambda: cache.batch_select_indices(torch.tensor([0])),
                lambda: cache.reorder_cache(torch.tensor([1, 0])),
            ]
        for use in uses:
            with pytest.raises(ArgumentError, match=r"(past_key_values|attention_mask|input_ids).*reset\(\)"):
                use()
        cache.reset()
        pieces = [
            model(ids[:, :5], past_key_values=cache).logits,
            model(ids[:, 5:], past_key_values=cache).logits,
        ]
    torch.testing.assert_close(torch.cat(pieces, 1), want, rtol=1e-4, atol=1e-4)


def test_a_forward_that_raised_before_the_first_layer_or_behind_the_last_one() -> None:
    """Neither leaves layers that disagree: the cache goes on, as transformers' own does."""
    model, ids = paged("Llama"), torch.randint(3, 99, (1, 9))
    cache = PagedCache(model.config, 1, 32, block_size=4)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model(ids[:, :5], past_key_values=cache)
        undo = failing(model.model.layers[0])
        with pytest.raises(Failure):
            model(ids[:, 5:7], past_key_values=cache)
        undo()
        undo = failing(model.model.layers[-1].mlp)
        with pytest.raises(Failure):
            model(ids[:, 5:7], past_key_values=cache)
        undo()
        got = model(ids[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(got, want[:, 7:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "layers"])
def test_a_compiled_step_that_raised(regional: bool) -> None:
    """Nothing on the host sees where a compiled step stopped: the lengths on the device do, without a read by
    the host."""
    torch._dynamo.reset()
    model, ids = paged("Llama"), torch.randint(3, 99, (1, 9))
    cache = PagedCache(model.config, 1, 32, block_size=4)
    graphs: list[Any] = []
    stop = [False]

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)

        class Stops(torch.fx.Interpreter):
            writes = 0

            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                self.writes += "write_kv" in str(target)
                if stop[0] and self.writes == 2:
                    raise Failure
                return super().call_function(target, args, kwargs)

        return lambda *args: Stops(graph).run(*args)

    def step(position: int) -> torch.Tensor:
        return run(
            input_ids=ids[:, position : position + 1],
            position_ids=torch.tensor([[position]]),
            past_key_values=cache,
        ).logits

    run: Any = model
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model(ids[:, :5], past_key_values=cache)
        if regional:
            compile_layers(model, backend="aot_eager")
        else:
            run = torch.compile(model, fullgraph=True, backend=backend)
        for position in (5, 6):
            torch.testing.assert_close(step(position), want[:, position : position + 1], rtol=1e-4, atol=1e-4)
        undo = failing(model.model.layers[1]) if regional else lambda: None
        stop[0] = True
        with pytest.raises(Failure):
            step(7)
        stop[0] = False
        undo()
        with pytest.raises((RuntimeError, ArgumentError), match="reset"):
            step(7)
        with pytest.raises(ArgumentError, match=r"past_key_values.*reset\(\)"):
            model(ids[:, 7:], past_key_values=cache)
        with pytest.raises(ArgumentError, match=r"past_key_values.*reset\(\)"):
            cache.crop(-1)
        cache.reset()
        model(ids[:, :7], past_key_values=cache)
        torch.testing.assert_close(step(7), want[:, 7:8], rtol=1e-4, atol=1e-4)
    assert regional or len(graphs) == 1


def test_two_threads_on_one_cache() -> None:
    """A forward that begins while another one is between two layers is refused; the first one completes."""
    model, ids = paged("Llama"), torch.randint(3, 99, (1, 9))
    cache = PagedCache(model.config, 1, 32, block_size=4)
    inside, done, caught = threading.Event(), threading.Event(), []

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert done.wait(60)

    def first() -> None:
        with torch.no_grad():
            caught.append(model(ids[:, 5:7], past_key_values=cache).logits)

    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model(ids[:, :5], past_key_values=cache)
        model.model.layers[1].mlp.register_forward_pre_hook(wait)
        thread = threading.Thread(target=first)
        thread.start()
        assert inside.wait(60)
        try:
            with pytest.raises(ArgumentError, match="still runs"):
                model(ids[:, 5:7], past_key_values=cache)
        finally:
            done.set()
            thread.join()
        torch.testing.assert_close(caught[0], want[:, 5:7], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            model(ids[:, 7:], past_key_values=cache).logits, want[:, 7:], rtol=1e-4, atol=1e-4
        )


def test_lengths_that_the_host_knows() -> None:
    """As long as it has seen every forward: a compiled one moves them on where the host does not look."""
    model = paged()
    inputs = padded_prompts()
    cache = PagedCache(model.config, 2, 40, block_size=4)
    step = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        model(torch.tensor([[5], [6]]), past_key_values=cache)
        known = cache.rows.host_lengths(2, 1)
        assert known is not None
        assert list(known.seq_lens) == cache.rows.seq_lens.tolist()
        assert list(known.query_lens) == [1, 1]
        assert known.seq_lens[0] != known.seq_lens[1]
        for _ in range(2):
            step(torch.tensor([[7], [8]]), past_key_values=cache)
            assert cache.rows.host_lengths(2, 1) is None
            model(torch.tensor([[7], [8]]), past_key_values=cache)
            assert cache.rows.host_lengths(2, 1) is None
        cache.crop(-1)
        known = cache.rows.host_lengths(2, 1)
        assert known is not None
        assert list(known.seq_lens) == cache.rows.seq_lens.tolist()


# ------------------------------------------------------------------------------------------- rows of a batch
@pytest.mark.parametrize(
    "rows", [[-1, 0, 1], [3, 0, 1], [True, True, True], [True, False, True], [0.0, 1.0, 2.0], []]
)
@pytest.mark.parametrize("method", ["reorder_cache", "batch_select_indices"])
def test_rows_that_there_are_not_are_refused_before_anything_changes(method: str, rows: list[Any]) -> None:
    """A negative number would take blocks that were just given back, a mask of ones would make every row the
    second one."""
    model = paged()
    cache, ids = filled(model, rows=3)
    more, free = torch.randint(3, 99, (3, 1)), cache.pool.num_free
    with pytest.raises(ArgumentError, match="expected row numbers from 0 to 2"):
        getattr(cache, method)(torch.tensor(rows))
    assert cache.pool.num_free == free
    with torch.no_grad():
        got = model(more, past_key_values=cache).logits[:, -1]
        want = model(torch.cat([ids, more], 1), past_key_values=PagedCache(model.config, 3, 32)).logits[:, -1]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_repeats_that_leave_no_row_are_refused() -> None:
    cache, _ = filled(paged(), rows=2)
    with pytest.raises(ArgumentError, match="expected row numbers"):
        cache.batch_repeat_interleave(0)


@pytest.mark.parametrize("used", [False, True])
def test_rows_of_a_cache_that_holds_nothing_stay_as_they_are(used: bool) -> None:
    """As transformers' caches: unused, or after a reset, there is nothing to reorder."""
    model = paged()
    cache = PagedCache(model.config, 3, 32, block_size=4)
    ids = torch.randint(3, 99, (2, 8))
    if used:
        with torch.no_grad():
            model(ids, past_key_values=cache)
        cache.reset()
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert not cache.ready
    assert cache.get_seq_length() == 0
    assert len(cache.rows.blocks) == 0


@pytest.mark.parametrize("options", [{}, {"sliding_step": 2}])
def test_states_of_one_row_that_a_convolution_left_strided(options: dict[str, Any]) -> None:
    """``[1, heads * head_dim, tokens]``, transposed: reshape keeps such strides, and ops refuse them."""
    model = paged("Mistral")
    states = [torch.randn(1, heads * 16, 5) for heads in (4, 2, 2)]
    strided = [x.transpose(1, 2).unflatten(2, (-1, 16)).transpose(1, 2) for x in states]
    outs = []
    for q, k, v in (strided, [x.contiguous() for x in strided]):
        cache = PagedCache(model.config, 1, 64, block_size=4, **options)
        outs.append(
            paged_attention_forward(model.model.layers[0].self_attn, q, *cache.update(k, v, 0), None)[0]
        )
    assert strided[0].stride(-1) == 5
    assert torch.equal(*outs)


def test_a_shallow_copy_is_refused() -> None:
    """It would share rows and blocks with its original: one conversation would go on in the other's."""
    cache = PagedCache(paged().config, 1, 32)
    with pytest.raises(NotCopyableError, match="deepcopy"):
        copy.copy(cache)
    assert copy.deepcopy(cache).rows is not cache.rows


# ------------------------------------------------------------------------------------------- another prompt
@pytest.mark.parametrize(("length", "padding"), [(1, 0), (5, 0), (5, 3), (8, 0), (12, 3), (16, 3), (17, 3)])
@pytest.mark.parametrize("dense", [False, True])
def test_another_prompt_without_a_reset(length: int, padding: int, dense: bool) -> None:
    """generate() takes as many of its tokens as the cache holds for those; transformers' cache hides the rest
    behind the mask's end, or fails over no tokens at all."""
    model, prompt = paged(), torch.randint(3, 99, (2, 12))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    cache = PagedCache(model.config, 2, 64, block_size=4, dense=dense)
    model.generate(prompt, **options, past_key_values=cache)
    assert int(cache.get_seq_length()) == 17
    other = torch.randint(3, 99, (2, length))
    mask = torch.ones_like(other)
    mask[0, :padding] = 0
    call = {"input_ids": other, "attention_mask": mask, **options}
    with pytest.raises(ArgumentError, match=r"(_mask|_ids): .*17 in the cache.*; call cache.reset\(\)"):
        model.generate(**call, past_key_values=cache)
    assert int(cache.get_seq_length()) == 17
    cache.reset()
    want = paged().generate(**call)
    assert torch.equal(model.generate(**call, past_key_values=cache), want)


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3", "GptOss"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [9, 10, 12, 16, 17])
@pytest.mark.parametrize("dense", [False, True])
def test_the_same_prompt_again(name: str, masked: bool, length: int, dense: bool) -> None:
    """transformers 5.24 drops masks of ones, and runs what is left of the prompt behind itself."""
    if length == 17 and not masked:
        pytest.skip("transformers runs all of them, as it runs new tokens alone")
    model = paged(name)
    options: dict[str, Any] = {"do_sample": False, "disable_compile": True}
    call = {"input_ids": torch.randint(3, 99, (2, length)), **options}
    if masked:
        call["attention_mask"] = torch.ones_like(call["input_ids"])
    cache = PagedCache(model.config, 2, 64, block_size=4, dense=dense)
    want = model.generate(**call, max_new_tokens=18 - length, past_key_values=cache)
    assert int(cache.get_seq_length()) == 17
    with pytest.raises(ArgumentError, match=r"17 in the cache.*; call cache.reset\(\)"):
        model.generate(**call, max_new_tokens=4, past_key_values=cache)
    cache.reset()
    assert torch.equal(model.generate(**call, max_new_tokens=18 - length, past_key_values=cache), want)


@pytest.mark.parametrize("padding", [(3, 0), (0, 3), (2, 3)])
@pytest.mark.parametrize("length", [9, 10, 12, 16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_another_prompt_behind_padded_rows(
    padding: tuple[int, int], length: int, masked: bool, dense: bool
) -> None:
    """Its mask of ones says nothing: its positions tell, which are not those behind the first prompt's."""
    model, prompt = paged(), torch.randint(3, 99, (2, 12))
    mask = torch.arange(12)[None] >= torch.tensor(padding)[:, None]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    cache = PagedCache(model.config, 2, 64, block_size=4, dense=dense)
    model.generate(prompt, attention_mask=mask.long(), **options, past_key_values=cache)
    call = {"input_ids": torch.randint(3, 99, (2, length)), **options}
    if masked:
        call["attention_mask"] = torch.ones_like(call["input_ids"])
    with pytest.raises(ArgumentError, match=r"17 in the cache.*; call cache.reset\(\)"):
        model.generate(**call, past_key_values=cache)


@pytest.mark.parametrize("padding", [(3, 0), (0, 3), (11, 0)])
@pytest.mark.parametrize("new", [1, 3, 9, 17, 20])
@pytest.mark.parametrize("dense", [False, True])
def test_the_next_turn_behind_padded_rows(padding: tuple[int, int], new: int, dense: bool) -> None:
    """The whole text, or new tokens alone behind a mask over all; as many as may look like a prompt again."""
    model, prompt = paged(), torch.randint(3, 99, (2, 12))
    mask = (torch.arange(12)[None] >= torch.tensor(padding)[:, None]).long()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    first = model.generate(prompt, attention_mask=mask, **options)
    text = torch.cat([first, torch.randint(3, 99, (2, new))], 1)
    call = {"attention_mask": torch.nn.functional.pad(mask, (0, text.shape[1] - 12), value=1), **options}
    want = model.generate(text, **call)[:, text.shape[1] :]
    for given in (text, text[:, 17:]):
        cache = PagedCache(model.config, 2, 64, block_size=4, dense=dense)
        model.generate(prompt, attention_mask=mask, **options, past_key_values=cache)
        got = model.generate(given, **call, past_key_values=cache)
        assert torch.equal(got[:, given.shape[1] :], want)


def test_rows_that_are_all_padded_are_no_other_prompt() -> None:
    """Their positions are behind by as many as there are padding tokens, and pass those of a prompt that is
    given again."""
    for dense in (False, True):
        model, prompt = paged(), torch.randint(3, 99, (2, 12))
        mask = torch.ones_like(prompt)
        mask[:, :8] = 0
        call = {"input_ids": prompt, "attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
        cache = PagedCache(model.config, 2, 64, block_size=4, dense=dense)
        want = paged().generate(**call)
        assert torch.equal(model.generate(**call, disable_compile=True, past_key_values=cache), want)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("chunks", [(10,), (1, 9), (4, 6)])
def test_positions_behind_a_picture_are_no_other_prompt(chunks: tuple[int, ...], dense: bool) -> None:
    """Tokens of a picture stand at one place (M-RoPE): later positions pass half of what is cached."""
    ids, places = torch.randint(3, 99, (1, 40)), torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 2, *range(3, 34)]])
    model, cache = paged(), PagedCache(paged().config, 1, 64, block_size=4, dense=dense)
    parts = [part.split([*chunks, *[1] * 30], 1) for part in (ids, places)]
    with torch.no_grad():
        want = paged().eval()(ids, position_ids=places).logits[:, -1:]
        for tokens, positions in zip(*parts, strict=True):
            got = model(tokens, position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(got[:, -1:], want)


@pytest.mark.slow_cases(but_every=3)
@pytest.mark.parametrize("length", [5, 9, 12])
@pytest.mark.parametrize(
    "model_type",
    [
        *("bloom", "falcon", "mpt", "xglm", "mamba", "mamba2"),
        *("ctrl", "deepseek_v32", "gpt_bigcode", "llama4_text", "persimmon", "recurrent_gemma", "zamba"),
    ],
)
def test_the_same_prompt_again_where_nothing_tells_positions(model_type: str, length: int) -> None:
    """generate() itself shows it: it finds no token left, or is told to run all of them again."""
    model = attach(model_of(model_type))
    prompt = torch.randint(3, 99, (2, length))
    options: dict[str, Any] = {"do_sample": False, "disable_compile": True, "use_cache": True}
    options["eos_token_id"] = None
    cache = PagedCache(model.config, 2, 64, block_size=4)
    once = {"input_ids": prompt, "max_new_tokens": 18 - length, **options}
    want = model.generate(**once, past_key_values=cache)
    with pytest.raises(ArgumentError, match=r"17 in the cache.*; call cache.reset\(\)"):
        model.generate(**once, past_key_values=cache)
    further = {**once, "input_ids": torch.cat([want, prompt], 1)}
    found = model.generate(**further, past_key_values=cache)
    cache.reset()
    assert torch.equal(model.generate(**further, past_key_values=cache), found)
    cache.reset()
    assert torch.equal(model.generate(**once, past_key_values=cache), want)
    cache.reset()
    with pytest.raises(ArgumentError, match=f"use_cache: expected True behind the {length} tokens"):
        model.generate(**{**once, "use_cache": False}, past_key_values=cache)
    detach(model)
    assert torch.equal(model.generate(**further), found)
    assert "prepare_inputs_for_generation" not in vars(model)


@pytest.mark.parametrize("model_type", ["bloom", "mamba2"])
def test_embeddings_of_fewer_tokens_than_are_cached(model_type: str) -> None:
    model = attach(model_of(model_type))
    embeddings = model.get_input_embeddings()(torch.randint(3, 99, (2, 9))).detach()
    cache = PagedCache(model.config, 2, 64, block_size=4)
    call: dict[str, Any] = {"inputs_embeds": embeddings, "do_sample": False, "disable_compile": True}
    call |= {"max_new_tokens": 4, "eos_token_id": None, "past_key_values": cache}
    want = model.generate(**call)
    with pytest.raises(ArgumentError, match=r"more tokens than the 12 in the cache, got 9; call cache.reset"):
        model.generate(**call)
    cache.reset()
    assert torch.equal(model.generate(**call), want)


@pytest.mark.parametrize("model_type", ["bloom", "mamba2"])
def test_a_prepare_inputs_for_generation_of_ones_own(model_type: str) -> None:
    """It is asked behind the refusals, and stands there again when the model is detached."""
    model, asked = model_of(model_type), []
    name = "prepare_inputs_for_generation"
    plain = getattr(model, name)

    def own(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(input_ids.shape[1])
        return plain(input_ids, *args, **kwargs)

    setattr(model, name, own)
    attach(model)
    cache = PagedCache(model.config, 2, 64, block_size=4)
    call: dict[str, Any] = {"do_sample": False, "disable_compile": True, "max_new_tokens": 3}
    call |= {"input_ids": torch.randint(3, 99, (2, 9)), "eos_token_id": None, "past_key_values": cache}
    model.generate(**call)
    assert asked == [9, 10, 11]
    with pytest.raises(ArgumentError, match="more tokens than the 11 in the cache, got 9"):
        model.generate(**call)
    assert asked == [9, 10, 11]
    detach(model)
    assert getattr(model, name) is own


def test_another_prompt_that_looks_like_the_next_turn() -> None:
    """Longer than the cached tokens: as transformers has it."""
    model, prompt = paged(), torch.randint(3, 99, (2, 12))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    for length in (18, 24):
        caches = [PagedCache(model.config, 2, 64, block_size=4), DynamicCache(config=model.config)]
        other = torch.randint(3, 99, (2, length))
        found = []
        for cache in caches:
            model.generate(prompt, **options, past_key_values=cache)
            found.append(model.generate(other, **options, past_key_values=cache))
        assert torch.equal(*found)


def test_the_next_turn() -> None:
    """All tokens so far and some more, as transformers has it, or the new ones behind a mask over all."""
    model, prompt, more = paged(), torch.randint(3, 99, (2, 12)), torch.randint(3, 99, (2, 4))
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True}
    cache = PagedCache(model.config, 2, 64, block_size=4)
    first = model.generate(prompt, **options, past_key_values=cache)
    second = torch.cat([first, more], 1)
    got = model.generate(second, **options, past_key_values=cache)
    assert torch.equal(got, model.generate(second, **options))


@pytest.mark.parametrize("size", [1, 3, 19])
def test_a_padded_prompt_in_chunks(size: int) -> None:
    """Of a row of nothing but padding, the next mask may say more; chunks of one token look like steps."""
    model, call = paged(), {**padded_prompts(), "max_new_tokens": 4, "do_sample": False}
    want = model.generate(**call)
    cache = PagedCache.for_inputs(model, **call, block_size=4)
    assert torch.equal(model.generate(**call, prefill_chunk_size=size, past_key_values=cache), want)
    assert cache.rows.padding == [7, 0]
    assert not cache.rows.cut_padding
    more = torch.cat([call["attention_mask"], torch.ones(2, 4, dtype=torch.int64)], 1)
    more[1, 0] = 0
    with pytest.raises(ArgumentError, match="rows can't be padded again later"), torch.no_grad():
        model(torch.full((2, 1), 5), attention_mask=more, past_key_values=cache)


class Total(OnADevice):
    """Tokens that each look would synchronise for."""

    def __int__(self) -> int:
        OnADevice.reads += 1
        return 3


def test_steps_on_a_device_are_not_read() -> None:
    """Their masks grow; one that is shorter than one before is asked about."""
    cache, _ = filled(paged(), rows=2)
    cache.rows.total = torch.tensor(3).as_subclass(Total)
    for length, reads in ((9, 0), (9, 0), (10, 0), (4, 1)):
        OnADevice.reads = 0
        cache.masks.require_next(MaskRequest(2, 1, 32, torch.ones(2, length).as_subclass(OnADevice)))
        assert OnADevice.reads == reads
