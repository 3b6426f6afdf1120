"""The vLLM backend under a stand-in of vLLM's documented interface, driven as vLLM drives one: registered,
chosen, built once per step, called per layer with padding."""

import importlib
import logging
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from documented import Pools, documented_attention, starts_of
from torch import Tensor

from torchpaged import vllm as plugin

ONE = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class that vLLM finds, by its own registry."""
    for name, module in fake_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = ("torchpaged.vllm.backend", "torchpaged.vllm.layer")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    plugin.register()
    yield fake_vllm.AttentionBackendEnum.CUSTOM.get_class()
    for name in ours:
        sys.modules.pop(name, None)


def batch(
    query_lens: list[int], seq_lens: list[int], layout: str, padding: int = 0, **pool: Any
) -> tuple[Any, Any, Any]:
    """What vLLM hands over before the step's keys are stored: the pools hold the context alone."""
    contexts = [n - q for n, q in zip(seq_lens, query_lens, strict=True)]
    pools = Pools(contexts, room=max(query_lens), block_size=16, **pool)
    size = pools.k_cache.shape[1]
    slots = [
        int(pools.table[row, at // size]) * size + at % size
        for row, (start, n) in enumerate(zip(contexts, query_lens, strict=True))
        for at in range(start, start + n)
    ]
    common = fake_vllm.CommonAttentionMetadata(
        query_start_loc=starts_of([*query_lens, *[0] * bool(padding)]),
        query_start_loc_cpu=starts_of([*query_lens, *[0] * bool(padding)]),
        seq_lens=torch.tensor([*seq_lens, *[0] * bool(padding)], dtype=torch.int32),
        num_reqs=len(seq_lens) + bool(padding),
        num_actual_tokens=len(slots) + padding,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.nn.functional.pad(pools.table, (0, 0, 0, int(bool(padding)))),
        slot_mapping=torch.tensor([*slots, *[-1] * padding]),
    )
    if layout == "old":
        cache = torch.stack([pools.k_cache, pools.v_cache], 1)
    else:  # [num_blocks, num_kv_heads, block_size, 2 * head_size]
        cache = torch.cat([pools.k_cache, pools.v_cache], -1).transpose(1, 2).contiguous()
    return pools, common, cache


def expected(pools: Pools, query_lens: list[int], q: Tensor, k: Tensor, v: Tensor, **known: Any) -> Tensor:
    """Of a layer whose softmax scale is 0.3."""
    outs = []
    for row, (x, new_k, new_v) in enumerate(zip(*(t.split(query_lens) for t in (q, k, v)), strict=True)):
        keys, values = torch.cat([pools.k[row], new_k]), torch.cat([pools.v[row], new_v])
        outs.append(documented_attention(x, keys, values, **{"scale": 0.3, "causal": True, **known})[0])
    return torch.cat(outs)


def run(
    backend: Any,
    common: Any,
    cache: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any = ONE,
    **options: Any,
) -> Tensor:
    builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    impl = backend.get_impl_cls()(4, 16, 0.3, 2, **options)
    padded = [
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, common.num_actual_tokens + 2 - x.shape[0]))
        for x in (q, k, v)
    ]
    output = torch.full((padded[0].shape[0], 4 * 16), float("nan"))
    got = impl.forward(layer, *padded, cache, builder.build(0, common), output)
    assert got is output
    assert bool((output[q.shape[0] : common.num_actual_tokens] == 0).all()), "padding is not zero"
    return output[: q.shape[0]].view(-1, 4, 16)


#: name -> options of the layer, and what the oracle calls them
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 5}, {"window": (4, -1)}),
    "soft_cap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "alibi": ({"alibi_slopes": [0.5, 0.25, 0.1, 1.0]}, {"slopes": torch.tensor([0.5, 0.25, 0.1, 1.0])}),
    "sinks": ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("layout", ["old", "new"])
