"""Steps of a fused model beyond its tokens: hidden states, rotations, ids, rows taken back, engines that come
and go, and calls that are refused."""

from typing import Any

import pytest
import torch
import transformers
from fused_models import build, eager_tokens, fused, generate, logits, pools
from model_coverage.architectures import model_of
from models import COMMON, padded_prompts
from torch import Tensor

from torchpaged import ArgumentError, AttentionMetadata
from torchpaged.backends import Limits
from torchpaged.engine import Generator, SamplingParams
from torchpaged.fuse.layers import LayerPlan
from torchpaged.fuse.report import count_launches
from torchpaged.fuse.rope_table import RopeTable
from torchpaged.hf import (
    PagedCache,
    PagedModel,
    attach,
    compile_layers,
    detach,
    fuse,
    uncompile_layers,
    unfuse,
)
from torchpaged.hf.packed_mixers import is_packed, mixers_of


def test_hidden_states_are_those_of_the_unfused_model() -> None:
    model, ids = build("Llama"), padded_prompts()["input_ids"]

    def states() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return model(
                ids, past_key_values=PagedCache(model.config, 2, 32), output_hidden_states=True
            ).hidden_states

    fuse(model)
    got = states()
    unfuse(model)
    assert len(got) == 4
    for x, y in zip(got, states(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asked", [None, "before", "after"])
def test_hooks_by_which_transformers_collects_outputs(asked: str | None) -> None:
    """They stay for ever where hidden states were asked for once, on attention modules, too."""
    model, ids = build("Llama"), padded_prompts()["input_ids"]

    def ask() -> None:
        with torch.no_grad():
            model(ids, output_hidden_states=True)
        assert any(m._forward_hooks for m in model.get_decoder().layers[0].self_attn.modules())

    if asked == "before":
        ask()
    report = fuse(model, count=False)
    want = logits(model)
    if asked == "after":
        ask()
    assert len(report.replaced["qkv"]) == 3
    assert torch.equal(logits(model), want)


def test_positions_beyond_the_table_and_gradients() -> None:
    model = build("Llama", max_position_embeddings=16)
    want = logits(model)
    fuse(model)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="no_grad"):
        model(torch.tensor([[5]]), past_key_values=PagedCache(model.config, 1, 8))
    cache = PagedCache(model.config, 1, 8)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]), past_key_values=cache)
    # in a second forward, whose embedding could be the op
    with pytest.raises(ArgumentError, match="no_grad"):
        model(input_ids=torch.tensor([[5]]), past_key_values=cache)


@pytest.mark.parametrize("part", ["self_attn.o_proj.weight", "mlp.experts.down_proj"])
def test_weights_that_train_behind_a_frozen_embedding(part: str) -> None:
    """Their gradients are not dropped in silence."""
    model = fused("Mixtral").requires_grad_(False)
    ids = torch.tensor([[5, 6, 7]])
    model(ids, past_key_values=PagedCache(model.config, 1, 8))
    model.get_decoder().layers[1].get_parameter(part).requires_grad_(True)
    with pytest.raises(ArgumentError, match=f"{part}: expected a tensor without grad"):
        model(ids, past_key_values=PagedCache(model.config, 1, 8))


@pytest.mark.parametrize("name", ["Llama", "lfm2"])
def test_autocast_is_the_unfused_models(name: str) -> None:
    """Its numbers have other dtypes than the weights that the ops take."""
    model = build(name)
    with torch.autocast("cpu", torch.bfloat16):
        want = logits(model)
        fuse(model, count=False)
        got = logits(model)
    torch.testing.assert_close(got, want, check_dtype=False, rtol=0, atol=0.02 * float(want.abs().max()))


