"""Routes: the decodes of a batch by one backend, the rest by another, at every door, traced and captured."""

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from as_oracle import assert_as_oracle
from sessions import KEPT, PLANNING
from small_gpt import BLOCK, GPT, STEPS, WIDTH, batch, check_packed_steps, close_to_dense, fed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from wrapper_backend import WRAPPER

import torchpaged
from torchpaged import ArgumentError, BackendUnavailableError, Limits, PagedAttention
from torchpaged.backends import (
    AttentionSpec,
    Backend,
    GraphSupport,
    Planning,
    Route,
    get_backend,
    register_backend,
    select_backend,
)
from torchpaged.backends.choose import names as names_module
from torchpaged.backends.choose.route import parse_route, route_backend
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import (
    BATCH_SPECS,
    BatchSpec,
    assert_attention_close,
    check_graph_support,
    make_batch,
    run_paged_attention,
)

SPEC = AttentionSpec(
    device=torch.device("cpu"), dtype=torch.float32, head_dim=64, num_heads=4, num_kv_heads=2
)
SHAPE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
NAME = "decode=reference,prefill=torch_sdpa"
CPU, REFERENCE = get_backend("cpu"), get_backend("reference")


def of_reference(name: str, attend: Any = None, **can: Any) -> Backend:
    """A backend of the reference's kernels, or of another attention, that declares something else."""
    ops = BACKEND_OPS["reference"]
    capabilities = dataclasses.replace(REFERENCE.capabilities, **can)
    return Backend(name, capabilities, {"paged_attention": attend or ops.paged_attention}, lambda: None)


# ------------------------------------------------------------------------------------------------------ names
def test_a_route_has_one_name() -> None:
    route = Route("cuda", "flash_attn")
    assert str(route) == "decode=cuda,prefill=flash_attn"
    assert parse_route(str(route)) == route
    assert parse_route(" prefill = flash_attn , decode=cuda") == route
    assert get_backend("prefill=FLASH_ATTN,decode=cuda") is get_backend(route)
    assert str(Route("cpu", "cpu")) == "cpu"
    assert get_backend("decode=cpu,prefill=cpu") is CPU
    choice = select_backend(SPEC, Route("reference", "TORCH_SDPA"))
    assert (choice.name, choice.route) == (NAME, Route("reference", "torch_sdpa"))
    assert select_backend(SPEC, "cpu").route == Route("cpu", "cpu")


@pytest.mark.parametrize(
    "text",
    ["decode=cpu", "decode=cpu,decode=cpu", "prefill=cpu,decode=", "decode=cpu,rest=cpu", "cpu=decode"],
)
def test_what_is_no_route_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"(decode=NAME,prefill=NAME|the name of one backend)"):
        select_backend(SPEC, text)


def test_parts_that_are_no_backends() -> None:
    with pytest.raises(BackendUnavailableError, match="got 'nope'"):
        select_backend(SPEC, "decode=nope,prefill=cpu")
    with pytest.raises(ArgumentError, match="not 'auto'"):
        Route("auto", "cpu")
    with pytest.raises(ArgumentError, match="without '='"):
        register_backend(Backend("a=b", CPU.capabilities, CPU.ops, lambda: None))


# --------------------------------------------------------------------------------------------- what each does
@pytest.mark.parametrize("lens", [(1, 4, 1, 3), (5, 1, 0, 1), (0, 0, 2, 1), (1, 1, 1, 1), (3, 3, 3, 3)])
def test_each_request_is_computed_by_its_part(lens: tuple[int, ...]) -> None:
    """In any order of the requests, and with padding tokens behind the last."""
    marks = {"decodes": 1.0, "rest": 2.0}
    seen: dict[str, list[int]] = {}

    def marking(name: str) -> Any:
        def attend(q, k, v, table, seq_lens, starts, out, lse=None, **options):  # type: ignore[no-untyped-def]
            BACKEND_OPS["reference"].paged_attention(q, k, v, table, seq_lens, starts, out, lse, **options)
            sees = (out != 0).any(-1, keepdim=True)
            out.copy_(torch.where(sees, marks[name], 0.0))
            seen.setdefault(name, []).append(options["max_query_len"])

        return attend

    backend = route_backend(of_reference("a", marking("decodes")), of_reference("b", marking("rest")))
    spec = BatchSpec("marked", tuple(40 if n else 0 for n in lens), lens, padded_tokens=3)
    made = make_batch(spec, **SHAPE)
    out, lse = run_paged_attention(backend.ops, made)
    want = [marks["decodes" if n == 1 else "rest"] for n in lens for _ in range(n)] + [0.0] * 3
    if made.max_query_len == 1:
        want[:4] = [1.0] * 4
    assert out[:, 0, 0].tolist() == want
    assert bool((lse > -10).all(1).tolist() == [w > 0 for w in want])
    assert seen["decodes"] == [1]
    assert seen.get("rest", []) == ([] if max(lens) == 1 else [max(lens)])


