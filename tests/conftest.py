"""Shared fixtures. Run with OMP_NUM_THREADS=1 on small machines: two threads under load are slower
than one."""

import functools
import gc
import importlib
import math
import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from command import python

from torchpaged.custom_ops import native_status

#: Of a case, for ``but_every``.
PLACE = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _matches(item: pytest.Item, pattern: str) -> bool:
    case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    return bool(re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), case, re.DOTALL))


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return names.replace(",", " ").split() if isinstance(names, str) else list(names)


def _places(cases: list[pytest.Function]) -> Iterator[int]:
    """Of each case of one function the sum of its parameters' places, each among its values. What one
    `parametrize` gives to several names is one parameter, unless it is a matrix, as of `kernels.over`.
    (``callspec.indices`` counts cases, in pytest 9, once per name: their sum tells nothing of a matrix.)"""
    together = [_names(mark) for mark in cases[0].iter_markers("parametrize")]
    alone = cases[0].callspec.params.keys() - set(chain(*together))
    axes: list[Sequence[Hashable]] = []
    for names in [*together, *([name] for name in alone)]:
        rows = [tuple(id(case.callspec.params[name]) for name in names) for case in cases]
        columns = list(zip(*rows, strict=True))
        is_matrix = len(set(rows)) == math.prod(len(set(column)) for column in columns)
        axes += columns if is_matrix else [rows]
    place = [{value: n for n, value in enumerate(dict.fromkeys(axis))} for axis in axes]
    return (sum(of[value] for of, value in zip(place, case, strict=True)) for case in zip(*axes, strict=True))


def find_places(items: list[pytest.Item]) -> None:
    """For ``but_every``, of the cases of each function that has it."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for of_function in cases.values():
        if any("but_every" in mark.kwargs for mark in of_function[0].iter_markers("slow_cases")):
            for item, place in zip(of_function, _places(of_function), strict=True):
                item.stash[PLACE] = place


def is_slow(item: pytest.Item) -> bool:
    """Whether a default run leaves this test out: it is marked ``slow``, or ``slow_cases`` with its
    parameters (``*`` stands for anything; no pattern: all cases) that are not among ``but``, nor each
    ``but_every``-th along every parameter (in a matrix each value of each parameter so stays; `find_places`
    came before)."""
    return "slow" in item.keywords or any(
        (not mark.args or any(_matches(item, one) for one in mark.args))
        and not any(_matches(item, one) for one in mark.kwargs.get("but", ()))
        and not ("but_every" in mark.kwargs and item.stash.get(PLACE, 0) % mark.kwargs["but_every"] == 0)
        for mark in item.iter_markers("slow_cases")
    )


def refuse_patterns_without_cases(items: list[pytest.Item]) -> None:
    """Of whole functions.

    Raises:
        pytest.UsageError: ``slow_cases`` names a case that its function does not have.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, of_function in cases.items():
        for mark in of_function[0].iter_markers("slow_cases"):
            for pattern in (*mark.args, *mark.kwargs.get("but", ())):
                if pattern.startswith("triton-"):  # such cases may exist in Triton's interpreter only
                    continue
                if not any(_matches(item, pattern) for item in of_function):
                    raise pytest.UsageError(f"{name} has no case {pattern!r}, which its slow_cases names")


def mark_quick(items: list[pytest.Item]) -> None:
    """``-m "not slow or quick"``: what a default run takes, and the first case of each test that it leaves
    out as a whole."""
    in_default_run = {item.nodeid.split("[")[0] for item in items if "slow" not in item.keywords}
    for item in items:
        name = item.nodeid.split("[")[0]
        if not {"gpu", "long"} & set(item.keywords) and name not in in_default_run:
            item.add_marker("quick")
            in_default_run.add(name)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped without a GPU; slow ones unless asked for. The longest come first."""
    chosen = config.getoption("-m") or ""
    if config.args == config.getini("testpaths"):  # else cases may be chosen by name
        refuse_patterns_without_cases(items)
    find_places(items)
    for item in items:
        if is_slow(item):
            item.add_marker("slow")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))
        if "slow" in item.keywords and "slow" not in chosen:
            item.add_marker(pytest.mark.skip(reason="slow; run with -m slow"))
    mark_quick(items)
    # processes of their own, minutes long: begun last they would be waited for
    long = ("in_the_interpreter", "under_another_triton")
    items.sort(key=lambda item: not any(words in item.name for words in long))


@pytest.fixture(autouse=True, scope="module")
def _what_lives_on() -> None:
    """Imports, and thousands of collected tests, are taken out of the collector's sight: engines call it, and
    in the middle of a long run a call took half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    # where CUDA is not begun torch.manual_seed keeps a traceback for it: half a millisecond, 10,000 times
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the threads of a test's ops."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compile`` traces and generates no code, for which a C++ compiler takes up to half a minute: for
    tests whose claim is about graphs."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.fixture(scope="session")
def native() -> None:
    """Skip where the native CPU kernels are absent; fail where they must be
    there (TORCHPAGED_REQUIRE_NATIVE=1)."""
    loaded, reason = native_status()
    if loaded:
        return
    if os.environ.get("TORCHPAGED_REQUIRE_NATIVE") == "1":
        pytest.fail(f"TORCHPAGED_REQUIRE_NATIVE=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Query tokens of each call, on a CPU, that read prefixes once."""
    seen: list[int] = []
    prefixes_module = importlib.import_module("torchpaged.prefixes.attention")
    two = prefixes_module._two_passes

    def counted(call: Any, *rest: Any) -> Any:
        seen.append(call.q.shape[0])
        return two(call, *rest)

    monkeypatch.setattr(prefixes_module, "_two_passes", counted)
    return seen


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Any]:
    """``make_llama(vocab_size=99, ...)``: a Llama of two layers with random weights, 4 query and 2 kv heads,
    end of text 7; the options are those of its config. Skip without transformers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def make(**options: Any) -> Any:
        torch.manual_seed(0)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        tokens = {"eos_token_id": 7, "pad_token_id": 0, "bos_token_id": 1}
        config = transformers.LlamaConfig(**{"num_hidden_layers": 2, **heads, **tokens, **options})
        return transformers.LlamaForCausalLM(config).eval()

    return make


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct; skip where it can't be had, fail
    with TORCHPAGED_REQUIRE_MODEL=1."""
    required = os.environ.get("TORCHPAGED_REQUIRE_MODEL") == "1"
    try:
        from torchpaged.cli.demo import ensure_smollm2

        return ensure_smollm2(offline=not required, progress=False)
    except Exception as error:
        if required:
            raise
        pytest.skip(
            f"SmolLM2 is not in the cache ({error}); run `torchpaged generate hello` once, or set "
            "TORCHPAGED_REQUIRE_MODEL=1"
        )


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Skip where Triton's interpreter can't run at all: Triton 3.6 asks int() of arrays of one element, which
    NumPy 2.4 refuses."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    import numpy

    probe = Path(__file__).parent / "support/probe_interpreter.py"
    done = python(str(probe), TRITON_INTERPRET="1")
    if done.returncode:
        assert "only 0-dimensional arrays can be converted" in done.stderr, done.stderr
        pytest.skip(
            f"the interpreter of triton {triton.__version__} does not run with numpy {numpy.__version__}"
        )
