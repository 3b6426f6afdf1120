"""Kinds of layer cache: two toys, each a class and one registration, through the block pool, HuggingFace's
cache and the engine."""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torchpaged import ArgumentError, BlockPool, PagedKVCache
from torchpaged.cache import KVLayerSpec, LayerKind, LayerSpec, kinds, register_layer_kind
from torchpaged.cache.kinds import layer_kinds
from torchpaged.custom_ops import BACKEND_OPS


# --------------------------------------- a kind that lays keys and values of a token side by side in one pool
class JointPool(NamedTuple):
    kv_cache: Tensor


@dataclass(frozen=True)
class JointSpec(LayerSpec):
    num_kv_heads: int
    head_dim: int

    POOLS = JointPool

    def block_shapes(self, block_size: int, dtype: torch.dtype) -> Any:
        return {"kv_cache": ((block_size, self.num_kv_heads, 2 * self.head_dim), dtype)}


# -------------------------------------------------- a kind whose blocks hold no tokens, in a dtype of its own
class StatePool(NamedTuple):
    state: Tensor
    decay: Tensor | None = None


@dataclass(frozen=True)
class StateSpec(LayerSpec):
    width: int

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        return 4 * self.width

    def make_pools(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> StatePool:
        return StatePool(
            torch.zeros(num_blocks, self.width, dtype=torch.float32, device=device),
            torch.ones(self.width, device=device),
        )

    def block_tensors(self, pools: StatePool) -> dict[str, Tensor]:
        return {"state": pools.state}


def joint_layer(owner: Any, index: int, config: Any, template: Any) -> Any:
    """Every second layer of a model whose config asks for it."""
    if not getattr(config, "joint_kv", False) or index % 2:
        return None
    from torchpaged.hf.layer import PagedLayer

    class JointLayer(PagedLayer):
        def stored_by(self, key_states: Tensor, value_states: Tensor) -> JointSpec:
            return JointSpec(key_states.shape[1], key_states.shape[3])

        def keys_and_values(self, pools: JointPool) -> tuple[Tensor, Tensor]:
            keys, values = pools.kv_cache.chunk(2, dim=-1)
            return keys, values

    return JointLayer(owner, index)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))
    register_layer_kind(LayerKind("joint", JointSpec, hf_layer=joint_layer))
    register_layer_kind(LayerKind("toy state", StateSpec))
    yield


SPECS = [KVLayerSpec(2, 8, 4), JointSpec(2, 8), StateSpec(5)]


def filled() -> PagedKVCache:
    cache = PagedKVCache(SPECS, block_size=4, num_blocks=6, dtype=torch.bfloat16)
    for tensor in cache.tensors().values():
        tensor.copy_(torch.randn_like(tensor))
    return cache


def test_pools_of_several_kinds_and_what_they_cost() -> None:
    cache = filled()
    per_block = (4 * 2 * 12 + 2 * 4 * 2 * 8) * 2 + 4 * 5
    assert cache.bytes_per_block == per_block
    assert cache.num_bytes == 6 * per_block == sum(t.nbytes for t in cache.tensors().values())
    assert list(cache.tensors()) == ["k_cache[0]", "v_cache[0]", "kv_cache[1]", "state[2]"]
    assert cache[1].kv_cache.shape == (6, 4, 2, 16)
    assert cache[2].state.dtype == torch.float32
    assert cache[2].decay.tolist() == [1.0] * 5
    budget = PagedKVCache(
        SPECS, block_size=4, memory_budget=5 * per_block + per_block - 1, dtype=torch.bfloat16
    )
    assert budget.num_blocks == 5
    assert not any(t.is_inference() for t in cache.tensors().values())


def test_a_fork_of_a_block_is_copied_in_every_layer() -> None:
    cache, pool = filled(), BlockPool(6)
    parent = pool.allocate(2)
    child = [*pool.fork(parent[:1]), *pool.allocate(1)]
    before = {name: tensor.clone() for name, tensor in cache.tensors().items()}
    cache.copy_blocks(torch.tensor([[parent[1], child[1]]]), BACKEND_OPS["reference"])
    for name, tensor in cache.tensors().items():
        want = before[name].clone()
        want[child[1]] = want[parent[1]]
        assert torch.equal(tensor, want), name


@dataclass(frozen=True)
class RequestStateSpec(StateSpec):
    per_request = True