@pytest.mark.parametrize("name", BATCH_SPECS)
def test_results_are_the_oracles(name: str) -> None:
    made = make_batch(BATCH_SPECS[name], **SHAPE, sinks=True)
    for options in ({}, {"window_left": 7}):
        assert_as_oracle(get_backend(NAME).ops, made, **options)


def test_no_tokens_and_no_requests() -> None:
    for lens in ((0, 0), ()):
        made = make_batch(BatchSpec("none", lens, lens), **SHAPE)
        made.max_query_len = 4
        out, _ = run_paged_attention(get_backend(NAME).ops, made)
        assert out.shape[0] == made.q.shape[0]
        assert not out.any()


# ------------------------------------------------------------------------------------------- what it declares
@pytest.mark.parametrize(
    ("decode", "prefill", "support"),
    [
        (CPU, PLANNING, GraphSupport.ALWAYS),
        (WRAPPER, CPU, GraphSupport.ALWAYS),  # alone it holds single tokens only
        (KEPT, CPU, GraphSupport.NEVER),
        (CPU, WRAPPER, GraphSupport.SINGLE_TOKEN_DECODE),
        (CPU, REFERENCE, GraphSupport.SINGLE_TOKEN_DECODE),
    ],
    ids=["planning", "wrapper", "never", "prefill_less", "prefill_never"],
)
def test_graph_support_follows_from_both_and_holds(
    decode: Backend, prefill: Backend, support: GraphSupport
) -> None:
    backend = route_backend(decode, prefill)
    assert backend.capabilities.graph_support == support
    if support == GraphSupport.NEVER:
        wanted = dataclasses.replace(SPEC, graphs=GraphSupport.SINGLE_TOKEN_DECODE)
        assert "graph support NEVER (of 'kept' NEVER, 'cpu' ALWAYS)" in " ".join(backend.reject(wanted))
        return
    report = check_graph_support(backend, device="cpu", dtypes=(torch.float32,), block_size=16, **SHAPE)
    plans = max(decode.capabilities.planning, prefill.capabilities.planning) == Planning.EVERY_STEP
    assert backend.capabilities.planning == Planning(2 * plans)
    assert report.forgotten_plans == plans


def test_refusals_name_the_part() -> None:
    wide = of_reference("wide", max_head_dim=32)
    route = route_backend(
        wide, of_reference("plain", features=REFERENCE.capabilities.features - {"alibi", "lse"})
    )
    assert route.reject(SPEC) == ["decode by 'wide': head_dim 64 is over 32"]
    assert route.reject(dataclasses.replace(SPEC, head_dim=32, uses=frozenset({"alibi"}))) == [
        "prefill by 'plain': alibi is not supported"
    ]
    assert "prefill by 'triton': " in str(get_backend("decode=cpu,prefill=triton").unavailable())
    with pytest.raises(BackendUnavailableError, match="prefill by 'triton': device cpu is not one of cuda"):
        PagedAttention(4, 16, backend="decode=cpu,prefill=triton")
    with pytest.raises(BackendUnavailableError, match="'wide' cannot run this attention: head_dim 64"):
        route.open([SPEC], Limits(), "cpu")


def test_a_backend_of_decodes_alone_can_be_a_part() -> None:
    decodes = of_reference("decodes", max_query_len=1)
    assert decodes.reject(SPEC) == ["queries of any length are over 1"]
    assert decodes.reject(dataclasses.replace(SPEC, max_query_len=1)) == []
    assert route_backend(decodes, CPU).reject(SPEC) == []
    assert route_backend(CPU, decodes).reject(SPEC) == [
        "prefill by 'decodes': queries of any length are over 1"
    ]


# ------------------------------------------------------------------------------------------------------ doors
@pytest.fixture
def planning_route(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Decodes by a backend that plans every step, the rest by the device's own."""
    monkeypatch.setattr(names_module, "REGISTERED", {})
    register_backend(PLANNING)
    yield "decode=planning,prefill=cpu"


LIMITS = Limits(max_num_reqs=4, max_num_tokens=24, max_blocks_per_req=WIDTH, block_size=BLOCK)


@pytest.mark.slow_cases("fullgraph")
@torch.no_grad()
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "fullgraph"])
def test_a_gpt_on_a_route(planning_route: str, native: None, compile: bool) -> None:
    torch._dynamo.reset()
    session = get_backend(planning_route).open([], LIMITS, "cpu")
    gpt, counter = GPT(session), CompileCounterWithBackend("aot_eager")
    step = torch.compile(gpt, fullgraph=True, dynamic=True, backend=counter) if compile else gpt
    assert gpt.layers[0].attention.choice.route == Route("planning", "cpu")
    frames = set()
    for query_lens, seq_lens in STEPS:
        metadata = batch(query_lens, seq_lens)
        metadata.max_query_len = 9 if compile else metadata.max_query_len
        session.plan(metadata)
        close_to_dense(gpt, step(fed(query_lens, seq_lens), metadata), query_lens, seq_lens)
        frames.add(counter.frame_count)
    assert len(frames) == 1, "a later batch was compiled anew"
    with pytest.raises(RuntimeError, match="plan"):
        step(fed([1, 1], [18, 12]), batch([1, 1], [18, 12]))


