"""A process of its own for the real vLLM: torchpaged's backend behind vLLM's registry, base classes, metadata
and ``Attention`` layer, on a CPU. No engine and no model: those need vLLM's compiled extension.

    python tests/support/vllm_worker.py      # prints one line of JSON: what was seen, or an error
"""

import dataclasses
import inspect
import json
from types import SimpleNamespace
from typing import Any

import torch
import vllm
import vllm.platforms
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform

BLOCK, HEADS, KV_HEADS, DIM, SCALE = 16, 4, 2, 16, 0.3
CONTEXTS, STEPS = [37, 5, 18], ([1, 1, 1], [3, 7, 1], [1, 1, 1])


def config_on_cpu() -> Any:
    """vLLM finds no device on a machine whose vLLM was built for another: it is told."""
    vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig(device="cpu"))


def registered_backend() -> Any:
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from torchpaged import vllm as plugin

    plugin.register()
    assert AttentionBackendEnum.CUSTOM.is_overridden()
    found = AttentionBackendEnum.CUSTOM.get_class()
    for cls, base in (
        (found, AttentionBackend),
        (found.get_impl_cls(), AttentionImpl),
        (found.get_builder_cls(), AttentionMetadataBuilder),
    ):
        assert issubclass(cls, base), cls
        assert not inspect.isabstract(cls), cls
    return found


def reasons(backend: Any, **changed: Any) -> list[str]:
    """By every argument that this vLLM knows; those of others are left out."""
    asked: dict[str, Any] = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "attn_type": "decoder",
        "device_capability": None,
    }
    known = inspect.signature(backend.validate_configuration).parameters
    given = {name: {**asked, **changed}.get(name, False) for name in known}
    return backend.validate_configuration(**given)


def check_configuration(backend: Any) -> None:
    for fine in ("has_sink", "has_sliding_window", "use_non_causal", "use_kv_connector"):
        assert reasons(backend, **{fine: True}) == [], (fine, reasons(backend, **{fine: True}))
    for bad in ("use_mla", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales", "use_batch_invariant"):
        assert reasons(backend, **{bad: True}), bad
    assert reasons(backend, dtype=torch.float64)
    assert reasons(backend, block_size=24)


def cache_of(backend: Any, spec: Any, num_blocks: int, order: tuple[int, ...]) -> Tensor:
    """A layer's view as vLLM makes it: by the backend's own shape, or by the one of all backends."""
    if hasattr(spec, "state_content_size_bytes"):
        shape = (num_blocks, spec.num_heads, spec.block_size, 2 * spec.head_size)
        physical = [shape[axis] for axis in order]
        inverse = [order.index(axis) for axis in range(4)]
        return torch.zeros(physical, dtype=spec.dtype).permute(inverse)
    return torch.zeros(backend.get_kv_cache_shape(num_blocks, BLOCK, KV_HEADS, DIM), dtype=spec.dtype)


def common_of(query_lens: list[int], seq_lens: list[int], table: Tensor, padding: int) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    slots = [
        int(table[row, at // BLOCK]) * BLOCK + at % BLOCK
        for row, (n, q) in enumerate(zip(seq_lens, query_lens, strict=True))
        for at in range(n - q, n)
    ]
    given = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "num_reqs": len(seq_lens),
        "num_actual_tokens": len(slots) + padding,
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "block_table_tensor": table,
        "slot_mapping": torch.tensor([*slots, *[-1] * padding]),
        "causal": True,
    }
    names = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    assert set(given) <= names, set(given) - names
    return CommonAttentionMetadata(**given)


def oracle(q: Tensor, k: Tensor, v: Tensor, window: int | None, cap: float | None) -> Tensor:
    """Of one request: its last queries over all its keys, in float64."""
    group, count, n = HEADS // KV_HEADS, q.shape[0], k.shape[0]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    scores = cap * torch.tanh(scores / cap) if cap else scores
    at, keys = torch.arange(n - count, n)[:, None], torch.arange(n)[None]
    seen = (keys <= at) & (keys > at - (window or n + 1))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).float()


def check_layer(
    backend: Any, config: Any, name: str, order: tuple[int, ...], window: int | None, cap: float | None
) -> None:
    """A prompt, decodes and a mixed step through vLLM's own ``Attention``; padding is zeros."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention

    options: dict[str, Any] = {} if window is None else {"per_layer_sliding_window": window}
    layer = Attention(
        HEADS,
        DIM,
        SCALE,
        num_kv_heads=KV_HEADS,
        cache_config=config.cache_config,
        logits_soft_cap=cap,
        prefix=name,
        attn_backend=backend,
        **options,
    )
    assert type(layer.impl) is backend.get_impl_cls()
    model, config.model_config = config.model_config, SimpleNamespace(use_mla=False)
    asked = layer.get_kv_cache_spec(config)  # of a model that there is none of
    config.model_config = model
    spec = dataclasses.replace(asked, block_size=BLOCK, dtype=torch.float32)
    asks = inspect.signature(backend.__mro__[1].get_supported_kernel_block_sizes).parameters
    assert [size.base for size in backend.get_supported_kernel_block_sizes(*[spec] * len(asks))] == [16]
    layer.kv_cache = cache_of(backend, spec, 16, order)
    builder = backend.get_builder_cls()(spec, [name], config, torch.device("cpu"))
    assert builder.get_cudagraph_support(config, spec).name == "ALWAYS"
    table = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    lens, history = [0, 0, 0], [[torch.empty(0, KV_HEADS, DIM)] * 2 for _ in range(3)]
    for query_lens in (CONTEXTS, *STEPS):
        lens = [n + q for n, q in zip(lens, query_lens, strict=True)]
        common = common_of(query_lens, lens, table, padding=2)
        q, k, v = (torch.randn(sum(query_lens) + 2, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        metadata = builder.build(0, common)
        with set_forward_context(
            {name: metadata}, config, num_tokens=len(q), slot_mapping={name: metadata.slot_mapping}
        ):
            got = layer(q, k, v).view(-1, HEADS, DIM)
        assert not got[-2:].any(), "padding is not zero"
        q, k, v = q.view(-1, HEADS, DIM), k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM)
        at = 0
        for row, count in enumerate(query_lens):
            mine = slice(at, at + count)
            history[row] = [
                torch.cat([old, new[mine]]) for old, new in zip(history[row], (k, v), strict=True)
            ]
            want = oracle(q[mine], *history[row], window, cap)
            torch.testing.assert_close(got[mine], want, rtol=2e-5, atol=2e-5)
            at += count


def main() -> None:
    config = config_on_cpu()
    from vllm.config import set_current_vllm_config

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    layers = 0
    with set_current_vllm_config(config), torch.inference_mode():
        config.cache_config.block_size = BLOCK
        backend = registered_backend()
        check_configuration(backend)
        for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
            for window, cap in ((None, None), (6, None), (None, 2.0)):
                check_layer(backend, config, f"model.layers.{layers}.attn", order, window, cap)
                layers += 1
    print(json.dumps({"vllm": vllm.__version__, "layers": layers}))


if __name__ == "__main__":
    main()
