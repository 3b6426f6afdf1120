"""The functions choose their backend as every other door does: argument, `use_backend`,
TORCHPAGED_BACKEND, automatic."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchpaged
from torchpaged import ArgumentError, BackendUnavailableError, PagedAttention, use_backend
from torchpaged.backends import Backend, Planning, get_backend, register_backend
from torchpaged.backends.choose import names as names_module
from torchpaged.backends.features import FEATURES
from torchpaged.custom_ops import BACKEND_OPS, BackendOps


def arguments(
    dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
) -> dict[str, dict[str, Any]]:
    """What each function takes, by its name."""
    k, q = torch.randn(3, 2, 16, dtype=dtype), torch.randn(3, 4, 16, dtype=dtype)
    pool, other = (torch.zeros(4, 4, 2, 16, dtype=kv_dtype or dtype) for _ in range(2))
    slots, table = torch.arange(4, 7), torch.tensor([[1]], dtype=torch.int32)
    seq_lens, starts = torch.tensor([3], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    one = torch.tensor([1.0]) if kv_dtype else None
    scales, pools = {"k_scale": one, "v_scale": one}, {"k_cache": pool, "v_cache": other}
    out, lse = torch.randn(3, 4, 16, dtype=dtype), torch.randn(3, 4)
    ids = {
        name: torch.zeros(1, dtype=torch.int64)
        for name in ("sampled_token_ids", "input_ids", "positions", "slot_mapping")
    }
    return {
        "write_kv": {"k": k, "v": k.clone(), **pools, "slot_mapping": slots, **scales},
        "rope_write_kv": {
            "q": q,
            "k": k,
            "v": k.clone(),
            "positions": torch.arange(3),
            "cos_sin": torch.ones(8, 16),
            **pools,
            "slot_mapping": slots,
            **scales,
        },
        "paged_attention": {
            "q": q,
            **pools,
            "block_table": table,
            "seq_lens": seq_lens,
            "query_start_loc": starts,
            "max_query_len": 3,
            **scales,
        },
        "merge_attn_states": {"out_a": out, "lse_a": lse, "out_b": out.clone(), "lse_b": lse.clone()},
        "copy_blocks": {**pools, "block_mapping": torch.tensor([[1, 2]])},
        "advance_step": {**ids, "block_table": table, "seq_lens": seq_lens, "block_size": 4},
    }


FUNCTIONS = list(arguments())
Counting = Callable[..., list[str]]


EVERY = frozenset(FEATURES)
NO_WINDOW = EVERY - {"window"}


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Registers a backend "mine" whose ops are the reference's and count their calls; returns the names that
    were called."""
    monkeypatch.setattr(names_module, "REGISTERED", {})
    monkeypatch.setattr(names_module, "AUTOMATIC", list(names_module.AUTOMATIC))

    def register(automatic: bool = False, missing: str | None = None, **declared: Any) -> list[str]:
        called: list[str] = []

        def counted(name: str) -> Any:
            def run(*args: Any, **kwargs: Any) -> None:
                called.append(name)
                getattr(BACKEND_OPS["reference"], name)(*args, **kwargs)

            return run

        capabilities = dataclasses.replace(get_backend("reference").capabilities, **declared)
        ops = BackendOps(*map(counted, BackendOps._fields))
        register_backend(Backend("mine", capabilities, ops, lambda: missing), automatic=automatic)
        return called

    return register


