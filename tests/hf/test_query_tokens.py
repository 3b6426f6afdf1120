"""Which cache writes let an attention start early: those of its own query tokens, and in no other
case (docs/stream_order.md)."""

import re
from typing import Any

import fused_models
import pytest
import torch
from models import padded_prompts, tiny
from sessions import KEPT, semaphore_of
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BartConfig, BartForConditionalGeneration, EncoderDecoderCache, PreTrainedModel

from torchpaged.backends.choose import names as names_module
from torchpaged.hf import PagedCache, fuse, query_starts

BART: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "init_std": 0.5,
}


class Writes(TorchDispatchMode):
    """``(tokens, are_query_tokens)`` of every `write_kv`, `rope_write_kv` and `rope_write_latent`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("torchpaged::write_kv", "torchpaged::rope_write_kv", "torchpaged::rope_write_latent")
        if func.name().startswith(names):
            self.seen.append((len(args[0]), (kwargs or {}).get("are_query_tokens", False)))
        return func(*args, **(kwargs or {}))


def written(model: PreTrainedModel, cache: Any, **inputs: torch.Tensor) -> list[tuple[int, bool]]:
    with torch.no_grad(), Writes() as writes:
        model(**inputs, past_key_values=cache)
    return writes.seen


def test_a_decoder_writes_its_query_tokens() -> None:
    """The first layer's write comes right behind what it computes of the step, and lets nothing start early;
    nor does any write of several tokens per row, whose slots are made there."""
    model, inputs = tiny("Llama"), padded_prompts()
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 8, 64)
    rows, num_tokens = len(inputs["input_ids"]), inputs["input_ids"].numel()
    others = model.config.num_hidden_layers - 1
    assert others
    assert written(model, cache, **inputs) == [(num_tokens, False)] * (others + 1)
    writes = written(model, cache, input_ids=torch.ones(rows, 1, dtype=torch.long))
    assert writes == [(rows, False), *[(rows, True)] * others]
    writes = written(model, PagedCache(model.config, 8, 64, dense=True), **inputs)
    assert writes == [(num_tokens, False)] * (others + 1)


def test_a_fused_model_over_latents_writes_its_query_tokens() -> None:
    model, inputs = fused_models.build("youtu"), padded_prompts()
    fuse(model)
    cache, rows = PagedCache(model.config, 8, 64), len(inputs["input_ids"])
    written(model, cache, **inputs)
    writes = written(model, cache, input_ids=torch.ones(rows, 1, dtype=torch.long))
    assert writes == [(rows, n > 0) for n in range(model.config.num_hidden_layers)]


@pytest.mark.parametrize("each", [True, False])
def test_a_fused_model_whose_rows_share_positions_lets_nothing_start_early(each: bool) -> None:
    """Its layers copy them right in front of the write, which reads positions early where it may."""
    model = tiny("Llama")
    model.set_attn_implementation("torchpaged")
    fuse(model)
    cache, ids = PagedCache(model.config, 2, 64), torch.ones(2, 3, dtype=torch.long)
    written(model, cache, input_ids=ids)
    positions = torch.tensor([[3], [3]] if each else [[3]])
    writes = written(model, cache, input_ids=ids[:, :1], position_ids=positions)
    assert writes == [(2, False), *[(2, each)] * (model.config.num_hidden_layers - 1)]


@pytest.mark.parametrize("query_len", [1, 3])
def test_an_encoders_keys_are_context(query_len: int) -> None:
    """Cross attention over a paged cache: the queries read keys that were written right before, are not their
    own, and are not as many."""
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**BART)).eval()
    inputs = {
        "input_ids": torch.randint(4, 99, (2, 20)),
        "decoder_input_ids": torch.randint(4, 99, (2, query_len)),
    }
    with torch.no_grad():
        want = model(**inputs).logits
        model.set_attn_implementation("torchpaged")
        cache = EncoderDecoderCache(*(PagedCache(model.config, 2, 32) for _ in range(2)))
        got = model(**inputs, past_key_values=cache).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    cache = EncoderDecoderCache(*(PagedCache(model.config, 2, 32) for _ in range(2)))
    assert written(model, cache, **inputs) == [(2 * query_len, False), (40, False)] * 2


class Writers(TorchDispatchMode):
    """Of every `paged_attention`: how many ops ahead of it its query starts were last written; None: before
    this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int | None] = []
        self._count, self._written = 0, {}  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().startswith("torchpaged::paged_attention"):
            at = self._written.get(args[5].untyped_storage().data_ptr())
            self.seen.append(None if at is None else self._count - at)
        elif not func.is_view:
            self._count += 1
            targets = [
                x
                for x, a in zip(args, func._schema.arguments, strict=False)
                if a.alias_info is not None and a.alias_info.is_write
            ]
            for x in (*targets, *(out if isinstance(out, tuple | list) else [out])):
                if isinstance(x, torch.Tensor):
                    self._written[x.untyped_storage().data_ptr()] = self._count
            # two kernels behind each other, see below
            self._count += func.name() in ("torchpaged::_fill_query_starts", "torchpaged::_pin_batch")
        return out


