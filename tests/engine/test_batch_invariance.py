"""Generator(batch_invariant=True): a request's logits have the same bits, whichever requests run, join or end
with it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchpaged import ArgumentError, BackendUnavailableError
from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedModel

WATCHED = [5 + i * 7 % 90 for i in range(13)]
OTHERS = [[*WATCHED[:9], 3, 4], [8], list(range(3, 40)), WATCHED]
SIX = SamplingParams(max_new_tokens=6, ignore_eos=True)


def logits_of(model: Any, others: list[list[int]], late: list[list[int]], **options: Any) -> list[Tensor]:
    """Of the watched prompt's tokens, step by step; ``late`` join in the middle."""
    generator = Generator(
        model, max_batch_size=4, max_seq_len=64, block_size=4, prefill_chunk_size=8, **options
    )
    seen: list[Tensor] = []
    rows = generator.loop.rows  # type: ignore[union-attr]
    step, prefill = rows.finish_step, rows.finish_rows

    def of_step(logits: Tensor, num_rows: int, index: int) -> None:
        if watched.row is not None and int(rows.seq_lens[watched.row]):
            seen.append(logits[watched.row].clone())
        step(logits, num_rows, index)

    def of_prefill(logits: Tensor, places: Any) -> Tensor:
        if watched.row in places and int(rows.seq_lens[watched.row]):
            seen.append(logits[list(places).index(watched.row)].clone())
        return prefill(logits, places)

    rows.finish_step, rows.finish_rows = of_step, of_prefill  # type: ignore[method-assign]
    first = [generator.submit(prompt, SIX) for prompt in others]
    watched = generator._requests[generator.submit(WATCHED, SIX)]
    for count, _ in enumerate(generator.stream()):
        if count == 3:
            first += [generator.submit(prompt, SIX) for prompt in late]
    assert len(seen) == 6
    assert generator.stats.preemptions == 0
    assert generator.stats.shared_tokens == 0
    return seen


BATCHES = [(OTHERS[:3], []), (OTHERS[1:2], OTHERS[2:]), ([], OTHERS)]


@pytest.mark.parametrize(("others", "late"), BATCHES)
def test_bits_are_independent_of_batch_composition(
    model: Any, others: list[list[int]], late: list[list[int]]
) -> None:
    alone = logits_of(model, [], [], batch_invariant=True)
    got = logits_of(model, others, late, batch_invariant=True)
    assert all(torch.equal(x, y) for x, y in zip(got, alone, strict=True))


def test_without_it_bits_depend_on_the_others(model: Any) -> None:
    """Else the tests above show nothing."""
    options: dict[str, Any] = {"backend": "reference", "share_prefixes": False}
    alone = logits_of(model, [], [], **options)
    differ = [
        not torch.equal(x, y)
        for others, late in BATCHES
        for x, y in zip(logits_of(model, others, late, **options), alone, strict=True)
    ]
    assert any(differ)


def test_its_backend_declares_it(model: Any) -> None:
    generator = Generator(model, max_batch_size=2, max_seq_len=64, batch_invariant=True)
    assert generator.choice.name == "reference" and generator.loop.runner.buckets == [2]  # type: ignore[union-attr]
    assert all(spec.batch_invariant for spec in generator.model.session.specs)
    assert "batch_invariant=True" in generator.cascade_reason
    with pytest.raises(BackendUnavailableError, match="batch_invariant is not declared"):
        Generator(model, max_seq_len=64, batch_invariant=True, backend="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graphs": False}, "batch_invariant: expected graphs: decode steps of one size"),
        ({"buckets": [1, 4]}, r"buckets: expected None or \[4\]"),
        ({"share_prefixes": True}, "share_prefixes: expected 'auto' or False"),
        ({"num_blocks": 16}, "num_blocks: expected at least 17"),
        ({"kv_dtype": "fp8_e4m3"}, "kv_scales: expected scales"),
    ],
    ids=str,
)
def test_what_would_break_it_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Generator(model, max_batch_size=4, max_seq_len=64, batch_invariant=True, **options)


def test_a_paged_model_is_asked(model: Any) -> None:
    with pytest.raises(ArgumentError, match="batch_invariant: expected False with a PagedModel"):
        Generator(PagedModel(model, num_blocks=20), max_batch_size=2, max_seq_len=64, batch_invariant=True)
    paged = PagedModel(model, num_blocks=20, batch_invariant=True)
    generator = Generator(paged, max_batch_size=2, max_seq_len=64, batch_invariant=True)
    assert generator.generate([WATCHED], SIX)[0].finish_reason == "length"
