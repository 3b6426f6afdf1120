"""The pass "mlp" of fuse(): where it applies, the ops of a step with it and without, and the semaphore that the layers share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import padded_prompts, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from torchpaged.custom_ops.validation_layers import O_PROJ_MLP_SEMAPHORE
from torchpaged.hf import PagedCache, compile_layers, fuse, unfuse
from torchpaged.hf.fusible import PASSES

WITHOUT = tuple(each for each in PASSES if each != "mlp")
BEFORE = ["linear", "rope_write_kv", "paged_attention"]


class Calls(TorchDispatchMode):
    """The ops of this library that ran, and the semaphores they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.semaphores: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "torchpaged":
            self.names.append(str(func).split(".")[1])
            if self.names[-1] == "o_proj_mlp":
                self.semaphores.append(kwargs["semaphore"])
        return func(*args, **(kwargs or {}))


def build(name: str = "Llama", **options: Any) -> PreTrainedModel:
    """A tiny model whose logits depend on its layers."""
    model = tiny(name, **options)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.mul_(1.0 if parameter.dim() == 1 else 4.0 if "embed" in key else 8.0)
    model.set_attn_implementation("torchpaged")
    return model


def logits(model: PreTrainedModel) -> Tensor:
    """A prefill of two prompts and a decode step: ``[2, 21, vocab]``."""
    ids, cache = padded_prompts()["input_ids"], PagedCache(model.config, 2, 32, block_size=4)
    ids = torch.cat([ids, ids[:, :1]], dim=1).to(model.device)
    with torch.inference_mode():
        return torch.cat([model(part, past_key_values=cache).logits for part in ids.split([20, 1], dim=1)], dim=1)


def step(model: PreTrainedModel) -> Calls:
    """The op calls of a step of one token."""
    with Calls() as calls, torch.no_grad():
        model(input_ids=torch.tensor([[5]]), past_key_values=PagedCache(model.config, 1, 8))
    return calls


def semaphores(model: PreTrainedModel) -> list[Tensor]:
    return [layer._torchpaged_plan.semaphore for layer in model.get_decoder().layers]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral"])
def test_one_op_for_all_behind_attention(name: str) -> None:
    model = build(name)
    want = logits(model)
    report = fuse(model)
    assert report.replaced["mlp"] == ["layers.0", "layers.1", "layers.2"] and report.complete
    assert step(model).names == [*BEFORE, "o_proj_mlp"] * 3 + ["linear"]
    assert report.after is not None and set(report.after.layers) == {6}, "composed at one token: launches as without the pass"
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)


def test_without_the_pass_nothing_changes() -> None:
    model = build()
    report = fuse(model, WITHOUT)
    assert report.complete and "mlp" not in report.replaced and "mlp" not in report.skipped
    assert step(model).names == [*BEFORE, "linear", "linear", "linear"] * 3 + ["linear"]
    assert semaphores(model) == [None] * 3
    unfused = build()
    torch.testing.assert_close(logits(model), logits(unfused), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "passes", "reason", "complete"),
    [
        ("Gemma2", {}, None, "its norms after attention and MLP stand between the products", True),
        ("Gemma3", {}, None, "its norms after attention and MLP stand between the products", True),
        ("Llama", {"attention_bias": True}, None, "o_proj, gate_proj, up_proj or down_proj has a bias", True),
        ("Llama", {"mlp_bias": True}, None, "o_proj, gate_proj, up_proj or down_proj has a bias", True),
        ("GptOss", {}, None, "it joins ops of the passes norm and gate_up, and gate_up was not done", False),
        ("Llama", {"hidden_act": "relu2"}, None, "it joins ops of the passes norm and gate_up, and gate_up was not done", False),
        ("Llama", {}, ("gate_up", "mlp"), "it joins ops of the passes norm and gate_up, and norm was not done", False),
        ("Llama", {}, ("mlp",), "it joins ops of the passes norm and gate_up, and norm and gate_up was not done", False),
    ],
)
def test_where_it_does_not_apply(name: str, options: Any, passes: Any, reason: str, complete: bool) -> None:
    """The other passes go on as before. A model is complete without it: nothing is left to the model's own code."""
    model = build(name, **options)
    want = logits(model)
    report = fuse(model, passes)
    assert set(report.skipped["mlp"].values()) == {reason} and len(report.skipped["mlp"]) == 3
    assert "mlp" not in report.replaced and report.complete is complete and reason in str(report)
    assert "o_proj_mlp" not in step(model).names
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)


def test_layers_share_a_semaphore_that_is_no_state() -> None:
    model = build()
    state = set(model.state_dict())
    fuse(model, count=False)
    first = semaphores(model)[0]
    assert all(each is first for each in semaphores(model)) and all(each is first for each in step(model).semaphores)
    assert first.shape == (O_PROJ_MLP_SEMAPHORE,) and first.dtype == torch.int32 and not first.any() and not first.is_inference()
    assert first._dynamo_static_input_type == "unguarded", "compiled CUDA graphs would copy it in every replay"
    assert set(model.state_dict()) == state and all(buffer is not first for buffer in model.buffers())
    model.to("cpu").load_state_dict(build("Llama").state_dict())
    assert semaphores(model)[0] is first, "captured graphs write this memory"
    other = copy.deepcopy(model)
    assert len({each.data_ptr() for each in semaphores(other)}) == 1 and semaphores(other)[0].data_ptr() != first.data_ptr()
    assert semaphores(other)[0]._dynamo_static_input_type == "unguarded"
    assert all(each is semaphores(other)[0] for each in step(other).semaphores)


def test_the_semaphore_moves_with_the_model() -> None:
    """To "meta", the only second device that is everywhere; tables of cosines can't go there."""
    model = build()
    with torch.inference_mode():
        fuse(model, ("norm", "gate_up", "mlp"), count=False)
    first = semaphores(model)[0]
    assert not first.is_inference()
    model.to("meta")
    assert {each.device.type for each in semaphores(model)} == {"meta"}
    assert len(set(map(id, semaphores(model)))) == 1
    assert list(model.get_decoder()._torchpaged_fusion.semaphores) == [torch.device("meta")]  # type: ignore[union-attr]


def test_unfuse_leaves_no_trace() -> None:
    model = build()
    want = logits(model)
    fuse(model, count=False)
    unfuse(model)
    assert torch.equal(logits(model), want) and not any(name in ("linear", "o_proj_mlp") for name in step(model).names)


def test_compiled_layers_give_the_same_and_leave_zeros() -> None:
    torch._dynamo.reset()
    model = build("Qwen3")
    fuse(model, count=False)
    want = logits(model)
    compile_layers(model, backend="aot_eager")
    torch.testing.assert_close(logits(model), want, rtol=1e-5, atol=1e-5)
    assert not semaphores(model)[0].any()