@pytest.mark.parametrize("query_len", [1, 2, 8, 9])
def test_query_starts_are_not_written_in_front_of_attention(query_len: int) -> None:
    """Up to 8 tokens per row, none does in the whole forward; of more tokens, and where each query of cross
    attention is a request, another kernel comes in between."""
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**BART)).eval()
    model.set_attn_implementation("torchpaged")
    cache = EncoderDecoderCache(*(PagedCache(model.config, 2, 64) for _ in range(2)))
    inputs = {
        "input_ids": torch.randint(4, 99, (2, 20)),
        "decoder_input_ids": torch.randint(4, 99, (2, query_len)),
    }
    with torch.no_grad():
        encoded = model.get_encoder()(inputs["input_ids"])
        want = model(**inputs, encoder_outputs=encoded).logits
        got = model(**inputs, past_key_values=cache, encoder_outputs=encoded).logits
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        with Writers() as writers:
            model(**inputs, past_key_values=cache, encoder_outputs=encoded)
    distances = writers.seen
    assert len(distances) == 4
    own, cross = distances[::2], distances[1::2]
    assert own == [None] * 2 if query_len <= 8 else all(n is not None and n >= 2 for n in own), own
    assert cross == [None] * 2 if query_len == 1 else all(n is not None and n >= 2 for n in cross), cross


class Kernels(TorchDispatchMode):
    """Names of the ops that launch something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_query_starts_are_two_kernels() -> None:
    starts, rows = torch.zeros(5, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    with Kernels() as kernels:
        query_starts._fill(starts, rows, 9)
    assert starts.tolist() == [0, 9, 18, 27, 36]
    assert kernels.names == ["aten::mul.out", "aten::add.Tensor"]


@pytest.mark.parametrize("crosses", [True, False])
def test_compiled_code_keeps_the_kernel_in_between(crosses: bool) -> None:
    """Nothing that Inductor generates writes the query starts of nine tokens per row; in front of each
    attention, or of all, stands the op."""
    torch._dynamo.reset()
    model = BartForConditionalGeneration(BartConfig(**BART)) if crosses else tiny("Llama")
    model.set_attn_implementation("torchpaged")
    heads, dim = (2, 16) if crosses else (4, 16)
    cache, states = PagedCache(model.config, 2, 64), torch.randn(2, 2, 9, dim)
    for index in range(2):
        cache.update(states, states, index)
    pools = [(layer, layer.keys, layer.values) for layer in cache.paged[:2]]
    q = torch.randn(18, heads, dim)

    def attend(q: torch.Tensor) -> list[torch.Tensor]:
        outs = []
        for index, (layer, k, v) in enumerate(pools):
            if not crosses:
                cache.update(states, states, index)
            step, out = cache.metadata_of(layer, 2, 9), torch.empty_like(q)
            batch = step.block_table, step.seq_lens, step.query_start_loc
            cache.backend.ops.paged_attention(q, k, v, *batch, out, None, max_query_len=9, scale=0.25)
            outs.append(out)
        return outs

    with torch.no_grad():
        got, codes = run_and_get_code(torch.compile(attend, fullgraph=True), q)
        starts = torch.tensor([0, 9, 18], dtype=torch.int32)
        for out, (_, k, v) in zip(got, pools, strict=True):
            want = torch.empty_like(q)
            batch = cache.rows.block_table, cache.rows.seq_lens, starts
            cache.backend.ops.paged_attention(q, k, v, *batch, want, None, max_query_len=9, scale=0.25)
            torch.testing.assert_close(out, want)
    code = "\n".join(codes)
    calls = re.findall(
        r"torch\.ops\.torchpaged\.(_fill_query_starts|paged_attention)[\w.]*\(([^\n]*)\)", code
    )
    fills = [arguments.split(",")[0] for name, arguments in calls if name == "_fill_query_starts"]
    attentions = [arguments for name, arguments in calls if name == "paged_attention"]
    assert len(attentions) == 2
    assert len(fills) == (2 if crosses else 1)
    assert [name for name, _ in calls] == (
        ["_fill_query_starts", "paged_attention"] * 2
        if crosses
        else ["_fill_query_starts", *["paged_attention"] * 2]
    )
    for fill, arguments in zip(fills if crosses else fills * 2, attentions, strict=True):
        assert re.search(rf"\b{fill}\b", arguments), (fill, arguments)


def test_a_new_batch_begins_with_a_clear_semaphore(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny("Llama"), padded_prompts()
    model.set_attn_implementation("torchpaged")
    monkeypatch.setattr(names_module, "REGISTERED", {"kept": KEPT})
    cache = PagedCache(model.config, 8, 64, backend="kept")
    with torch.no_grad():
        want = model(**inputs, past_key_values=cache).logits
        cache.reset()
        semaphore_of(cache.session)[3] = 1
        torch.testing.assert_close(model(**inputs, past_key_values=cache).logits, want)
    assert not semaphore_of(cache.session).any()
