"""Errors of several parts: shown whole by a trace, by copies and by pickles."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from torchpaged import ArgumentError
from torchpaged.custom_ops.checks import check_dtype
from torchpaged.custom_ops.errors import BlockPoolExhaustedError, RequestError, TorchpagedError

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
