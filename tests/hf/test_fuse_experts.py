"""Mixtures of experts in fused layers: each family's module and what the ops make of it, and what keeps the
module's own forward."""

import copy
from typing import Any

import pytest
import torch
from fused_models import FAMILIES, build, fused, fused_again, logits
from models import padded_prompts
from torch import Tensor, nn

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.fuse.experts import ExpertsPlan, why_not_experts
from torchpaged.hf import PagedCache, fuse, unfuse

MIXED = [name for name, known in FAMILIES.items() if known.mixture]


def mixture_of(name: str) -> tuple[Any, str]:
    """Of the last layer of a tiny model, and its family."""
    layer = build(name, attached=False).get_decoder().layers[-1]
    block = layer.feed_forward if name.startswith("lfm2") else layer.mlp
    return block, type(layer).__name__.removesuffix("DecoderLayer")


def with_router(block: Any, **options: Any) -> None:
    """Set the router's fields that it has, and a bias that matters."""
    for key, value in options.items():
        if hasattr(block.gate, key):
            setattr(block.gate, key, value)
    for bias in (getattr(block.gate, "e_score_correction_bias", None), getattr(block, "expert_bias", None)):
        if bias is not None:
            bias.copy_(torch.randn(bias.shape) * 0.2)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_the_ops_are_the_module(name: str, norms: bool) -> None:
    """With groups, biases, a scale and a norm of the weights, where the router has them."""
    torch.manual_seed(1)
    block, family = mixture_of(name)
    groups = {"num_group": 2, "topk_group": 1} if block.gate.num_experts % 2 == 0 else {}
    top_k = min(2, block.gate.num_experts // 2)
    method = {"topk_method": "group_limited_greedy"}
    with torch.no_grad():
        with_router(block, norm_topk_prob=norms, routed_scaling_factor=1.7, top_k=top_k, **groups, **method)
        h = torch.randn(7, 1, block.experts.hidden_dim)
        want = block(h)[:, 0]
        assert why_not_experts(block, family) is None
        plan, residual = ExpertsPlan(block, family), torch.randn(7, block.experts.hidden_dim)
        got = plan.run(BACKEND_OPS["default"], h[:, 0], None if plan.post_norm else residual)
        got = plan.post_norm(got) + residual if plan.post_norm else got
    torch.testing.assert_close(got, want + residual, rtol=1e-4, atol=1e-5)
    assert float(want.abs().max()) > 1e-2


@pytest.mark.parametrize(("name", "layers"), [("kimi_linear", 4), ("bailing_hybrid", 2)])
def test_mixtures_behind_states(name: str, layers: int) -> None:
    """Whose entry in `FAMILIES` has MLPs alone."""
    model = build(name, mlp_layer_types=["dense"] + ["sparse"] * (layers - 1))
    with torch.no_grad():
        for layer in model.get_decoder().layers[1:]:
            with_router(layer.mlp)
    want = logits(model)
    report = fuse(model, count=False)
    assert len(report.replaced["experts"]) == layers - 1
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)


def test_a_number_of_the_router_that_changes_is_refused_and_taken_by_the_next_fuse() -> None:
    model = fused("deepseek_v3")
    before = logits(model)
    model.get_decoder().layers[1].mlp.gate.routed_scaling_factor *= 3.0
    with pytest.raises(ArgumentError, match="routed_scaling_factor 7.5, before 2.5"):
        logits(model)
    _, want = fused_again(model)
    assert not torch.allclose(want, before, rtol=1e-2, atol=1e-2)


