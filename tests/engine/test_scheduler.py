"""What a step's schedule rests on: room for the next tokens, which is remembered, and whole chunks."""

import random
from typing import Any

import engine_requests
import pytest

from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.block_demand import Asked, BlockDemand
from torchpaged.engine.scheduler import Schedule, Scheduler
from torchpaged.engine.sequence import Sequence

SIZES = {**engine_requests.SIZES, "max_batch_size": 6}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_launch": 3},
        {"mixed_steps": False},
        {"num_blocks": 30, "lookahead": 8},
        {"num_blocks": 30, "lookahead": 8, "steps_per_launch": 2},
        {"lookahead": 16, "prefix_cache": False},
    ],
    ids=str,
)
def test_room_that_is_remembered_is_there(
    options: dict[str, Any], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is that of counting tokens and blocks, also behind packed batches, preemptions, and blocks
    that were given ahead of need and taken back."""
    seen, look, schedule = {"decodes": 0, "counted": 0}, BlockDemand.lacks, Scheduler.schedule

    def counted(self: BlockDemand, sequence: Sequence) -> int:
        found = look(self, sequence)
        needs = min(len(sequence.tokens) + sequence.in_flight + self.ahead, sequence.max_len - 1)
        assert found == -(-needs // self.block_size) - len(sequence.blocks)
        seen["counted"] += sequence.row is not None
        return found

    def checked(self: Scheduler, asked: Asked | None = None) -> Schedule:
        step = schedule(self, asked)
        for sequence in step.decodes:
            needs = len(sequence.tokens) + sequence.in_flight + self._demand.ahead
            assert min(needs, sequence.max_len - 1) <= len(sequence.blocks) * self.block_size
        seen["decodes"] += len(step.decodes)
        return step

    monkeypatch.setattr(BlockDemand, "lacks", counted)
    monkeypatch.setattr(Scheduler, "schedule", checked)
    rng = random.Random(3)
    generator = Generator(model, **{**SIZES, **options})
    for _ in range(24):
        prompt = [rng.randrange(8, 99) for _ in range(rng.choice([1, 3, 9, 30]))]
        generator.submit(prompt, SamplingParams(rng.randint(1, 40), ignore_eos=True))
        for _ in range(rng.randint(0, 4)):
            generator.step()
    while generator.has_unfinished:
        generator.step()
    assert min(seen.values()) > 50, seen
    assert generator.pool.num_free == generator.pool.num_usable


def test_a_request_that_has_its_last_token_on_the_way_leaves_chunks_whole(model: Any) -> None:
    """Prompts of a chunk each, and one token of output: no chunk is cut by a row that wants nothing more."""
    generator = Generator(model, **SIZES)
    rng = random.Random(5)
    prompts = [[rng.randrange(8, 99) for _ in range(16)] for _ in range(5)]
    generator.generate(prompts, SamplingParams(1, ignore_eos=True))
    assert (generator.stats.passes, generator.stats.mixed_steps) == (5, 0)