@pytest.mark.parametrize("lens", [([1, 1, 5, 9], [20, 33, 5, 40]), ([1, 1], [18, 40])])
def test_layers(backend: Any, name: str, layout: str, lens: tuple[list[int], list[int]]) -> None:
    """A mixed batch and a decode batch, padded as for a graph; what is stored can be read back."""
    layer, known = LAYERS[name]
    pools, common, cache = batch(*lens, layout, padding=3)
    q, k, v = (torch.randn(sum(lens[0]), heads, 16) for heads in (4, 2, 2))
    got = run(backend, common, cache, q, k, v, **layer)
    torch.testing.assert_close(got, expected(pools, lens[0], q, k, v, **known), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("raw", [True, False])
def test_fp8(backend: Any, raw: bool) -> None:
    """The cache as uint8 or as fp8; what is stored is divided by the layer's scale, and read times it."""
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    pools, common, cache = batch([1, 3], [7, 9], "old", dtype=torch.float8_e4m3fn)
    q, k, v = (torch.randn(4, heads, 16) for heads in (4, 2, 2))
    held = cache.view(torch.uint8) if raw else cache
    got = run(backend, common, held, q, k, v, layer, kv_cache_dtype="fp8")
    pools.k, pools.v = [x.float() * 0.5 for x in pools.k], [x.float() * 2 for x in pools.v]
    k, v = ((x / s).to(torch.float8_e4m3fn).float() * s for x, s in ((k, 0.5), (v, 2.0)))
    torch.testing.assert_close(got, expected(pools, [1, 3], q, k, v), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("flat", [True, False])
def test_results_of_e4m3(backend: Any, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's compiler fuses a quantisation behind the layer into it: asked for first, its scale of one
    number or of none; the same layer still writes numbers of the queries' dtype."""
    impl = backend.get_impl_cls()(4, 16, 0.3, 2)
    assert impl.fused_output_quant_supported(fake_vllm.kFp8StaticTensorSym)
    for other in (
        fake_vllm.QuantKey(torch.float8_e4m3fn, "dynamic, one"),
        fake_vllm.QuantKey(torch.uint8, "blocks"),
    ):
        assert not impl.fused_output_quant_supported(other)
    pools, common, cache = batch([1, 3], [7, 9], "new", padding=2)
    q, k, v = (torch.randn(4, heads, 16) for heads in (4, 2, 2))
    want = expected(pools, [1, 3], q, k, v)
    metadata = backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, common)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 2)) for x in (q, k, v)]
    scale = torch.tensor(0.02) if flat else torch.tensor([0.02])
    out = torch.full((6, 64), 1.0).to(torch.float8_e4m3fn)
    out = out if flat else out.view(6, 4, 16)
    assert impl.forward(ONE, *padded, cache, metadata, out, scale) is out
    found = out.float().view(6, 4, 16) * 0.02
    torch.testing.assert_close(found[:4], want, rtol=1 / 14, atol=0.02 * 2**-8)
    assert not found[4:].any()
    plain = torch.full((6, 64), float("nan"))
    impl.forward(ONE, *padded, cache, metadata, plain)
    torch.testing.assert_close(plain[:4].view(4, 4, 16), want, rtol=2e-5, atol=2e-5)
    assert not impl.forward(ONE, *padded, cache, None, out, scale).float().any(), "a profiling run"
    monkeypatch.setenv("TORCHPAGED_BACKEND", "torch_sdpa")
    assert not impl.fused_output_quant_supported(fake_vllm.kFp8StaticTensorSym)


def test_not_causal_and_shared_caches(backend: Any) -> None:
    """A drafter's bidirectional batch; a layer that reads another's cache writes nothing."""
    pools, common, cache = batch([2, 3], [7, 9], "old")
    q, k, v = (torch.randn(5, heads, 16) for heads in (4, 2, 2))
    common.causal = False
    got = run(backend, common, cache, q, k, v)
    torch.testing.assert_close(got, expected(pools, [2, 3], q, k, v, causal=False), rtol=2e-5, atol=2e-5)
    before = cache.clone()
    again = run(backend, common, cache, q, k + 1, v + 1, kv_sharing_target_layer_name="other")
    assert torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0))
    assert torch.equal(again, got)