def test_a_kind_that_keeps_a_state_per_request() -> None:
    """Its pools have an entry per request and one for padding, whatever the number of blocks; a fork of a
    request copies it, one of a block does not."""
    register_layer_kind(LayerKind("of a request", RequestStateSpec))
    specs = [KVLayerSpec(2, 8), RequestStateSpec(5)]
    cache = PagedKVCache(specs, block_size=4, num_blocks=9, max_num_reqs=3, dtype=torch.bfloat16)
    assert cache[1].state.shape == (4, 5)
    assert cache.bytes_per_block == 4 * 2 * 16 * 2
    assert cache.num_bytes == sum(tensor.nbytes for tensor in cache.tensors().values())
    for tensor in cache.tensors().values():
        tensor.copy_(torch.randn_like(tensor))
    before = {name: tensor.clone() for name, tensor in cache.tensors().items()}
    cache.copy_requests(torch.tensor([[1, 3]]), BACKEND_OPS["reference"])
    assert torch.equal(cache[1].state, before["state[1]"][[0, 1, 2, 1]])
    assert torch.equal(cache[0].k_cache, before["k_cache[0]"])
    cache.copy_blocks(torch.tensor([[1, 3]]), BACKEND_OPS["reference"])
    assert torch.equal(cache[0].k_cache[3], before["k_cache[0]"][1])
    assert torch.equal(cache[1].state, before["state[1]"][[0, 1, 2, 1]])
    with pytest.raises(ArgumentError, match="max_num_reqs: expected an int of at least 1, got None"):
        PagedKVCache(specs, num_blocks=9)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_copies_hold_the_same(again: Callable[[PagedKVCache], PagedKVCache]) -> None:
    cache = filled()
    other = again(cache)
    for name, tensor in cache.tensors().items():
        assert torch.equal(other.tensors()[name], tensor), name
        assert other.tensors()[name].data_ptr() != tensor.data_ptr(), name
    assert [type(pools) for pools in other] == [type(pools) for pools in cache]
    assert other[2].decay.tolist() == [1.0] * 5


def test_what_is_not_registered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["kv", "latent", "indexed_latent", "state", "joint", "toy state"]
    assert [kind.name for kind in layer_kinds()] == names
    for kind in (LayerKind("kv", StateSpec), LayerKind("mine", JointSpec)):
        with pytest.raises(ArgumentError, match="kind: expected a name and a class"):
            register_layer_kind(kind)
    monkeypatch.delitem(kinds._KINDS, "toy state")
    with pytest.raises(
        ArgumentError,
        match=r"specs of registered kinds \(kv, latent, indexed_latent, state, joint\), got StateSpec",
    ):
        PagedKVCache(SPECS, num_blocks=4)


# ----------------------------------------------------------------------------------------------- whole models
@pytest.fixture
def models(make_llama: Callable[..., Any]) -> tuple[Any, Any]:
    """The same weights twice, without and with layers of the toy kind."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    plain = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    joint = copy.deepcopy(plain)
    joint.config.joint_kv = True
    return plain, joint


def kinds_of(layers: Any) -> list[str]:
    return [type(layer.stored).__name__ for layer in layers]


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"]
)
def test_generate_over_a_cache_of_two_kinds(models: tuple[Any, Any], options: dict[str, Any]) -> None:
    """Beams fork rows: partial blocks are copied in the pools of both kinds."""
    from torchpaged.hf import PagedCache

    ids = torch.randint(1, 99, (2, 7), generator=torch.Generator().manual_seed(0))
    outs = []
    for model in models:
        model.set_attn_implementation("torchpaged")
        cache = PagedCache(model.config, max_batch_size=6, max_seq_len=40, block_size=4, backend="reference")
        outs.append(model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, **options))
        expected = ["JointSpec", "KVLayerSpec"] if model is models[1] else ["KVLayerSpec"] * 2
        assert kinds_of(cache.paged) == expected
    assert torch.equal(*outs)
    pools = [layer.pools for layer in cache.paged]
    assert pools[0].kv_cache.count_nonzero()
    assert not hasattr(pools[0], "k_cache")
    assert cache.describe().endswith(f"({2 * 2 * cache.paged[0].keys[0, 0].numel() * 4} bytes per token)")


def test_the_engine_over_a_cache_of_two_kinds(models: tuple[Any, Any]) -> None:
    from torchpaged.engine import Generator, SamplingParams

    outs = []
    for model in models:
        engine = Generator(
            model,
            block_size=4,
            max_batch_size=3,
            max_seq_len=48,
            backend="reference",
            compile=False,
            steps_per_launch=2,
        )
        outputs = engine.generate(
            [[5, 6, 7], list(range(1, 20)), [9]], SamplingParams(max_new_tokens=10, ignore_eos=True)
        )
        outs.append([output.token_ids for output in outputs])
        names = list(engine.model.kv_cache.tensors())
    assert outs[0] == outs[1]
    assert all(len(tokens) == 10 for tokens in outs[0])
    assert names == ["kv_cache[0]", "k_cache[1]", "v_cache[1]"]
