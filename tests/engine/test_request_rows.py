"""DecodeRows, CopiedTokens and the runner over them, with a model that is plain arithmetic."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torchpaged import ArgumentError, AttentionMetadata
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.errors import TorchpagedError
from torchpaged.engine.device import CopiedTokens, DecodeRows, RingFullError, RowState, WholeStepRunner
from torchpaged.graphs import TapeCapture
from torchpaged.graphs.capture import EagerCapture

VOCAB, BLOCK, REFERENCE = 70, 4, BACKEND_OPS["reference"]
NOT_PER_ROW = ("query_start_loc", "tokens_out", "ring", "launches")


def make_rows(steps: int = 1) -> DecodeRows:
    return DecodeRows(6, 8, BLOCK, VOCAB, "cpu", REFERENCE, steps)


def successor(input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Logits whose greatest is ``(7 * token + 3 * position + 1) % VOCAB``."""
    best = (7 * input_ids + 3 * metadata.positions + 1) % VOCAB
    return -(torch.arange(VOCAB)[None] - best[:, None]).abs().float()


def state(token: int = 5, seq_len: int = 6, remaining: int = 9, **options: Any) -> RowState:
    return RowState(token, seq_len, [3, 9, 4, 5, 6, 7], seed=11, counter=0, remaining=remaining, **options)


def expected(token: int, seq_len: int, count: int) -> list[int]:
    tokens = []
    for position in range(seq_len - 1, seq_len - 1 + count):
        token = (7 * token + 3 * position + 1) % VOCAB
        tokens.append(token)
    return tokens


def fields(rows: DecodeRows) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in rows.tensors().items()}


@pytest.mark.parametrize("places", [[0, 1], [2, 3], [3, 1], [0, 4]], ids=str)
def test_rows_side_by_side_are_written_as_others(places: list[int]) -> None:
    """In one go; with what a penalty has seen, and with words of odd number."""
    states = [state(7, seen=(1, 69), repetition_penalty=2.0), state(8, 7, temperature=0.5)]
    rows, apart = make_rows(), make_rows()
    rows.write(dict(zip(places, states, strict=True)))
    for place, one in zip(places, states, strict=True):
        apart.write({place: one})
    assert all(torch.equal(tensor, apart.tensors()[name]) for name, tensor in rows.tensors().items())
    assert rows.input_ids[places].tolist() == [7, 8]


def test_a_row_that_a_graph_begins_is_one_that_is_written() -> None:
    """And what is refused there is not sent."""
    begun, written, logits = make_rows(), make_rows(), torch.randn(1, VOCAB)
    one = state(7, temperature=0.8, top_p=0.9, stop_token_ids=[3])
    begun.send_first(one)
    written.write({0: one})
    with pytest.raises(ArgumentError, match="blocks"):
        begun.send_first(RowState(5, 30, [1], seed=1, counter=0, remaining=2))
    assert torch.equal(begun.begin_first(logits), written.finish_rows(logits, [0]))
    assert all(torch.equal(tensor, written.tensors()[name]) for name, tensor in begun.tensors().items())


def test_padding_leaves_rows_as_they_were() -> None:
    rows = make_rows()
    rows.write({0: state(7), 2: state(9)})
    before = fields(rows)
    with rows.padding(1):
        rows.send_first(RowState(3, 2, [8], seed=1, counter=0, remaining=1, stop_token_ids=[4]))
        rows.begin_first(torch.randn(1, VOCAB))
    assert all(torch.equal(tensor, before[name]) for name, tensor in rows.tensors().items())