@torch.no_grad()
def test_decodes_need_no_plan_of_the_other_part(monkeypatch: pytest.MonkeyPatch, native: None) -> None:
    """Prompts are planned, steps of single tokens are not."""
    monkeypatch.setattr(names_module, "REGISTERED", {})
    register_backend(PLANNING)
    session = get_backend("decode=cpu,prefill=planning").open([], LIMITS, "cpu")
    assert session.plans_every_step
    assert not session.plans_every_decode
    gpt = GPT(session)
    prompt, decode = batch([5, 4], [5, 4]), batch([1, 1], [6, 5])
    with pytest.raises(torchpaged.PlanError):
        gpt(fed([5, 4], [5, 4]), prompt)
    session.plan(prompt)
    gpt(fed([5, 4], [5, 4]), prompt)
    close_to_dense(gpt, gpt(fed([1, 1], [6, 5]), decode), [1, 1], [6, 5])
    assert get_backend("decode=planning,prefill=cpu").open([], LIMITS, "cpu").plans_every_decode


def test_a_gpt_is_captured_on_a_route(planning_route: str, native: None) -> None:
    """Mixed steps of all lengths, one graph per number of tokens."""
    session = get_backend(planning_route).open([], LIMITS, "cpu")
    check_packed_steps(GPT(session))


@torch.no_grad()
def test_the_module_takes_a_route_and_copies_keep_it(native: None) -> None:
    layer = PagedAttention(4, 16, 2, backend=Route("cpu", "torch_sdpa"))
    assert layer.choice.name == "decode=cpu,prefill=torch_sdpa"
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to(torch.bfloat16)):
        assert again.choice.route == Route("cpu", "torch_sdpa")
        assert again.session.name == layer.choice.name


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "fullgraph"])
def test_the_function_runs_the_route_that_was_asked_for(
    compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    made = make_batch(BATCH_SPECS["mixed_padded"], **SHAPE)
    calls = []
    original = get_backend("torch_sdpa").ops.paged_attention

    def attend(*arguments: Any, **options: Any) -> None:
        calls.append(options["max_query_len"])
        original(*arguments, **options)

    monkeypatch.setattr(names_module, "REGISTERED", {})
    register_backend(of_reference("counting", attend))

    def call() -> Tensor:
        batch = made.block_table, made.seq_lens, made.query_start_loc
        return torchpaged.paged_attention(
            made.q, made.k_cache, made.v_cache, *batch, max_query_len=made.max_query_len, scale=made.scale
        )

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compile else call
    with torch.inference_mode(), torchpaged.use_backend("decode=reference,prefill=counting"):
        out = run()
    assert_attention_close(out, None, made)
    assert calls == [made.max_query_len]
    with torchpaged.use_backend(Route("reference", "counting")):
        assert select_backend(SPEC).route.prefill == "counting"


def test_fp16_pools_or_float64_are_what_both_can(monkeypatch: pytest.MonkeyPatch) -> None:
    can = get_backend("decode=cpu,prefill=reference").capabilities
    assert torch.float64 not in can.dtypes
    assert torch.float16 in can.dtypes
    assert can.device_types == ("cpu",)
    monkeypatch.setenv("TORCHPAGED_BACKEND", NAME)
    assert select_backend(SPEC).reason == f"TORCHPAGED_BACKEND={NAME} is set"


def test_the_engine_and_generate_on_a_route(make_llama: Any, planning_route: str, native: None) -> None:
    """Prompts and decodes in one batch, chunked and captured; and transformers' own generate(). Several
    steps per launch where decodes need no plan."""
    from torchpaged.engine import Generator, SamplingParams
    from torchpaged.hf import PagedCache

    model = make_llama(vocab_size=99, hidden_size=32, intermediate_size=48, max_position_embeddings=64)
    model.set_attn_implementation("eager")
    prompts, tokens = [[5, 6, 8], list(range(11, 30)), [9]], []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        tokens.append(out[0, len(prompt) :].tolist())
    with pytest.raises(ArgumentError, match="steps_per_launch: expected 1 with"):
        Generator(model, backend="decode=planning,prefill=cpu", steps_per_launch=2, graphs=True)
    Generator(model, backend="decode=cpu,prefill=planning", steps_per_launch=2, graphs=True)
    generator = Generator(model, backend=NAME, max_batch_size=3, prefill_chunk_size=5, max_seq_len=48)
    assert generator.choice.route == Route("reference", "torch_sdpa")
    done = generator.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert [one.token_ids for one in done] == tokens
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, max_batch_size=1, max_seq_len=48, backend=NAME)
    out = model.generate(
        torch.tensor([prompts[1]]),
        past_key_values=cache,
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
    )
    assert out[0, 19:].tolist() == tokens[1]
    assert cache.choice.name == NAME