@pytest.mark.parametrize("asked", ["use_backend", "TORCHPAGED_BACKEND"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_backend_that_was_asked_for_runs(
    function: str, asked: str, mine: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = mine()
    call = getattr(torchpaged, function)
    call(**arguments()[function])
    assert not called
    if asked == "use_backend":
        with use_backend("mine"):
            call(**arguments()[function])
    else:
        monkeypatch.setenv("TORCHPAGED_BACKEND", "mine")
        call(**arguments()[function])
        with use_backend("auto"):
            call(**arguments()[function])
        call(**arguments()[function], ops=BACKEND_OPS["default"])
    assert called == [function]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_choice_that_cannot_serve_the_call_is_refused(
    function: str, mine: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = mine(missing="its library is not here")
    with (
        use_backend("mine"),
        pytest.raises(BackendUnavailableError, match=r"use_backend\('mine'\).*its library is not here"),
    ):
        getattr(torchpaged, function)(**arguments()[function])
    monkeypatch.setenv("TORCHPAGED_BACKEND", "cuda")
    with pytest.raises(
        BackendUnavailableError,
        match=r"'cuda' \(TORCHPAGED_BACKEND=cuda is set\).*device cpu is not one of cuda",
    ):
        getattr(torchpaged, function)(**arguments()[function])
    assert not called


def test_threads_choose_for_themselves(mine: Counting) -> None:
    called, given = mine(), arguments()["paged_attention"]
    inside, go, wrong = threading.Barrier(2), threading.Barrier(2), []

    def other() -> None:
        try:
            inside.wait(60)
            torchpaged.paged_attention(**given)
            assert not called
            with use_backend("mine"):
                go.wait(60)
                go.wait(60)
                torchpaged.paged_attention(**given)
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    with use_backend("mine"):
        inside.wait(60)
        go.wait(60)
    torchpaged.paged_attention(**given)
    assert not called
    go.wait(60)
    thread.join(60)
    assert not wrong
    assert called == ["paged_attention"]


def test_what_the_choice_declares_is_asked(mine: Counting) -> None:
    called = mine(features=EVERY - {"logits_soft_cap"})
    with use_backend("mine"):
        torchpaged.paged_attention(**arguments()["paged_attention"])
        with pytest.raises(BackendUnavailableError, match="logits_soft_cap is not supported"):
            torchpaged.paged_attention(**arguments()["paged_attention"], logits_soft_cap=30.0)
    assert called == ["paged_attention"]


@pytest.mark.slow_cases("*-False-*", but=("*-False-declared1-*",))
@pytest.mark.parametrize(
    ("declared", "asked", "reason"),
    [
        (
            {"features": EVERY - {"logits_soft_cap"}},
            {"logits_soft_cap": 30.0},
            "logits_soft_cap is not supported",
        ),
        ({"features": EVERY - {"window"}}, {"window_size": (1, -1)}, "window"),
        ({"features": EVERY - {"chunked"}}, {"chunk_size": 2}, "chunked"),
        ({"features": EVERY - {"lse"}}, {"return_lse": True}, "lse"),
        ({"features": EVERY - {"bidirectional"}}, {"causal": False}, "bidir"),
        ({"features": EVERY - {"sinks"}}, {"sinks": torch.zeros(4)}, "sinks"),
        ({"features": EVERY - {"alibi"}}, {"alibi_slopes": torch.ones(4)}, "alibi"),
        ({"dtypes": (torch.bfloat16,)}, {}, "dtype float32"),
        ({"kv_dtypes": (torch.bfloat16,)}, {}, "kv dtype float32"),
        ({"head_dims": (64,)}, {}, "head_dim 16 is not one of"),
        ({"block_sizes": (16,)}, {}, "block_size 4 is not one of"),
        ({"planning": Planning.EVERY_STEP}, {}, r"plans.*workspace=session.workspace\(spec\)"),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("by", ["use_backend", "ops"])
def test_what_the_choice_declares_is_asked_while_a_call_is_traced(
    declared: dict[str, Any], asked: dict[str, Any], reason: str, dynamic: bool, by: str, mine: Counting
) -> None:
    """Compiled code would hand the feature to a backend that does not look at it."""
    called = mine(**declared)
    given = {"ops": get_backend("mine").ops} if by == "ops" else {}
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="eager")
    def call(arguments: dict[str, Any], options: dict[str, Any]) -> Any:
        return torchpaged.paged_attention(**arguments, **options, **given)

    with use_backend("auto" if by == "ops" else "mine"), pytest.raises(Exception, match=reason):
        call(arguments()["paged_attention"], asked)
    assert not called


def test_ops_of_two_backends_run_what_one_of_them_declares(mine: Counting) -> None:
    """Handles do not say whose they are, once they are in a trace; and those that are not registered are not
    asked at all."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def call(given: dict[str, Any], ops: BackendOps) -> Any:
        return torchpaged.paged_attention(**given, window_size=(1, -1), ops=ops)

    given, called = arguments()["paged_attention"], mine(features=NO_WINDOW)
    able, foreign = get_backend("reference"), get_backend("mine").ops._replace(linear=print)
    unable = dataclasses.replace(able.capabilities, features=NO_WINDOW)
    register_backend(Backend("other", unable, able.ops, lambda: None))
    expected = torchpaged.paged_attention(**given, window_size=(1, -1))
    for ops in (able.ops, foreign):
        torch.testing.assert_close(call(given, ops), expected)
    assert called == ["paged_attention"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("function", ["write_kv", "rope_write_kv", "paged_attention"])
def test_the_automatic_choice_is_the_modules(function: str, compiled: bool, mine: Counting) -> None:
    """A registered one that comes first; on to the next where it declares something away."""
    torch._dynamo.reset()
    call = getattr(torchpaged, function)
    if compiled:
        call = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    called = mine(automatic=True, features=NO_WINDOW, block_sizes=(4,))
    module = PagedAttention(4, 16, 2, block_size=4, dtype=torch.float32)
    assert module.choice.name == "mine"
    call(**arguments()[function])
    assert called == [function]
    if function == "paged_attention":
        call(**arguments()[function], window_size=(1, -1))
    other = arguments()[function]
    for name in ("k_cache", "v_cache"):
        other[name] = torch.zeros(4, 8, 2, 16)
    if "slot_mapping" in other:
        other["slot_mapping"] = other["slot_mapping"] + 8
    call(**other)
    assert called == [function], "it declares neither windows nor blocks of 8"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("function", ["write_kv", "rope_write_kv", "paged_attention"])
def test_fp8_pools_on_a_cpu_run_where_the_module_runs_them(function: str, compiled: bool) -> None:
    torch._dynamo.reset()
    module = PagedAttention(4, 16, 2, kv_dtype=torch.float8_e4m3fn, dtype=torch.float32)
    assert module.choice.name == "reference"
    call, given = getattr(torchpaged, function), arguments(kv_dtype=torch.float8_e4m3fn)[function]
    if compiled:
        torch.compile(call, fullgraph=True, backend="eager")(**given)
        return
    if get_backend("cpu").unavailable() is None:
        with (
            use_backend("cpu"),
            pytest.raises((ArgumentError, BackendUnavailableError), match="float8_e4m3fn"),
        ):
            call(**given)
    call(**given)


@pytest.mark.parametrize("function", ["paged_attention", "write_kv"])
def test_a_compiled_call_keeps_what_was_chosen_when_it_was_traced(function: str) -> None:
    """As a module keeps what was chosen at its construction; a name that can't run here is refused then."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    def call(given: dict[str, Any]) -> Any:
        return getattr(torchpaged, function)(**given)

    for name, overload in (("reference", f"{function}.reference"), ("auto", f"{function}.default")):
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
        with use_backend(name):
            compiled(arguments()[function])
        assert overload.replace(".", "_") in graphs[-1] or overload in graphs[-1]
        compiled(arguments()[function])
    assert len(graphs) == 2
    torch._dynamo.reset()
    with use_backend("triton"), pytest.raises(Exception, match="device cpu is not one of cuda"):
        torch.compile(call, fullgraph=True, backend=backend)(arguments()[function])


def test_handles_are_held_to_their_backend_as_soon_as_it_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Handles may run before it is registered what they can't do."""
    monkeypatch.setattr(names_module, "REGISTERED", {})
    own = lambda *args, **options: BACKEND_OPS["reference"].paged_attention(*args, **options)  # noqa: E731
    ops = BACKEND_OPS["reference"]._replace(paged_attention=own)
    given = arguments()["paged_attention"]
    torchpaged.paged_attention(**given, logits_soft_cap=5.0, ops=ops)
    able = get_backend("reference").capabilities
    for lacking, refused in (({"features": EVERY - {"logits_soft_cap"}}, True), ({}, False)):
        register_backend(Backend("lesser", dataclasses.replace(able, **lacking), ops, lambda: None))
        if refused:
            with pytest.raises(BackendUnavailableError, match="logits_soft_cap is not supported"):
                torchpaged.paged_attention(**given, logits_soft_cap=5.0, ops=ops)
        else:
            torchpaged.paged_attention(**given, logits_soft_cap=5.0, ops=ops)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_that_is_given_queries_of_another_dtype_than_it_was_built_for(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its model's weights were replaced by others: its backend runs what it declares, or refuses."""
    torch._dynamo.reset()
    monkeypatch.setattr(names_module, "REGISTERED", {})
    reference = get_backend("reference")
    able = dataclasses.replace(reference.capabilities, dtypes=(torch.float32,))
    register_backend(Backend("float32", able, reference.ops, lambda: None))
    for name in ("float32", "reference"):
        layer = PagedAttention(4, 16, 2, backend=name)
        call: Any = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
        given = arguments(torch.bfloat16)
        q, pools = given["paged_attention"]["q"], [given["write_kv"][pool] for pool in ("k_cache", "v_cache")]
        batch = torchpaged.AttentionMetadata.from_lists([3], [3], [[1]], block_size=4)
        args = (q, given["write_kv"]["k"], given["write_kv"]["v"], tuple(pools), batch)
        if name == "float32":
            refusal = Exception if compiled else BackendUnavailableError
            with pytest.raises(refusal, match="dtype bfloat16 is not"):
                call(*args)
            assert not pools[0].any(), "nothing is written"
        else:
            assert call(*args).dtype == torch.bfloat16
