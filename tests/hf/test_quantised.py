"""Models with quantised weights: the same tokens paged, compiled, fused and accelerated as eager, under the
same weights. What fuse() can't take as it is stays as it is, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from models import padded_prompts, tiny
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

import torchpaged.hf
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.hf import PagedCache

SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
CALL: dict[str, Any] = {**padded_prompts(), "max_new_tokens": 12, "do_sample": False}


class Int8Linear(nn.Linear):
    """What quantisation libraries put in a Linear's place: a class of its own, weights in another dtype."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        made = cls(linear.in_features, linear.out_features, linear.bias is not None)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        made.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), False)
        made.register_buffer("scale", scale)
        made.bias = linear.bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Int8Weight(Tensor):
    """A weight that is dequantised where it is used: a tensor subclass in a plain Linear."""

    @staticmethod
    def __new__(cls, weight: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight: Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.stored = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map(
            lambda x: x.stored * x.scale if isinstance(x, Int8Weight) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _linears(model: PreTrainedModel) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (module, name, child)
        for layer in model.get_decoder().layers
        for module in layer.modules()
        for name, child in list(module.named_children())
        if isinstance(child, nn.Linear)
    ]


def own_class(path: Path) -> PreTrainedModel:
    model = tiny("Llama", **SHAPE)
    for parent, name, linear in _linears(model):
        setattr(parent, name, Int8Linear.of(linear))
    return model


def tensor_subclass(path: Path) -> PreTrainedModel:
    model = tiny("Llama", **SHAPE)
    for _, _, linear in _linears(model):
        linear.weight = nn.Parameter(Int8Weight(linear.weight.detach()), requires_grad=False)
    return model


def torchao_int8(path: Path) -> PreTrainedModel:
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model = tiny("Llama", **SHAPE)
    quantization.quantize_(model.get_decoder(), quantization.Int8WeightOnlyConfig())
    return model


def _bitsandbytes(path: Path, **options: Any) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny("Llama", **SHAPE).save_pretrained(path)
    config = BitsAndBytesConfig(**options)
    return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
        path, quantization_config=config, device_map="cpu", attn_implementation="eager"
    ).eval()


def bitsandbytes_nf4(path: Path) -> PreTrainedModel:
    return _bitsandbytes(
        path, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def bitsandbytes_int8(path: Path) -> PreTrainedModel:
    return _bitsandbytes(path, load_in_8bit=True)


def _paged(model: PreTrainedModel) -> Tensor:
    return model.generate(**CALL, past_key_values=PagedCache(model.config, 2, 64))


def _compiled(model: PreTrainedModel) -> Tensor:
    torch._dynamo.reset()
    torchpaged.hf.compile_layers(model, backend="eager")
    try:
        return _paged(model)
    finally:
        torchpaged.hf.uncompile_layers(model)


def _accelerated(model: PreTrainedModel) -> Tensor:
    torchpaged.hf.accelerate(model, max_batch_size=2, max_seq_len=64)
    try:
        return model.generate(**CALL)
    finally:
        torchpaged.hf.unaccelerate(model)


@pytest.mark.parametrize(
    "make",
    [own_class, tensor_subclass, torchao_int8, bitsandbytes_nf4, bitsandbytes_int8],
    ids=lambda f: f.__name__,
)
def test_every_way_gives_eager_tokens(make: Callable[[Path], PreTrainedModel], tmp_path: Path) -> None:
    model = make(tmp_path)
    want = model.generate(**CALL)
    with torch.no_grad():
        assert not torch.equal(
            model(CALL["input_ids"]).logits, tiny("Llama", **SHAPE)(CALL["input_ids"]).logits
        )
    with torchpaged.hf.paged(model):
        assert torch.equal(_paged(model), want)
        assert torch.equal(_accelerated(model), want)
        report = torchpaged.hf.fuse(model)
        names = str(report)
        for each in ("qkv", "rope", "norm", "gate_up"):
            assert each not in report.replaced
            assert list(report.skipped[each]) == ["layers.0", "layers.1"]
        assert "tensor subclass (quantised" in names or "expected a plain Linear" in names
        assert torch.equal(_paged(model), want)
        assert torch.equal(_accelerated(model), want)


@pytest.mark.parametrize("model_type", ["jamba", "falcon_mamba"])
def test_steps_of_a_state(model_type: str) -> None:
    """Mixers multiply by the weight of ``dt_proj`` themselves, unless the config says it is quantised."""
    model = model_of(model_type, "eager")
    mixers = [module for module in model.modules() if hasattr(module, "dt_proj")]
    for mixer in mixers:
        mixer.dt_proj, mixer.config._is_quantized = Int8Linear.of(mixer.dt_proj), True
    want = model.generate(**CALL)
    torchpaged.hf.attach(model)
    assert torch.equal(_paged(model), want)
    assert torch.equal(_accelerated(model), want)


@pytest.mark.slow
@pytest.mark.parametrize("make", [own_class, torchao_int8, bitsandbytes_int8], ids=lambda f: f.__name__)
def test_compiled_layers(make: Callable[[Path], PreTrainedModel], tmp_path: Path) -> None:
    model = make(tmp_path)
    want = model.generate(**CALL)
    with torchpaged.hf.paged(model):
        assert torch.equal(_compiled(model), want)


def test_quantised_after_fuse_is_noticed() -> None:
    """Fused layers hold q, k and v in one weight of their own, which would go on unquantised."""
    model = tiny("Llama", **SHAPE)
    model.set_attn_implementation("torchpaged")
    torchpaged.hf.fuse(model)
    for _, _, linear in _linears(model):
        linear.weight = nn.Parameter(Int8Weight(linear.weight.detach()), requires_grad=False)
    with pytest.raises(ArgumentError, match=r"layers\.0\.self_attn\.q_proj\.weight lies elsewhere"):
        _paged(model)


def test_quantised_after_accelerate_is_refused() -> None:
    """A graph replays kernels over the weights that it was captured with."""
    model = tiny("Llama", **SHAPE)
    torchpaged.hf.accelerate(model, max_batch_size=2, max_seq_len=64)
    for parent, name, linear in _linears(model)[:1]:
        setattr(parent, name, Int8Linear.of(linear))
    with pytest.raises(ArgumentError, match=r"layers\.0\.self_attn has other parts"):
        model.generate(**CALL)
    torchpaged.hf.unaccelerate(model)
    model.set_attn_implementation("eager")
    want = model.generate(**CALL)
    assert torch.equal(_accelerated(model), want)
