"""Which requests make steps raise, by `FaultBisection` over requests that only count: the faulty ones are
found, no others are, and retries come to an end."""

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from torchpaged.engine.fault_bisection import PROBES, RETRIES, FaultBisection, free_locals


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Thousands of warnings, each with a traceback."""
    caplog.set_level(logging.ERROR, "torchpaged.engine")
    yield


@dataclass(eq=False)
class Request:
    """Gets ``length`` tokens."""

    request_id: int
    length: int = 1000
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    log: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def step(self) -> None:
        self.log.append(0)
        self.tokens.append(0)
        if len(self.log) == self.length:
            self.finish_reason = "length"


#: Whether a step of a group raises, the how many-th it is.
Fault = Callable[[list[Request], int], bool]


def bisect(
    candidates: list[Request], fault: Fault, others: list[Request] | None = None
) -> tuple[FaultBisection, list[list[Request]]]:
    """All retries behind a step, number 0, that raised; their groups."""
    requests: Any = {one.request_id: one for one in [*candidates, *(others or [])]}
    bisection = FaultBisection(candidates, requests, 3, RuntimeError("first"))  # type: ignore[arg-type]
    groups: list[list[Request]] = []
    for number in itertools.count(1):
        group: Any = bisection.group
        if group is None:
            return bisection, groups
        error = RuntimeError(str(number)) if fault(group, number) else None
        if error is None:
            for one in group:
                if one.finish_reason is None:
                    one.step()
        if bisection.stepped(error):
            groups.append(group)
        assert number < 20_000, "no end"
    raise AssertionError


def requests(count: int, length: int = 1000) -> list[Request]:
    return [Request(number, length) for number in range(count)]


def found(bisection: FaultBisection) -> set[int]:
    return {sequence.request_id for sequence, _ in bisection.faulty}


@pytest.mark.parametrize("length", [1, 2, 1000])
def test_requests_that_always_raise_are_found_and_no_others(length: int) -> None:
    """Every set of requests among five, whatever length they have left."""
    for which in itertools.chain.from_iterable(itertools.combinations(range(5), n) for n in range(6)):
        faulty = set(which)
        fault: Fault = lambda group, _: any(one.request_id in faulty for one in group)  # noqa: B023, E731
        bisection, groups = bisect(requests(5, length), fault)
        assert bisection.is_of_engine is (len(faulty) == 5), faulty
        assert found(bisection) == (set() if len(faulty) == 5 else faulty)
        assert bisection.limit is None
        assert len(groups) <= 2 * 5 + PROBES * (len(faulty) + 1)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("length", [1, 4, 1000])
def test_an_error_that_comes_for_a_while_ends_no_request(count: int, length: int) -> None:
    """Wherever it begins and ends, and also beside a request that always raises."""
    for start, end in itertools.combinations(range(1, 40), 2):
        if length < 1000 and end - start >= PROBES:
            continue  # who passed may have ended
        for faulty in (None, 0, count - 1):

            def fault(group: list[Request], number: int) -> bool:
                about = any(one.request_id == faulty for one in group)  # noqa: B023
                return about or start <= number < end  # noqa: B023

            bisection, groups = bisect(requests(count, length), fault)
            assert found(bisection) <= {faulty}, (start, end, faulty)
            assert len(groups) <= 2 * count + PROBES * (count + 1)


@pytest.mark.parametrize("period", range(2, 12))
def test_an_error_at_every_few_steps_ends_no_request(period: int) -> None:
    """Whatever the count of steps is then."""
    for count, phase in itertools.product((2, 3, 6), range(period)):
        bisection, _ = bisect(requests(count), lambda _, number: number % period == phase)  # noqa: B023
        assert not bisection.faulty, (count, phase)


def test_other_requests_show_that_the_engine_works() -> None:
    """A request alone in its step: it is told from the engine by those that wait."""
    about: Fault = lambda group, _: any(one.request_id == 0 for one in group)  # noqa: E731
    bisection, _ = bisect(requests(1), about)
    assert bisection.is_of_engine
    everyone = requests(4)
    bisection, groups = bisect(everyone[:1], about, everyone[1:])
    assert not bisection.is_of_engine
    assert found(bisection) == {0}
    assert [[one.request_id for one in group] for group in groups] == [[0], [1], *[[0]] * RETRIES]
    first, second = (lambda group, _: bool({0, 1} & {one.request_id for one in group}), {0})
    bisection, groups = bisect(everyone[:1], first, everyone[1:])
    assert found(bisection) == second


def test_who_comes_while_another_is_probed_is_probed_too() -> None:
    """That one raises as well: the one that came would end with an error of others, untried."""
    first, probe, late = everyone = requests(3)
    waiting: Any = {one.request_id: one for one in (first, probe)}
    bisection: Any = FaultBisection([first], waiting, 3, RuntimeError("first"))  # type: ignore[list-item]
    while (group := bisection.group) is not None:
        if group == [probe]:
            waiting[late.request_id] = late
        if group == [late]:
            late.step()
        bisection.stepped(None if group == [late] else RuntimeError("again"))
    assert not bisection.is_of_engine
    assert found(bisection) == {everyone[0].request_id}


def test_an_error_of_the_engine_is_known_by_a_few_retries() -> None:
    for count in (1, 2, 5, 256):
        bisection, groups = bisect(requests(count), lambda *_: True, requests(count)[1:])
        assert bisection.is_of_engine
        assert not bisection.faulty
        assert len(groups) <= 2 * PROBES + math.log2(count) + 1, count


def test_few_retries_find_few_among_many() -> None:
    draw = random.Random(0)
    for faults in (1, 2, 7):
        everyone = requests(256)
        faulty = set(draw.sample(range(256), faults))
        bisection, groups = bisect(everyone, lambda group, _: any(r.request_id in faulty for r in group))  # noqa: B023
        assert found(bisection) == faulty
        assert len(groups) <= faults * (2 * 8 + RETRIES) + 2


def test_groups_that_are_too_large_make_steps_smaller() -> None:
    """Until it passes; no request is faulty."""
    for count, most in itertools.product((2, 3, 8, 100), (1, 2, 5)):
        limit, rounds = count, 0
        while limit > most:
            bisection, _ = bisect(requests(limit), lambda group, _: len(group) > most)  # noqa: B023
            assert not bisection.faulty
            assert not bisection.is_of_engine
            assert bisection.limit is not None
            assert bisection.limit < limit
            limit, rounds = bisection.limit, rounds + 1
        assert rounds <= math.ceil(math.log2(count))


def test_steps_that_give_nothing_are_no_pass() -> None:
    bisection: Any = FaultBisection(requests(2), {}, 3, RuntimeError())  # type: ignore[arg-type]
    for _ in range(1000):
        if bisection.group is None:
            break
        bisection.stepped(None)
    assert bisection.is_of_engine


def test_requests_that_were_cancelled_are_not_faulty() -> None:
    """A cancel is an event, but no sign of an engine that works."""
    everyone = requests(2)
    bisection: Any = FaultBisection(everyone, {}, 3, RuntimeError())  # type: ignore[arg-type]
    for one in everyone:
        one.log.append(0)
        one.finish_reason = "cancelled"
    bisection.stepped(None)
    assert bisection.group is None
    assert not bisection.is_of_engine
    assert not bisection.faulty


def test_an_error_keeps_no_batch() -> None:
    """Of the frames that it came through, its causes' included."""

    class Batch:
        alive = 0

        def __init__(self) -> None:
            Batch.alive += 1

        def __del__(self) -> None:
            Batch.alive -= 1

    def inner() -> None:
        batch = Batch()
        raise MemoryError(str(batch is None))

    def outer() -> None:
        batch = Batch()
        try:
            inner()
        except MemoryError as error:
            raise RuntimeError(str(batch is None)) from error

    with pytest.raises(RuntimeError) as caught:
        outer()
    assert Batch.alive == 2
    free_locals(caught.value)
    assert Batch.alive == 0
