"""The fuzz's own tests, on a CPU: a planted hang, crash, error and wrong answer are seen and named by their
seeds, and the run goes on."""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from command import script
from fuzz.aims import CASCADE_WIDTHS, PREFILL_WIDTHS
from fuzz.case import run_case
from fuzz.configuration import Configuration
from fuzz.draw import BLOCK_SIZES, DTYPES, KV_DTYPES, WIDTHS, random_batch, random_configuration
from pool_layouts import strided
from worker_pool import WorkerPool

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.check import check_paged_attention

REFERENCE = BACKEND_OPS["reference"]
CASE: dict[str, Any] = {
    "batches": 2,
    "backends": ["reference"],
    "device": "cpu",
    "small": True,
    "captures": True,
}

PLANTED = """
import os, subprocess, sys, time
from torchpaged.custom_ops import BACKEND_OPS
from fuzz.case import run_case

REFERENCE = BACKEND_OPS["reference"]
HANG, CRASH, WRONG, ERROR = 3, 5, 7, 9

def run(case, beat):
    def attention(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, *rest, **options):
        print("what a library says on stdout")
        while case["seed"] == HANG:
            time.sleep(1)
        if case["seed"] == CRASH:
            os._exit(41)
        if case["seed"] == ERROR:
            raise RuntimeError("an illegal memory access")
        pools, batch = (k_cache, v_cache), (block_table, seq_lens, query_start_loc)
        REFERENCE.paged_attention(q, *pools, *batch, out, *rest, **options)
        if case["seed"] == WRONG:
            out.add_(0.5)
    return run_case(case, beat, {"reference": REFERENCE._replace(paged_attention=attention)})

def phases(case, beat):
    if "child" in case:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        beat("running", child=child.pid)
    for phase, seconds in case["phases"]:
        beat(phase)
        time.sleep(seconds)
    return {"pid": os.getpid()}

def absent(case, beat):
    os._exit(1)
"""


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, str]:
    """The environment in which workers find the module ``planted``."""
    (tmp_path / "planted.py").write_text(PLANTED)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}


@pytest.fixture
def command() -> ModuleType:
    return script("tests/gpu/fuzz_attention.py")


