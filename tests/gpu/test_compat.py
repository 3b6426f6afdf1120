"""Other libraries' calls, shared prefixes and generate_batch on a GPU: the documented results, and one
captured graph that serves other lengths."""

import random
from typing import Any

import pytest
import torch
from captured import captured
from documented import Pools, documented_attention, starts_of
from torch import Tensor

from torchpaged.compat import flash_attn_varlen_func, flash_attn_with_kvcache, varlen_attn
from torchpaged.prefixes import SharedPrefixes, cascade_attention, find_prefix_groups

pytestmark = pytest.mark.gpu
BF16 = {"rtol": 2e-2, "atol": 2e-2}


def documented(queries: list[Tensor], keys: list[Tensor], values: list[Tensor], **known: Any) -> Tensor:
    rows = zip(queries, keys, values, strict=True)
    return torch.cat([documented_attention(q.float(), k.float(), v.float(), **known)[0] for q, k, v in rows])


@pytest.mark.parametrize("block_size", [1, 16, 100])
@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({"causal": True}, {"causal": True}),
        ({}, {}),
        ({"window_size": (7, 3)}, {"window": (7, 3)}),
        (
            {"causal": True, "softcap": 5.0, "window_size": (9, 0)},
            {"causal": True, "softcap": 5.0, "window": (9, -1)},
        ),
    ],
)
def test_varlen_of_any_block_size(block_size: int, options: dict[str, Any], known: dict[str, Any]) -> None:
    """More queries than keys among them; packed keys too."""
    query_lens, key_lens = [1, 7, 33, 20], [40, 30, 33, 9]
    pools = Pools(key_lens, block_size=block_size, head_dim=64, dtype=torch.bfloat16)
    queries = [torch.randn(n, 4, 64, dtype=torch.bfloat16) for n in query_lens]
    want = documented(queries, pools.k, pools.v, **known)
    q, starts = torch.cat(queries).cuda(), starts_of(query_lens).cuda()
    paged = {"seqused_k": pools.lens.cuda(), "block_table": pools.table.cuda()}
    got = flash_attn_varlen_func(
        q, pools.k_cache.cuda(), pools.v_cache.cuda(), 33, starts, 40, **paged, **options
    )
    torch.testing.assert_close(got.float().cpu(), want, **BF16)
    keys, ends = (torch.cat(pools.k).cuda(), torch.cat(pools.v).cuda()), starts_of(key_lens).cuda()
    got = flash_attn_varlen_func(q, *keys, 33, starts, 40, ends, **options)
    torch.testing.assert_close(got.float().cpu(), want, **BF16)


def test_one_graph_of_varlen_attn_for_other_lengths() -> None:
    """torch's call, of which other kernels keep a batch's maxima in the graph. Full attention, whose queries
    may outnumber the keys."""
    batches = [([9, 30, 1], [50, 30, 64]), ([20, 4, 16], [3, 64, 16]), ([1, 1, 38], [1, 0, 38])]

    def inputs(query_lens: list[int], key_lens: list[int]) -> tuple[list[Tensor], Tensor]:
        pools = Pools(key_lens, block_size=16, head_dim=64, dtype=torch.bfloat16)
        queries = [torch.randn(n, 4, 64, dtype=torch.bfloat16) for n in query_lens]
        table = torch.nn.functional.pad(pools.table, (0, 5 - pools.table.shape[1]), value=-1)
        room = (0, 0, 0, 0, 0, 0, 0, 16 - pools.k_cache.shape[0])
        k, v = (torch.nn.functional.pad(pool, room) for pool in (pools.k_cache, pools.v_cache))
        want = documented(queries, pools.k, pools.v)
        return [torch.cat(queries), k, v, starts_of(query_lens), pools.lens, table], want

    held = [x.cuda() for x in inputs(*batches[0])[0]]
    q, k_pool, v_pool, starts, lens, table = held
    paged = {"seqused_k": lens, "block_table": table, "enable_gqa": True}
    graph, out = captured(lambda: varlen_attn(q, k_pool, v_pool, starts, None, 40, 80, **paged))
    for lengths in batches:
        now, want = inputs(*lengths)
        for buffer, x in zip(held, now, strict=True):
            buffer.copy_(x)
        graph.replay()
        torch.testing.assert_close(out.float().cpu(), want, **BF16)


