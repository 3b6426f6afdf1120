"""What a prefix cache knows, on disk: another process goes on with it, and files that are not what was
written, or of another model, change nothing."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchpaged import ArgumentError, BlockPool, BlockPoolExhaustedError, PagedKVCache, TorchpagedError
from torchpaged.cache import KVLayerSpec, LatentLayerSpec, PrefixCache, StateLayerSpec
from torchpaged.cache.snapshots import load_prefixes, save_prefixes
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedModel

pytest.importorskip("safetensors", reason="safetensors is not installed")
BLOCK = 4
OURS = {"model_type": "toy", "weights": "a1"}
TEXTS = [
    (list(range(14)), None),
    ([*range(9), 50, 51, 52, 53, 54], None),
    (list(range(6)), "tenant"),
    ([7] * 9, 3),
]


def made(
    dtype: torch.dtype = torch.float32, num_blocks: int = 16, spec: Any = None
) -> tuple[PagedKVCache, PrefixCache]:
    pools = PagedKVCache(
        [spec or KVLayerSpec(2, 16)] * 2, block_size=BLOCK, num_blocks=num_blocks, dtype=dtype
    )
    for tensor in pools.tensors().values():
        tensor.view(torch.uint8).fill_(127)  # NaN
    return pools, PrefixCache(BlockPool(num_blocks), BLOCK)


def values_of(tokens: list[int], shape: torch.Size) -> torch.Tensor:
    """A block's bytes follow from all tokens up to its end."""
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31))


