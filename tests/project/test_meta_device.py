"""Modules that are built without memory: on the meta device, given memory later, by whichever way."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchpaged
from torchpaged import (
    ArgumentError,
    AttentionMetadata,
    BackendUnavailableError,
    Limits,
    PagedAttention,
    PagedKVCache,
    open_session,
    use_backend,
)
from torchpaged.backends import attention_spec, register_backend

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 4
#: Per head, so that unwritten memory in their place would be seen.
GIVEN: dict[str, Any] = {"sinks": [0.5, -1.0, 2.0, 0.0], "alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}


class Layer(nn.Module):
    """A projection and paged attention."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, (HEADS + 2 * KV_HEADS) * DIM)
        self.attention = PagedAttention(HEADS, DIM, KV_HEADS, block_size=BLOCK, **given)

    def forward(self, x: Tensor, pools: Any, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        return self.attention(q, k, v, pools, metadata)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Any, AttentionMetadata]:
    """Two requests on fresh pools."""
    cache = PagedKVCache.uniform(1, KV_HEADS, DIM, block_size=BLOCK, num_blocks=8, dtype=dtype)
    metadata = AttentionMetadata.from_lists([5, 3], [5, 3], [[1, 2], [3]], block_size=BLOCK)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 32, generator=generator, dtype=torch.float32).to(dtype), cache[0], metadata


def on_meta(**given: Any) -> Layer:
    with torch.device("meta"):
        return Layer(**given)


@pytest.fixture
def built() -> Layer:
    """The same, built with memory."""
    torch.manual_seed(0)
    return Layer(**GIVEN)


@torch.inference_mode()
def test_memory_by_to_empty_and_a_state_dict(built: Layer) -> None:
    layer = on_meta(**GIVEN)
    assert layer.attention.choice.name == "meta"
    assert "real" in layer.attention.choice.reason
    layer.to_empty(device="cpu")
    assert layer.attention.choice == built.attention.choice
    for name, values in GIVEN.items():
        assert getattr(layer.attention, name).tolist() == values, "numbers that were given need no state dict"
    layer.load_state_dict(built.state_dict())
    torch.testing.assert_close(layer(*batch()), built(*batch()), rtol=0, atol=0)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*batch()), built(*batch()))


@torch.inference_mode()
def test_memory_by_assignment(built: Layer) -> None:
    """``load_state_dict(assign=True)`` and loaders like it tell no module that it moved: the first eager
    forward finds out, a compiled one says what to do."""
    layer = on_meta(**GIVEN)
    layer.load_state_dict({name: 2 * tensor for name, tensor in built.state_dict().items()}, assign=True)
    with pytest.raises(Exception, match=r"meta device.*to\(device\)"):
        torch.compile(layer, fullgraph=True, backend="eager")(*batch())
    moved = copy.deepcopy(layer).to("cpu")
    assert moved.attention.choice == built.attention.choice
    assert moved.attention.sinks.tolist() == [1.0, -2.0, 4.0, 0.0], "loaded, not as given"
    out = layer(*batch())
    assert layer.attention.choice == built.attention.choice
    torch.testing.assert_close(moved(*batch()), out, rtol=0, atol=0)
    built.load_state_dict(layer.state_dict())
    torch.testing.assert_close(built(*batch()), out, rtol=0, atol=0)


@torch.inference_mode()
def test_memory_by_replaced_buffers(built: Layer) -> None:
    """As loaders of large models do it, buffer by buffer, those that are in no state dict included."""
    layer = on_meta(**GIVEN)
    layer.load_state_dict(built.state_dict(), assign=True)
    for module in layer.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    torch.testing.assert_close(layer(*batch()), built(*batch()), rtol=0, atol=0)
    assert layer.attention.choice == built.attention.choice


