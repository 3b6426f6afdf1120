"""The start of a Generator: what it compiles, captures and runs once, what it says of that, and that all else
stays as it was."""

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine_requests import drawn
from kernels_of_steps import SMS, step_kernels
from model_coverage.architectures import model_of
from specialisations import specialisation

from torchpaged import ArgumentError
from torchpaged.custom_ops import ahead, compiles
from torchpaged.custom_ops.layers.cuda.linear_large import MAX_TOKENS, large_shape
from torchpaged.engine import Generator, SamplingParams, decisions, warm_up
from torchpaged.engine.warm_up import step_forms
from torchpaged.graphs.buckets import default_buckets
from torchpaged.hf import PagedModel

SIZES = {"block_size": 4, "max_batch_size": 12, "max_seq_len": 96, "prefill_chunk_size": 48}
LENGTHS = (1, 2, 5, 9, 30, 70)
SPECS = {
    "llama-1b": specialisation(dim=64),
    "llama-8b": specialisation(),
    "qwen3-0.6b": specialisation(group=2),
    "one-kv-head": specialisation(group=8, num_kv_heads=1),
    "two-kv-heads": specialisation(group=7, num_kv_heads=2),
    "many-heads": specialisation(group=1, num_kv_heads=32),
    "fp8": specialisation(kv_dtype=torch.float8_e4m3fn, scales=True),
    "window": specialisation(dim=256, group=2, num_kv_heads=4, window_left=512),
}


def tokens(generator: Generator, count: int = 40) -> list[list[int]]:
    return [output.token_ids for output in generator.generate(*drawn(count, LENGTHS, most=12))]


class _Compiler:
    """Reports a compilation for each kernel that a step is the first to take."""

    def __init__(self, name: str) -> None:
        self.spec, self.known = SPECS[name], set[Any]()

    def step(self, metadata: Any, num_logits: int) -> None:
        sizes = (metadata.num_reqs, metadata.num_tokens, metadata.max_query_len)
        for kernel in step_kernels(self.spec, *sizes, metadata.block_table.shape[1], num_logits):
            if kernel not in self.known:
                self.known.add(kernel)
                compiles.note("nvrtc", str(kernel), 0.0)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], _Compiler]:
    """Makes a paged model compile as an H200 would."""

    def use(name: str) -> _Compiler:
        made, run = _Compiler(name), PagedModel.__call__

        def call(model: Any, input_ids: Any, metadata: Any, logits_indices: Any = None) -> Any:
            made.step(metadata, input_ids.numel() if logits_indices is None else logits_indices.numel())
            return run(model, input_ids, metadata, logits_indices)

        monkeypatch.setattr(PagedModel, "__call__", call)
        return made

    return use