def test_many_tokens_keep_the_modules_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, run = build("deepseek_v3"), list[int](), ExpertsPlan.run
    want = logits(model)
    fuse(model, count=False)

    def counted(self: Any, ops: Any, h: Tensor, residual: Any) -> Tensor:
        seen.append(h.shape[0])
        return run(self, ops, h, residual)

    monkeypatch.setattr(ExpertsPlan, "run", counted)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    assert seen == [40, 2, 2, 2]
    with torch.no_grad():
        ids = torch.randint(3, 99, (2, 33))
        got = model(ids, past_key_values=PagedCache(model.config, 2, 64)).logits
        assert len(seen) == 4
        unfuse(model)
        want = model(ids, past_key_values=PagedCache(model.config, 2, 64)).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_scores_of_the_router_are_refused_or_the_modules() -> None:
    """They are not left out in silence: the call is refused, or, where the config asks for them, the module
    runs."""
    model, ids = build("qwen3_next_moe"), padded_prompts()["input_ids"]

    def scores(**options: Any) -> tuple[Tensor, ...]:
        cache = PagedCache(model.config, 2, 32)
        with torch.no_grad():
            found: tuple[Tensor, ...] = model(ids, past_key_values=cache, **options).router_logits
        return found

    want = scores(output_router_logits=True)
    fuse(model, count=False)
    with pytest.raises(ArgumentError, match="output_router_logits: expected False"):
        scores(output_router_logits=True)
    with torch.no_grad():
        assert len(model(ids, output_router_logits=True).router_logits) == 4  # over transformers' own cache
    unfuse(model)
    model.config.output_router_logits = True
    report = fuse(model, count=False)
    assert all("output_router_logits" in why for why in report.skipped["experts"].values())
    for x, y in zip(scores(), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def _another_part(block: Any) -> None:
    block.extra = nn.Linear(2, 2)


def _another_activation(block: Any) -> None:
    block.experts.act_fn = nn.ReLU()


def _bias(block: Any) -> None:
    block.shared_experts.up_proj.bias = nn.Parameter(torch.zeros(block.shared_experts.up_proj.out_features))


def _dtype(block: Any) -> None:
    block.experts.down_proj.data = block.experts.down_proj.data.double()


def _router(block: Any) -> None:
    block.gate.weight.data = block.gate.weight.data.half()


def _many(block: Any) -> None:
    block.gate.top_k = 33


def _method(block: Any) -> None:
    block.gate.topk_method = "noaux"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_method, "'noaux'"),
        (_another_part, "extra"),
        (_another_activation, "activation"),
        (_bias, "without biases"),
        (_dtype, "differ in dtype"),
        (_router, "router's weight"),
        (_many, "33 experts"),
    ],
)
def test_a_changed_mixture_keeps_its_own_forward(change: Any, words: str) -> None:
    block, family = mixture_of("deepseek_v3")
    change(block)
    assert words in str(why_not_experts(block, family))


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_replaced_experts_are_refused_not_ignored(part: str) -> None:
    model = fused("deepseek_v2")
    experts = model.get_decoder().layers[1].mlp.experts
    setattr(experts, part, nn.Parameter(getattr(experts, part).detach() * 2))
    with pytest.raises(ArgumentError, match="unfuse"):
        logits(model)
    fused_again(model)


def test_a_copy_and_a_moved_model_choose_by_their_own_bias() -> None:
    model = fused("deepseek_v3")
    twin = copy.deepcopy(model)
    gate = twin.get_decoder().layers[1].mlp.gate
    with torch.no_grad():
        gate.e_score_correction_bias.copy_(torch.randn(gate.num_experts))
    before, got = logits(model), logits(twin)
    assert not torch.allclose(got, before, rtol=1e-3, atol=1e-3)
    twin.double().float()
    torch.testing.assert_close(logits(twin), got, rtol=1e-4, atol=1e-4)
    unfuse(twin)
    torch.testing.assert_close(logits(twin), got, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["GptOss", "granitemoehybrid", "nemotron_h"])
def test_unknown_mixtures_keep_their_own_forward(name: str) -> None:
    model = build(name)
    want = logits(model)
    report = fuse(model, count=False)
    assert "experts" not in report.replaced
    assert all("mixture of experts" in why for why in report.skipped["experts"].values())
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