def test_write_fills_every_field_of_its_row_only() -> None:
    rows = make_rows()
    before = fields(rows)
    sampling: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
    }
    rows.write({4: state(**sampling, stop_token_ids=[8, 2**40], seen=[0, 31, 32, 69])})
    after = fields(rows)
    want = {
        "input_ids": 5,
        "positions": 5,
        "slot_mapping": 9 * BLOCK + 1,
        "seeds": 11,
        "counters": 0,
        "seq_lens": 6,
        "remaining": 9,
        "top_k": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
    }
    assert {name: after[name][4].item() for name in want} == want
    assert after["stop_token_ids"][4].tolist() == [8, 2**40, *[-1] * 14]
    assert after["block_table"][4].tolist() == [3, 9, 4, 5, 6, 7, 0, 0]
    assert after["seen"][4].tolist() == [1 - 2**31, 1, 1 << 5]
    for name, tensor in before.items():
        if name not in NOT_PER_ROW:
            others = [0, 1, 2, 3, 5]
            assert torch.equal(after[name][others], tensor[others]), name
    rows.write({4: RowState(1, 1, [2], seed=2**64 - 1, counter=3, remaining=1)})
    assert rows.seeds[4] == -1 and rows.seen[4].tolist() == [1 - 2**31, 1, 1 << 5]  # bits stay without `seen`
    assert rows.query_start_loc.tolist() == list(range(7))


