"""Events of launches, and memory of rings that are gone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchpaged.engine.device import token_rings


def test_no_ring_is_freed_that_was_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer may come while the list is emptied: what it left is waited for, or stays."""
    waited: list[torch.device] = []
    first, second = ((torch.device("cuda", index), torch.zeros(1)) for index in range(2))

    class Retired(list[Any]):
        def late(self, taken: Any) -> Any:
            if second not in self and taken not in (second, [second]):
                self.append(second)
            return taken

        def __getitem__(self, at: Any) -> Any:
            return self.late(super().__getitem__(at))

        def pop(self, *at: Any) -> Any:
            return self.late(super().pop(*at))

    retired = Retired([first])
    monkeypatch.setattr(token_rings, "_retired", retired)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    token_rings._free_retired()
    assert first[0] in waited and (second[0] in waited or second in retired)


@pytest.mark.parametrize("current", [0, 1])
def test_an_event_stands_behind_its_launch_whichever_device_is_current(
    monkeypatch: pytest.MonkeyPatch, current: int
) -> None:
    """Else another device's stream is waited for, and tokens are read that are not there."""
    recorded: list[str] = []

    def stream(device: Any = None) -> str:
        return f"stream of {torch.device('cuda', current) if device is None else device}"

    event: Any = SimpleNamespace(record=lambda given=None: recorded.append(given or stream()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    ring = token_rings.LaunchRing(2, 1, 1, "cpu")
    launches: Any = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(ring, "launches", launches)
    monkeypatch.setattr(ring, "_events", [event] * 2)
    ring.count()
    ring.take()
    assert recorded == ["stream of cuda:1"]