def fill(pools: PagedKVCache, prefixes: PrefixCache) -> None:
    for tokens, extra in TEXTS:
        text = prefixes.text(tokens, extra)
        blocks = text.take() or []
        blocks += prefixes.pool.allocate(-(-len(tokens) // BLOCK) - len(blocks))
        for place, block in enumerate(blocks):
            for tensor in pools.tensors().values():
                rows = tensor.view(torch.uint8)
                rows[block] = values_of(tokens[: (place + 1) * BLOCK], rows[block].shape).to(torch.uint8)
        text.computed(len(tokens), blocks)
        text.leave()
        prefixes.pool.free(blocks)


def hits(pools: PagedKVCache, prefixes: PrefixCache) -> list[int]:
    """Blocks that each text finds, whose bytes are looked at."""
    found = []
    for tokens, extra in TEXTS:
        text = prefixes.text(tokens, extra)
        blocks = text.take() or []
        for place, block in enumerate(blocks):
            for tensor in pools.tensors().values():
                rows = tensor.view(torch.uint8)
                want = values_of(tokens[: (place + 1) * BLOCK], rows[block].shape)
                assert torch.equal(rows[block], want.to(torch.uint8))
        found.append(len(blocks))
        text.leave()
        prefixes.pool.free(blocks)
    return found


@pytest.mark.parametrize(
    ("dtype", "spec"),
    [
        (torch.float32, None),
        (torch.float8_e4m3fn, KVLayerSpec(1, 16, 32)),
        (torch.bfloat16, LatentLayerSpec(16, 8)),
    ],
)
def test_texts_hit_behind_a_restore(dtype: torch.dtype, spec: Any, tmp_path: Path) -> None:
    first = made(dtype, spec=spec)
    fill(*first)
    want = hits(*first)
    assert want == [3, 3, 1, 2]
    tokens = save_prefixes(tmp_path / "a", first[1], first[0], OURS)
    assert tokens == (3 + 1 + 1 + 2) * BLOCK
    pools, prefixes = made(dtype, 24, spec)
    held = prefixes.pool.allocate(5)  # other places than before
    assert load_prefixes(tmp_path / "a", prefixes, pools, OURS) == tokens
    assert hits(pools, prefixes) == want
    assert load_prefixes(tmp_path / "a", prefixes, pools, OURS) == 0
    assert (prefixes.pool.num_used, len(prefixes.pool.idle)) == (5, 7)
    prefixes.pool.free(held)
    assert [*tmp_path.iterdir()] == [tmp_path / "a"]


def test_what_is_known_already_stays(tmp_path: Path) -> None:
    """A restore fills in what is missing behind it."""
    first = made()
    fill(*first)
    save_prefixes(tmp_path / "a", first[1], first[0], OURS)
    pools, prefixes = made()
    everything, TEXTS[1:] = TEXTS[1:], []
    try:
        fill(pools, prefixes)
    finally:
        TEXTS[1:] = everything
    assert load_prefixes(tmp_path / "a", prefixes, pools, OURS) == 4 * BLOCK
    assert hits(pools, prefixes) == [3, 3, 1, 2]


def test_what_can_not_be_found_is_left_out(tmp_path: Path) -> None:
    pools, prefixes = made(num_blocks=6)
    fill(pools, prefixes)  # the pool gave blocks up
    tokens = save_prefixes(tmp_path / "a", prefixes, pools, OURS)
    other = made()
    assert load_prefixes(tmp_path / "a", other[1], other[0], OURS) == tokens
    assert sum(hits(*other)) * BLOCK >= tokens > 0


def test_nothing_is_known_yet(tmp_path: Path) -> None:
    pools, prefixes = made()
    assert save_prefixes(tmp_path / "a", prefixes, pools, OURS) == 0
    assert load_prefixes(tmp_path / "a", prefixes, pools, OURS) == 0


def state_of(pools: PagedKVCache, prefixes: PrefixCache) -> Any:
    bytes_of = [tensor.view(torch.uint8).tolist() for tensor in pools.tensors().values()]
    return bytes_of, len(prefixes), prefixes.pool.num_used, len(prefixes.pool.idle)


def refused(path: Path, match: str, target: Any = None, who: Any = OURS, error: Any = ArgumentError) -> None:
    pools, prefixes = target or made()
    before = state_of(pools, prefixes)
    with pytest.raises(error, match=match):
        load_prefixes(path, prefixes, pools, who)
    assert state_of(pools, prefixes) == before


def test_truncated_and_flipped_files_are_refused(tmp_path: Path) -> None:
    pools, prefixes = made()
    fill(pools, prefixes)
    path = tmp_path / "a"
    save_prefixes(path, prefixes, pools, OURS)
    good, rng = path.read_bytes(), random.Random(0)
    for length in (0, 7, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        refused(path, "a snapshot as it was written")
    places = [rng.randrange(len(good)) for _ in range(60)] + [rng.randrange(8, 1500) for _ in range(60)]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        refused(path, "path: ")
    path.write_bytes(good)
    with pytest.raises(FileNotFoundError):
        load_prefixes(tmp_path / "b", prefixes, pools, OURS)


@pytest.mark.parametrize(
    ("target", "who", "match"),
    [
        ({}, {"weights": "b2"}, "weights: a1|whose weights are"),
        ({}, {"model_type": "other"}, "whose model_type are"),
        ({"dtype": torch.bfloat16}, {}, "whose blocks are"),
        ({"dtype": torch.float8_e4m3fn}, {}, "whose blocks, scales are"),
        ({"spec": KVLayerSpec(2, 32)}, {}, "whose blocks are"),
    ],
)
def test_what_differs_is_said(target: Any, who: Any, match: str, tmp_path: Path) -> None:
    pools, prefixes = made()
    fill(pools, prefixes)
    save_prefixes(tmp_path / "a", prefixes, pools, OURS)
    refused(tmp_path / "a", match, made(**target), {**OURS, **who})


def test_other_scales_and_too_small_a_pool(tmp_path: Path) -> None:
    pools, prefixes = made(torch.float8_e4m3fn)
    fill(pools, prefixes)
    save_prefixes(tmp_path / "a", prefixes, pools, OURS)
    refused(tmp_path / "a", "num_blocks", made(torch.float8_e4m3fn, 6), OURS, BlockPoolExhaustedError)
    other = made(torch.float8_e4m3fn)
    other[0][1].k_scale.fill_(2.0)
    refused(tmp_path / "a", "whose scales are", other)


def test_a_disk_that_is_full_leaves_the_file_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools, prefixes = made()
    (tmp_path / "a").write_text("before")

    def full(path: Path, content: bytes) -> int:
        path.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        save_prefixes(tmp_path / "a", prefixes, pools, OURS)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "before")]


def test_states_and_strange_keys_are_refused(tmp_path: Path) -> None:
    specs = [KVLayerSpec(1, 16), StateLayerSpec(4, 8)]
    states = PagedKVCache(specs, block_size=BLOCK, num_blocks=8, max_num_reqs=2)
    with pytest.raises(ArgumentError, match="states or rings"):
        save_prefixes(tmp_path / "a", PrefixCache(BlockPool(8), BLOCK), states, OURS)
    pools, prefixes = made()
    text, blocks = prefixes.text(range(8), ("a", "tuple")), prefixes.pool.allocate(2)
    text.computed(8, blocks)
    with pytest.raises(ArgumentError, match="extra: .*'tuple'"):
        save_prefixes(tmp_path / "a", prefixes, pools, OURS)
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------------------------- the engine
SIZES: dict[str, Any] = {"block_size": 4, "max_seq_len": 64, "graphs": False}
PROMPT = [3 + i * 7 % 90 for i in range(25)]
TEN = SamplingParams(max_new_tokens=10, ignore_eos=True)
OTHER_PROCESS = """
import json, sys
from transformers import AutoModelForCausalLM
from torchpaged.engine import Generator, SamplingParams
folder, prompt = sys.argv[1], json.loads(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder + "/model").eval()
generator = Generator(model, block_size=4, max_seq_len=64, graphs=False)
restored = generator.restore(folder + "/prefixes")
out = generator.generate([prompt], SamplingParams(max_new_tokens=10, ignore_eos=True))
print(json.dumps([restored, generator.stats.prefix_cache.hit_tokens, out[0].token_ids]))
"""


def test_another_process_hits(model: Any, tmp_path: Path) -> None:
    generator = Generator(model, **SIZES)
    want = generator.generate([PROMPT], TEN)[0].token_ids
    assert generator.snapshot(tmp_path / "prefixes") == 32  # of 34 tokens that have keys
    model.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path), json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [32, 24, want]


