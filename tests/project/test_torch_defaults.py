"""Entry points under another default dtype than float32 and another default device than the CPU: what a
library makes for itself has the dtype that it means, and stands where it means."""

import ast
import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from op_inputs.latent import assert_latent_close, make_latent_batch, run_mla_attention
from op_inputs.opcheck import opcheck_cases
from op_inputs.trees import TREE_SPECS, branches_of, make_tree_batch
from torch import Tensor, nn
from torch.utils import _device

import torchpaged
from torchpaged import AttentionMetadata, PagedAttention, PagedKVCache
from torchpaged.cache import LatentLayerSpec
from torchpaged.compat import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    reshape_and_cache_flash,
    varlen_attn,
)
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.graphs import DecodeGraphRunner, PackedGraphRunner, TapeCapture
from torchpaged.layers import CrossAttention, EncoderOnlyAttention, MLAAttention, encoder_metadata
from torchpaged.prefixes import (
    AutomaticPrefixes,
    CascadeCosts,
    SharedPrefixes,
    cascade_attention,
    find_prefix_groups,
)
from torchpaged.testing import BATCH_SPECS, assert_attention_close, make_batch, run_paged_attention

CPU = torch.device("cpu")


@pytest.fixture(params=["bfloat16", "float64", "meta", "torch.device"])
def change(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Sets other defaults when it is called: a dtype, a device, or the context of one. What stands on the
    meta device by mistake has no values, so that a read of it fails."""
    with contextlib.ExitStack() as stack:

        def to_others() -> None:
            if request.param == "torch.device":
                stack.enter_context(torch.device("meta"))
            elif request.param == "meta":
                torch.set_default_device("meta")
                stack.callback(torch.set_default_device, None)
            else:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(getattr(torch, request.param))

        yield to_others


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


# ---------------------------------------------------------------------------- entry points that load no model
def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device=CPU)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CPU)


def qkv(tokens: int, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return normal(tokens, heads, dim), normal(tokens, kv_heads, dim, seed=1), normal(tokens, kv_heads, dim)


def pools(kv_heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32) -> Any:
    return PagedKVCache.uniform(1, kv_heads, dim, block_size=4, num_blocks=12, dtype=dtype)


def module(backend: str = "auto", fp8: bool = False, **options: Any) -> Any:
    """Steps of a module over rows of a cache: prompts, then a decode step."""
    cache = pools(dtype=torch.float8_e4m3fn if fp8 else torch.float32)
    layer = PagedAttention(
        4, 16, 2, backend=backend, kv_dtype=cache.dtype, device="cpu", dtype=torch.float32, **options
    )
    rows = cache.allocate(2, max_seq_len=20)
    out = layer(*qkv(6), cache[0], rows.append([5, 1]))
    return [out, layer(*qkv(2), cache[0], rows.append([1, 1])), *cache[0]]


def functions() -> Any:
    """Every op by its checked function, as far as it takes host values."""
    cache, batch = pools(), AttentionMetadata.from_lists([5, 1], [9, 6], [[1, 2, 3], [4, 5]], block_size=4)
    q, k, v = qkv(6)
    torchpaged.write_kv(k, v, *cache[0][:2], batch.slot_mapping)
    torchpaged.copy_blocks(*cache[0][:2], [(1, 6), (2, 7)])
    starts = batch.block_table, batch.seq_lens, batch.query_start_loc
    out, lse = torchpaged.paged_attention(q, *cache[0][:2], *starts, max_query_len=5, return_lse=True)
    step = AttentionMetadata.from_lists([1, 1], [9, 6], [[1, 2, 3], [4, 5]], block_size=4)
    ids = torch.zeros(2, dtype=torch.int64, device=CPU)
    assert step.positions is not None
    assert step.slot_mapping is not None
    torchpaged.advance_step(
        ids + 1, step.block_table, ids, step.positions, step.seq_lens, step.slot_mapping, block_size=4
    )
    tree = torchpaged.tree_mask_from_parents(ints(-1, 0, 0))
    return [out, lse, ids, step.positions, step.slot_mapping, tree, *cache[0]]


def layers() -> Any:
    q, k, v = qkv(6)
    encoder = EncoderOnlyAttention(4, 16, 2, device="cpu", dtype=torch.float32)
    out = [encoder(q, k, v, encoder_metadata([4, 2]))]
    cross, cache = CrossAttention(4, 16, 2, device="cpu", dtype=torch.float32), pools()
    rows = cache.allocate(2, max_seq_len=20)
    out.append(cross(q[:2], k, v, cache[0], rows.cross([1, 1], written=rows.append([4, 2]))))
    latent = MLAAttention(3, 6, 4, 5, 16, device="cpu", dtype=torch.float32).requires_grad_(False)
    latent.kv_b_proj.weight.copy_(normal(*latent.kv_b_proj.weight.shape))
    held = PagedKVCache([LatentLayerSpec(16, 4)], block_size=4, num_blocks=9, dtype=torch.float32)
    batch = AttentionMetadata.from_lists([5, 1], [5, 1], [[1, 2], [3]], block_size=4)
    return [*out, latent(normal(6, 3, 10), normal(6, 16), normal(6, 4), held[0], batch)]


def compat() -> Any:
    q, k, v = qkv(6)
    starts, table, (k_cache, v_cache) = ints(0, 4, 6), ints([0, 2], [1, 3]), pools()[0][:2]
    out = [flash_attn_varlen_func(q, k, v, 4, starts, 4, starts, causal=True, window_size=(3, 0))]
    out.append(varlen_attn(q, k, v, starts, starts, 4, 4, enable_gqa=True))
    slots = torch.arange(6, dtype=torch.int64, device=CPU)
    reshape_and_cache_flash(k, v, k_cache, v_cache, slots, "auto", None, None)
    rotary = {"rotary_cos": normal(9, 8), "rotary_sin": normal(9, 8)}
    new, same = (x[:2, None] for x in (k, v)), (x[:2] for x in (k, v))
    out.append(
        flash_attn_with_kvcache(
            q[:2, None], k_cache, v_cache, *new, cache_seqlens=3, page_table=table, causal=True, **rotary
        )
    )
    packed = {"cu_seqlens_q": ints(0, 1, 2), "cu_seqlens_k_new": ints(0, 2, 2), "max_seqlen_q": 1}
    out.append(
        flash_attn_with_kvcache(
            q[:2], k_cache, v_cache, *same, cache_seqlens=ints(4, 4), page_table=table, **packed
        )
    )
    out.append(flash_attn_with_kvcache(q[:2, None], k_cache, v_cache, cache_batch_idx=ints(2, 1)))
    return [*out, k_cache, v_cache]


def cascade() -> Any:
    tables, lens, cache = [[1, 2, 3], [1, 2, 4], [1, 2, 5]], [10, 11, 12], pools()
    for pool in cache[0][:2]:
        pool.copy_(normal(*pool.shape))
    prefixes = SharedPrefixes.allocate(
        max_num_groups=4, num_reqs=3, num_tokens=3, max_blocks_per_req=3, block_size=4
    )
    prefixes.set(find_prefix_groups(tables, [1, 1, 1], lens, block_size=4), tables, [1, 1, 1], lens)
    batch = AttentionMetadata.from_lists([1, 1, 1], lens, tables, block_size=4)
    starts = batch.block_table, batch.seq_lens, batch.query_start_loc
    q, k, v = qkv(3)
    out = [cascade_attention(q, *cache[0][:2], *starts, prefixes, max_query_len=1)]
    free = CascadeCosts(0.0, 0.0, 1.0, 1e9, "whatever is shared pays")
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "kv_dtype": torch.float32}
    automatic = AutomaticPrefixes(**sizes, max_blocks_per_req=3, block_size=4, costs=free)
    shared = automatic.prepare(batch, tables)
    assert shared.prefixes is not None
    layer = PagedAttention(4, 16, 2, device="cpu", dtype=torch.float32)
    return [*out, layer(q, k, v, cache[0], shared)]


class Step(nn.Module):
    """A layer of attention, for the runners."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = pools()
        self.attention = PagedAttention(4, 16, 2, block_size=4, device="cpu", dtype=torch.float32)

    def forward(self, input_ids: Tensor, metadata: AttentionMetadata, last: Tensor | None = None) -> Tensor:
        x = (input_ids[:, None] + torch.arange(8 * 16, device=CPU)).view(-1, 8, 16).float().sin()
        out = self.attention(x[:, :4], x[:, 4:6], x[:, 6:], self.cache[0], metadata).flatten(1)
        return out if last is None else out[last]


def runners() -> Any:
    sizes: dict[str, Any] = {"max_blocks_per_req": 4, "block_size": 4, "num_blocks": 12}
    packed = PackedGraphRunner(Step(), buckets=[8], max_num_reqs=4, capture=TapeCapture(), **sizes)
    packed.capture()
    step = {"query_lens": [3, 2], "seq_lens": [3, 6], "block_tables": [[1], [2, 3]]}
    out = [packed.run([1, 2, 3, 4, 5], **step, logits_indices=[2, 4]).clone()]
    decode = DecodeGraphRunner(
        Step(), max_batch_size=2, buckets=[2], compile=False, capture=TapeCapture(), **sizes
    )
    decode.capture()
    return [*out, *(decode.run([t, 9], [t, 1], [[1, 2], [3]]).clone() for t in (1, 2))]


def made_for_backends() -> Any:
    """What `torchpaged.testing` makes for a backend's author."""
    batch = make_batch(BATCH_SPECS["mixed_padded"], alibi=True, sinks=True)
    out = run_paged_attention(BACKEND_OPS["reference"], batch)
    assert_attention_close(*out, batch)
    branches, _ = branches_of(make_tree_batch(TREE_SPECS["tree_mixed"]))
    latent = make_latent_batch(BATCH_SPECS["mixed_small"])
    assert_latent_close(*run_mla_attention(BACKEND_OPS["reference"], latent), latent)
    for op, args, options in opcheck_cases().values():
        getattr(BACKEND_OPS["reference"], op)(*args, **options)
    return [*out, branches.q]


ENTRIES: dict[str, Callable[[], Any]] = {
    "module": module,
    "reference": lambda: module("reference"),
    "numbers": lambda: module(sinks=[0.1] * 4, alibi_slopes=[0.5] * 4, logits_soft_cap=30.0),
    "fp8": lambda: module(fp8=True),
    "functions": functions,
    "layers": layers,
    "compat": compat,
    "cascade": cascade,
    "runners": runners,
    "testing": made_for_backends,
}


@pytest.mark.parametrize("entry", ENTRIES)
@torch.inference_mode()
def test_an_entry_point(entry: str, change: Callable[[], None], native: None) -> None:
    want = ENTRIES[entry]()
    change()
    got = ENTRIES[entry]()
    for one, other in zip(got, want, strict=True):
        assert other is None or (one.dtype, one.device) == (other.dtype, CPU)
        assert other is None or torch.equal(one.double(), other.double())


# ---------------------------------------------------------------------------------- entry points with a model
def through_generate(model: Any) -> Any:
    """1024 tokens: positions that bfloat16 can't count."""
    from torchpaged.hf import PagedCache

    model.set_attn_implementation("torchpaged")
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.arange(1024, device=CPU)[None] % 90 + 8
    long = model.generate(ids, **options, past_key_values=PagedCache(model.config, 1, 1040))
    padded = ids[:, :18].view(2, 9).clone()
    mask = torch.ones_like(padded)
    padded[0, :3] = mask[0, :3] = 0
    cache = PagedCache(model.config, 2, 32)
    short = model.generate(padded, attention_mask=mask, **options, past_key_values=cache)
    assert cache.paged[0].keys.dtype == torch.float32
    return [long.tolist(), short.tolist()]


def through_the_engine(model: Any, fused: bool = False, **options: Any) -> Any:
    from torchpaged.engine import Generator, SamplingParams

    prompts = [[8, 9, 10, 11, 12], [20] * 70]  # positions of 64 tokens and more are made by torch
    sampling = [
        SamplingParams(max_new_tokens=8),
        SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.8, seed=3, repetition_penalty=1.2),
    ]
    if fused:
        torchpaged.hf.fuse(model, count=False)
    generator = Generator(model, max_batch_size=2, max_seq_len=128, steps_per_launch=2, **options)
    return [[output.token_ids for output in generator.generate(prompts, params)] for params in sampling]


