"""Queries of e4m3 over pools of e4m3: what the reference makes of them, who takes them, what is refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specialisations import specialisation
from torch import Tensor

import torchpaged
from torchpaged.backends import attention_spec, get_backend, list_backends
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.check import check_paged_attention
from torchpaged.custom_ops.attention.cuda import paged_attention as cuda_op
from torchpaged.custom_ops.attention.cuda import prefill
from torchpaged.custom_ops.attention.cuda.prefill_shape import refuse
from torchpaged.custom_ops.cuda.loaded_kernel import Map
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.testing import Batch, BatchSpec, make_batch, run_paged_attention

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Q_SCALE = torch.tensor([0.5, 0.75])


def drawn(**sizes: Any) -> Batch:
    """A batch with e4m3 queries, whose scale is `Q_SCALE`."""
    spec = BatchSpec("drawn", (20, 3, 0, 40), (20, 1, 0, 5), padded_tokens=2)
    sizes = {"kv_dtype": E4M3, "scales": "per_head", "dtype": torch.bfloat16, **sizes}
    batch = make_batch(spec, num_heads=4, num_kv_heads=2, head_dim=64, seed=1, **sizes)
    return replace(batch, q=(batch.q.float() / Q_SCALE.repeat_interleave(2)[:, None]).to(E4M3))


def dequantised(batch: Batch, dtype: torch.dtype) -> dict[str, Any]:
    """The same batch as numbers of ``dtype``, without scales."""
    wide = {
        "q": batch.q.to(dtype) * Q_SCALE.to(dtype).repeat_interleave(2)[:, None],
        "k_cache": batch.k_cache.to(dtype) * batch.extras["k_scale"].to(dtype)[:, None],
        "v_cache": batch.v_cache.to(dtype) * batch.extras["v_scale"].to(dtype)[:, None],
    }
    extras = {name: x for name, x in batch.extras.items() if not name.endswith("_scale")}
    return {**wide, "extras": extras}


def call(batch: Batch, **options: Any) -> Any:
    tensors = batch.tensors
    options = {**batch.extras, "max_query_len": batch.max_query_len, **options}
    return torchpaged.paged_attention(*tensors, **options)


@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.float64])
def test_the_reference_computes_what_the_numbers_stand_for(out_dtype: torch.dtype | None) -> None:
    """In float64 to its last bits, in others to their rounding; bfloat16 by default."""
    batch = drawn()
    out = None if out_dtype is None else torch.empty(*batch.q.shape, dtype=out_dtype)
    found, lse = call(batch, q_scale=Q_SCALE, window_size=(7, 0), out=out, return_lse=True)
    assert found.dtype == (out_dtype or torch.bfloat16)
    assert out is None or found is out
    wide = replace(batch, **dequantised(batch, torch.float64))
    exact, exact_lse = run_paged_attention(BACKEND_OPS["reference"], wide, window_left=7)
    tolerance = {torch.float64: 1e-12, torch.float16: 2e-3}.get(found.dtype, 2e-2)
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("q_scale", [None, Q_SCALE, Q_SCALE[:1], Q_SCALE[0]])
@pytest.mark.parametrize("k_scale", [None, torch.tensor([1.5]), torch.tensor([1.5, 0.5])])
def test_a_scale_of_queries_is_one_of_the_products(q_scale: Tensor | None, k_scale: Tensor | None) -> None:
    batch = drawn(scales="none")
    found = call(batch, q_scale=q_scale, k_scale=k_scale)
    scales = [s for s in (q_scale, k_scale) if s is not None]
    product = scales[0] * scales[1] if len(scales) == 2 else scales[0] if scales else None
    assert torch.equal(found, call(batch, k_scale=product))
    if q_scale is not None and k_scale is not None:
        assert not torch.equal(found, call(batch, k_scale=k_scale))


def test_who_takes_them() -> None:
    """The reference; cuda where its prefill kernel does; no other, and each says so."""
    spec = attention_spec(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        kv_dtype=E4M3,
        fp8_queries=True,
    )
    declare = {name for name in list_backends() if "fp8_queries" in get_backend(name).capabilities.features}
    assert declare == {"reference", "cuda"}
    assert get_backend("reference").capabilities.reject(spec) == []
    for name in set(list_backends()) - declare:
        assert "fp8_queries is not supported" in get_backend(name).capabilities.reject(spec), name
    with pytest.raises(BackendUnavailableError, match="fp8_queries is not supported"):
        call(drawn(), ops=BACKEND_OPS["triton"])


def test_what_the_kernel_takes() -> None:
    def refused(compute: tuple[int, int] = (9, 0), **spec: Any) -> str | None:
        return refuse(specialisation(**{"kv_dtype": E4M3, "fp8_queries": True, **spec}), compute)

    assert refused() is None
    assert refused(dtype=torch.float16) is None
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"compute": (10, 0)}, "compute capability 10.0"),
        ({"kv_dtype": E5M2}, "both are e4m3"),
        ({"kv_dtype": torch.bfloat16}, "both are e4m3"),
        ({"dtype": torch.float32}, "dtypes"),
        ({"dim": 96}, "fp8 queries of head_dim 96/96"),
        ({"dim": 192, "dim_v": 128}, "fp8 queries of head_dim 192/128"),
        ({"block_size": 24}, "block_size 24"),
        ({"block_size": 4}, "block_size 4"),
    )
    for changed, reason in changes:
        assert reason in str(refused(**changed)), changed


def op_arguments(batch: Batch, **changed: Any) -> tuple[list[Tensor], dict[str, Any]]:
    tensors = {name: getattr(batch, name) for name in ("q", "k_cache", "v_cache")}
    out = torch.full(batch.q.shape, float("nan"), dtype=torch.bfloat16)
    tensors |= {"block_table": batch.block_table, "seq_lens": batch.seq_lens}
    tensors |= {"query_start_loc": batch.query_start_loc, "out": out}
    tensors |= {name: x for name, x in changed.items() if name in tensors}
    options = {name: x for name, x in changed.items() if name not in tensors}
    return list(tensors.values()), {
        **batch.extras,
        "max_query_len": batch.max_query_len,
        "scale": batch.scale,
        **options,
    }


@pytest.mark.parametrize(
    ("changed", "name", "said"),
    [
        ({"q": E5M2}, "q", "float8_e4m3fn"),
        ({"pools": E5M2}, "k_cache", "float8_e4m3fn"),
        ({"pools": torch.bfloat16}, "k_cache", "float8_e4m3fn"),
        ({"out": E4M3}, "out", "bfloat16"),
    ],
)
def test_what_the_op_refuses(changed: dict[str, torch.dtype], name: str, said: str) -> None:
    """Before it writes."""
    batch = drawn(scales="none", **({"kv_dtype": changed["pools"]} if "pools" in changed else {}))
    swapped = {
        key: getattr(batch, key, torch.empty(batch.q.shape)).to(x)
        for key, x in changed.items()
        if key != "pools"
    }
    tensors, options = op_arguments(batch, **swapped)
    with pytest.raises(ArgumentError, match=said) as caught:
        BACKEND_OPS["reference"].paged_attention(*tensors, **options)
    assert caught.value.argument == name
    if "out" not in changed:
        assert tensors[-1].isnan().all()


def test_ops_that_take_none_refuse_them() -> None:
    """What all ops check that do not ask for them: Triton's, the libraries', and the CPU's own."""
    tensors, options = op_arguments(drawn())
    with pytest.raises(ArgumentError, match="declares fp8_queries") as caught:
        check_paged_attention(AttentionCall.of(*tensors, **options))
    assert caught.value.argument == "q"
    with pytest.raises((ArgumentError, RuntimeError), match=r"\bq: expected"):
        BACKEND_OPS["cpu"].paged_attention(
            *op_arguments(drawn(scales="none"))[0], max_query_len=20, scale=1.0
        )