def test_int32_ids_are_taken_as_before() -> None:
    model = fused("Llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        want, got = (
            torch.cat(
                [
                    model(input_ids=part.to(dtype), past_key_values=cache).logits
                    for part in ids.split(1, dim=1)
                ],
                dim=1,
            )
            for dtype, cache in (
                (torch.int64, PagedCache(model.config, 1, 16)),
                (torch.int32, PagedCache(model.config, 1, 16)),
            )
        )
    assert torch.equal(want, got)


ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPE)
def test_the_table_is_what_the_model_computes(kind: str) -> None:
    model = build("Llama", rope_parameters=ROPE[kind])
    rotary: Any = model.get_decoder().rotary_emb
    cos, sin = rotary(torch.zeros(1), torch.arange(256)[None])
    table = RopeTable(rotary, None, 16, False, 256).cos_sin
    assert torch.equal(table, torch.cat([cos[0, :, :8], sin[0, :, :8]], dim=-1))
    assert table.dtype == torch.float32
    want = eager_tokens(model)
    fuse(model)
    assert torch.equal(generate(model), want)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_stay_the_models(kind: str) -> None:
    options: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    }
    if kind == "longrope":
        options |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = build("Llama", rope_parameters=options, max_position_embeddings=16 if kind == "dynamic" else 64)
    want = eager_tokens(model)
    report = fuse(model)
    assert "rope" not in report.replaced
    assert "depends on the length" in str(report)
    assert len(report.replaced["qkv"]) == 3
    assert torch.equal(generate(model), want)


def test_unknown_models_are_reported() -> None:
    torch.manual_seed(0)
    model = transformers.OlmoForCausalLM(transformers.OlmoConfig(**COMMON)).eval()
    report = fuse(model)
    assert not report.replaced
    assert "OlmoDecoderLayer is none of the known layers" in str(report)
    assert report.before == report.after
    unfuse(model)


def test_an_activation_without_a_kernel_leaves_the_mlp() -> None:
    model = build("Llama", hidden_act="relu2")
    want = eager_tokens(model)
    report = fuse(model)
    assert "gate_up" not in report.replaced
    assert "ReLUSquaredActivation" in str(report)
    assert len(report.replaced["norm"]) == 3
    assert torch.equal(generate(model), want)


def test_wrong_calls_are_refused() -> None:
    model = build("Llama")
    for passes in (("qkv", "swiglu"), "qkv"):
        with pytest.raises(
            ArgumentError,
            match="passes: expected a sequence of qkv, rope, norm, gate_up, experts, lm_head, embedding",
        ):
            fuse(model, passes)
    with pytest.raises(ArgumentError, match="not fused"):
        unfuse(model)
    fuse(model, count=False)
    with pytest.raises(ArgumentError, match="unfuse"):
        fuse(model)
    assert count_launches(model).per_layer() == "6"  # type: ignore[union-attr]
    compile_layers(model, backend="eager")
    with pytest.raises(ArgumentError, match="uncompile_layers"):
        unfuse(model)
    uncompile_layers(model)
    unfuse(model)


def test_a_base_model_has_no_head_to_fuse() -> None:
    model = build("Llama").get_decoder()
    model.set_attn_implementation("torchpaged")
    ids = padded_prompts()["input_ids"]

    def last() -> Tensor:
        with torch.no_grad():
            return model(ids, past_key_values=PagedCache(model.config, 2, 32)).last_hidden_state

    want = last()
    report = fuse(model)
    assert "no causal LM" in report.skipped["lm_head"]["lm_head"]
    assert len(report.replaced["qkv"]) == 3
    torch.testing.assert_close(last(), want, rtol=1e-4, atol=1e-4)


def test_fp8_latents() -> None:
    """The same rows of fp8, but for numbers that round to another neighbour."""
    model = build("youtu")
    plain, fused = (PagedCache(model.config, 2, 32, block_size=4, kv_dtype="fp8_e4m3") for _ in range(2))
    want = logits(model, plain)
    fuse(model)
    torch.testing.assert_close(logits(model, fused), want, rtol=0.05, atol=0.05)
    first = [pools(cache)[0].view(torch.uint8) for cache in (fused, plain)]
    assert float((first[0] != first[1]).float().mean()) < 0.01


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("count", [True, False])
def test_engines_of_hybrids_come_and_go(attached: bool, count: bool) -> None:
    """What an engine sets and gives back is no change that the next step would refuse."""
    model = build("lfm2")
    want = generate(model, disable_compile=True)
    if not attached:
        detach(model)
    fuse(model, count=count)
    for _ in range(2):
        generator = Generator(model, max_batch_size=2, block_size=4)
        generator.generate([[5, 6, 7]], SamplingParams(max_new_tokens=3, ignore_eos=True))
        generator.close()
    if not attached:
        attach(model)
    assert torch.equal(generate(model, disable_compile=True), want)
    unfuse(model)
    assert torch.equal(generate(model, disable_compile=True), want)
    detach(model)
    assert not any(map(is_packed, mixers_of(model)))
    model = build("lfm2")
    detach(model)
    with_fusion = Generator(model, fuse=True, max_batch_size=2, block_size=4)
    assert with_fusion.fusion_report.complete
    with_fusion.close()
    assert not any(map(is_packed, mixers_of(model)))


