"""Unmodified generate() with a PagedCache: tokens equal the eager path's, through every mode
of generation; the cache by each name that transformers takes."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from models import MODELS, padded_prompts, tiny
from sessions import KEPT, semaphore_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from transformers import CompileConfig, PreTrainedModel

import torchpaged
from torchpaged.backends.choose import names as names_module
from torchpaged.hf import PagedCache, attach, fuse
from torchpaged.hf.cache_argument import CACHE, CACHE_LENGTH, CACHE_NAMES, STATES_CACHE, cache_of, take_cache

COUNT: list[Any] = []  # graphs seen by `counting`


def counting(graph: Any, inputs: Any) -> Any:
    """A backend that counts; a plain function, because generate() copies its config, and an object in
    it, deeply."""
    COUNT.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


def both(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: PagedCache, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate with eager attention and HuggingFace's own cache, then paged."""
    model.set_attn_implementation("eager")
    torch.manual_seed(7)
    want = model.generate(**inputs, **{**GREEDY, **options})
    model.set_attn_implementation("torchpaged")
    torch.manual_seed(7)
    return model.generate(**inputs, **{**GREEDY, **options}, past_key_values=cache), want


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams_returned": {"num_beams": 4, "num_return_sequences": 3},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "num_return_sequences": 3},
    "chunked_prefill": {"prefill_chunk_size": 4},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_eager(name: str, mode: str) -> None:
    model, inputs = tiny(name), padded_prompts()
    if mode == "prompt_lookup":  # assisted generation takes one row
        inputs = {k: v[1:, :].repeat(1, 2) for k, v in inputs.items()}
    got, want = both(model, inputs, PagedCache(model.config, 8, 64, block_size=4), **MODES[mode])
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_backends(backend: str, request: pytest.FixtureRequest) -> None:
    if backend == "cpu":
        request.getfixturevalue("native")
    model = tiny("GptOss")
    cache = PagedCache(model.config, 2, 64, backend=backend)
    got, want = both(model, padded_prompts(), cache)
    assert torch.equal(got, want)
    assert cache.choice.name == backend


def test_bf16_runs() -> None:
    model = tiny("Llama").to(torch.bfloat16)
    got, _ = both(model, padded_prompts(), PagedCache(model.config, 2, 64))
    assert got.shape == (2, 30)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GptOss"])
def test_several_turns_on_one_cache(name: str) -> None:
    model, inputs = tiny(name), padded_prompts()
    cache = PagedCache(model.config, 2, 64, block_size=4)
    first, _ = both(model, inputs, cache)
    question = torch.randint(3, 99, (2, 5))
    ids = torch.cat([first, question], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, ids.shape[1] - 20, dtype=torch.int64)], 1)
    got, want = both(model, {"input_ids": ids, "attention_mask": mask}, cache)
    assert torch.equal(got, want)
    assert int(cache.get_seq_length()) == 44
    cache.reset()
    again, want = both(model, padded_prompts(rows=1, length=9, padding=2), cache)
    assert torch.equal(again, want)


@pytest.mark.slow_cases(but=("Llama",))
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_generates_own_compile_path(name: str) -> None:
    """generate() compiles the decode step itself: one graph for every length and every new cache."""
    torch._dynamo.reset()
    model, inputs = tiny(name, num_hidden_layers=2), padded_prompts()
    COUNT.clear()
    config = CompileConfig(backend=counting, mode=None, fullgraph=True)
    config._compile_all_devices = True  # transformers' own switch for testing the path on a CPU
    for _ in range(3):
        cache = PagedCache(model.config, 2, 64, block_size=4)
        got, want = both(model, inputs, cache, compile_config=config)
        assert torch.equal(got, want)
    assert len(COUNT) == 1


def test_no_property_is_read_by_way_of_super() -> None:
    """In a trace: the Dynamo of torch 2.11 breaks the graph there, and refuses it with fullgraph=True."""
    package = Path(torchpaged.__file__).parent
    found = []
    for path in (*package.glob("*.py"), *package.glob("hf/*.py"), *package.glob("cache/*.py")):
        tree = ast.parse(path.read_text())
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        found += [
            f"{path.relative_to(package)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and ast.unparse(node.value) == "super()"
            and id(node) not in called
        ]
    assert found == []


def test_tokens_taken_back_from_rows_that_share_blocks() -> None:
    """The cut lies in a shared block: both rows go on behind it, each in a block of its own."""
    model, ids, more = tiny("Llama"), torch.randint(3, 90, (1, 10)), torch.randint(3, 90, (2, 6))
    cache = PagedCache(model.config, 2, 32, block_size=4)
    with torch.no_grad():
        want = model(torch.cat([ids[:, :5].expand(2, -1), more], 1)).logits[:, 5:]
        model.set_attn_implementation("torchpaged")
        model(ids.expand(2, -1), past_key_values=cache)
        cache.reorder_cache(torch.tensor([0, 0]))
        cache.crop(-5)
        torch.testing.assert_close(model(more, past_key_values=cache).logits, want, rtol=1e-4, atol=1e-4)
    cache.reset()
    assert cache.pool.num_used == 0