def test_one_graph_of_the_cache_call_for_other_lengths() -> None:
    """New keys are stored and seen by the replay, into a row per request cut into blocks."""
    cache = [torch.randn(4, 256, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    lens = torch.tensor([5, 200, 17, 64], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(4, 1, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))

    def call() -> Tensor:
        return flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lens, causal=True)

    graph, out = captured(call)
    for step in range(3):
        lens.copy_(torch.tensor([5 + step, 255 - step, 0, 127 + step], dtype=torch.int32))
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        old = [x.float().cpu() for x in cache]
        n = lens.tolist()
        for row in range(4):
            assert torch.equal(old[0][row, n[row]], k[row, 0].float().cpu())
        rows = [[x[row, : n[row] + 1] for row in range(4)] for x in old]
        want = documented(list(q.float().cpu()), *rows, causal=True)
        torch.testing.assert_close(out[:, 0].float().cpu(), want, **BF16)


def test_one_graph_of_shared_prefixes() -> None:
    """Groups come, change and go between replays."""
    rng = random.Random(0)
    prefixes = SharedPrefixes.allocate(
        max_num_groups=4, num_reqs=8, num_tokens=8, max_blocks_per_req=24, block_size=16, device="cuda"
    )
    pools = [torch.randn(300, 16, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    q = torch.randn(8, 8, 64, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(8, 24, dtype=torch.int32, device="cuda")
    lens, starts = (
        torch.ones(8, dtype=torch.int32, device="cuda"),
        torch.arange(9, dtype=torch.int32, device="cuda"),
    )
    sinks = torch.randn(8, dtype=torch.bfloat16, device="cuda")
    common = {"max_query_len": 1, "sinks": sinks, "return_lse": True}
    graph, out = captured(lambda: cascade_attention(q, *pools, table, lens, starts, prefixes, **common))
    from torchpaged import paged_attention

    for step in range(4):
        ids = rng.sample(range(1, 300), 250)
        shared = [ids[:16], ids[16:22]]
        rows = [(shared[rng.randrange(2)] if step else []) + ids[30 + 8 * i : 38 + 8 * i] for i in range(8)]
        sizes = [rng.randint(16 * (len(row) - 8) + 1, 16 * len(row)) for row in rows]
        groups = find_prefix_groups(rows, [1] * 8, sizes, block_size=16)
        assert bool(groups) == bool(step)
        prefixes.set(groups, rows, [1] * 8, sizes)
        lens.copy_(torch.tensor(sizes, dtype=torch.int32))
        table.zero_()
        for i, row in enumerate(rows):
            table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
        q.normal_()
        graph.replay()
        want = paged_attention(q, *pools, table, lens, starts, **common)
        torch.testing.assert_close([x.float() for x in out], [x.float() for x in want], **BF16)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "cuda_graphs"])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_generate_batch(name: str, graphs: bool) -> None:
    """transformers' continuous batching gives its own tokens, with its CUDA graphs on as well."""
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    import torchpaged.hf  # noqa: F401 - registers the names

    torch.manual_seed(0)
    window = {"sliding_window": 24} if name == "Mistral" else {}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=199,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **window,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).cuda().eval()
    prompts = [torch.randint(4, 199, (n,)).tolist() for n in (70, 3, 41, 18, 100)]
    parameters = transformers.ContinuousBatchingConfig.__dataclass_fields__
    block = "page_size" if "page_size" in parameters else "block_size"
    prefix = "" if block == "page_size" else "paged|"

    def run(attention: str, **options: Any) -> list[list[int]]:
        model.set_attn_implementation(attention)
        made = transformers.ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=64, max_memory_percent=0.5, **{block: 16}, **options
        )
        tokens = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0
        )
        got = model.generate_batch(prompts, generation_config=tokens, continuous_batching_config=made)
        return sorted(output.generated_tokens for output in got.values())

    want = run(f"{prefix}sdpa", use_cuda_graph=False)
    assert run("torchpaged", use_cuda_graph=graphs) == want