@torch.inference_mode()
def test_memory_by_accelerate(built: Layer, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    torch.save(built.state_dict(), tmp_path / "pytorch_model.bin")
    with accelerate.init_empty_weights(include_buffers=True):
        layer = Layer(**GIVEN)
    assert layer.attention.choice.name == "meta"
    accelerate.load_checkpoint_and_dispatch(
        layer, str(tmp_path / "pytorch_model.bin"), device_map={"qkv": "cpu", "attention": "cpu"}
    )
    torch.testing.assert_close(layer(*batch()), built(*batch()), rtol=0, atol=0)


def test_types_change_on_the_meta_device() -> None:
    layer = on_meta(**GIVEN).bfloat16()
    assert layer.attention.choice.name == "meta"
    layer.to_empty(device="cpu")
    assert layer.attention.spec.dtype == torch.bfloat16 == layer.attention.sinks.dtype
    assert layer.attention.alibi_slopes.dtype == torch.float32
    assert layer.attention.alibi_slopes.tolist() == GIVEN["alibi_slopes"]
    assert layer.to("meta").attention.choice.name == "meta"


def test_what_is_asked_is_refused_when_it_is_known() -> None:
    with pytest.raises(BackendUnavailableError, match="expected one of auto"):
        PagedAttention(4, 16, device="meta", backend="nonesuch")
    module = PagedAttention(4, 16, device="meta", backend="triton")
    with pytest.raises(BackendUnavailableError, match="device cpu is not one of cuda"):
        module.to_empty(device="cpu")
    with use_backend("reference"):
        module = PagedAttention(4, 16, device="meta").to_empty(device="cpu")
    assert module.choice.name == "reference"
    with pytest.raises(ValueError, match="meta"):
        register_backend(type(module.choice.backend)("meta", module.session.capabilities, {}, lambda: None))


@torch.inference_mode()
def test_a_session_of_several_modules() -> None:
    spec = attention_spec(
        device=torch.device("cpu"), dtype=torch.float32, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM
    )
    session = open_session(spec, Limits(max_num_reqs=4))
    layers = [on_meta(session=session) for _ in range(2)]
    assert all(layer.attention.session is not session for layer in layers)
    for layer in layers:
        assert layer.to_empty(device="cpu").attention.session is session


@torch.inference_mode()
def test_copies_and_shapes() -> None:
    layer = on_meta(**GIVEN)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.attention.choice.name == "meta"
        other.to_empty(device="cpu")
        assert other.attention.sinks.tolist() == GIVEN["sinks"]
    x, pools, metadata = batch()
    shapes = AttentionMetadata(
        **{
            name: value.to("meta") if isinstance(value, Tensor) else value
            for name, value in vars(metadata).items()
            if not name.startswith("_")
        }
    )
    meta_pools = (pools.k_cache.to("meta"), pools.v_cache.to("meta"))
    assert layer(x.to("meta"), meta_pools, shapes).shape == (8, HEADS, DIM)


def test_memory_found_in_inference_mode_takes_a_state_dict_later(built: Layer) -> None:
    """What the first forward fills in is no inference tensor, which nothing could be loaded into."""
    layer = on_meta(**GIVEN)
    layer.load_state_dict(built.qkv.state_dict(prefix="qkv."), assign=True, strict=False)
    with torch.inference_mode():
        torch.testing.assert_close(layer(*batch()), built(*batch()), rtol=0, atol=0)
    layer.load_state_dict(built.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(layer(*batch()), built(*batch()), rtol=0, atol=0)


def test_tensors_without_memory_are_refused_by_name(built: Layer) -> None:
    """Fake and functional ones, whose values and addresses can't be checked, and those of vmap and sparse
    ones; ops take fake ones, and a trace over real ones is served."""
    x, (k_cache, v_cache, *_), metadata = batch()
    k = x.view(-1, 1, 32)[:, :, :DIM].expand(-1, KV_HEADS, DIM).contiguous()

    def write(k: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        torchpaged.write_kv(k, k, k_cache, v_cache, slots)
        return k_cache + 0

    arguments = k, k_cache, v_cache, metadata.slot_mapping
    said = "expected a tensor with memory, got a fake or functional one; trace the call with torch.compile"
    for tracing_mode in ("fake", "symbolic"):
        with pytest.raises(ArgumentError, match=f"^k: {said}"):
            make_fx(write, tracing_mode=tracing_mode)(*arguments)
    with pytest.raises(ArgumentError, match=f"^k: {said}"):
        torch.func.functionalize(write)(*arguments)
    with pytest.raises(ArgumentError, match="^k: expected a tensor with memory, got one of torch.vmap; "):
        torch.vmap(write, (0, None, None, None))(k[None], *arguments[1:])
    for place, name in enumerate(("k", "k_cache", "v_cache", "slot_mapping")):
        given = [*arguments[:place], arguments[place].to_sparse(), *arguments[place + 1 :]]
        with pytest.raises(ArgumentError, match=f"^{name}: expected a dense tensor, got torch.sparse_coo; "):
            write(*given)
    with FakeTensorMode() as mode, torch.no_grad():
        fake = [mode.from_tensor(tensor) for tensor in arguments]
        with pytest.raises(ArgumentError, match=f"^k: {said}"):
            write(*fake)
        with pytest.raises(ArgumentError, match=f": {said}"):
            built.attention(fake[0].repeat(1, 2, 1), None, None, (fake[1], fake[2]), metadata)
        torch.ops.torchpaged.write_kv(fake[0], *fake, None, None, are_query_tokens=False)
    assert not k_cache.any()
    again = make_fx(write)(k, k_cache.clone(), v_cache.clone(), metadata.slot_mapping)
    assert torch.equal(again(*arguments), write(*arguments))
    assert k_cache.any()