@pytest.mark.slow
def test_a_compiled_model_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile(model, fullgraph=True) by hand: the decode step, over growing lengths."""
    torch._dynamo.reset()
    model = tiny("Llama", num_hidden_layers=2)
    model.set_attn_implementation("torchpaged")
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    ids = torch.randint(3, 99, (2, 12))
    monkeypatch.setattr(names_module, "REGISTERED", {"kept": KEPT})
    cache = PagedCache(model.config, 2, 32, block_size=4, backend="kept")
    codes: list[str] = []
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        for step in range(4, 12):
            inputs = {
                "input_ids": ids[:, step : step + 1],
                "position_ids": torch.full((2, 1), step),
                "past_key_values": cache,
            }
            if codes:
                logits = compiled(**inputs).logits
            else:
                output, codes = run_and_get_code(compiled, **inputs)
                logits = output.logits
            model.set_attn_implementation("eager")
            want = model(ids[:, : step + 1], use_cache=False).logits[:, -1:]
            model.set_attn_implementation("torchpaged")
            torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
    # the cache's own tensor in every layer, not a clone of it
    semaphores = re.findall(r"semaphore=(\w+)", codes[0])
    assert len(semaphores) == model.config.num_hidden_layers, semaphores
    assert len(set(semaphores)) == 1, semaphores
    assert re.fullmatch(r"arg\d+_1", semaphores[0])
    assert not semaphore_of(cache.session).any()
    copied = [x for x in codes[0].splitlines() if re.search(rf"(copy_|clone)\b.*\b{semaphores[0]}\b", x)]
    assert not copied, copied


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "words"), [((1, 8), "more tokens than max_seq_len"), ((2, 32, 12), "by hand")]
)
def test_overlong_compiled_steps_fail_loudly(sizes: tuple[int, ...], words: str) -> None:
    """Nothing on the host counts when a step is compiled by hand: the in-graph assertion fires, where rows
    grow, too."""
    torch._dynamo.reset()
    model = tiny("Llama", num_hidden_layers=2)
    model.set_attn_implementation("torchpaged")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = PagedCache(model.config, *sizes[:2], block_size=4, num_blocks=sizes[2] if sizes[2:] else None)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, 7)), past_key_values=cache)
        step = {"input_ids": torch.tensor([[5]]), "past_key_values": cache}
        compiled(position_ids=torch.tensor([[7]]), **step)
        with pytest.raises(RuntimeError, match=words):
            compiled(position_ids=torch.tensor([[8]]), **step)


def test_compiled_steps_look_at_their_masks_and_rows() -> None:
    """What an eager step refuses, the graph's own assertions refuse; the right mask passes."""
    torch._dynamo.reset()
    model, inputs = tiny("Llama", num_hidden_layers=2), padded_prompts()
    want = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    model.set_attn_implementation("torchpaged")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for wrong in ("late", "hole", "behind", "row", ""):
        cache, mask = PagedCache(model.config, 2, 32, block_size=4), inputs["attention_mask"]
        with torch.no_grad():
            ids = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
            for step in range(3):
                mask = torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), dim=1)
                places = (mask.sum(-1, keepdim=True) - 1).long()
                if wrong and step == 2:
                    bad, rows = mask.clone(), slice(0, 1 if wrong == "row" else 2)
                    if wrong == "late":
                        bad[1, :3] = 0
                    elif wrong != "row":
                        bad[:, {"hole": 12, "behind": -1}[wrong]] = 0
                    call = {"input_ids": ids[rows], "attention_mask": bad[rows], "position_ids": places[rows]}
                    said = "other rows" if wrong == "row" else "mask with other padding"
                    with pytest.raises(RuntimeError, match=said):
                        compiled(**call, past_key_values=cache)
                    break
                ids = (
                    compiled(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache)
                    .logits[:, -1:]
                    .argmax(-1)
                )
            else:
                assert torch.equal(ids[:, 0], want[:, 20 + 3])


@pytest.mark.slow
@pytest.mark.parametrize(("eagerly", "compiled"), [(2, 0), (5, 2)])
def test_golden_tokens_of_a_real_model(smollm2_path: Any, eagerly: int, compiled: int) -> None:
    """SmolLM2 in float32, 24 tokens each: of so many prompts decoded eagerly, and by generate()'s compiled
    decode."""
    import json
    from pathlib import Path

    from transformers import AutoModelForCausalLM

    golden = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text())["prompts"]
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    model.set_attn_implementation("torchpaged")
    torch._dynamo.reset()
    COUNT.clear()
    config = CompileConfig(backend=counting, mode=None, fullgraph=True)
    config._compile_all_devices = True
    for options, prompts in (({}, golden[:eagerly]), ({"compile_config": config}, golden[:compiled])):
        for prompt in prompts:
            ids = torch.tensor([prompt["input_ids"]])
            cache = PagedCache(model.config, 1, 64)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
                past_key_values=cache,
                **options,
            )
            assert out[0, ids.shape[1] :].tolist() == prompt["new_ids"]
    assert len(COUNT) == bool(compiled)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["llama", "bloom", "mamba2", "trocr", "deepseek_v3"])
def test_by_each_name(name: str) -> None:
    model, inputs = attach(model_of(name)), padded_prompts()
    if name == "llama":
        assert fuse(model, count=False).replaced
    found: dict[str, Tensor] = {}
    for argument in {"past_key_values", CACHE, STATES_CACHE if name == "mamba2" else CACHE}:
        cache = PagedCache(model.config, 2, 32, block_size=4)
        with torch.no_grad():
            found[argument] = model(**inputs, **{argument: cache}).logits
        assert cache.ready
    assert all(torch.equal(logits, found[CACHE]) for logits in found.values())


def test_what_is_looked_for() -> None:
    for name in CACHE_NAMES:
        options = dict.fromkeys(CACHE_NAMES) | {name: 7, "use_cache": True}
        assert cache_of(options) == take_cache(options) == 7
        assert options == {"use_cache": True}
    assert cache_of({}) is None
    assert CACHE_LENGTH in ("past_key_values_length", "cache_length")