@pytest.mark.slow_cases(but=["*llama-1b", "*one-kv-head"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_buckets": [8, 16]}, {"graphs": False, "capture_ahead": "auto"}],
    ids=["graphs", "prefill-graphs", "no-graphs"],
)
def test_a_warmed_up_start_leaves_nothing_to_compile(
    model: Any, compiler: Any, name: str, options: dict[str, Any]
) -> None:
    compiler(name)
    generator = Generator(model, **{**SIZES, "capture_ahead": True, "warm_up": True, **options})
    assert generator.start_report.compiled > 0
    tokens(generator)
    assert generator.stats.late_compiles == 0


def test_without_one_kernels_are_compiled_late_and_counted(
    model: Any, compiler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    compiler("llama-1b")
    generator = Generator(model, **SIZES, warm_up=False)
    tokens(generator)
    assert generator.stats.late_compiles > 3
    assert not caplog.records, "it was not said that there would be none"


def shapes(batch: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Steps of every number of requests, whose queries are short, equal, nearly equal or not at all."""
    for n in range(1, min(batch, chunk // 2) + 1):
        for longest in (2, 3, 8, 9, 60, chunk // n):
            for num_tokens in {n * longest, n * longest - 1, longest + (n - 1) * 2, longest + n - 1, chunk}:
                if longest + n - 1 <= num_tokens <= min(n * longest, chunk):
                    yield n, num_tokens, longest


@pytest.mark.slow_cases(but=["256-2176-2048-llama-1b", "64-512-0-two-kv-heads", "8-512-128-window"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("batch", "chunk", "captured"),
    [(256, 2048, 0), (256, 4096, 2048), (256, 2176, 2048), (64, 512, 0), (8, 512, 128), (1, 512, 0)],
)
def test_steps_of_any_shape_take_kernels_of_the_forms(
    name: str, batch: int, chunk: int, captured: int
) -> None:
    spec, columns = SPECS[name], 132
    known: set[Any] = set()
    for form in step_forms(batch, chunk, columns, 16, captured=captured, num_sms=SMS):
        known |= step_kernels(spec, *form, form.num_reqs)
    for bucket in default_buckets(batch):  # decodes and first tokens
        known |= step_kernels(spec, bucket, bucket, 1, columns, bucket)
    for n, num_tokens, longest in shapes(batch, chunk):
        least = -(-longest // 16)
        for width in {least, least + 1, least + 3, 64, 65, columns}:
            if least <= width <= columns and num_tokens > captured:
                sizes = n, num_tokens, longest, width
                assert not step_kernels(spec, *sizes, n) - known, sizes


@pytest.mark.parametrize(("chunk", "captured"), [(512, 0), (512, 100), (200, 64), (100, 0), (2048, 256)])
def test_products_of_up_to_256_tokens_are_found_at_the_start(chunk: int, captured: int) -> None:
    """A kernel of ``linear_large.cu`` is for so many tokens, padded."""
    known = {form.num_tokens for form in step_forms(64, chunk, 64, 16, captured=captured, num_sms=SMS)}
    found = {large_shape(tokens, 4096, 14336, SMS) for tokens in known if tokens <= MAX_TOKENS}
    least = max(captured, 64) + 1
    needed = {large_shape(tokens, 4096, 14336, SMS) for tokens in range(least, min(chunk, MAX_TOKENS) + 1)}
    assert None not in needed
    assert needed <= found


@pytest.mark.parametrize("stored", [False, True])
def test_kernels_are_gathered_until_no_step_has_another(
    model: Any, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """An op's second kernel is known once its first one is compiled. Where all are stored, a part of the
    steps says so."""
    generator = Generator(model, **SIZES)
    forms = step_forms(4, 16, 8, 4)
    ran: list[int] = []

    def call(self: Any, input_ids: Any, metadata: Any, logits_indices: Any) -> Any:
        gathered = ahead.here()
        assert gathered is not None
        ran.append(metadata.num_reqs)
        for kernel in ("norm", "linear"):
            if (metadata.num_reqs, kernel) not in gathered.kernels:
                found = (lambda: None) if stored else partial(compiles.note, "nvrtc", kernel, 0.0)
                gathered.compile((metadata.num_reqs, kernel), kernel, found)
                raise ahead.Postponed
        return torch.zeros(logits_indices.numel(), 99)

    monkeypatch.setattr(PagedModel, "__call__", call)
    counts = {form.num_reqs for form in (forms[::4] if stored else forms)}
    assert warm_up.WarmUp(generator.model, generator._rows, forms).gather((), None) == 2 * len(counts)
    assert len(ran) < (len(forms) if stored else 3 * len(forms) + 4), (
        "only steps that have found something run again"
    )
    assert ahead.here() is None


def test_tokens_pools_rows_and_random_numbers_stay_as_they_were(model: Any) -> None:
    paged = PagedModel(model, num_blocks=400, block_size=4)
    for pool in paged.kv_cache:
        for cache in (pool.k_cache, pool.v_cache):
            cache.fill_(7.0)
    sizes = {name: size for name, size in SIZES.items() if name != "block_size"}
    state = torch.get_rng_state()
    generator = Generator(paged, **sizes, warm_up=True, capture_ahead=True, prefill_buckets=[16])
    assert torch.equal(torch.get_rng_state(), state)
    for pool in paged.kv_cache:
        assert bool((pool.k_cache == 7.0).all() and (pool.v_cache == 7.0).all())
    assert generator.loop is not None
    rows = generator.loop.rows
    assert bool((rows.seq_lens == 0).all() and (rows.slot_mapping == -1).all() and (rows.seen == 0).all())
    assert generator.pool.num_free == generator.pool.num_usable
    assert generator.stats == type(generator.stats)(num_blocks=generator.pool.num_usable)
    assert tokens(generator) == tokens(Generator(model, **SIZES, warm_up=False))


@pytest.mark.slow_cases("gpt_oss", "qwen3_next")
@pytest.mark.parametrize("name", ["gemma2", "lfm2", "gpt_oss", "qwen3_next"])
def test_windows_and_states_stay_as_they_were(name: str) -> None:
    """Rings and slots are of requests, and padding has none."""
    windowed = model_of(name).eval()
    prompts = [[(7 * i + j) % 90 + 5 for j in range(length)] for i, length in enumerate((5, 23, 40))]
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    sizes = {**SIZES, "max_batch_size": 3, "max_seq_len": 64, "prefill_chunk_size": 12}
    cold = Generator(copy.deepcopy(windowed), **sizes, warm_up=False)
    want = [output.token_ids for output in cold.generate(prompts, sampling)]
    warm = Generator(windowed, **sizes, warm_up=True)
    assert [output.token_ids for output in warm.generate(prompts, sampling)] == want


def test_fp8_pools_whose_scales_are_not_known_yet(model: Any) -> None:
    options = {**SIZES, "kv_dtype": "fp8_e4m3", "backend": "reference"}
    warm = Generator(model, **options, warm_up=True)
    assert tokens(warm, 6) == tokens(Generator(model, **options, warm_up=False), 6)


def test_a_late_compilation_is_counted_and_warned_of_once(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator = Generator(model, **SIZES, warm_up=True)
    run = PagedModel.__call__

    def call(*arguments: Any) -> Any:
        compiles.note("triton", "some_kernel", 1.5)
        return run(*arguments)

    monkeypatch.setattr(PagedModel, "__call__", call)
    with caplog.at_level(logging.WARNING, "torchpaged.engine"):
        tokens(generator, 3)
    assert generator.stats.late_compiles > 1
    [record] = caplog.records
    assert "some_kernel (triton, 1.5 s)" in record.getMessage()


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = warm_up.WarmUp._sample

    def sample(*arguments: Any) -> None:
        run(*arguments)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(warm_up.WarmUp, "_sample", sample)


def test_an_error_of_the_warm_up_is_raised_and_leaves_nothing_behind(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = tokens(Generator(model, **SIZES))
    with monkeypatch.context() as patched:
        failing(patched)
        with pytest.raises(RuntimeError, match="no such kernel"):
            Generator(model, **SIZES, warm_up=True)
        # transformers' own, or the library's while an engine of before is not collected yet
        assert model.config._attn_implementation in ("sdpa", "torchpaged")
    assert tokens(Generator(model, **SIZES, warm_up=True)) == want


def test_where_it_was_not_asked_for_an_error_is_logged(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch)
    monkeypatch.setattr(decisions, "decide_warm_up", lambda *_: (True, "as on a GPU"))
    generator = Generator(model, **SIZES)
    assert not generator.start_report.warmed_up
    assert "RuntimeError: no such kernel" in generator.start_report.reason
    assert "goes on without its warm-up" in caplog.text
    assert generator.pool.num_free == generator.pool.num_usable
    assert tokens(generator) == tokens(Generator(model, **SIZES, graphs=False))


@pytest.mark.parametrize(
    ("options", "phases", "reason"),
    [
        ({}, ["model"], "automatic: on a CPU next to nothing is compiled"),
        ({"warm_up": True}, ["model", "warm-up"], "warm_up=True was given"),
        (
            {"capture_ahead": True, "prefill_buckets": [16], "warm_up": False},
            ["model", "decode graphs", "prefill graphs"],
            "warm_up=False was given",
        ),
    ],
)
def test_the_report_says_what_was_done(
    model: Any, options: dict[str, Any], phases: list[str], reason: str
) -> None:
    report = Generator(model, **SIZES, **options).start_report
    assert [phase.name for phase in report.phases] == phases
    assert report.reason == reason
    assert report.warmed_up == options.get("warm_up", False)
    assert all(phase.count > 0 for phase in report.phases[1:])
    assert report.seconds == sum(phase.seconds for phase in report.phases) > 0
    lines = str(report).splitlines()
    assert [line.split("  ")[0] for line in lines[1:-2]] == phases
    assert lines[-1] == f"warm-up: {reason}"


@pytest.mark.parametrize(
    ("on_gpu", "ahead", "warm"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_it_is_automatic_on_a_gpu(on_gpu: bool, ahead: bool, warm: bool) -> None:
    assert decisions.decide_warm_up("auto", on_gpu, ahead)[0] is warm
    assert decisions.decide_warm_up(True, on_gpu, ahead) == (True, "warm_up=True was given")
    assert decisions.decide_warm_up(False, on_gpu, ahead) == (False, "warm_up=False was given")


def test_nothing_else_is_taken(model: Any) -> None:
    with pytest.raises(ArgumentError, match="warm_up"):
        Generator(model, **SIZES, warm_up="always")


def test_progress_counts_each_part(model: Any) -> None:
    seen: list[tuple[int, int, str]] = []
    Generator(model, **SIZES, warm_up=True, progress=lambda *now: seen.append(now))
    assert [done for done, _, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total, _ in seen} == {len(seen)}
