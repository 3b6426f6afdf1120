"""Which calls the CUDA C++ kernel takes, and the shapes it takes them with; no GPU needed."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specialisations import SHARED_MEMORY, specialisation

from torchpaged import BackendUnavailableError
from torchpaged.backends import get_backend
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.cuda import specialise
from torchpaged.custom_ops.cuda import jit
from torchpaged.testing import BATCH_SPECS, make_batch, run_paged_attention


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
def test_every_shape_fits_its_device(dim: int) -> None:
    """Of 132 multiprocessors or fewer."""
    for rows, kv_bytes, (per_sm, per_cta), pairs, heads, sms in itertools.product(
        (1, 4, 8, 16, 32),
        (1, 2),
        set(SHARED_MEMORY.values()),
        (1, 2, 8, 64, 200, 512, 5000),
        (1, 2),
        (84, 132),
    ):
        kv_dtype = torch.float8_e4m3fn if kv_bytes == 1 else torch.bfloat16
        spec = specialisation(dim=dim, kv_dtype=kv_dtype)
        if -(-rows // 8) * dim > 512 or (heads == 2 and specialise.pair_heads(spec, rows, pairs, sms) == 1):
            continue
        shape = specialise.decode_shape(dim, dim, kv_bytes, rows, pairs, sms, per_sm, heads)
        used = shape.shared_bytes(dim, dim, kv_bytes, heads * rows)
        assert shape.warps >= 1
        assert shape.stages >= 2
        assert shape.keys % 16 == 0
        assert shape.pair_heads == heads
        assert shape.ctas_per_sm * (used + 3328) <= per_sm
        assert used + 2304 <= per_cta
        assert heads * rows * dim * 4 <= shape.stage_bytes(dim, dim, kv_bytes), "states meet in a stage"


def test_two_heads_make_a_pair_where_they_are_narrow_and_adjacent() -> None:
    def heads(rows: int = 4, pairs: int = 64, apart: tuple[str, ...] = (), **spec: Any) -> int:
        made = specialisation(**{"dim": 64, **spec})
        lie_apart = {name: (*getattr(made, name)[:2], 1024) for name in apart}
        return specialise.pair_heads(made._replace(**lie_apart), rows, pairs, 132)

    assert heads() == 2
    assert heads(rows=8, dim_v=32) == 2
    others = {
        "an odd number of heads": heads(3, num_kv_heads=3),
        "wide": heads(dim=128),
        "fp8": heads(kv_dtype=torch.float8_e4m3fn),
        "keys of one head side by side": heads(apart=("k_strides", "v_strides")),
        "values of one head side by side": heads(apart=("v_strides",)),
        "more rows than a tile has columns": heads(6),
        "few": heads(pairs=32),
    }
    assert others == dict.fromkeys(others, 1)


def test_teams_leave_few_multiprocessors_idle() -> None:
    teams = {pairs: specialise.team(pairs, 132) for pairs in (1, 2, 3, 5, 7, 8, 32, 40, 96)}
    assert teams == {1: 1, 2: 2, 3: 3, 5: 5, 7: 7, 8: 8, 32: 32, 40: 10, 96: 32}
    assert all(pairs % size == 0 and 132 // size * size >= 126 for pairs, size in teams.items())
    assert specialise.team(8, 4) == 4, "fewer CTAs than pairs"


def test_clusters_only_where_two_ctas_share_a_pair() -> None:
    clusters = {
        pairs: specialise.decode_shape(128, 128, 2, 4, pairs, 132, 233472).cluster
        for pairs in (1, 8, 32, 44, 64, 66, 67, 512)
    }
    assert clusters == {1: 1, 8: 1, 32: 1, 44: 2, 64: 2, 66: 2, 67: 1, 512: 1}


def test_registers_are_held_for_one_request_of_a_small_model() -> None:
    """Where it was measured to pay: heads up to 64 wide, groups up to 4, 8 to 16
    pairs (docs/log/decode.md)."""

    def most(dim: int, rows: int, pairs: int, kv_bytes: int = 2) -> int:
        return specialise.decode_shape(dim, dim, kv_bytes, rows, pairs, 132, 233472).max_registers

    assert [most(64, 4, pairs) for pairs in (3, 7, 8, 16, 17, 64, 512)] == [0, 0, 168, 168, 0, 0, 0]
    assert [most(128, 4, 8), most(64, 8, 8), most(64, 4, 8, kv_bytes=1)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "dtypes"),
        ({"kv_dtype": torch.float16}, "dtypes"),
        ({"kv_dtype": torch.float8_e4m3fn, "compute": (8, 0)}, "fp8 conversions"),
        ({"kv_dtype": torch.float8_e5m2, "compute": (8, 6)}, "fp8 conversions"),
        ({"dim": 72}, "head_dim"),
        ({"dim_v": 512}, "head_dim"),
        ({"block_size": 24}, "block_size"),
        ({"rows": 33}, "query rows"),
        ({"dim_v": 256, "rows": 17}, "query rows"),
        ({"block_size": 1, "keys": 64}, "more than 32 blocks"),
    ],
    ids=str,
)
def test_what_it_leaves_to_triton(changed: dict[str, Any], reason: str) -> None:
    def refused(rows: int = 4, compute: tuple[int, int] = (9, 0), keys: int = 16, **spec: Any) -> str | None:
        return specialise.refuse(specialisation(**spec), rows, compute, keys)

    assert refused() is None
    assert reason in str(refused(**changed))


def test_fp8_with_many_rows_and_single_token_blocks_is_refused() -> None:
    keys = specialise.decode_shape(128, 128, 1, 32, 8, 132, 233472).keys
    assert keys == 64, "a warp's state needs the room"
    for block_size, fits in ((1, False), (2, True)):
        spec = specialisation(block_size=block_size, kv_dtype=torch.float8_e4m3fn)
        assert (specialise.refuse(spec, 32, (9, 0), keys) is None) == fits


def test_tensors_elsewhere_are_refused_by_name() -> None:
    batch = make_batch(BATCH_SPECS["decode_edges"])
    with pytest.raises(BackendUnavailableError, match="backend 'cuda'.*cpu"):
        pytest.importorskip("triton", reason="triton is not installed")
        run_paged_attention(BACKEND_OPS["cuda"], batch)


def test_why_it_is_unavailable() -> None:
    reasons = [get_backend("cuda").unavailable(), jit.unavailable()]
    if torch.version.cuda is None:
        assert "no CUDA device" in str(reasons[0])
        assert "without CUDA" in str(reasons[1])
        with pytest.raises(BackendUnavailableError, match="backend 'cuda'"):
            jit.kernel("decode.cu", "paged_decode", {}, torch.device("cuda", 0), shared_bytes=0)


def test_the_overload_has_the_contract_of_the_others() -> None:
    assert set(BACKEND_OPS) == {"default", "reference", "cpu", "triton", "cuda"}
    for op in ("paged_attention", "write_kv", "rope_write_kv"):
        schemas = {str(getattr(BACKEND_OPS[name], op)._schema).split("(", 1)[1] for name in BACKEND_OPS}
        assert len(schemas) == 1


def test_which_kernels_serve_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short queries, long ones and both by CUDA C++ kernels; Triton's, with the reason, where one of them
    declines or TORCHPAGED_CUDA_PREFILL=0."""
    from torchpaged.custom_ops.attention.cuda import paged_attention as module

    why: dict[str, str | None] = {"prefill": None, "decode": None}
    monkeypatch.setattr(module.prefill, "why_not", lambda *a, **k: why["prefill"])
    monkeypatch.setattr(module.specialise, "unsupported", lambda *a: why["decode"])
    monkeypatch.setattr(module.gpu, "num_sms", lambda index: 132)
    q, cache = torch.zeros(64, 8, 64), torch.zeros(9, 1, 2, 64)

    def route(num_reqs: int = 1, max_query_len: int = 64, capacity: int = 1000) -> Any:
        table, none = torch.zeros(num_reqs, capacity, dtype=torch.int32), torch.zeros(0)
        call = AttentionCall(q, cache, cache, table, none, none, q, None, max_query_len, 0.125)
        return module.route(call, Specialisation.of(call))

    monkeypatch.setenv("TORCHPAGED_CUDA_PREFILL", "1")
    assert route() == ("prefill", 0, "")
    assert route(max_query_len=8) == ("decode", 0, "")
    assert route(num_reqs=9) == ("prefill and decode", 2, "")
    assert route(num_reqs=0).kernel == "triton"
    assert route(capacity=128).reason.startswith("prefill: at most 128 keys and 4 tiles")
    assert route(capacity=129).kernel == "prefill"
    why["decode"] = "odd strides"
    assert route() == ("prefill", 0, "")
    assert route(max_query_len=8) == ("triton", 0, "decode: odd strides")
    with monkeypatch.context() as many:
        many.setattr(module.specialise, "too_many_rows", lambda *a: True)
        assert route(max_query_len=8) == ("prefill", 0, ""), "more query rows than decode takes"
    assert route(num_reqs=9) == ("triton", 0, "decode with prefill: odd strides")
    why["prefill"] = "head_dim 72/72"
    assert route() == ("triton", 0, "prefill: head_dim 72/72")
    monkeypatch.setenv("TORCHPAGED_CUDA_PREFILL", "0")
    why["prefill"] = why["decode"] = None
    assert route() == ("triton", 0, "prefill: TORCHPAGED_CUDA_PREFILL=0")
    assert route(max_query_len=8).kernel == "decode"
    monkeypatch.delenv("TORCHPAGED_CUDA_PREFILL")
    for even, kernel in ((True, "prefill"), (False, "prefill and decode")):
        monkeypatch.setattr(module, "is_even", lambda *a, even=even: even)
        assert route(num_reqs=2, max_query_len=60).kernel == kernel, (
            "32 query tokens of a request in the mean"
        )
        assert route(num_reqs=3, max_query_len=60).kernel == "prefill and decode"
        assert route(num_reqs=2, max_query_len=60, capacity=2049).kernel == "prefill and decode"
    assert route(max_query_len=8).kernel == "decode"
    monkeypatch.setattr(module.specialise, "many_rows", lambda *a: True)
    assert route(max_query_len=8).kernel == "decode", "lengths may differ"
    monkeypatch.setattr(module, "is_even", lambda *a: True)
    assert route(max_query_len=8) == ("prefill", 0, "")


