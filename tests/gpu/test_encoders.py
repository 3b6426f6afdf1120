"""Encoders without a cache and cross attention on a GPU: metadata that is made inside a forward, in front of
kernels that start early; compiled and captured."""

from typing import Any

import pytest
import torch
from captured import captured
from torch import Tensor

from torchpaged.cache import PagedKVCache
from torchpaged.layers import CrossAttention, EncoderOnlyAttention, encoder_metadata

pytestmark = pytest.mark.gpu
LENS = ([30, 9, 1], [4, 20, 16], [17, 1, 22])


def dense(query_lens: list[int], key_lens: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query over all keys of its row, in float32."""
    parts = zip(q.split(query_lens), k.split(key_lens), v.split(key_lens), strict=True)
    return torch.cat([_row(*(x.float().transpose(0, 1) for x in part)) for part in parts])


def _row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    return ((q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(0, 1)


def states(count: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(count, heads, 64, dtype=dtype, device="cuda", generator=generator) for heads in (8, 2, 2)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_encoder_captured(dtype: torch.dtype) -> None:
    layer = EncoderOnlyAttention(8, 64, 2, device="cuda", dtype=dtype)
    batch, buffers = encoder_metadata(LENS[0], max_len=40, device="cuda"), states(40, dtype, 0)
    graph, out = captured(lambda: layer(*buffers, batch))
    for seed, lens in enumerate(LENS):
        new, tensors = encoder_metadata(lens, max_len=40, device="cuda"), states(40, dtype, seed)
        for name in ("block_table", "seq_lens", "query_start_loc"):
            getattr(batch, name).copy_(getattr(new, name))
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
        torch.testing.assert_close(out.float(), dense(lens, lens, *tensors), rtol=tolerance, atol=tolerance)


def test_cross_attention_captured() -> None:
    """Written in one step, read in those after it, which are one graph."""
    cache = PagedKVCache.uniform(1, 2, 64, num_blocks=16, dtype=torch.bfloat16, device="cuda")
    layer = CrossAttention(8, 64, 2, device="cuda", dtype=torch.bfloat16)
    rows, lens = cache.allocate(3, max_seq_len=48), LENS[0]
    q, k, v = states(sum(lens), torch.bfloat16, 0)
    first = layer(q[:7], k, v, cache[0], rows.cross([4, 1, 2], written=rows.append(lens)))
    torch.testing.assert_close(first.float(), dense([4, 1, 2], lens, q[:7], k, v), rtol=2e-2, atol=2e-2)
    batch, buffer = rows.cross([1, 1, 1]), q[:3].clone()
    graph, out = captured(lambda: layer(buffer, None, None, cache[0], batch))
    for seed in range(1, 4):
        new = states(3, torch.bfloat16, seed)[0]
        buffer.copy_(new)
        graph.replay()
        torch.testing.assert_close(out.float(), dense([1, 1, 1], lens, new, k, v), rtol=2e-2, atol=2e-2)


# ------------------------------------------------------------------------------------ models of transformers
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "vit"])
def test_an_encoder_of_transformers(model_type: str, compiled: bool) -> None:
    """In float32 against eager attention, padding on either side."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from model_coverage import encoders

    model = encoders.model_of(model_type, "eager").cuda()
    ours: Any = encoders.model_of(model_type, "torchpaged").cuda()
    step = torch.compile(ours, fullgraph=True) if compiled else ours
    for padding in ("right", "left") if model_type != "vit" else ("even",):
        given = encoders.inputs_of(model, model_type, padding, (20, 13, 6))
        given = {name: tensor.cuda() for name, tensor in given.items()}
        want = encoders.hidden_states(model, model, given)
        got = encoders.hidden_states(step, ours, given)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model_type", ["bart", "t5", "whisper"])
def test_an_encoder_decoder_of_transformers(model_type: str, compiled: bool) -> None:
    """The logits of generate() in float32, with a padded source; decode steps compiled and in CUDA graphs."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from model_coverage import encoder_decoders

    from torchpaged.hf import PagedEncoderDecoderCache, paged

    model = encoder_decoders.model_of(model_type).cuda()
    given = encoder_decoders.inputs_of(model, model_type)
    given = {name: tensor.cuda() for name, tensor in given.items()}
    want, _ = encoder_decoders.generate(model, given)
    with paged(model):
        cache = PagedEncoderDecoderCache(model.config, 3, 32)
        got, _ = encoder_decoders.generate(model, given, cache, disable_compile=not compiled)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))
    assert torch.equal(got.argmax(-1), want.argmax(-1))
