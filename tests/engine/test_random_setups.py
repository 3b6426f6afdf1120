"""A few of the random set-ups of `random_setups`, and that they would notice a wrong token."""

from typing import Any

import pytest
import random_setups

from torchpaged import BlockPool, TorchpagedError


@pytest.mark.parametrize("seed", range(6))
def test_set_up(seed: int) -> None:
    setup = random_setups.SetUp(seed)
    assert setup.run() >= 0


def test_wrong_tokens_and_lost_blocks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(family: str, prompt: Any, sampling: Any) -> list[int]:
        return [1] * sampling.max_new_tokens

    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(random_setups, "alone", wrong)
        random_setups.SetUp(0).run()
    free, setup = BlockPool.free, random_setups.SetUp(0)
    alone = random_setups._alone(setup.family).pool  # it would wait for its blocks without end
    monkeypatch.setattr(BlockPool, "free", lambda pool, blocks: free(pool, blocks[pool is not alone :]))
    with pytest.raises((AssertionError, TorchpagedError), match="were lost|one more|requested"):
        setup.run()