@pytest.mark.parametrize(
    "options", [{"graphs": True, "max_batch_size": 2}, {"kv_dtype": "fp8_e4m3"}], ids=str
)
def test_tokens_behind_a_restore_are_those_without(model: Any, options: Any, tmp_path: Path) -> None:
    first = Generator(model, **{**SIZES, **options})
    salted = SamplingParams(max_new_tokens=10, ignore_eos=True, cache_salt="tenant")
    want = [first.generate([PROMPT], each)[0].token_ids for each in (TEN, salted)]
    first.snapshot(tmp_path / "a")
    if "kv_dtype" in options:
        with pytest.raises(ArgumentError, match="kv_scales"):
            Generator(model, **{**SIZES, **options}).restore(tmp_path / "a")
        scales = first.model.kv_scales
        other = Generator(model, **{**SIZES, **options}, kv_scales=[(k * 2, v) for k, v in scales])
        with pytest.raises(ArgumentError, match="whose kv_scales are"):
            other.restore(tmp_path / "a")
        options = {**options, "kv_scales": scales}
    second = Generator(model, **{**SIZES, **options})
    second.restore(tmp_path / "a")
    assert [second.generate([PROMPT], each)[0].token_ids for each in (TEN, salted)] == want
    assert second.stats.prefix_cache.hit_tokens == 2 * 24


def test_what_is_found_is_not_given_up_for_the_rest(model: Any, tmp_path: Path) -> None:
    """The pool has idle blocks alone, the oldest of which the file holds, too."""
    sizes = {**SIZES, "max_batch_size": 1, "max_seq_len": 32, "num_blocks": 9}
    texts = [
        [10 + (place * 11 + i * 7) % 80 for i in range(length)] for place, length in enumerate((13, 17, 17))
    ]
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    first = Generator(model, **sizes)
    for text in texts[:2]:
        first.generate([text], one)
    first.snapshot(tmp_path / "a")
    want = [
        Generator(model, **SIZES, prefix_cache=False).generate([text], TEN)[0].token_ids for text in texts
    ]
    second = Generator(model, **sizes)
    for text in (texts[0], texts[2]):
        second.generate([text], one)
    assert second.restore(tmp_path / "a") == 16
    assert [second.generate([text], TEN)[0].token_ids for text in texts] == want


def test_two_engines_over_one_cache(model: Any, tmp_path: Path) -> None:
    """What the other one wrote is in no snapshot, and none is restored under its requests."""
    paged = PagedModel(model, num_blocks=40, block_size=4)
    first, second = (Generator(paged, max_seq_len=64, graphs=False) for _ in range(2))
    first.generate([PROMPT], TEN)
    assert first.snapshot(tmp_path / "a") == 32
    second.generate([PROMPT[::-1]], TEN)
    assert first.snapshot(tmp_path / "b") == 0
    second.submit(PROMPT, TEN)
    second.step()
    with pytest.raises(TorchpagedError, match="another"):
        first.restore(tmp_path / "a")


def test_models_that_differ_in_one_number(make_llama: Any, tmp_path: Path) -> None:
    def made(**options: Any) -> Any:
        sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
        return make_llama(**sizes, **options)

    generator = Generator(made(), **SIZES)
    generator.generate([PROMPT], TEN)
    generator.snapshot(tmp_path / "a")
    changed, other_norms = made(), made(rms_norm_eps=0.1)
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight[40, 60] += 1e-6
    others = [made() for _ in range(4)]
    others[0].model.layers[0].self_attn.scaling *= 2
    others[1].model.rotary_emb.attention_scaling *= 2
    others[2].model.layers[0].mlp.act_fn = torch.nn.ReLU()
    others[3].model.layers[0].mlp.register_forward_hook(lambda *args: 2 * args[2])
    for other in (changed, other_norms, *others):
        with pytest.raises(ArgumentError, match="whose weights are"):
            Generator(other, **SIZES).restore(tmp_path / "a")
    assert Generator(made(), **SIZES).restore(tmp_path / "a") == 32


def test_a_generator_that_can_not(model: Any, make_llama: Any, tmp_path: Path) -> None:
    generator = Generator(model, **SIZES)
    generator.generate([PROMPT], TEN)
    generator.snapshot(tmp_path / "a")
    generator.submit(PROMPT, TEN)
    with pytest.raises(ArgumentError, match="requests that have not ended"):
        generator.restore(tmp_path / "a")
    with pytest.raises(ArgumentError, match="switched off by prefix_cache=False"):
        Generator(model, **SIZES, prefix_cache=False).restore(tmp_path / "a")
    other = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    with pytest.raises(ArgumentError, match="whose weights are"):
        Generator(other, **SIZES).restore(tmp_path / "a")
