"""The same request has the same bits in every batch: what is declared, what is refused, and backends that
declare too much."""

import dataclasses
from typing import Any

import pytest
import torch

import torchpaged
from torchpaged import ArgumentError, BackendUnavailableError, PagedAttention
from torchpaged.backends import Backend, attention_spec, get_backend, list_backends, select_backend
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import SURROUNDINGS, check_batch_invariance

REFERENCE = get_backend("reference")
FEW: dict[str, Any] = {"requests": ((1, 37), (20, 90)), "options": ({},), "head_dim": 16, "device": "cpu"}


def test_the_reference_holds_what_it_declares() -> None:
    """Of heads whose rows are not aligned: a product's bits depend on that."""
    shape = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 17}
    report = check_batch_invariance(
        REFERENCE, device="cpu", requests=((1, 37), (1, 300), (20, 90)), **shape, sinks=True
    )
    assert report.calls == 3 * 2 * 2 * (len(SURROUNDINGS) - 1)
    assert str(report) == f"reference: {report.calls} calls gave the same bits"


def liar(attend: Any) -> Backend:
    capabilities = dataclasses.replace(REFERENCE.capabilities, batch_invariant=True)
    return Backend("liar", capabilities, {"paged_attention": attend}, lambda: None)


def rounding_otherwise(where: Any) -> Any:
    """A right result with other roundings where ``where(requests, longest query)`` says so, as a kernel has
    whose splits follow from the batch."""

    def attend(
        q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any, out: Any, lse: Any, **o: Any
    ) -> None:
        wide = torch.float64 if where(len(lens), o["max_query_len"]) else torch.float32
        y = out.to(wide)
        BACKEND_OPS["reference"].paged_attention(
            q.to(wide), k.to(wide), v.to(wide), table, lens, starts, y, lse, **o
        )
        out.copy_(y)

    return attend


@pytest.mark.parametrize(
    ("where", "next_to"),
    [
        (lambda requests, longest: requests == 1, "a short one"),
        (lambda requests, longest: requests > 10, "decodes"),
        (lambda requests, longest: longest > 40, "prompts"),
    ],
)
def test_a_liar_is_found_out(where: Any, next_to: str) -> None:
    with pytest.raises(
        AssertionError, match=f"liar: out of a request .* next to '{next_to}' from what it is alone"
    ):
        check_batch_invariance(liar(rounding_otherwise(where)), dtypes=(torch.float32,), **FEW)


def test_a_backend_that_is_wrong_alone_is_found_out() -> None:
    def zeros(
        q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any, out: Any, lse: Any, **o: Any
    ) -> None:
        out.zero_()
        lse.zero_()

    with pytest.raises(AssertionError, match="budget"):
        check_batch_invariance(liar(zeros), dtypes=(torch.float32,), **FEW)


def test_who_does_not_declare_it_is_refused() -> None:
    why = "batch_invariant is not declared: a request's bits may depend on the others"
    with pytest.raises(BackendUnavailableError, match=why):
        check_batch_invariance(get_backend("cpu"), **FEW)
    with pytest.raises(BackendUnavailableError, match=f"backend 'cpu' .*{why}"):
        PagedAttention(4, 16, batch_invariant=True, backend="cpu", dtype=torch.float32)
    layer = PagedAttention(4, 16, batch_invariant=True, dtype=torch.float32)
    assert layer.choice.name == "reference"
    assert layer.spec.batch_invariant
    assert why in layer.choice.rejected["cpu"]
    assert any("pool's order" in reason for reason in layer.choice.rejected["flex"])
    spec = attention_spec(
        device=torch.device("cpu"), dtype=torch.float32, num_heads=4, num_kv_heads=4, head_dim=16
    )
    for name in list_backends():
        can = get_backend(name)
        asks = dataclasses.replace(
            spec, device=torch.device(can.capabilities.device_types[0]), batch_invariant=True
        )
        assert can.capabilities.batch_invariant or any(why in reason for reason in can.reject(asks)), name
    assert select_backend(spec).name != "reference" or get_backend("cpu").unavailable()


def test_what_splits_by_the_batch_is_not_called_invariant() -> None:
    """Undeclared, it can be tried: torch's attention over as many keys as the table is wide."""
    with pytest.raises(
        AssertionError, match="torch_sdpa: .* differs by up to .* do not declare batch_invariant"
    ):
        check_batch_invariance(get_backend("torch_sdpa"), declared=False, dtypes=(torch.float32,), **FEW)


# ------------------------------------------------------------------------------------- through the functions
def call(rows: int, **options: Any) -> Any:
    """The output of a request of 37 keys, next to ``rows - 1`` longer ones."""
    generator = torch.Generator().manual_seed(0)
    pools = [torch.randn(8 * 12, 16, 2, 16, generator=generator) for _ in range(2)]
    q = torch.randn(8, 4, 16, generator=generator)[:rows]
    lens = torch.tensor([37, *range(100, 100 + rows - 1)], dtype=torch.int32)
    table = torch.arange(8 * 12, dtype=torch.int32).view(8, 12)[:rows]
    starts = torch.arange(rows + 1, dtype=torch.int32)
    return torchpaged.paged_attention(q, *pools, table, lens, starts, max_query_len=1, **options)[0]


def test_the_function_asks_for_it() -> None:
    alone = call(1, batch_invariant=True)
    assert torch.equal(call(8, batch_invariant=True), alone)
    torch.testing.assert_close(call(8), alone)
    own = {"batch_invariant": True, "ops": BACKEND_OPS["reference"]}
    assert torch.equal(call(8, **own), alone)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"ops": BACKEND_OPS["default"]},
            BackendUnavailableError,
            "no backend that declares batch_invariant",
        ),
        ({"ops": get_backend("torch_sdpa").ops}, BackendUnavailableError, "batch_invariant is not declared"),
        ({"workspace": {}}, ArgumentError, "workspace: expected None with batch_invariant=True"),
    ],
    ids=["default", "sdpa", "workspace"],
)
def test_the_function_refuses(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(2, batch_invariant=True, **options)


def test_an_answer_that_is_neither_yes_nor_no_is_refused() -> None:
    """As `PagedCache` and the engine do."""
    wanted = "batch_invariant: expected True or False, got 'no'"
    with pytest.raises(ArgumentError, match=wanted):
        call(1, batch_invariant="no")
    pytest.importorskip("transformers")
    from torchpaged.hf import PagedModel

    nothing: Any = None
    no: Any = "no"
    with pytest.raises(ArgumentError, match=wanted):
        PagedModel(nothing, batch_invariant=no)


def test_a_trace_is_refused() -> None:
    torch._dynamo.reset()

    def attend(q: Any, pool: Any, table: Any, lens: Any, starts: Any) -> Any:
        options: Any = {"max_query_len": 1, "batch_invariant": True}
        return torchpaged.paged_attention(q, pool, pool, table, lens, starts, **options)

    ints = [torch.zeros(shape, dtype=torch.int32) for shape in ((1, 1), (1,), (2,))]
    with pytest.raises(Exception, match="batch_invariant.*False in a traced call"):
        torch.compile(attend, fullgraph=True, backend="eager")(
            torch.zeros(1, 1, 16), torch.zeros(1, 16, 1, 16), *ints
        )