@pytest.mark.parametrize(
    ("q_scale", "said"),
    [
        (torch.ones(3), "per kv head"),
        (torch.ones(1, 1), "per kv head"),
        (torch.ones(2, dtype=torch.float64), "float32"),
        (-torch.ones(1), "positive"),
    ],
)
def test_scales_that_are_refused(q_scale: Tensor, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call(drawn(scales="none"), q_scale=q_scale)


@pytest.mark.parametrize(
    ("q_scale", "k_scale", "name"),
    [
        (-torch.ones(1), -torch.ones(1), "q_scale"),  # whose product is good
        (torch.ones(1), -torch.ones(2), "k_scale"),
        (torch.full((1,), float("nan")), None, "q_scale"),
        (torch.ones(2), torch.ones(4), "k_scale"),
        (torch.ones(2), torch.ones(2, 1), "k_scale"),
        (torch.ones(2), torch.ones(1, dtype=torch.float16), "k_scale"),  # whose product is float32
    ],
)
def test_each_scale_is_held_to_its_own_rules(q_scale: Tensor, k_scale: Tensor | None, name: str) -> None:
    """Not their product alone, which is what the ops see; and the error names the one that was given."""
    with pytest.raises(ArgumentError) as caught:
        call(drawn(scales="none"), q_scale=q_scale, k_scale=k_scale)
    assert caught.value.argument == name


def test_a_scale_of_another_dtype_is_refused_in_a_trace() -> None:
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with torchpaged.use_backend("reference"), pytest.raises(Exception, match=r"q_scale.*torch\.float32"):
        compiled(drawn(), q_scale=Q_SCALE.half())


def test_a_scale_without_fp8_queries_is_refused() -> None:
    batch = drawn()
    with pytest.raises(ArgumentError, match="scales belong to fp8 queries"):
        call(replace(batch, q=batch.q.bfloat16()), q_scale=Q_SCALE, ops=BACKEND_OPS["reference"])


def test_in_a_trace() -> None:
    """The op traces with results of another dtype than its queries; so does the function."""
    batch = drawn()
    expected = call(batch, q_scale=Q_SCALE)
    tensors, options = op_arguments(batch)
    torch.library.opcheck(
        BACKEND_OPS["reference"].paged_attention, tuple(tensors), options, test_utils=("test_faketensor",)
    )
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with torchpaged.use_backend("reference"):
        assert torch.equal(compiled(batch, q_scale=Q_SCALE), expected)


@pytest.mark.parametrize("max_query_len", [1, 20])
def test_the_cuda_backend_has_one_kernel_for_them(
    max_query_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short they are; nothing else serves what it does not take."""
    monkeypatch.setattr(prefill.gpu, "capability", lambda index: (9, 0))
    batch = drawn()

    def call(q: Tensor) -> AttentionCall:
        tensors, _ = op_arguments(replace(batch, q=q))
        return AttentionCall.of(*tensors, max_query_len=max_query_len, scale=batch.scale)

    def routed(q: Tensor) -> cuda_op.Route:
        return cuda_op.route(call(q), Specialisation.of(call(q)))

    assert routed(batch.q) == cuda_op.Route("prefill")
    odd = torch.empty(*batch.q.shape[:2], 72, dtype=E4M3)[..., :64]
    monkeypatch.setenv("TORCHPAGED_CUDA_PREFILL", "0")
    assert routed(batch.q) == cuda_op.Route("triton", reason="prefill: TORCHPAGED_CUDA_PREFILL=0")
    monkeypatch.delenv("TORCHPAGED_CUDA_PREFILL")
    kernel, _, reason = routed(odd)
    assert "multiples of 16 bytes" in reason
    with pytest.raises(BackendUnavailableError, match="multiples of 16 bytes"):
        cuda_op._refuse_fp8_queries(kernel, reason, call(odd))
    words = torch.zeros(26, dtype=torch.int64)
    for changed in ({"tree_mask": words}, {"output_scale": torch.ones(1)}):
        with pytest.raises(ArgumentError, match="None with fp8 queries"):
            cuda_op._refuse_fp8_queries("prefill", "", call(batch.q)._replace(**changed))


def test_tokens_without_requests_have_a_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A semaphore of no requests has no number that the kernel could count with."""
    tickets: list[int] = []

    def launch(grid: int, threads: int, params: Any, *, early: bool) -> None:
        tickets.append(params.tickets)

    kernel = SimpleNamespace(launch=launch)
    monkeypatch.setattr(prefill.gpu, "num_sms", lambda index: 132)
    monkeypatch.setattr(prefill.gpu, "launches_early", lambda index: True)
    monkeypatch.setattr(prefill, "_specialised", lambda *_: (kernel, None))
    monkeypatch.setattr(prefill, "queries_map", lambda *_: Map())
    monkeypatch.setattr(prefill, "pool_map", lambda *_: (Map(), (0, 0, 0)))
    tensors, _ = op_arguments(drawn())
    none = torch.zeros(0, dtype=torch.int32)
    call = AttentionCall.of(*tensors, max_query_len=20, scale=1.0, semaphore=none)
    prefill.prefill(call, Specialisation.of(call))
    assert tickets[0]