def test_tokens_taken_back() -> None:
    """crop() runs the gated convolution once more, over the tokens that stay."""
    model = build("lfm2")
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(2))
    fuse(model)
    with torch.inference_mode():
        cache = PagedCache(model.config, 2, 32, block_size=4)
        want = [model(part, past_key_values=cache).logits for part in ids.split([8, 1, 3], 1)][2]
        cache = PagedCache(model.config, 2, 32, block_size=4)
        model(ids[:, :8], past_key_values=cache)
        cache.activate_past_recording()
        model(torch.cat((ids[:, 8:9], ids[:, :3]), 1), past_key_values=cache)
        cache.crop(-3)
        torch.testing.assert_close(model(ids[:, 9:], past_key_values=cache).logits, want)


def test_rotations_of_images_stay_the_models() -> None:
    """Of a model that sees images, whose places in it are rotated by, too."""
    text = model_of("qwen3_5_text")
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": text.config.hidden_size, "num_position_embeddings": 16}
    config = transformers.Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision)
    model = transformers.Qwen3_5ForConditionalGeneration._from_config(config).eval()
    report = fuse(model, count=False)
    assert "places in images" in next(iter(report.skipped["rope"].values()))
    assert report.replaced["qkv"]


@pytest.mark.parametrize(
    ("name", "left", "why", "launches"),
    [
        ("olmo_hybrid", "layers.3", "OlmoHybridAttentionDecoderLayer is none of the known", (5, 5, 5, 47)),
        ("zamba2", "layers.1.shared_transformer", "adapters of its own", (3, 31, 3, 31)),
    ],
    ids=["olmo_hybrid", "zamba2"],
)
def test_layers_with_attention_that_stay_as_they_are(
    name: str, left: str, why: str, launches: tuple[int, ...]
) -> None:
    """OLMo hybrid's norm queries and keys as a whole, Zamba 2's share their weights."""
    want = eager_tokens(build(name, attached=False))
    assert len(set(want[:, 20:].flatten().tolist())) > 4, "the tokens must tell models apart"
    model = build(name)
    report = fuse(model)
    assert report.after and report.before
    assert why in report.skipped["norm"][left]
    assert len(report.replaced["norm"]) + len(report.skipped["norm"]) >= report.num_layers
    assert report.after.layers == launches
    assert torch.equal(generate(model, disable_compile=True), want)
    for graphs in (True, False):
        sizes = {"max_batch_size": 2, "block_size": 4, "graphs": graphs, "prefill_chunk_size": 9}
        generator = Generator(model, **sizes)
        prompt = padded_prompts()["input_ids"][1].tolist()
        outputs = generator.generate([prompt], SamplingParams(max_new_tokens=10, ignore_eos=True))
        assert outputs[0].token_ids == want[1, 20:].tolist()


def test_biases_of_multiplied_inputs_leave_the_layer() -> None:
    """Falcon-H1's: a multiplier of the input leaves the bias as it is, one of the product does not."""
    report = fuse(build("falcon_multiplied", mamba_proj_bias=True), count=False)
    assert not report.replaced.get("qkv")
    assert "projections have biases" in report.skipped["qkv"]["layers.0"]
    whole = {"attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0, "attention_bias": True}
    model = build("falcon_multiplied", mamba_proj_bias=True, **whole)
    want = logits(model)
    assert fuse(model, count=False).complete
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fuses", [(False, False), (True, True), (True, False)], ids=str)
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["Llama", "falcon_h1"])
def test_engines_share_a_model(name: str, graphs: bool, fuses: tuple[bool, bool]) -> None:
    """The first one's end leaves what the second one runs on; the last one gives back what was before."""
    model = build(name, attached=False)
    sizes: dict[str, Any] = {"max_batch_size": 2, "block_size": 4, "graphs": graphs}
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    first, second = (Generator(model, fuse=fuse, **sizes) for fuse in fuses)
    want = first.generate([[5, 6, 7]], params)[0].token_ids
    first.close()
    assert second.generate([[5, 6, 7]], params)[0].token_ids == want
    assert (second.fusion_report is None) == (not fuses[0])
    second.close()
    assert model.config._attn_implementation == "eager"
    assert not any("forward" in vars(module) for module in model.modules())
    assert not hasattr(model.get_decoder(), "_torchpaged_fusion")


