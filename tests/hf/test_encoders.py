"""Attention without a cache: which calls run on our kernels, that padding takes no part, and that no other
call is taken for one of them."""

import copy
from typing import Any

import pytest
import torch
import transformers
from model_coverage import encoders, examine
from model_coverage.checks import Row
from model_coverage.encoders import Attended
from test_query_tokens import Kernels
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import MistralConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from torchpaged.hf import query_starts
from torchpaged.hf.call import LayerCall
from torchpaged.hf.call_mask import CallMask, held_by
from torchpaged.hf.families import family_of
from torchpaged.hf.mask_kinds import MaskKind
from torchpaged.hf.model_classes import needs_eager_mask
from torchpaged.hf.uncached import Way, way_of

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "bert": transformers.BertConfig(**SIZES),
    "modernbert": transformers.ModernBertConfig(
        **SIZES,
        local_attention=4,
        global_attn_every_n_layers=2,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "causal": transformers.CLIPTextConfig(**SIZES, eos_token_id=98, bos_token_id=1),
    "splinter": transformers.SplinterConfig(**SIZES),
}


def built(name: str, implementation: str = "torchpaged") -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                )
    return model


def batch(padding: str) -> dict[str, Tensor]:
    """Three rows of up to 14 tokens."""
    ids = torch.randint(3, 97, (3, 14), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding in ("right", "both"):
        mask[0, 9:] = 0
        mask[2, 4:] = 0
    if padding in ("left", "both"):
        mask[0, :3] = 0
    if padding == "hole":
        mask[1, 5:7] = 0
    if padding == "empty":
        mask[1] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def states(model: Any, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**given).last_hidden_state
    return found[given["attention_mask"].bool()]


@pytest.mark.parametrize("padding", ["none", "right", "left", "both", "empty"])
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_equal_eager(name: str, padding: str) -> None:
    given = batch(padding)
    with Attended() as counts:
        got = states(built(name), given)
    torch.testing.assert_close(got, states(built(name, "eager"), given), rtol=1e-4, atol=1e-5)
    windowed = name == "modernbert" and padding in ("left", "both")  # one of two layers
    assert (counts.ours, counts.sdpa) == ((1, 1) if windowed else (2, 0))


HEADS: dict[str, Any] = {
    "bert": CONFIGS["bert"],
    "albert": transformers.AlbertConfig(**SIZES, embedding_size=16),
    "distilbert": transformers.DistilBertConfig(vocab_size=99, dim=32, hidden_dim=48, n_layers=2, n_heads=4),
    "electra": transformers.ElectraConfig(**SIZES, embedding_size=32),
    "esm": transformers.EsmConfig(**SIZES, mask_token_id=4),
    "modernbert": CONFIGS["modernbert"],
    "xlm-roberta": transformers.XLMRobertaConfig(**SIZES),
}


@pytest.mark.slow_cases("*-both", but=("bert-both", "distilbert-both", "modernbert-both"))
@pytest.mark.parametrize("padding", ["left", "both"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_that_read_the_first_position(name: str, padding: str) -> None:
    """Padding in front sees the tokens, also where it is more than they are; with windows it is so little
    here that every position sees one: others have no defined values."""
    given, logits = batch(padding), {}
    if name == "modernbert":
        given["attention_mask"] = (torch.arange(14) >= torch.tensor([[1], [0], [2]])).long()
    else:
        given["attention_mask"][1, :9] = 0
    for implementation in ("torchpaged", "eager"):
        torch.manual_seed(0)
        model = transformers.AutoModelForSequenceClassification.from_config(
            copy.deepcopy(HEADS[name]), attn_implementation=implementation
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
            logits[implementation] = model(**given).logits
            if implementation == "torchpaged" and padding == "both":
                torch._dynamo.reset()
                compiled = torch.compile(model, fullgraph=True, backend="eager")
                logits["compiled"] = compiled(**given).logits
    want = logits.pop("eager")
    for got in logits.values():
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_pooled_state_of_a_padded_position() -> None:
    """SigLIP pools the last position, whatever it is: the states of padding must be transformers' own."""
    given, pooled = batch("right"), []
    for implementation in ("torchpaged", "eager"):
        torch.manual_seed(0)
        config = transformers.SiglipTextConfig(**SIZES, bos_token_id=1, eos_token_id=2)
        model = transformers.SiglipTextModel._from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            pooled.append(model(**given).pooler_output)
    torch.testing.assert_close(pooled[0], pooled[1], rtol=1e-4, atol=1e-5)


def test_convolutions_behind_an_encoder() -> None:
    """wav2vec2's adapter mixes a row's last tokens with the padding behind them."""
    given = {"input_values": torch.randn(2, 120, generator=torch.Generator().manual_seed(0))}
    given["attention_mask"] = (torch.arange(120) < torch.tensor([[120], [74]])).long()
    states = []
    for implementation in ("torchpaged", "eager"):
        torch.manual_seed(0)
        config = transformers.Wav2Vec2Config(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            conv_dim=(8, 8),
            conv_kernel=(4, 4),
            conv_stride=(2, 2),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            initializer_range=0.5,
            add_adapter=True,
            num_adapter_layers=1,
        )
        model = transformers.Wav2Vec2Model._from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            states.append(model(**given).last_hidden_state)
    torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=1e-5)


def test_a_hole_goes_to_sdpa() -> None:
    given = batch("hole")
    with Attended() as counts:
        got = states(built("bert"), given)
    torch.testing.assert_close(got, states(built("bert", "eager"), given), rtol=1e-4, atol=1e-5)
    assert (counts.ours, counts.sdpa) == (0, 2)
    with pytest.raises(RuntimeError, match="a hole between two"):
        states(torch.compile(built("bert"), fullgraph=True, backend="eager"), given)
    torch._dynamo.reset()


def test_padding_changes_nothing() -> None:
    """A row beside longer ones, by itself, and with any values in its padding."""
    model, given = built("bert"), batch("right")
    other = {**given, "input_ids": torch.where(given["attention_mask"].bool(), given["input_ids"], 55)}
    alone = {name: tensor[2:, :4] for name, tensor in given.items()}
    want = states(model, given)
    assert torch.equal(states(model, other), want)
    torch.testing.assert_close(states(model, alone), want[-4:], rtol=1e-5, atol=1e-6)


@pytest.mark.slow_cases("causal")
@pytest.mark.parametrize("name", ["bert", "causal"])
def test_one_graph_for_all_lengths(name: str) -> None:
    """Of the rows, and of the longest one too."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    step, eager = (
        torch.compile(built(name), fullgraph=True, backend=counter, dynamic=True),
        built(name, "eager"),
    )
    for padding, length in (("right", 14), ("left", 11), ("both", 13)):
        given = {key: tensor[:, :length].clone() for key, tensor in batch(padding).items()}
        torch.testing.assert_close(states(step, given), states(eager, given), rtol=1e-4, atol=1e-5)
    ours = [
        str(node)
        for graph in counter.graphs
        for node in graph.graph.nodes
        if "torchpaged" in str(node.target)
    ]
    assert counter.frame_count == 1 and len(ours) == 3, ours  # the batch, pinned once for both layers
    torch._dynamo.reset()


def test_what_gradients_need() -> None:
    """Training runs on SDPA, as before."""
    given, model = batch("right"), built("bert")
    with Attended() as counts:
        model(**given).last_hidden_state.sum().backward()
    assert (counts.ours, counts.sdpa) == (0, 2)
    assert next(model.parameters()).grad is not None


def test_a_decoder_of_the_same_type() -> None:
    """Its cross attention looks like an encoder's self-attention where there are as many queries as keys; its
    modules don't tell."""
    config = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    given, encoded = batch("right"), torch.randn(3, 14, 32, generator=torch.Generator().manual_seed(2))
    found = []
    for implementation in ("eager", "torchpaged"):
        torch.manual_seed(0)
        model = transformers.BertModel._from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            out = model(
                given["input_ids"],
                encoder_hidden_states=encoded,
                encoder_attention_mask=given["attention_mask"],
                use_cache=False,
            )
        found.append(out.last_hidden_state)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class Module(torch.nn.Module):
    """An attention module that says whether it is a decoder's, or does not."""

    def __init__(self, is_decoder: bool | None = None) -> None:
        super().__init__()
        if is_decoder is not None:
            self.is_decoder = is_decoder


def way(config: Any, module: torch.nn.Module, num_keys: int = 14, needs_kernel: bool = False) -> Way | None:
    """Of 14 queries and as many keys or others, behind a padded mask of the model's making."""
    config._attn_implementation = "torchpaged"
    padding = torch.ones(3, num_keys, dtype=torch.bool)
    padding[0, 2:] = False
    x, keys = torch.zeros(3, 14, 32), torch.zeros(3, num_keys, 32)
    mask = create_bidirectional_mask(config, x, padding, encoder_hidden_states=keys)
    q, k = torch.zeros(3, 4, 14, 8), torch.zeros(3, 4, num_keys, 8)
    call = LayerCall(module, q, k, k, causal=False, softcap=0.5 if needs_kernel else None)
    return way_of(call, mask, 0.0)


def test_the_way_of_a_call() -> None:
    """Queries are left out only where they are known to be the padded tokens."""
    from transformers import BartConfig, BlipTextConfig

    assert way(transformers.BertConfig(**SIZES), Module()) is Way.TOKENS
    assert way(transformers.BertConfig(**SIZES), Module(is_decoder=True)) is None
    assert way(transformers.BertConfig(**SIZES, is_decoder=True), Module()) is None
    assert way(BartConfig(), Module()) is None
    assert way(BartConfig(), Module(is_decoder=True)) is None
    assert way(BartConfig(), Module(is_decoder=False)) is Way.TOKENS
    assert way(BlipTextConfig(), Module()) is None
    assert family_of("blip_text_model").attends_to_others is None
    for keys in (6, 14, 20):  # what SDPA can't do is worth a request for each query
        assert way(BartConfig(), Module(), keys, needs_kernel=True) is Way.QUERIES


@pytest.mark.parametrize("num_keys", [6, 14, 20])
def test_a_request_for_each_query(num_keys: int) -> None:
    """A soft cap in cross attention without a cache, over padded keys: fewer than queries, as many, more."""
    from transformers import BartConfig

    from torchpaged.hf.attention import paged_attention_forward

    config = BartConfig()
    config._attn_implementation = "torchpaged"
    padding = torch.ones(3, num_keys, dtype=torch.bool)
    padding[0, :2], padding[2, 3:] = False, False
    q, k, v = (torch.randn(3, 4, n, 8) for n in (14, num_keys, num_keys))
    queries, keys = torch.zeros(3, 14, 32), torch.zeros(3, num_keys, 32)
    mask = create_bidirectional_mask(config, queries, padding, encoder_hidden_states=keys)
    out, _ = paged_attention_forward(Module(), q, k, v, mask, scaling=0.5, softcap=0.7, is_causal=False)
    scores = (0.7 * torch.tanh(q @ k.transpose(2, 3) * 0.5 / 0.7)).masked_fill(
        ~padding[:, None, None], float("-inf")
    )
    torch.testing.assert_close(out, (scores.softmax(-1) @ v).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_keys_that_are_the_values() -> None:
    """As where a model attends to its own layers' states (Inkling 2): no kernel takes one memory twice, in a
    trace neither."""
    from torchpaged.hf.attention import paged_attention_forward

    def attend(q: Tensor, x: Tensor) -> Tensor:
        states = x * 1  # made in the trace
        return paged_attention_forward(module, q, states, states, None, scaling=0.5, is_causal=False)[0]

    module, q, x = Module(), torch.randn(3, 4, 1, 8), torch.randn(3, 1, 5, 8)
    want = ((q @ x.transpose(2, 3) * 0.5).softmax(-1) @ x).transpose(1, 2)
    with Attended() as counts:
        torch.testing.assert_close(attend(q, x), want, rtol=1e-4, atol=1e-5)
    assert (counts.ours, counts.sdpa) == (1, 0)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, x), want, rtol=1e-4, atol=1e-5)


def test_masks_that_are_not_described() -> None:
    config = copy.deepcopy(CONFIGS["bert"])
    config._attn_implementation = "torchpaged"
    x = torch.zeros(2, 6, 32)

    def some_keys(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key % 2 == 0

    overlay = create_bidirectional_mask(config, x, None, and_mask_function=some_keys)
    causal = create_causal_mask(config, x, torch.tensor([[0, 1, 1, 1, 1, 1]] * 2), None)
    held = held_by(causal)
    assert held_by(overlay) is None
    assert held is not None
    assert held.kind == MaskKind()
    assert held_by(causal.clone()) is None  # another tensor says nothing


def test_packed_sequences_are_not_described() -> None:
    """Wherever the second one begins, also between the queries at which a windowed mask is looked at."""
    config = MistralConfig(sliding_window=2)
    config._attn_implementation = "torchpaged"
    for first in range(200):
        positions = torch.cat((torch.arange(first), torch.arange(200 - first)))[None]
        mask = create_sliding_window_causal_mask(
            config, torch.zeros(1, 200, 32), None, None, position_ids=positions
        )
        held = held_by(mask)
        assert (held is not None and held.kind == MaskKind(window=2)) == (first == 0), first


def test_who_was_made_for_sdpa() -> None:
    """By a flag of transformers' own, which is not public: bert was, splinter was not."""
    assert needs_eager_mask("splinter")
    assert not needs_eager_mask("bert")


def test_a_type_that_is_registered_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said of it before is not kept: its models would be given masks of booleans, which they add."""

    class LateConfig(transformers.SplinterConfig):
        model_type = "registered_late"

    class LateModel(transformers.SplinterModel):
        config_class = LateConfig

    assert not needs_eager_mask("registered_late")
    for mapping in (transformers.CONFIG_MAPPING, transformers.MODEL_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    transformers.AutoConfig.register("registered_late", LateConfig)
    transformers.AutoModel.register(LateConfig, LateModel)
    assert needs_eager_mask("registered_late")


def test_a_pinned_batch_is_followed_by_a_kernel() -> None:
    tensors = torch.ones(2, 3).int(), torch.tensor([3, 4]).int(), torch.arange(3).int()
    with Kernels() as kernels:
        pinned = query_starts._pin(*tensors)
    assert all(torch.equal(a, b) and a is not b for a, b in zip(pinned, tensors, strict=True))
    assert kernels.names == ["aten::clone"] * 3 + ["aten::add.Tensor"]
    torch.library.opcheck(torch.ops.torchpaged._pin_batch.default, tensors)


@pytest.mark.slow_cases(but=("esm",))
@pytest.mark.parametrize("model_type", ["esm", "layoutlm", "mpnet", "t5", "vit", "wav2vec2", "whisper"])
def test_a_family(model_type: str) -> None:
    """As the committed table says."""
    from test_coverage import committed_row

    row, want = encoders.examine(model_type), committed_row(model_type, "encoders")
    assert (row.mode, row.graphs, row.kind) == (want.mode, want.graphs, want.kind), row


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that is seen by the tokens of its row."""
    plain = CallMask.__init__

    def faulty(self: Any, model_type: str, kinds: Any, prompt: Any, kv_len: Any = 0, *_: Any) -> None:
        plain(self, model_type, kinds, prompt, kv_len)

    monkeypatch.setattr(CallMask, "__init__", faulty)
    row: Row = encoders.examine("bert", compiled=False)
    assert row.mode == "wrong", row
    assert row.checks["even"] == "right", row


def test_the_sweep_is_of_one_kind() -> None:
    assert examine("llama", compiled=False).mode == "paged"
    with pytest.raises(KeyError):
        encoders.examine("llama")