def test_planted_faults_are_seen_and_the_run_goes_on(
    planted: dict[str, str],
    command: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", planted["PYTHONPATH"])
    report_path = tmp_path / "fuzz.json"
    numbers = "--configurations 9 --batches 2 --workers 1 --first-seed 2 --compile-limit 5"
    places = "--backends reference --device cpu --small --target planted:run"
    status = command.main([*numbers.split(), *places.split(), "--json", str(report_path)])
    report = json.loads(report_path.read_text())
    assert status == 1
    assert [(f["seed"], f["kind"]) for f in report["failures"]] == [
        (3, "hang"),
        (5, "crash"),
        (7, "wrong"),
        (7, "wrong"),
        (9, "error"),
    ]
    hang, crash, wrong, _, error = report["failures"]
    assert hang["phase"] == "launching", "the stack of the hang"
    assert "planted.py" in hang["message"], "the stack of the hang"
    assert "exit status 41" in crash["message"]
    assert "illegal memory access" in error["message"]
    assert "over the budget" in wrong["message"]
    assert all(f["configuration"]["seed"] == f["seed"] for f in report["failures"])
    assert report["hangs"] == report["crashes"] == 1
    assert not report["cut"]
    assert report["seeds"] == [2, 4, 6, 7, 8, 10]
    assert report["next_seed"] == 11
    assert report["batches"] == 12
    printed = capsys.readouterr().out
    assert all(
        f"seed {seed}: {kind}" in printed
        for seed, kind in ((3, "hang"), (5, "crash"), (7, "wrong"), (9, "error"))
    )


def test_a_clean_run_ends_with_0_and_an_empty_one_with_1(command: ModuleType, tmp_path: Path) -> None:
    shared = ["--batches", "1", "--device", "cpu", "--small", "--backends", "reference", "--workers", "1"]
    assert command.main([*shared, "--configurations", "2"]) == 0
    assert command.main([*shared, "--configurations", "0"]) == 1


@pytest.mark.slow
def test_each_phase_has_its_own_limit(planted: dict[str, str]) -> None:
    limits = {"launching": 60, "running": 5}
    with WorkerPool("planted:phases", workers=1, limits=limits, environment=planted) as pool:
        slow_compile, hang, after = pool.run(
            [
                {"phases": [("launching", 7), ("running", 0)]},
                {"phases": [("launching", 0), ("running", 600)]},
                {"phases": []},
            ]
        )
    assert slow_compile.kind == "done", slow_compile.message
    assert (hang.kind, hang.phase) == ("hang", "running")
    assert hang.seconds >= 5
    assert after.kind == "done", "a new process"
    assert after.result != slow_compile.result, "a new process"


def is_alive(process: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.timeout(300)
def test_a_killed_worker_takes_what_it_started_along(planted: dict[str, str]) -> None:
    with WorkerPool("planted:phases", limits={"running": 0.5}, environment=planted) as pool:
        (outcome,) = pool.run([{"child": True, "phases": [("running", 600)]}])
    while is_alive(outcome.facts["child"]):  # the kernel takes a while; a hang is a failure
        time.sleep(0.01)


@pytest.mark.slow
def test_when_the_time_is_up_running_cases_are_cut_and_others_not_begun(planted: dict[str, str]) -> None:
    with WorkerPool("planted:phases", workers=2, environment=planted) as pool:
        outcomes = list(
            pool.run(({"n": n, "phases": [("launching", 600)]} for n in range(4)), seconds=8, reserve=1.0)
        )
    assert [outcome.kind for outcome in outcomes] == ["cut", "cut"]


@pytest.mark.slow_cases("planted:no_such_function")
@pytest.mark.parametrize("target", ["planted:no_such_function", "planted:absent"])
def test_workers_that_cannot_begin(target: str, planted: dict[str, str]) -> None:
    with WorkerPool(target, environment=planted) as pool:
        cases = [{"phases": []}] * 5
        if target == "planted:absent":  # it begins, and each case costs it its life
            assert [outcome.kind for outcome in pool.run(cases[:2])] == ["crash", "crash"]
        else:
            with pytest.raises(RuntimeError, match="no_such_function"):
                list(pool.run(cases))


def _run(
    seed: int, attention: Callable[..., None], batches: int = 2, backend: str = "reference"
) -> dict[str, Any]:
    case = {**CASE, "seed": seed, "batches": batches, "backends": [backend]}
    return run_case(
        case, lambda *_, **__: None, {backend: BACKEND_OPS[backend]._replace(paged_attention=attention)}
    )


def _writes_between_rows(q: torch.Tensor, *rest: Any, **options: Any) -> None:
    REFERENCE.paged_attention(q, *rest, **options)
    torch.empty(0, dtype=q.dtype).set_(rest[5].untyped_storage()).nan_to_num_(0.0)


def _leaves_a_semaphore(q: torch.Tensor, *rest: Any, **options: Any) -> None:
    REFERENCE.paged_attention(q, *rest, **options)
    if options.get("semaphore") is not None:
        options["semaphore"][-1] = 1


def _writes_q(q: torch.Tensor, *rest: Any, **options: Any) -> None:
    REFERENCE.paged_attention(q, *rest, **options)
    q.view(-1)[:1].mul_(2) if q.is_contiguous() else q[0, 0, 0].mul_(2)


def _reads_others(q: torch.Tensor, k_cache: torch.Tensor, *rest: Any, **options: Any) -> None:
    REFERENCE.paged_attention(q, k_cache, *rest, **options)
    touched = rest[1][:, 0].long()  # the first block of each row, read by all
    poisoned = k_cache[touched[touched < len(k_cache)]].float()[:, 0].isnan().any()
    rest[4].mul_(float("nan")) if poisoned else None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_writes_between_rows, "gaps"),
        (_leaves_a_semaphore, "semaphore"),
        (_writes_q, "q was written"),
        (_reads_others, "blocks of others"),
    ],
)
def test_what_every_run_must_keep(fault: Callable[..., None], message: str) -> None:
    results = [_run(seed, fault) for seed in range(12)]
    messages = [failure["message"] for result in results for failure in result["failures"]]
    assert any(message in text for text in messages), messages[:3]