def through_accelerate(model: Any) -> Any:
    """Padded, with a penalty and seeds of torch's generator."""
    from torchpaged.engine import accelerate

    accelerate(model, max_batch_size=2, max_seq_len=64)
    ids = torch.arange(18, device=CPU).view(2, 9) + 8
    mask = torch.ones_like(ids)
    ids[0, :3] = mask[0, :3] = 0
    options = {"max_new_tokens": 6, "repetition_penalty": 1.2, "pad_token_id": 0}
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, **options).tolist()


def through_an_encoder(model: Any) -> Any:
    """Padded rows and a window, each told by a mask of transformers."""
    model.set_attn_implementation("torchpaged")
    mask = torch.ones(2, 9, dtype=torch.int64, device=CPU)
    mask[1, 5:] = 0
    with torch.no_grad():
        out = model(torch.arange(18, device=CPU).view(2, 9) + 8, attention_mask=mask).last_hidden_state
    return (out * mask[..., None]).double().tolist()


MODEL_ENTRIES: dict[str, Callable[[Any], Any]] = {
    "generate": through_generate,
    "engine": through_the_engine,
    "fused": lambda model: through_the_engine(model, fused=True),
    "fp8 engine": lambda model: through_the_engine(model, kv_dtype="fp8_e4m3"),
    "accelerate": through_accelerate,
    "windows": through_generate,
    "encoder": through_an_encoder,
}


