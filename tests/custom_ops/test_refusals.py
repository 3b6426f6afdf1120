"""What the ops, the module and the host-side builders refuse, before anything is written: aliasing,
duplicates, options, types; errors of several parts."""

import copy
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from op_inputs.rope import make_rope_inputs
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError

import torchpaged
from torchpaged import (
    ArgumentError,
    AttentionMetadata,
    BackendUnavailableError,
    BlockPool,
    PagedAttention,
    PagedKVCache,
)
from torchpaged.cache import LayerKVCache
from torchpaged.custom_ops import BACKEND_OPS, native_status
from torchpaged.custom_ops import pools as validation
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.cascade_call import MergeCall
from torchpaged.custom_ops.attention.check import check_merge_attn_states, check_paged_attention
from torchpaged.custom_ops.cache_write import fake
from torchpaged.custom_ops.cache_write.call import WriteCall
from torchpaged.custom_ops.cache_write.check import check_write_kv
from torchpaged.custom_ops.checks import check_dtype, switch
from torchpaged.custom_ops.errors import BlockPoolExhaustedError, RequestError, TorchpagedError
from torchpaged.custom_ops.memory import pools_meet

NAN, INF = float("nan"), float("inf")
BLOCKS, SIZE, HEADS, DIM = 6, 4, 2, 8


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Any:
    if request.param == "cpu" and not native_status()[0]:
        pytest.skip(native_status()[1])
    return BACKEND_OPS[request.param]


def pools(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(BLOCKS, SIZE, HEADS, DIM, dtype=dtype) for _ in range(2)]


def write_arguments() -> dict[str, Tensor]:
    k_cache, v_cache = pools()
    k, v = torch.randn(2, 3, HEADS, DIM)
    return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": torch.tensor([5, 6, 9])}


def one_pool(a: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"v_cache": a["k_cache"]}


def shifted_pool(a: dict[str, Tensor]) -> dict[str, Tensor]:
    big = torch.zeros(BLOCKS + 1, SIZE, HEADS, DIM)
    return {"k_cache": big[:-1], "v_cache": big[1:]}


def latent_pool(a: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"v_cache": a["k_cache"][..., :5], "v": a["v"][..., :5]}


def complex_write(a: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name].to(torch.complex64) for name in ("k", "v", "k_cache", "v_cache")}


def integer_write(a: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name].to(torch.int32) for name in ("k", "v", "k_cache", "v_cache")}


BAD_WRITES: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "two_tokens_one_slot": ("slot_mapping", lambda a: {"slot_mapping": torch.tensor([5, 9, 5])}),
    "one_pool_twice": ("v_cache", one_pool),
    "pools_that_overlap": ("v_cache", shifted_pool),
    "a_latent_pool_is_written_by_one_op": ("v_cache", latent_pool),
    "keys_from_the_cache": ("k", lambda a: {"k": a["k_cache"][0, :3]}),
    "values_from_the_key_cache": ("v", lambda a: {"v": a["k_cache"][1, :3]}),
    "integers": ("k_cache", integer_write),
    "complex": ("k_cache", complex_write),
    "no_heads": ("cache", lambda a: {name: x[..., :0, :] for name, x in a.items() if name != "slot_mapping"}),
    "no_columns": ("cache", lambda a: {name: x[..., :0] for name, x in a.items() if name != "slot_mapping"}),
    "no_blocks": ("cache", lambda a: {"k_cache": a["k_cache"][:0], "v_cache": a["v_cache"][:0]}),
}


@pytest.mark.parametrize("name", BAD_WRITES)
def test_bad_writes(ops: Any, name: str) -> None:
    argument, change = BAD_WRITES[name]
    arguments = write_arguments()
    arguments |= change(arguments)
    for cache in ("k_cache", "v_cache"):
        arguments[cache].fill_(3)
    for call in (ops.write_kv, lambda **x: torchpaged.write_kv(**x, ops=ops)):
        with pytest.raises((ArgumentError, RuntimeError), match=argument):
            call(**arguments)
        assert bool((arguments["k_cache"] == 3).all())
        assert bool((arguments["v_cache"] == 3).all())
    with pytest.raises(ArgumentError, match=argument):
        torchpaged.write_kv(**arguments, ops=ops)


@pytest.mark.parametrize(
    "name", [n for n in BAD_WRITES if not n.startswith("no_") and n not in ("integers", "complex")]
)
def test_bad_rope_writes(name: str) -> None:
    argument, change = BAD_WRITES[name]
    inputs = make_rope_inputs(num_tokens=3, num_heads=2, num_kv_heads=HEADS, head_dim=DIM, rotary_dim=4)
    arguments = inputs | write_arguments()
    arguments |= change(arguments)
    del arguments["q_out"]
    with pytest.raises(ArgumentError, match=argument):
        torchpaged.rope_write_kv(**arguments)
    assert not bool(arguments["v_cache"].any())