@pytest.mark.parametrize("capture", [EagerCapture(), TapeCapture()], ids=["eager", "tape"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_launches_follow_the_rows(capture: Any, steps: int) -> None:
    """Rows of different remaining lengths, an idle row between them, blocks appended on the way."""
    rows = make_rows(steps)
    runner = WholeStepRunner(successor, rows, buckets=[2, 6], compile=False, capture=capture)
    runner.capture()
    rows.write(
        {
            0: state(5, 6, remaining=9),
            2: RowState(9, 1, [2], seed=1, counter=0, remaining=3),
            3: state(20, 7, remaining=100),
        }
    )
    rows.append_blocks([(2, 1, 8)])
    got: list[list[int]] = [[] for _ in range(6)]
    for turn in range(-(-10 // steps)):
        if turn % 2:
            runner.launch(4)
            tokens = rows.tokens_out[:, :4]
        else:
            tokens = runner.replay(4)
        assert tokens.shape == (steps, 4)
        for row in range(4):
            got[row] += [t for t in tokens[:, row].tolist() if t >= 0]
    count = -(-10 // steps) * steps
    assert got[:4] == [expected(5, 6, 9), [], expected(9, 1, 3), expected(20, 7, count)]
    assert rows.seq_lens.tolist() == [0, 0, 0, 7 + count, 0, 0]
    assert rows.slot_mapping[[0, 1, 2]].tolist() == [-1] * 3
    position = 6 + count
    assert rows.slot_mapping[3] == [3, 9, 4, 5, 6, 7][position // BLOCK] * BLOCK + position % BLOCK
    eager = runner.launch_eager(4)
    assert eager[0, 3] == expected(20, 7, count + 1)[-1]
    assert eager[0, 0] == -1


def test_a_stop_token_ends_a_row_on_the_device() -> None:
    rows = make_rows(8)
    tokens = expected(5, 6, 8)
    rows.write({0: state(stop_token_ids=[tokens[2]])})
    runner = WholeStepRunner(successor, rows, compile=False)
    runner.capture_for(1)
    assert runner.replay(1)[:, 0].tolist() == [*tokens[:3], *[-1] * 5]


def test_a_late_capture_leaves_live_rows_alone() -> None:
    rows = make_rows(2)
    runner = WholeStepRunner(successor, rows, buckets=[2, 6], compile=False, capture=TapeCapture())
    runner.capture_for(1)
    rows.write({0: state(5), 1: state(6)})
    runner.replay(2)
    before = fields(rows)
    runner.capture_for(6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fields(rows).items())


def test_move_and_clear() -> None:
    rows = make_rows()
    rows.write(
        {
            1: state(5, temperature=0.5, seen=[3], stop_token_ids=[1]),
            4: state(6, 5, temperature=0.25, seen=[40], stop_token_ids=[2]),
            5: state(7),
        }
    )
    before = fields(rows)
    rows.move([(4, 0), (5, 2)])
    after = fields(rows)
    per_row = [name for name in before if name not in NOT_PER_ROW]
    for name in per_row:
        assert torch.equal(after[name][[0, 2, 1]], before[name][[4, 5, 1]]), name
    assert rows.seq_lens[[3, 4, 5]].tolist() == [0] * 3
    assert rows.slot_mapping[[3, 4, 5]].tolist() == [-1] * 3
    rows.clear([0, 1])
    assert rows.seq_lens.tolist() == [0, 0, 6, 0, 0, 0]
    assert rows.slot_mapping[:2].tolist() == [-1, -1]


def test_slots_of_states_are_looked_up_where_rows_change() -> None:
    """And not in a step, which has a slice of what stays in place."""
    looked_up: list[Tensor] = []

    def find(block_table: Tensor) -> Tensor:
        looked_up.append(block_table)
        return 10 * block_table[:, 0]

    rows = DecodeRows(6, 8, BLOCK, VOCAB, "cpu", REFERENCE, find_slots=find)
    slots = rows.view(4)[1].state_slots
    assert slots is not None and slots.tolist() == [0] * 4
    rows.write({1: RowState(5, 6, [3, 9], seed=1, counter=0, remaining=9), 5: state()})
    assert slots.tolist() == [0, 30, 0, 0]
    rows.move([(1, 0), (5, 1)])
    assert slots.tolist()[:2] == [30, 30] and rows.view(2)[1].state_slots.tolist() == [30, 30]
    assert len(looked_up) == 2
    assert make_rows().view(4)[1].state_slots is None


def test_finish_rows_is_a_step_of_chosen_rows() -> None:
    rows = make_rows()
    rows.write({3: state(5), 1: state(9, 4, remaining=1), 0: state(11)})
    logits = successor(
        rows.input_ids[[3, 1]],
        AttentionMetadata(
            rows.block_table,
            rows.seq_lens,
            rows.query_start_loc,
            rows.slot_mapping,
            rows.positions[[3, 1]],
            1,
        ),
    )
    tokens = rows.finish_rows(logits, [3, 1])
    assert tokens.tolist() == [*expected(5, 6, 1), *expected(9, 4, 1)]
    assert rows.seq_lens.tolist() == [6, 0, 0, 7, 0, 0]
    assert rows.input_ids[3] == tokens[0]
    assert rows.counters.tolist() == [0, 1, 0, 1, 0, 0]


@pytest.mark.parametrize("count", [1, 3])
def test_finish_rows_of_the_first_rows_is_that_of_any_others(count: int) -> None:
    """The first ones are finished in place, others in copies of theirs."""
    states = [
        state(5 + n, 4 + n, remaining=1 + n, temperature=0.5 * n, repetition_penalty=1.5, seen=[n, 40])
        for n in range(count)
    ]
    tokens, after = [], []
    for chosen in (list(range(count)), [5, 3, 2][:count]):
        rows = make_rows()
        rows.write(dict(zip(chosen, states, strict=True)) | {4: state(11)})
        before = fields(rows)
        logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(7))
        tokens.append(rows.finish_rows(logits, chosen))
        found = {name: tensor for name, tensor in fields(rows).items() if name not in NOT_PER_ROW}
        after.append({name: tensor[chosen] for name, tensor in found.items()})
        assert all(torch.equal(tensor[4], before[name][4]) for name, tensor in found.items())
    assert torch.equal(*tokens)
    assert all(torch.equal(tensor, after[1][name]) for name, tensor in after[0].items())
    assert after[0]["counters"].tolist() == [1] * count


def test_refusals() -> None:
    rows = make_rows()
    before = fields(rows)
    for bad in (
        {6: state()},
        {-1: state()},
        {0: state(seq_len=0)},
        {0: state(seq_len=25)},
        {0: RowState(1, 1, list(range(9)), 0, 0, 1)},
        {0: RowState(1, 1, [0], 0, 0, 1)},
        {0: state(repetition_penalty=1.5)},
    ):
        with pytest.raises(ArgumentError, match="states"):
            rows.write({1: state(), **bad})
    assert all(torch.equal(tensor, before[name]) for name, tensor in fields(rows).items())
    # the first would land in the next row's table
    for place in ((0, rows.max_blocks_per_req, 3), (6, 0, 3), (-1, 0, 3), (0, 0, 0)):
        with pytest.raises(ArgumentError, match="blocks"):
            rows.append_blocks([(1, 0, 5), place])
    assert all(torch.equal(tensor, before[name]) for name, tensor in fields(rows).items())
    with pytest.raises(ArgumentError, match="steps_per_launch"):
        make_rows(0)


def test_copied_tokens_are_those_of_the_moment() -> None:
    source = torch.tensor([1, 2, -1])
    first = CopiedTokens(source)
    source.zero_()
    assert CopiedTokens(source).read() == [0, 0, 0]
    assert first.read() == [1, 2, -1]


@pytest.mark.parametrize("capture", [EagerCapture(), TapeCapture()], ids=["eager", "tape"])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_rows_ring_holds_launches_of_any_bucket_until_they_are_read(capture: Any, steps: int) -> None:
    """Read two launches late, over twice the ring's depth; buckets change, one is captured with tokens
    unread, launches go unread."""
    rows = make_rows(steps)
    runner = WholeStepRunner(successor, rows, buckets=[2, 4, 6], compile=False, capture=capture)
    runner.capture_for(2)
    rows.write({0: state(5, 6, remaining=99), 1: state(9, 4, remaining=2 * steps)})
    first, second = expected(5, 6, 9 * steps), [*expected(9, 4, 2 * steps), *[-1] * 7 * steps]
    taken: list[int] = []
    for turn, num_rows in enumerate((2, 1, 3, 2, 6, 2, 5, 2, 3)):
        runner.launch(num_rows)  # captures two buckets on the way
        if turn != 4:
            taken.append(rows.ring.take())
        if len(taken) == 3 or turn == 8:
            for launch in taken[:1] if turn < 8 else taken:
                tokens = rows.ring.read(launch, 2)
                own = slice(launch * steps, (launch + 1) * steps)
                assert [list(column) for column in zip(*tokens, strict=True)] == [first[own], second[own]], (
                    launch
                )
            taken = taken[1:]


def test_the_rows_ring_refuses() -> None:
    rows = make_rows()
    runner = WholeStepRunner(successor, rows, compile=False)
    runner.capture()
    with pytest.raises(ArgumentError, match="take"):
        rows.ring.take()
    rows.write({0: state(5, 6, remaining=99)})
    launches = []
    for _ in range(4):
        runner.launch(1)
        launches.append(rows.ring.take())
    with pytest.raises(ArgumentError, match="take"):
        rows.ring.take()
    before = fields(rows)
    for launch in (lambda: runner.launch(1), lambda: runner.replay(1), lambda: runner.launch_eager(1)):
        with pytest.raises(RingFullError, match="launch 0 was taken and not read"):
            launch()
    assert all(torch.equal(tensor, before[name]) for name, tensor in fields(rows).items())
    assert rows.ring.read(launches[0], 1) == [expected(5, 6, 1)]
    with pytest.raises(ArgumentError, match="launch"):
        rows.ring.read(launches[0], 1)
    runner.launch(1)  # into the slot that was read
    assert [rows.ring.read(n, 1)[0][0] for n in (*launches[1:], rows.ring.take())] == expected(5, 6, 5)[1:]
    rows.finish_step(torch.zeros(1, VOCAB), 1, step=0)  # by hand
    rows.ring.count()
    assert rows.ring.read(rows.ring.take(), 1) == [[0]]
    rows.ring.count()  # of nothing: the slot still holds what was read long ago
    with pytest.raises(TorchpagedError, match=r"slot of launch 6 holds launch 2"):
        rows.ring.read(rows.ring.take(), 1)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_fields_of_chosen_rows_begin_at_multiples_of_16_bytes(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles anew for other alignments: in the middle of serving, when as many prompts end."""
    rows, seen = make_rows(), []
    ops = SimpleNamespace(finish_step=lambda *tensors, **_: seen.extend(tensors))
    monkeypatch.setattr(rows, "_ops", ops)
    rows.write({row: state() for row in range(1, count + 1)})
    rows.finish_rows(torch.zeros(count, VOCAB), list(range(1, count + 1)))
    assert len(seen) > 10
    assert all(tensor.data_ptr() % 16 == 0 for tensor in seen)
    assert {tensor.shape[0] for tensor in seen} == {count}