@pytest.mark.parametrize("name", ["Llama", "lfm2"])
def test_an_engine_goes_on_over_a_model_that_was_unfused(name: str) -> None:
    """Without graphs, which are of the fused model."""
    model = fused(name, attached=False)
    sizes: dict[str, Any] = {"max_batch_size": 2, "block_size": 4}
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    plain, graphs = (Generator(model, graphs=each, **sizes) for each in (False, True))
    want = plain.generate([[5, 6, 7]], params)[0].token_ids
    unfuse(model)
    assert plain.generate([[5, 6, 7]], params)[0].token_ids == want
    with pytest.raises(ArgumentError, match="its graphs were made with"):
        graphs.generate([[5, 6, 7]], params)
    plain.close()
    graphs.close()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("unfused", [False, True])
def test_graphs_do_not_go_on_behind_an_engine_that_fused_their_model(unfused: bool) -> None:
    """In the middle of a request, too: graphs of a GPU hold addresses of weights."""
    model = build("Llama", attached=False)
    first = Generator(model, max_batch_size=2, block_size=4, graphs=True)
    request = first.submit([5, 6, 7], SamplingParams(max_new_tokens=9))
    first.step()
    second = Generator(model, max_batch_size=2, block_size=4, fuse=True)
    if unfused:
        second.close()
    for _ in range(2):
        with pytest.raises(ArgumentError, match="its graphs were made with"):
            first.step()
    first.cancel(request)
    first.close()
    second.close()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Mixtral", "falcon_h1", "granitemoehybrid", "zamba2"])
def test_the_last_layer_computes_the_tokens_whose_logits_are_wanted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its attention; keys, values and states are written for all. None is wanted of a chunk in the
    middle of a prompt; negative numbers count from the end, as in transformers."""
    model = fused(name, attached=False)
    fed, feed = list[int](), LayerPlan.feed

    def watched(self: LayerPlan, ops: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        if self.ends is not None:
            fed.append(x.shape[0])
        return feed(self, ops, x, shape)

    monkeypatch.setattr(LayerPlan, "feed", watched)
    ids = torch.randint(3, 99, (11,), generator=torch.Generator().manual_seed(1))

    def run(wanted: list[int] | None) -> tuple[Tensor, Tensor]:
        """Logits of ``wanted`` of two requests of 7 and 4 tokens, and of a token behind the first."""
        limits = Limits(max_num_reqs=2, max_blocks_per_req=4)
        paged = PagedModel(model, num_blocks=12, block_size=4, limits=limits)
        size = {"block_size": 4, "num_blocks": 12}
        if paged.rings is not None:
            paged.rings.take(3), paged.rings.take(5)
        fed.clear()  # of the token by which the model was looked at
        batch = AttentionMetadata.from_lists([7, 4], [7, 4], [[3, 9], [5]], **size)
        after = AttentionMetadata.from_lists([1], [8], [[3, 9]], **size)
        with torch.inference_mode():
            got = paged(ids, batch, None if wanted is None else torch.tensor(wanted, dtype=torch.int64))
            return got, paged(torch.tensor([7]), after)

    every, behind = run(None)
    for wanted in ([6, 10], [10], [], [10, 2, 2, 0], [-1, 3]):
        got, then = run(wanted)
        torch.testing.assert_close(got, every[wanted], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(then, behind, rtol=1e-4, atol=1e-4)
        if name != "zamba2":  # its last layer is not fused as a whole
            assert fed == ([len(wanted), 1] if wanted else [1])