def make_model(entry: str, make_llama: Callable[..., Any]) -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 2048}
    if entry not in ("windows", "encoder"):
        return make_llama(**sizes)
    import transformers

    torch.manual_seed(0)
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "local_attention": 4, "pad_token_id": 0}
    if entry == "windows":
        config = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=6)
        return transformers.MistralForCausalLM(config).eval()
    return transformers.ModernBertModel(transformers.ModernBertConfig(**sizes)).eval()


@pytest.mark.parametrize("entry", MODEL_ENTRIES)
def test_an_entry_point_with_a_model(
    entry: str, change: Callable[[], None], make_llama: Callable[..., Any]
) -> None:
    model = make_model(entry, make_llama)
    want, model = MODEL_ENTRIES[entry](copy.deepcopy(model)), copy.deepcopy(model)
    change()
    assert MODEL_ENTRIES[entry](model) == want


# ------------------------------------------------------------------------------------------------ the source
#: Calls of torch that make a tensor -> of what torch has a default there.
FLOATS = dict.fromkeys(("zeros", "ones", "empty", "rand", "randn"), "dtype")
#: torch's own list of what a default device changes: private, and nowhere said in public.
PLACED = dict.fromkeys((make.__name__ for make in _device._device_constructors()), "device")


@pytest.mark.parametrize("makes", [FLOATS, PLACED], ids=["dtype", "device"])
def test_every_tensor_of_the_library_says_its(makes: dict[str, str]) -> None:
    """The dtype where it holds no integers; the device, or ``out``. Benchmarks and tests may follow the
    defaults."""
    assert {"zeros", "ones", "empty"} <= set(makes)
    root, unsaid = Path(torchpaged.__file__).parent, []
    for path in (*root.rglob("*.py"), *(root / "custom_ops").rglob("*.py"), *(root / "graphs").rglob("*.py")):
        if path.relative_to(root).parts[0] == "testing":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, keywords = ast.unparse(node.func.value), {keyword.arg for keyword in node.keywords}
            wanted = makes.get(node.func.attr) if owner == "torch" else None
            if wanted and not {wanted, None} & keywords:
                unsaid.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert not unsaid, unsaid


def test_cases_for_other_backends(default_dtype: torch.dtype) -> None:
    for op, args, kwargs in opcheck_cases().values():
        for tensor in (*args, *kwargs.values()):
            assert (
                not isinstance(tensor, torch.Tensor)
                or not tensor.is_floating_point()
                or tensor.dtype == torch.float32
            )
        torch.library.opcheck(getattr(BACKEND_OPS["reference"], op), args, kwargs, test_utils="test_schema")