@pytest.mark.parametrize(
    ("group", "query_len", "dim", "many", "too_many"),
    [
        (4, 8, 128, True, False),
        (7, 3, 128, True, False),
        (6, 4, 128, False, False),
        (32, 1, 128, True, False),
        (4, 8, 64, False, False),
        (5, 8, 128, True, True),
        (4, 4, 256, False, False),
        (5, 4, 256, False, True),
    ],
)
def test_when_query_rows_are_many(group: int, query_len: int, dim: int, many: bool, too_many: bool) -> None:
    spec = specialisation(group=group, dim=dim)
    found = specialise.many_rows(spec, query_len), specialise.too_many_rows(spec, query_len)
    assert found == (many, too_many)


@pytest.mark.parametrize("split", [False, True])
def test_a_mixed_batch_is_prepared_before_prefill_and_launched_right_behind_it(
    monkeypatch: pytest.MonkeyPatch, split: bool
) -> None:
    """Prefill is compiled in a thread while decode is made ready; between the two launches there is nothing.
    A third of prefill's CTAs come behind decode, but not where tiles are cut: parts are put together last."""
    from torchpaged.custom_ops.attention.cuda import prefill
    from torchpaged.custom_ops.cuda.loaded_kernel import Map

    events: list[str] = []
    mixed = True

    def kernel(name: str) -> Any:
        def launch(grid: int, threads: int, params: Any, *, early: bool) -> None:
            events.append(f"{name} of {grid}{', early' if early else ''}")
            if name == "prefill":
                late = 44 if mixed and not split else 0
                these = int(mixed and early)
                said = params.ctas, params.late, params.is_late
                assert said == (132, late, these), "CTAs in all, late ones, whether it is these"

        return SimpleNamespace(launch=launch)

    def specialised(*_: Any) -> Any:
        events.append("loaded")
        return kernel("prefill"), kernel("merge") if split else None

    def behind() -> Any:
        events.append("decode made ready")
        return lambda: events.append("decode"), 2

    monkeypatch.setattr(prefill, "_begin", lambda *_: events.append("compiler begins"))
    monkeypatch.setattr(prefill, "_specialised", specialised)
    monkeypatch.setattr(prefill.gpu, "num_sms", lambda index: 132)
    monkeypatch.setattr(prefill, "may_split", lambda *_: split)
    monkeypatch.setattr(prefill.gpu, "launches_early", lambda index: True)
    monkeypatch.setattr(prefill, "queries_map", lambda *_: Map())
    monkeypatch.setattr(prefill, "pool_map", lambda *_: (Map(), (0, 0, 0)))
    q, cache, ints = (
        torch.zeros(40, 4, 64, dtype=torch.bfloat16),
        torch.zeros(9, 16, 2, 64, dtype=torch.bfloat16),
        torch.zeros(9, dtype=torch.int32),
    )
    tensors = (q, cache, cache, ints.view(1, 9), ints, ints, q, None)
    call = AttentionCall(*tensors, max_query_len=40, scale=0.125, semaphore=ints)
    spec = Specialisation.of(call)
    prefill.prefill(call, spec, short=2, behind=behind)
    assert events == [
        "compiler begins",
        "decode made ready",
        "loaded",
        *(["prefill of 132", "decode", "merge of 12, early"] if split else []),
        *(["prefill of 88", "decode", "prefill of 44, early"] if not split else []),
    ]
    events.clear()
    mixed = False
    prefill.prefill(call, spec)
    assert events == ["loaded", "prefill of 132, early", *["merge of 12, early"] * split], "alone"
