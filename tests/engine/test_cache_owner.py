"""Two engines over one paged model: in turns they may, at once they would write into each other's blocks."""

from collections.abc import Callable
from typing import Any

import pytest

from torchpaged import TorchpagedError
from torchpaged.backends import Limits
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedModel

PROMPTS, SAMPLING = ([5, 6, 7, 8], [9, 10, 11, 12, 13]), SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture
def engines(make_llama: Callable[..., Any]) -> tuple[Generator, Generator]:
    limits = Limits(max_num_reqs=2, max_num_tokens=16, max_blocks_per_req=8)
    model = PagedModel(
        make_llama(vocab_size=99, hidden_size=32, intermediate_size=48),
        num_blocks=20,
        block_size=4,
        limits=limits,
    )
    options: dict[str, Any] = {
        "max_batch_size": 2,
        "max_seq_len": 32,
        "prefill_chunk_size": 16,
        "compile": False,
    }
    return Generator(model, **options), Generator(model, **options, graphs=False)


def test_in_turns(engines: tuple[Generator, Generator]) -> None:
    first, second = engines
    want = [output.token_ids for output in first.generate(PROMPTS, SAMPLING)]
    for generator in (second, first, second):
        assert [output.token_ids for output in generator.generate(PROMPTS, SAMPLING)] == want


def test_at_once(engines: tuple[Generator, Generator]) -> None:
    """The one that came second is refused; the other goes on as if nothing were."""
    first, second = engines
    want = [output.token_ids for output in first.generate(PROMPTS, SAMPLING)]
    first.submit(PROMPTS[0], SAMPLING)
    first.step()
    for call in (lambda: second.submit(PROMPTS[1]), lambda: second.generate(PROMPTS, SAMPLING)):
        with pytest.raises(TorchpagedError, match="another Generator runs requests over the same PagedModel"):
            call()
    assert not second.has_unfinished
    assert [event.token_id for event in first.stream()] == want[0][1:]
    assert second.generate(PROMPTS[1:], SAMPLING)[0].token_ids == want[1]


def test_made_while_another_ran(engines: tuple[Generator, Generator]) -> None:
    """Its books are new, so what the other one began is lost; both may go on afterwards."""
    first, _ = engines
    number = first.submit(PROMPTS[0], SAMPLING)
    first.step()
    third = Generator(first.model, max_batch_size=2, max_seq_len=32, prefill_chunk_size=16, compile=False)
    with pytest.raises(TorchpagedError, match="was made while this one's ran"):
        first.step()
    want = third.generate(PROMPTS, SAMPLING)
    first.cancel(number)
    assert [o.token_ids for o in first.generate(PROMPTS, SAMPLING)] == [o.token_ids for o in want]