def test_metadata(backend: Any) -> None:
    """Built without a look at lengths; captures see one key; another group's table is swapped in."""
    _, common, _ = batch([1, 1], [18, 40], "old")
    builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    assert builder.get_cudagraph_support(None, None) is fake_vllm.AttentionCGSupport.ALWAYS
    built = builder.build_for_drafting(common, 0)
    assert built.seq_lens is common.seq_lens
    assert built.block_table is common.block_table_tensor
    other = builder.update_block_table(built, built.block_table + 1, built.slot_mapping + 16)
    assert torch.equal(other.block_table, built.block_table + 1)
    assert other.seq_lens is built.seq_lens
    assert builder.build_for_cudagraph_capture(common).seq_lens.tolist() == [1, 1]
    common.causal = torch.tensor([True, False])
    with pytest.raises(NotImplementedError, match="causality"):
        builder.build(0, common)
    common.causal, common.rswa_prefix_lens = True, torch.ones(2)
    with pytest.raises(NotImplementedError, match="a batch with rswa_prefix_lens"):
        builder.build(0, common)


def test_a_profiling_run(backend: Any) -> None:
    impl = backend.get_impl_cls()(4, 16, 0.3, 2)
    output = torch.full((6, 64), float("nan"))
    x = torch.zeros(6, 4, 16)
    assert bool((impl.forward(ONE, x, x, x, torch.empty(0), None, output) == 0).all())


def reasons(backend: Any, **changed: Any) -> list[str]:
    asked: dict[str, Any] = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "device_capability": None,
        "attn_type": "decoder",
    }
    return backend.validate_configuration(**{**asked, **changed})


def test_what_vllm_is_told(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the selector's own words."""
    assert backend.get_name() == "CUSTOM"
    assert backend.get_kv_cache_shape(7, 16, 2, 64) == (7, 2, 16, 2, 64)
    for spec in ((), (None,)):  # newer vLLM gives one
        assert [size.base for size in backend.get_supported_kernel_block_sizes(*spec)] == [16]
    assert backend.supports_sliding_window()
    assert reasons(backend) == []
    assert reasons(backend, has_sink=True, kv_cache_dtype="fp8") == []
    assert "dtype not supported" in reasons(backend, dtype=torch.float64)
    assert "kv_cache_dtype not supported" in reasons(backend, kv_cache_dtype="nvfp4")
    assert reasons(backend, use_mla=True) == ["MLA not supported"]
    assert reasons(backend, attn_type="encoder") == ["attention type encoder not supported"]
    monkeypatch.setenv("TORCHPAGED_BACKEND", "triton")
    (reason,) = reasons(backend)
    assert reason.startswith("torchpaged: backend 'triton' (TORCHPAGED_BACKEND=triton is set)")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_type": "encoder_only"}, "attention type"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype nvfp4"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt"),
    ],
)
def test_layers_that_are_refused(backend: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        backend.get_impl_cls()(4, 16, 0.3, 2, **options)


def test_calls_that_are_refused(backend: Any) -> None:
    _, common, cache = batch([2], [7], "old")
    q, k, v = (torch.randn(2, heads, 16) for heads in (4, 2, 2))
    metadata = backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, common)
    impl, out = backend.get_impl_cls()(4, 16, 0.3, 2, sliding_window=3), torch.zeros(2, 64)
    before = cache.clone()
    for args in ((None,), (out, torch.ones(1), torch.ones(1)), (out, None, torch.ones(1))):
        with pytest.raises(NotImplementedError, match="one scale at most"):
            impl.forward(ONE, q, k, v, cache, metadata, *args)
    with pytest.raises(NotImplementedError, match="KV cache of shape"):
        impl.forward(ONE, q, k, v, cache[0], metadata, out)
    metadata.causal = False
    with pytest.raises(NotImplementedError, match="window or ALiBi"):
        impl.forward(ONE, q, k, v, cache, metadata, out)
    assert torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0))


def test_the_plugin(backend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It names a path, takes no place that is taken, and never stops a vLLM from starting."""
    custom = fake_vllm.AttentionBackendEnum.CUSTOM
    assert custom.get_path() == plugin.BACKEND_PATH
    plugin.register()
    assert not caplog.records
    fake_vllm.register_backend(custom, "another.plugin.Backend")
    with caplog.at_level(logging.WARNING):
        plugin.register()
        assert custom.get_path() == "another.plugin.Backend"
        assert "taken by another.plugin.Backend" in caplog.text
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
        plugin.register()
    assert "no such registry" in caplog.text
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["torchpaged"].partition(":")
    assert getattr(importlib.import_module(module), function) is plugin.register