def test_two_runs_must_agree_bit_for_bit() -> None:
    calls: list[int] = []

    def attention(q: torch.Tensor, *rest: Any, **options: Any) -> None:
        REFERENCE.paged_attention(q, *rest, **options)
        calls.append(0)
        if len(calls) % 2:
            rest[5][0, 0, 0] = (
                rest[5][0, 0, 0] * (1 + 2 * torch.finfo(q.dtype).eps) + torch.finfo(q.dtype).tiny
            )

    assert any("differ" in failure["message"] for failure in _run(0, attention)["failures"])


def test_a_relative_error_of_1e_4_in_float32_is_seen() -> None:
    """Everywhere, and in the largest number alone."""

    def everywhere(*tensors: Any, **options: Any) -> None:
        REFERENCE.paged_attention(*tensors, **options)
        tensors[6].mul_(1 + 1e-4)

    def largest(*tensors: Any, **options: Any) -> None:
        REFERENCE.paged_attention(*tensors, **options)
        at = tuple(
            int(i) for i in torch.unravel_index(tensors[6].nan_to_num().abs().argmax(), tensors[6].shape)
        )
        tensors[6][at] *= 1 + 1e-4

    seeds = [
        s
        for s in range(60)
        if random_configuration(s, backends=("reference",), small=True).dtype == "float32"
    ]
    assert len(seeds) > 8
    for seed in seeds:
        assert not _run(seed, REFERENCE.paged_attention)["failures"]
        for fault in (everywhere, largest):
            found = _run(seed, fault)["failures"]
            assert found, seed
            assert all("over the budget" in failure["message"] for failure in found), seed


