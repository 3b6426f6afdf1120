"""The engine behind generate() on a GPU: transformers' own greedy tokens in float32, and fp8 pools."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu


@pytest.mark.long
@pytest.mark.parametrize("fuse", [False, True])
def test_generate_of_an_accelerated_model(make_llama: Callable[..., Any], fuse: bool) -> None:
    import torchpaged.hf as hf

    model = make_llama(vocab_size=99, hidden_size=256, intermediate_size=384, max_position_embeddings=256)
    model = model.to("cuda").eval()
    ids = torch.randint(1, 99, (3, 21), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :7], ids[1, :7] = 0, 0
    call = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    model.set_attn_implementation("eager")
    free = model.generate(ids, eos_token_id=None, **call)
    ends = [int(free[0, 25]), int(free[2, 30])]
    want = model.generate(ids, eos_token_id=ends, **call)
    hf.accelerate(model, max_batch_size=2, max_seq_len=64, fuse=fuse)
    assert model.generate.generator.loop is not None
    assert torch.equal(model.generate(ids, eos_token_id=None, **call), free)
    assert torch.equal(model.generate(ids, eos_token_id=ends, **call), want)


@pytest.mark.parametrize("fuse", [False, True])
def test_beams_of_an_accelerated_model(
    make_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fuse: bool
) -> None:
    """Captured steps, between which rows are reordered; across blocks of 16 and with padding."""
    import torchpaged.hf as hf
    from torchpaged.engine.replayed_steps import ReplayedSteps

    model = make_llama(vocab_size=99, hidden_size=256, intermediate_size=384, max_position_embeddings=256)
    model = model.to("cuda").eval()
    ids = torch.randint(1, 99, (2, 21), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :7], ids[1, :7] = 0, 0
    call = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    call |= {"num_beams": 5, "num_return_sequences": 2, "eos_token_id": None}
    model.set_attn_implementation("eager")
    want = model.generate(ids, **call)
    hf.accelerate(model, max_batch_size=2, max_seq_len=128, fuse=fuse)
    replayed, close = list[int](), ReplayedSteps.close

    def noted(self: ReplayedSteps) -> None:
        replayed.append(self.num_replayed)
        close(self)

    monkeypatch.setattr(ReplayedSteps, "close", noted)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **call), want)
    assert replayed == [57, 57]


@pytest.mark.parametrize("fuse", [False, True], ids=["compiled", "fused"])
def test_fp8_pools_of_a_generator(make_llama: Callable[..., Any], fuse: bool) -> None:
    """Captured and compiled steps read the scales that the first prompt gave after they were captured."""
    import torchpaged.hf as hf
    from torchpaged.engine import Generator, SamplingParams

    model = make_llama(vocab_size=99, hidden_size=256, intermediate_size=384, max_position_embeddings=256)
    model = model.to("cuda", torch.bfloat16).eval()
    prompt = torch.randint(1, 99, (40,)).tolist()
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    generator = Generator(model, max_batch_size=2, max_seq_len=64, kv_dtype="fp8_e4m3", fuse=fuse)
    [output] = generator.generate([prompt], params)
    scales = generator.model.kv_scales
    assert scales
    assert all(bool((scale != 1).all()) for pair in scales for scale in pair)
    given = Generator(model, max_batch_size=2, max_seq_len=64, kv_dtype="fp8_e4m3", kv_scales=scales)
    assert [output.token_ids] == [each.token_ids for each in given.generate([prompt], params)]
    cache = hf.PagedCache(model.config, 1, 64, kv_dtype="fp8_e4m3", kv_scales=scales)
    ids = torch.tensor([prompt], device="cuda")
    with torch.no_grad():
        ours = model(ids, past_key_values=cache).logits[0, -1]
    # bf16: the next token of the engine is the model's, or nearly as likely
    gap = float(ours.max() - ours[output.token_ids[0]])
    assert gap <= 0.05 * float(ours.max() - ours.mean())
