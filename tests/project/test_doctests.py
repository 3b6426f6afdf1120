"""Examples in the docstrings of public names: they run on a CPU, and give what is written."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest
import torch

import torchpaged

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
#: With what a reader of the reference has imported.
NAMES = {name: getattr(torchpaged, name) for name in torchpaged.__all__} | {"torch": torch}
NAMES["attention_spec"] = importlib.import_module("torchpaged.backends").attention_spec


def examples() -> list[doctest.DocTest]:
    """Of all public names and their own methods, once each."""
    finder, found = doctest.DocTestFinder(exclude_empty=True), {}
    for page in sorted(REFERENCE.glob("torchpaged*.rst")):
        if page.stem == "torchpaged.hf":
            continue  # needs a model
        module = importlib.import_module(page.stem)
        for name in module.__all__:
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            for test in finder.find(value, name, globs={name: value} | NAMES):
                if test.examples:
                    found[test.name] = test
    return list(found.values())


EXAMPLES = examples()


def test_there_are_examples() -> None:
    names = {test.name.split(".")[0] for test in EXAMPLES}
    assert {"PagedAttention", "PagedKVCache", "BlockPool", "AttentionMetadata", "SamplingParams"} <= names
    assert len(names) >= 13, names


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_an_example_gives_what_is_written(test: doctest.DocTest) -> None:
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert not result.failed, test.name