class _OnHopper:
    """A tensor in all that `specialise.unsupported` looks at, but for the device."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels ask of a GPU is an H100's."""
    from torchpaged.custom_ops.cuda import gpu

    monkeypatch.setattr(gpu, "capability", lambda index: (9, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda index: 132)
    monkeypatch.setattr(gpu, "shared_per_sm", lambda index: 228 * 1024)


def _on_hopper(c: Configuration) -> AttentionCall:
    """The call of a configuration's first batch."""
    batch, (token, head, offset) = random_batch(c, 0), c.out_padding
    strides = (c.num_heads * (c.head_dim_v + head) + token, c.head_dim_v + head, 1)
    shape = batch.q.shape[0], c.num_heads, c.head_dim_v
    out = strided(shape, strides, batch.q.dtype, offset, torch.device("cpu"))
    tensors: list[Any] = [_OnHopper(tensor) for tensor in (batch.q, batch.k_cache, batch.v_cache)]
    lengths = (batch.block_table, batch.seq_lens, batch.query_start_loc)
    result: Any = _OnHopper(out)
    options = {"max_query_len": batch.max_query_len, "scale": batch.scale, **batch.extras}
    return AttentionCall.of(*tensors, *lengths, result, None, **options)


def _why_not_decode(c: Configuration) -> str | None:
    from torchpaged.custom_ops.attention.cuda import specialise

    call = _on_hopper(c)
    return specialise.unsupported(call, Specialisation.of(call), c.max_query_len, c.num_reqs)


def _pairs_missed(
    configurations: list[Configuration],
    features: dict[str, Callable[[Configuration], bool]],
    excluded: set[frozenset[str]],
) -> list[tuple[str, str]]:
    """Pairs of features that no configuration has."""
    sets = {name: {i for i, c in enumerate(configurations) if holds(c)} for name, holds in features.items()}
    return [(a, b) for a in sets for b in sets if frozenset((a, b)) not in excluded and not sets[a] & sets[b]]


#: Features that configurations of any aim have in common.
FEATURES: dict[str, Callable[[Configuration], bool]] = {
    "window": lambda c: "window_left" in c.options,
    "chunk": lambda c: "chunk_size" in c.options,
    "soft cap": lambda c: "logits_soft_cap" in c.options,
    "bidirectional": lambda c: "causal" in c.options,
    "alibi": lambda c: c.alibi,
    "captured": lambda c: c.captured,
    "heads first": lambda c: c.layout.heads_first,
    "head padding": lambda c: c.layout.head_padding > 0,
}


def test_a_third_of_a_gpus_configurations_are_for_the_cuda_decode_kernel(hopper: None) -> None:
    """By the kernel's own word on tensors that say they are an H100's."""
    drawn = [random_configuration(seed) for seed in range(60)]
    taken = [_why_not_decode(c) is None for c in drawn if c.backend == "cuda" and c.kernel == "decode"]
    assert 20 <= sum(taken) <= 34


@pytest.mark.parametrize("aim", ["cuda-prefill", "cuda-prefill-fp8"])
def test_all_configurations_aimed_at_the_cuda_prefill_kernel_are_taken_by_it(
    hopper: None, monkeypatch: pytest.MonkeyPatch, aim: str
) -> None:
    """By the kernel's own word on tensors that say they are an H100's; with every feature that it has."""
    from torchpaged.custom_ops.attention.cuda import paged_attention

    monkeypatch.setenv("TORCHPAGED_CUDA_PREFILL", "1")
    configurations = [random_configuration(seed, aim=aim) for seed in range(600)]
    for c in configurations[:24]:
        call = _on_hopper(c)
        taken = paged_attention.route(call, Specialisation.of(call))
        both = c.kernel == "mixed" and (
            taken.kernel != "prefill" or not paged_attention.is_mostly_prompts(call)
        )
        assert taken.kernel == ("prefill and decode" if both else "prefill"), (c, taken)
    assert {(c.head_dim, c.head_dim_v) for c in configurations} == set(PREFILL_WIDTHS)
    assert {c.block_size for c in configurations} == {8, 16, 32, 64, 128}
    assert {c.dtype for c in configurations} == {"bfloat16", "float16"}
    assert {1, 7, 16, 32, 64, 128} <= {c.num_heads // c.num_kv_heads for c in configurations}
    assert 150 < sum(c.kernel == "mixed" for c in configurations) < 300
    fp8 = aim == "cuda-prefill-fp8"
    assert {c.scales for c in configurations} == ({"none", "one", "per_head"} if fp8 else {"none"})
    assert all((c.kv_dtype in ("float8_e4m3fn", "float8_e5m2")) == fp8 for c in configurations)
    features = FEATURES | {
        "window right": lambda c: "window_right" in c.options,
        "sinks": lambda c: c.sinks == "same",
        "lse": lambda c: c.lse,
        "several": lambda c: c.num_reqs > 4,
        "beside decode": lambda c: c.kernel == "mixed",
        "wide": lambda c: max(c.head_dim, c.head_dim_v) > 128,
    }
    assert not _pairs_missed(configurations, features, {frozenset(("heads first", "head padding"))})


def test_all_configurations_aimed_at_the_cuda_decode_kernel_are_taken_by_it(hopper: None) -> None:
    """With runs of several pairs, whose borders move, in many of them, and pairs of many parts in some."""
    from torchpaged.custom_ops.attention.cuda import specialise

    configurations = [random_configuration(seed, aim="cuda-decode") for seed in range(60)]
    assert [_why_not_decode(c) for c in configurations[:8]] == [None] * 8
    moving = grouped = 0
    for c in configurations:
        rows = c.num_heads // c.num_kv_heads * c.max_query_len
        pairs = c.num_reqs * c.num_kv_heads
        shape = specialise.decode_shape(c.head_dim, c.head_dim_v, 2, rows, pairs, 132, 228 * 1024)
        moving += shape.near > 0 and shape.ask_early
        grouped += shape.grouped
    assert moving > 25
    assert grouped > 8


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_generated_batches_are_accepted_and_the_reference_passes(first: int) -> None:
    for seed in range(first, first + 20):
        result = run_case({**CASE, "seed": seed}, lambda *_, **__: None)
        assert not result["failures"], result
        assert result["batches"] == 2, result


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_the_native_kernel_passes(first: int, native: None) -> None:
    for seed in range(first, first + 20):
        result = run_case({**CASE, "seed": seed, "backends": ["cpu"]}, lambda *_, **__: None)
        assert not result["failures"], result


def test_batches_of_a_gpu_are_valid() -> None:
    for seed in range(12):
        configuration = random_configuration(seed)
        batch = random_batch(configuration, 0)
        out = batch.q.new_empty(*batch.q.shape[:2], configuration.head_dim_v)
        call = AttentionCall.of(
            *batch.tensors,
            out,
            max_query_len=batch.max_query_len,
            scale=batch.scale,
            **batch.extras,
            **configuration.options,
        )
        check_paged_attention(call)


def test_a_seed_gives_the_same_batch_again() -> None:
    one, other = (random_batch(random_configuration(11, small=True), 3) for _ in range(2))
    assert one.spec == other.spec
    assert one.max_query_len == other.max_query_len
    torch.testing.assert_close(one.q, other.q, rtol=0, atol=0)
    torch.testing.assert_close(one.k_cache.float(), other.k_cache.float(), rtol=0, atol=0, equal_nan=True)
    assert random_batch(random_configuration(11, small=True), 4).spec != one.spec
    assert random_configuration(11) != random_configuration(12)


def test_every_feature_is_reached_and_so_are_their_pairs() -> None:
    configurations = [random_configuration(seed) for seed in range(4000)]
    assert {(c.head_dim, c.head_dim_v) for c in configurations} == set(WIDTHS)
    assert {c.block_size for c in configurations} == set(BLOCK_SIZES)
    assert {c.num_heads // c.num_kv_heads for c in configurations} == set(range(1, 17))
    features = FEATURES | {
        "fp8": lambda c: c.kv_dtype.startswith("float8"),
        "per head": lambda c: c.scales == "per_head",
        "odd width": lambda c: c.head_dim % 16 > 0,
        "fp32": lambda c: c.dtype == "float32",
        "slot padding": lambda c: c.layout.slot_padding > 0,
        "offset": lambda c: c.layout.offset % 16 > 0,
        "q padding": lambda c: c.q_padding[0] > 0,
        "bound above": lambda c: c.max_query_len > c.longest_query,
        "wide table": lambda c: c.columns > 1024,
        "no lse": lambda c: not c.lse,
        "sinks": lambda c: c.sinks != "none",
        "decode": lambda c: c.kernel == "decode",
        "prefill": lambda c: c.kernel == "prefill",
        "mixed": lambda c: c.kernel == "mixed",
        "cuda": lambda c: c.backend == "cuda",
        "varying tokens": lambda c: c.num_tokens is None,
        "block sparse": lambda c: "block_sparse" in c.options,
    }
    apart = [("decode", "prefill"), ("decode", "mixed"), ("prefill", "mixed"), ("captured", "varying tokens")]
    apart.append(("bidirectional", "block sparse"))
    assert not _pairs_missed(configurations, features, set(map(frozenset, apart)))
    assert {c.kv_dtype for c in configurations} == {*DTYPES, *KV_DTYPES} - {"same"}


def test_a_replay_that_ignores_the_new_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(
        s for s in range(100) if random_configuration(s, backends=("reference",), small=True).captured
    )
    assert not run_case({**CASE, "seed": seed}, lambda *_, **__: None)["failures"]
    monkeypatch.setattr("fuzz.case._Runner._capture", lambda *_: lambda: None)
    assert run_case({**CASE, "seed": seed}, lambda *_, **__: None)["failures"]


def test_configurations_aimed_at_shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of widths over pools of 16 and of 8 bits, captured and not; and the harness runs them: a
    planted error in cascade_attention is seen, and none else."""
    drawn = [
        random_configuration(seed, backends=("cuda",), aim="cascade")
        for seed in range(4 * len(CASCADE_WIDTHS))
    ]
    seen = {(c.head_dim, c.head_dim_v, c.kv_dtype != c.dtype, c.captured) for c in drawn}
    assert len(seen) == len(drawn)
    assert {key[:2] for key in seen} == set(CASCADE_WIDTHS)
    assert {c.backend for c in drawn} == {"cuda"}
    assert {c.groups for c in drawn} == {1, 2, 3, 8}
    assert any(c.num_heads // c.num_kv_heads == 5 for c in drawn)
    case = {**CASE, "seed": 3, "aim": "cascade", "batches": 1}
    small = {"num_reqs": 3, "num_tokens": 60, "most_scores": 2**14, "backend": "reference"}
    monkeypatch.setattr(
        "fuzz.case.random_configuration",
        lambda *args, **options: dataclasses.replace(random_configuration(*args, **options), **small),
    )
    assert not run_case(case, lambda *args, **facts: None)["failures"]

    def wrong(*args: Any, **options: Any) -> None:
        REFERENCE.cascade_attention(*args, **options)
        args[11].add_(0.5)

    planted = {"reference": REFERENCE._replace(cascade_attention=wrong)}
    assert run_case(case, lambda *args, **facts: None, planted)["failures"]


def test_configurations_aimed_at_masks_of_blocks() -> None:
    """On Triton's kernels with and without tiles left out, in blocks that tiles divide and in others; and a
    kernel that passes the mask over is seen."""
    configurations = [random_configuration(seed, aim="block-sparse") for seed in range(300)]
    kernels = {(c.backend, c.kernel) for c in configurations}
    assert kernels == {(b, k) for b in ("cuda", "triton") for k in ("decode", "prefill", "mixed")}
    patterns = [(c.options["block_sparse"], c.num_heads // c.num_kv_heads) for c in configurations]
    for holds in (
        lambda pattern, group: pattern.verticals_of(group) == 0,
        lambda pattern, group: pattern.verticals_of(group) == 1 and pattern.block_size % 64 == 0,
        lambda pattern, group: pattern.verticals_of(group) > 1 and pattern.block_size % 64 == 0,
        lambda pattern, group: pattern.block_size % 16 > 0,
    ):
        assert sum(holds(*pattern) for pattern in patterns) > 15
    assert not any("causal" in c.options for c in configurations)
    beat = lambda *_, **__: None  # noqa: E731
    seeds = [
        seed
        for seed in range(120)
        if "block_sparse" in random_configuration(seed, backends=("reference",), small=True).options
    ]

    def blind(*arguments: Any, block_sparse: Any = None, **options: Any) -> None:
        REFERENCE.paged_attention(*arguments, **options)

    missed = {"reference": REFERENCE._replace(paged_attention=blind)}
    found = [bool(run_case({**CASE, "seed": seed}, beat, missed)["failures"]) for seed in seeds]
    assert len(seeds) > 15
    assert sum(found) >= 4


def test_configurations_aimed_at_trees() -> None:
    """On all kernels, with every feature that goes with a tree; words of garbage behind the last request."""
    configurations = [random_configuration(seed, aim="tree") for seed in range(300)]
    assert all(c.tree and c.max_query_len <= 64 and "causal" not in c.options for c in configurations)
    kernels = {(c.backend, c.kernel) for c in configurations}
    assert kernels == {(b, k) for b in ("cuda", "triton") for k in ("decode", "prefill", "mixed")}
    for holds in (
        lambda c: c.alibi,
        lambda c: c.captured,
        lambda c: "window_left" in c.options,
        lambda c: "chunk_size" in c.options,
        lambda c: c.kv_dtype != c.dtype,
        lambda c: c.kernel != "decode" and c.longest_query == 64,
    ):
        assert sum(map(holds, configurations)) > 15
    for c in configurations[:12]:
        batch = random_batch(c, 3)
        words, used = batch.extras["tree_mask"], int(batch.query_start_loc[-1])
        assert words.shape[0] == batch.q.shape[0]
        short = [n < q for n, q in zip(batch.spec.seq_lens, batch.spec.query_lens, strict=True) if n > 0]
        assert not any(short)
        assert used == 0 or bool((words[:used] != 0).all())


def test_a_fuzzed_tree_runs_and_a_wrong_one_is_seen() -> None:
    case = {**CASE, "seed": 5, "aim": "tree", "backends": ["cuda"]}
    beat = lambda *_, **__: None  # noqa: E731
    done = run_case(case, beat, {"cuda": REFERENCE, "triton": REFERENCE})
    assert done["batches"] == 2
    assert not done["failures"]

    def blind(*arguments: Any, tree_mask: Any, **options: Any) -> None:
        REFERENCE.paged_attention(*arguments, **options)

    ops = REFERENCE._replace(paged_attention=blind)
    assert run_case({**case, "batches": 6}, beat, {"cuda": ops, "triton": ops})["failures"]