def test_what_is_written_has_memory_of_its_own_for_each_element(ops: Any) -> None:
    """One number in many places, as `expand` makes it, can't hold what is written to each."""
    arguments = write_arguments()
    expanded = {name: arguments[name][:1].expand(6, -1, -1, -1) for name in ("k_cache", "v_cache")}
    with pytest.raises(ArgumentError, match="k_cache: expected memory of its own for each element"):
        torchpaged.write_kv(**arguments | expanded | {"slot_mapping": torch.tensor([5, 6, 7])}, ops=ops)
    assert not expanded["k_cache"].any()
    state, lse = torch.randn(3, 2, 8), torch.zeros(3, 2)
    for out, merged, name in (
        (state[:1].clone().expand(3, -1, -1), lse.clone(), "out"),
        (state.clone(), lse[:1].clone().expand(3, -1), "lse"),
    ):
        with pytest.raises(ArgumentError, match=f"{name}: expected memory of its own"):
            check_merge_attn_states(MergeCall(state, lse, state.clone(), lse.clone(), out, merged))


@pytest.mark.parametrize(
    ("op", "argument", "change"),
    [
        ("write_kv", "k_cache", lambda a: {name: expanded(6, 4, 2, 8) for name in ("k_cache", "v_cache")}),
        ("copy_blocks", "v_cache", lambda a: {"v_cache": expanded(6, 4, 2, 8)}),
        ("paged_attention", "out", lambda a: {"out": expanded(2, 4, 8)}),
        ("paged_attention", "lse", lambda a: {"lse": expanded(2, 4)}),
        ("paged_attention", "q", lambda a: {"lse": a["q"][..., 0]}),
        ("paged_attention", "out", lambda a: {"lse": a["out"][..., 0]}),
        ("merge_attn_states", "out", lambda a: {"out": expanded(3, 2, 8)}),
        ("merge_attn_states", "lse", lambda a: {"lse": expanded(3, 2)}),
    ],
)
def test_the_ops_themselves_look_at_memory_that_they_write(
    ops: Any, op: str, argument: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """As the checked functions do."""
    merged = {name: torch.randn(3, 2, 8) for name in ("out_a", "out_b")} | {"out": torch.zeros(3, 2, 8)}
    given: dict[str, Any] = {
        "write_kv": write_arguments(),
        "copy_blocks": {
            **dict(zip(("k_cache", "v_cache"), pools(), strict=True)),
            "block_mapping": torch.tensor([[1, 2]]),
        },
        "paged_attention": attention_arguments() | {"out": torch.zeros(2, 4, 8), "scale": 0.3},
        "merge_attn_states": merged | {name: torch.zeros(3, 2) for name in ("lse_a", "lse_b")},
    }[op]
    given |= change(given)
    before = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
    with pytest.raises((ArgumentError, RuntimeError), match=f"{argument}: expected memory"):
        getattr(ops, op)(**given)
    assert all(torch.equal(given[name], x) for name, x in before.items())


def expanded(*shape: int) -> Tensor:
    return torch.zeros(shape[1:]).expand(shape)


@pytest.mark.parametrize("slots", [[0, 0, 3], [-1, -1, 5], [3, 3, 5]])
def test_the_null_block_and_skipped_tokens_may_repeat(ops: Any, slots: list[int]) -> None:
    arguments = write_arguments() | {"slot_mapping": torch.tensor(slots)}
    ops.write_kv(**arguments)
    assert torch.equal(arguments["k_cache"][1, 1], arguments["k"][2]) or 5 not in slots


def test_pools_side_by_side_are_apart() -> None:
    """Layouts that hold keys and values in one tensor: by block, by slot, by head, and one after
    the other."""
    by_block = torch.zeros(BLOCKS, 2, SIZE, HEADS, DIM)
    by_slot, by_head = torch.zeros(BLOCKS, SIZE, 2, HEADS, DIM), torch.zeros(BLOCKS, SIZE, HEADS, 2, DIM)
    halves, heads_first = (
        torch.zeros(2, BLOCKS, SIZE, HEADS, DIM),
        torch.zeros(BLOCKS, 2, HEADS, SIZE, DIM).transpose(2, 3),
    )
    columns = torch.zeros(BLOCKS, SIZE, HEADS, DIM + 5)
    for k, v in (
        (by_block[:, 0], by_block[:, 1]),
        (by_slot[:, :, 0], by_slot[:, :, 1]),
        (by_head[..., 0, :], by_head[..., 1, :]),
        (halves[1], halves[0]),
        (heads_first[:, 1], heads_first[:, 0]),
        (columns[..., :DIM], columns[..., DIM:]),
    ):
        assert not pools_meet(k, v)
        assert not pools_meet(v, k)
        torchpaged.write_kv(
            torch.ones(1, HEADS, DIM), torch.full((1, HEADS, v.shape[3]), 2.0), k, v, torch.tensor([5])
        )
        assert bool((k[1, 1] == 1).all())
        assert bool((v[1, 1] == 2).all())
    for k, v in (
        (by_block[:, 0], by_block[:, 0]),
        (columns[..., :DIM], columns[..., DIM - 1 :]),
        (halves[0], halves.flatten(0, 1)[1 : BLOCKS + 1]),
    ):
        assert pools_meet(k, v)
        assert pools_meet(v, k)


def attention_arguments(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    k_cache, v_cache = pools(dtype)
    return {
        "q": torch.randn(2, 4, DIM).to(dtype),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "seq_lens": torch.tensor([7, 2], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "max_query_len": 1,
    }


BAD_ATTENTION: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "one_block_twice": (
        "block_table",
        lambda a: {"block_table": torch.tensor([[2, 2], [3, 4]], dtype=torch.int32)},
    ),
    "one_pool_twice": ("v_cache", lambda a: {"v_cache": a["k_cache"]}),
    "pools_that_overlap": ("v_cache", shifted_pool),
    "cap_nan": ("logits_soft_cap", lambda a: {"logits_soft_cap": NAN}),
    "cap_inf": ("logits_soft_cap", lambda a: {"logits_soft_cap": INF}),
    "cap_negative": ("logits_soft_cap", lambda a: {"logits_soft_cap": -1.0}),
    "scale_nan": ("scale", lambda a: {"scale": NAN}),
    "scale_inf": ("scale", lambda a: {"scale": INF}),
    "scale_negative": ("scale", lambda a: {"scale": -0.5}),
    "scale_zero": ("scale", lambda a: {"scale": 0.0}),
    "cap_beyond_float32": ("logits_soft_cap", lambda a: {"logits_soft_cap": 1e300}),
    "cap_below_float32": ("logits_soft_cap", lambda a: {"logits_soft_cap": 1e-300}),
    "scale_beyond_float32": ("scale", lambda a: {"scale": 1e300}),
    "chunk_negative": ("chunk_size", lambda a: {"chunk_size": -3}),
    "integers": (
        "k_cache",
        lambda a: {name: a[name].to(torch.int32) for name in ("q", "k_cache", "v_cache")},
    ),
    "complex": (
        "k_cache",
        lambda a: {name: a[name].to(torch.complex64) for name in ("q", "k_cache", "v_cache")},
    ),
    "no_kv_heads": ("cache", lambda a: {name: a[name][:, :, :0] for name in ("k_cache", "v_cache")}),
    "no_heads": ("q", lambda a: {"q": a["q"][:, :0]}),
    "no_columns": ("cache", lambda a: {name: a[name][..., :0] for name in ("q", "k_cache", "v_cache")}),
    "queries_without_dimensions": ("q", lambda a: {"q": torch.tensor(1.0)}),
}


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_bad_attention(ops: Any, name: str) -> None:
    argument, change = BAD_ATTENTION[name]
    arguments = attention_arguments()
    arguments |= change(arguments)
    with pytest.raises(ArgumentError, match=argument):
        torchpaged.paged_attention(**arguments, ops=ops)
    if arguments["q"].dim() == 3 and arguments["q"].dtype == torch.float32:
        out = torch.full((*arguments["q"].shape[:2], arguments["v_cache"].shape[3]), 7.0)
        with pytest.raises((ArgumentError, RuntimeError), match=argument):
            ops.paged_attention(**{"scale": 0.3} | arguments, out=out)
        assert bool((out == 7).all())


def test_outputs_apart_from_inputs(ops: Any) -> None:
    arguments = attention_arguments()
    with pytest.raises((ArgumentError, RuntimeError), match="out"):
        ops.paged_attention(**arguments, out=arguments["q"], scale=0.3)


@pytest.mark.parametrize("window", [5, (1, 2, 3), (1,), (-2, 3), (1.5, 2), None, (True, 1), "ab"], ids=str)
def test_windows_that_are_no_pairs(window: Any) -> None:
    with pytest.raises(ArgumentError, match="window_size"):
        torchpaged.paged_attention(**attention_arguments(), window_size=window)
    with pytest.raises(ArgumentError, match="window_size"):
        PagedAttention(4, DIM, HEADS, window_size=window)


def test_integers_of_numpy_and_tensors() -> None:
    """Sizes, windows and block ids as arrays and tensors give them mean what plain ints mean."""
    eight, three = numpy.int64(SIZE), numpy.int32(3)
    layer = PagedAttention(
        numpy.int64(4), DIM, numpy.int64(HEADS), window_size=(three, -1), chunk_size=eight, block_size=eight
    )
    assert layer.num_heads == 4
    assert layer.window_size == (3, -1)
    torchpaged.paged_attention(**attention_arguments(), window_size=(three, -1), chunk_size=eight)
    lists = {"query_lens": [2, 1], "seq_lens": [SIZE + 1, 1], "block_tables": [[1, 2], [3, 4]]}
    want = AttentionMetadata.from_lists(**lists, block_size=SIZE)
    for make in (numpy.array, torch.tensor):
        got = AttentionMetadata.from_lists(**{name: make(x) for name, x in lists.items()}, block_size=eight)
        assert torch.equal(got.slot_mapping, want.slot_mapping)
        assert torch.equal(got.block_table, want.block_table)
        for twice in ([[1, 1], [3, 4]], [[1, 2], [2, 4]]):  # in one row; written by both
            with pytest.raises(ArgumentError, match="block_tables"):
                AttentionMetadata.from_lists(
                    **{name: make(x) for name, x in (lists | {"block_tables": twice}).items()},
                    block_size=SIZE,
                )


def test_latent_pools_are_read() -> None:
    """Values that are the first columns of the keys: declared by the view, and read like any others."""
    arguments = attention_arguments()
    arguments["k_cache"].normal_()
    apart = torchpaged.paged_attention(**arguments | {"v_cache": arguments["k_cache"][..., :5].clone()})
    torch.testing.assert_close(
        torchpaged.paged_attention(**arguments | {"v_cache": arguments["k_cache"][..., :5]}), apart
    )


def test_the_null_block_may_repeat_in_a_table(ops: Any) -> None:
    arguments = attention_arguments() | {"block_table": torch.tensor([[0, 0], [3, 4]], dtype=torch.int32)}
    assert torchpaged.paged_attention(**arguments, ops=ops).isfinite().all()


@pytest.mark.parametrize("reach", [{"window_size": (3, -1)}, {"chunk_size": 8}], ids=["window", "chunk"])
def test_a_block_may_repeat_behind_what_is_seen(ops: Any, reach: dict[str, Any]) -> None:
    """A ring of blocks: columns behind the first query's window name blocks that newer tokens lie in. What
    stands behind is not read, and a block that is seen twice is refused as ever."""
    arguments = attention_arguments() | reach | {"q": torch.randn(3, 4, DIM), "max_query_len": 2}
    for pool in (arguments["k_cache"], arguments["v_cache"]):
        pool[1:5].normal_()
        pool[5] = NAN
    arguments |= {"seq_lens": torch.tensor([14, 2], dtype=torch.int32)}
    arguments |= {"query_start_loc": torch.tensor([0, 2, 3], dtype=torch.int32)}

    def attend(*row: int) -> Tensor:
        table = torch.tensor([row, [4, 0, 0, 0]], dtype=torch.int32)
        return torchpaged.paged_attention(**arguments | {"block_table": table}, ops=ops)

    ring, other = attend(3, 2, 2, 3), attend(5, 5, 2, 3)
    assert ring.isfinite().all()
    assert torch.equal(ring, other)
    with pytest.raises((ArgumentError, RuntimeError), match="once per request"):
        attend(1, 2, 3, 3)


NOT_TENSORS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "write_kv": (torchpaged.write_kv, write_arguments, ("k", "v", "k_cache", "v_cache", "slot_mapping")),
    "paged_attention": (
        torchpaged.paged_attention,
        attention_arguments,
        ("q", "k_cache", "v_cache", "block_table", "seq_lens", "query_start_loc"),
    ),
}


@pytest.mark.parametrize("bad", [None, [1.0, 2.0]], ids=["none", "list"])
@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f, (_, _, names) in NOT_TENSORS.items() for a in names]
)
def test_lists_and_none_for_tensors(function: str, argument: str, bad: Any) -> None:
    call, arguments, _ = NOT_TENSORS[function]
    with pytest.raises(ArgumentError) as error:
        call(**arguments() | {argument: bad})
    assert error.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("workspace", {"workspace": torch.zeros(8, dtype=torch.int32)}),
        ("workspace", {"workspace": [1]}),
        ("ops", {"ops": "cpu"}),
        ("max_query_len", {"max_query_len": 2.0}),
        ("max_query_len", {"max_query_len": True}),
        ("max_query_len", {"max_query_len": None}),
        ("causal", {"causal": 1}),
        ("return_lse", {"return_lse": "yes"}),
    ],
)
def test_options_of_another_type(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as error:
        torchpaged.paged_attention(**{**attention_arguments(), **options})
    assert error.value.argument == argument


def test_meta_tensors_have_shapes_alone() -> None:
    """Their addresses are all 0, which is no shared memory."""
    attention = {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in attention_arguments().items()
    }
    out, lse = torchpaged.paged_attention(**attention, return_lse=True)
    assert out.shape == attention["q"].shape
    assert lse.shape == out.shape[:2]
    assert out.device.type == lse.device.type == "meta"
    torchpaged.write_kv(**{name: x.to("meta") for name, x in write_arguments().items()})
    with pytest.raises(ArgumentError, match="slot_mapping"):
        torchpaged.write_kv(
            **{name: x.to("meta") for name, x in write_arguments().items()}
            | {"slot_mapping": torch.zeros(3, device="meta")}
        )


def test_float64_on_the_native_backend(native: None) -> None:
    """A typed error from every door, with nothing written; the reference takes it."""
    for ops in (BACKEND_OPS["cpu"], BACKEND_OPS["default"]):
        arguments = {
            name: x.double() if x.is_floating_point() else x for name, x in write_arguments().items()
        }
        with pytest.raises(ArgumentError, match="cpu backend"):
            torchpaged.write_kv(**arguments, ops=ops)
        assert not arguments["k_cache"].any()
        with pytest.raises(ArgumentError, match="cpu backend"):
            torchpaged.paged_attention(**attention_arguments(torch.float64), ops=ops)
        with pytest.raises(ArgumentError, match="cpu backend"):
            states = torch.zeros(2, 1, 8, dtype=torch.float64), torch.zeros(2, 1)
            torchpaged.merge_attn_states(*states, *states, ops=ops)
    layer, pair = PagedAttention(4, DIM, HEADS, backend="cpu"), pools(torch.float64)
    batch = AttentionMetadata.from_lists([1], [1], [[1]], block_size=SIZE)
    k = torch.ones(1, HEADS, DIM, dtype=torch.float64)
    with pytest.raises(BackendUnavailableError, match="'cpu' cannot run this attention: kv dtype"):
        layer(torch.ones(1, 4, DIM, dtype=torch.float64), k, k, LayerKVCache(*pair), batch)
    assert not pair[0].any()
    torchpaged.paged_attention(**attention_arguments(torch.float64), ops=BACKEND_OPS["reference"])


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF])
def test_scales_of_fp8_pools(ops: Any, bad: float) -> None:
    arguments: dict[str, Any] = write_arguments()
    arguments |= {name: arguments[name].to(torch.float8_e5m2) for name in ("k_cache", "v_cache")}
    with pytest.raises(ArgumentError, match="v_scale"):
        torchpaged.write_kv(**arguments, v_scale=torch.tensor([1.0, bad]), ops=ops)
    for scale in (torch.tensor([1.0, bad]), torch.ones(3), torch.ones(2).double(), torch.ones(1, 2)):
        with pytest.raises((ArgumentError, RuntimeError), match="v_scale: expected"):
            ops.write_kv(**arguments, v_scale=scale)
    with pytest.raises((ArgumentError, RuntimeError), match="v_scale: expected None"):
        ops.write_kv(**write_arguments(), v_scale=torch.ones(1))
    assert not arguments["k_cache"].float().any()


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("num_heads", {"num_heads": 0}),
        ("num_heads", {"num_heads": -4}),
        ("head_dim", {"head_dim": 0}),
        ("head_dim_v", {"head_dim_v": 0}),
        ("num_kv_heads", {"num_kv_heads": 0}),
        ("head_dim", {"head_dim": 2.5}),
        ("block_size", {"block_size": -1}),
        ("chunk_size", {"chunk_size": -3}),
        ("logits_soft_cap", {"logits_soft_cap": INF}),
        ("logits_soft_cap", {"logits_soft_cap": NAN}),
        ("scale", {"scale": NAN}),
        ("scale", {"scale": -1.0}),
        ("scale", {"scale": "0.5"}),
        ("logits_soft_cap", {"logits_soft_cap": "50"}),
        ("logits_soft_cap", {"logits_soft_cap": [50.0]}),
        ("logits_soft_cap", {"logits_soft_cap": 1e300}),
        ("scale", {"scale": [0.5]}),
        ("scale", {"scale": 10**400}),
        ("scale", {"scale": torch.ones(2)}),
        ("causal", {"causal": 1}),
        ("causal", {"causal": "no"}),
        ("batch_invariant", {"batch_invariant": 0}),
        ("tree_mask", {"tree_mask": torch.ones(3)}),
        ("dtype", {"dtype": "bf16"}),
        ("kv_dtype", {"kv_dtype": "fp8"}),
        ("backend", {"backend": 3}),
        ("alibi_slopes", {"alibi_slopes": ["a"] * 4}),
        ("sinks", {"sinks": [None] * 4}),
        ("sinks", {"sinks": [None] * 4, "device": "meta"}),
    ],
    ids=str,
)
def test_bad_modules(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as error:
        PagedAttention(**{"num_heads": 4, "head_dim": DIM} | options)
    assert error.value.argument == argument


@pytest.mark.parametrize("argument", ["query", "key", "k_cache"])
def test_lists_for_the_tensors_of_a_module(argument: str) -> None:
    layer, (k_cache, v_cache) = PagedAttention(4, DIM, HEADS), pools()
    given: dict[str, Any] = {
        "query": torch.ones(1, 4, DIM),
        "key": torch.ones(1, HEADS, DIM),
        "k_cache": k_cache,
    } | {argument: [1.0]}
    batch = AttentionMetadata.from_lists([1], [1], [[1]], block_size=SIZE)
    with pytest.raises(ArgumentError, match=argument):
        layer(given["query"], given["key"], torch.ones(1, HEADS, DIM), (given["k_cache"], v_cache), batch)
    assert not v_cache.any()


BAD_LISTS: dict[str, tuple[str, dict[str, Any]]] = {
    "floats_of_a_tensor": ("seq_lens: expected integers", {"seq_lens": torch.tensor([5.0, 2.0])}),
    "floats_behind_the_blocks": ("block_tables: expected integers", {"block_tables": [[1, 2, 0.5], [3]]}),
    "none_for_queries": ("query_lens: expected a list of integers, got None", {"query_lens": None}),
    "none_for_tables": ("block_tables", {"block_tables": None}),
    "none_for_a_row": ("block_tables", {"block_tables": [[1, 2], None]}),
    "a_flat_table": ("block_tables", {"block_tables": [1, 3]}),
    "text": ("query_lens", {"query_lens": "11"}),
    "a_block_beyond_int32": ("block_tables", {"block_tables": [[1, 2**31], [3]]}),
    "a_block_beyond_int32_that_is_not_read": ("block_tables", {"block_tables": [[1, 2, 2**40], [3]]}),
    "a_length_beyond_int32": ("seq_lens", {"seq_lens": [2**31, 2]}),
    "blocks_beyond_int32": ("block_size", {"block_size": 2**40}),
    "half_a_pool": ("num_blocks", {"num_blocks": 9.5}),
    "half_a_column": ("max_blocks_per_req", {"max_blocks_per_req": 2.5}),
    "half_a_query": ("max_query_len", {"max_query_len": 1.5}),
    "block_size": ("block_size", {"block_size": -1}),
    "block_size_0": ("block_size", {"block_size": 0}),
    "one_block_twice": ("block_tables", {"block_tables": [[1, 1], [3]]}),
    "float_block": ("block_tables: expected integers, got", {"block_tables": [[1, 2.5], [3]]}),
    "float_length": ("seq_lens: expected integers, got", {"seq_lens": [5.0, 2]}),
    "float_query": ("query_lens: expected integers, got", {"query_lens": [1.5, 1]}),
    "no_length": ("seq_lens: expected integers, got", {"seq_lens": [None, 2]}),
    "huge_length": ("seq_lens: expected integers, got", {"seq_lens": [2**64, 2]}),
    "two_writers": ("block_tables", {"block_tables": [[1, 2], [2]], "seq_lens": [6, 2]}),
    "two_writers_of_a_prefill": (
        "block_tables",
        {"block_tables": [[1, 2], [1, 3]], "seq_lens": [6, 6], "query_lens": [6, 6]},
    ),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_bad_lists(name: str) -> None:
    argument, change = BAD_LISTS[name]
    with pytest.raises(ArgumentError, match=argument):
        AttentionMetadata.from_lists(
            **{"query_lens": [1, 1], "seq_lens": [5, 2], "block_tables": [[1, 2], [3]], "block_size": SIZE}
            | change
        )


def test_blocks_that_are_only_read_may_be_shared() -> None:
    """A shared prefix; two requests in different slots of one block; a request that reads what another writes
    in this step."""
    for lens, tables, queries in (
        ([5, 6], [[1, 2], [1, 3]], [1, 1]),
        ([6, 7], [[1, 2], [1, 2]], [1, 1]),
        ([4, 6], [[1], [1, 2]], [4, 2]),
    ):
        AttentionMetadata.from_lists(queries, lens, tables, block_size=SIZE)


def test_pools_and_caches() -> None:
    pool = BlockPool(8)
    taken = pool.allocate(3)
    with pytest.raises(ArgumentError, match="blocks"):
        pool.fork([taken[0], taken[1], taken[0]])
    assert [pool.ref_count(b) for b in taken] == [1, 1, 1]
    for dtype in (torch.int8, torch.complex64):
        with pytest.raises(ArgumentError, match="dtype"):
            PagedKVCache.uniform(1, 1, 8, num_blocks=4, dtype=dtype)


@pytest.mark.parametrize("name", ["one_pool_twice", "keys_from_the_cache", "integers"])
def test_what_is_static_is_refused_while_tracing(name: str) -> None:
    """Under torch.compile the fakes say it, or the choice of a backend: neither needs values."""

    def step(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        if name == "keys_from_the_cache":
            k = k_cache[0, :3]
        torchpaged.write_kv(k, v, k_cache, v_cache, slots)

    arguments = write_arguments()
    if name != "keys_from_the_cache":
        arguments |= BAD_WRITES[name][1](arguments)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="expected memory|dtype int32 is not one of"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(*arguments.values())
    assert not arguments["k_cache"].any()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_ops_without_a_fake_refuse_when_compiled_code_runs_them(backend: str) -> None:
    """In the words of the eager call, before anything is written."""
    x, weight, out = torch.ones(2, 8), torch.ones(4, 6), torch.zeros(2, 4)
    linear = BACKEND_OPS[backend].linear

    def step() -> None:
        linear(x, weight, out)

    torch._dynamo.reset()
    said, kinds = [], (ArgumentError, RuntimeError)
    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        with torch.no_grad(), pytest.raises(kinds, match="weight: expected .*8") as error:
            call()
        said.append((error.type, str(error.value).splitlines()[0]))
    assert said[0] == said[1]
    assert not out.any()


def test_python_and_torch_agree_about_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few numbers are looked at by Python, many by torch: both take and refuse the same, in the
    same words."""
    r, outcomes = random.Random(0), {True: 0, False: 0}

    def message(call: Callable[[], None]) -> str:
        try:
            call()
        except ArgumentError as error:
            return str(error)
        return ""

    for _ in range(400):
        rows, columns, block_size, num_blocks = (
            r.randint(1, 4),
            r.randint(1, 4),
            r.choice((1, 4)),
            r.randint(2, 20),
        )
        table = [[r.choice((0, *range(1, num_blocks))) for _ in range(columns)] for _ in range(rows)]
        query_lens = [r.choice((0, 1, 2)) for _ in range(rows)]
        lens = [r.randint(-1, columns * block_size) for _ in range(rows)]
        starts = [0, *itertools.accumulate(query_lens)]
        slots = [r.randint(-1, num_blocks * block_size - 1) for _ in range(r.randint(1, 4))]
        limit = max(*query_lens, 1)
        match r.randrange(9):  # one thing wrong, or nothing
            case 0:
                table[-1][0] = r.choice((-1, num_blocks, num_blocks - 1))
            case 1:
                lens[0] = columns * block_size + r.randint(0, 1)
            case 2:
                starts[r.randrange(len(starts))] += r.choice((-1, 1))
            case 3:
                limit = r.randint(1, 2)
            case 4:
                slots[-1] = r.choice((-2, num_blocks * block_size, slots[0]))
        cache = torch.zeros(num_blocks, block_size, 1, 2)
        tensors = [torch.tensor(values, dtype=torch.int32) for values in (table, lens, starts)]
        q = torch.zeros(sum(query_lens) + r.randint(0, 1), 1, 2)
        calls = (
            lambda q=q, cache=cache, tensors=tensors, limit=limit: check_paged_attention(
                AttentionCall(q, cache, cache.clone(), *tensors, torch.empty_like(q), None, limit, 1.0)
            ),
            lambda cache=cache, slots=slots: check_write_kv(
                WriteCall(
                    torch.zeros(len(slots), 1, 2),
                    torch.zeros(len(slots), 1, 2),
                    cache,
                    cache.clone(),
                    torch.tensor(slots),
                )
            ),
        )
        for call in calls:
            monkeypatch.setattr(validation, "FEW", 256)
            by_python = message(call)
            monkeypatch.setattr(validation, "FEW", -1)
            assert message(call) == by_python
            outcomes[not by_python] += 1
    assert min(outcomes.values()) > 150, outcomes


def test_good_batches_of_few_numbers_are_taken_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every eager call on a CPU would pay for two dozen ops of torch."""

    def unwanted(*_: Any) -> None:
        raise AssertionError("torch was asked")

    monkeypatch.setattr(torch.Tensor, "sort", unwanted)
    monkeypatch.setattr(torch.Tensor, "diff", unwanted)
    monkeypatch.setattr(torch, "aminmax", unwanted)
    q, cache = torch.zeros(2, 1, 2), torch.zeros(5, 4, 1, 2)
    table, lens, starts = (torch.tensor(x, dtype=torch.int32) for x in ([[1, 2], [3, 0]], [7, 3], [0, 1, 2]))
    check_write_kv(WriteCall(q, q.clone(), cache, cache.clone(), torch.tensor([10, 14])))
    out = torch.empty_like(q)
    check_paged_attention(AttentionCall(q, cache, cache.clone(), table, lens, starts, out, None, 1, 1.0))


@pytest.mark.parametrize(
    ("value", "others", "words"),
    [
        (1, (), r"True or False, got 1; convert the int with bool\(\.\.\.\)"),
        (0, ("auto",), "True, False or 'auto', got 0; convert"),
        (numpy.True_, (None,), r"True, False or None, got (np\.)?True_?; convert"),
        (torch.ones(2), ("auto",), r"True, False or 'auto', got tensor\(\[1\., 1\.\]\)"),
        ("x", ("auto",), "True, False or 'auto', got 'x'$"),
        (None, (), "True or False, got None$"),
        ("auto", (), "True or False, got 'auto'$"),
    ],
)
def test_a_switch_is_a_bool(value: Any, others: tuple[Any, ...], words: str) -> None:
    """A test by ``is True`` would take 1 for False."""
    with pytest.raises(ArgumentError, match=f"^name: expected {words}"):
        switch("name", value, *others)


def test_what_a_switch_may_be() -> None:
    for value in (True, False, None, "auto"):
        switch("name", value, None, "auto")


@pytest.mark.parametrize("inference", [False, True])
def test_halves_of_one_tensor(monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    """Inductor of torch 2.11 read and wrote beyond them; a view made in inference mode names no base."""
    k, slots = torch.randn(3, 2, 16), torch.tensor([4, 9, 11])

    def step(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        BACKEND_OPS["reference"].write_kv(k, k + 1, k_cache, v_cache, slots)
        return k_cache.sum()

    with torch.inference_mode(inference):
        halves = torch.zeros(2, 5, 4, 2, 16).unbind()
        monkeypatch.setattr(fake, "_SPLITS_WRONG", True)
        torch._dynamo.reset()
        with pytest.raises(TorchRuntimeError, match="k_cache, v_cache: expected memory of their own"):
            torch.compile(step, backend="aot_eager", fullgraph=True)(*halves)
        torch._dynamo.reset()
        torch.compile(step, backend="aot_eager", fullgraph=True)(*(half.clone() for half in halves))
    assert not any(bool(half.any()) for half in halves)


ERRORS = (
    ArgumentError("query", "3 dimensions", "2", "unflatten it"),
    ArgumentError("query", "3 dimensions", "2"),
    BlockPoolExhaustedError(4, 1, 8),
    BlockPoolExhaustedError(4, 1, 8, "leave rows out"),
    RequestError(7, "no blocks"),
)


def test_messages_have_all_parts() -> None:
    assert [str(error) for error in ERRORS] == [
        "query: expected 3 dimensions, got 2; unflatten it",
        "query: expected 3 dimensions, got 2",
        "num_blocks: 4 requested, 1 free of 8 usable; free finished requests, or build the cache with "
        "num_blocks=12 or more",
        "num_blocks: 4 requested, 1 free of 8 usable; leave rows out",
        "request 7: no blocks",
    ]


def test_a_dtype_that_is_expected_twice_is_named_once() -> None:
    """A weight may have the tokens' dtype or float32, which may be the same."""
    with pytest.raises(ArgumentError, match=r"expected torch.float32, got torch.int64"):
        check_dtype("weight", torch.zeros(1, dtype=torch.int64), torch.float32, torch.float32)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_copies_and_pickles_are_the_same_error(
    error: TorchpagedError, way: Callable[[TorchpagedError], TorchpagedError]
) -> None:
    again = way(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
