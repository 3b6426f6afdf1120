"""The decode loop in CUDA graphs: no synchronisation in a thousand steps, tokens of the engine without
graphs, a long soak."""

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu
VOCAB = 499


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(model: Any, **options: Any) -> Any:
    from torchpaged.engine import Generator

    return Generator(
        model,
        **{"max_batch_size": 8, "max_seq_len": 1536, "compile": False, "buckets": [1, 2, 4, 8], **options},
    )


def draw(rng: random.Random, index: int) -> tuple[list[int], Any]:
    from torchpaged.engine import SamplingParams

    prompt = [rng.randrange(8, VOCAB) for _ in range(rng.choice([1, 3, 17, 200]))]
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 40), "ignore_eos": rng.random() < 0.5}
    if index % 2:
        options |= {
            "temperature": 0.9,
            "seed": index,
            "top_k": rng.choice([0, 20]),
            "top_p": rng.choice([1.0, 0.9]),
            "min_p": rng.choice([0.0, 0.02]),
            "repetition_penalty": rng.choice([1.0, 1.2]),
        }
    return prompt, SamplingParams(**options)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_thousand_steps_without_a_synchronisation(model: Any, steps: int) -> None:
    """Decoding, block tables growing, requests admitted, ended and cancelled: nothing of it waits for
    the device."""
    from torchpaged.engine import SamplingParams

    generator = make(model, steps_per_launch=steps, num_blocks=600)
    rng = random.Random(0)
    for index in range(12):  # kernels are compiled before the watch begins
        generator.submit(*draw(rng, index))
    for _ in generator.stream():
        pass
    long = SamplingParams(max_new_tokens=1200, ignore_eos=True)
    with no_synchronisation():
        generator.submit([5, 6, 7], long)
        launches, index, before = 0, 0, generator.stats.decode_tokens
        while launches * steps < 1000:
            if launches % 20 == 0:
                request = generator.submit(*draw(rng, index))
                index += 1
            generator.step()
            launches += 1
            if launches % 100 == 5 and request in generator._requests:
                generator.cancel(request)
    assert generator.stats.decode_tokens - before >= 1000 - 2 * steps
    assert index >= 1000 // steps // 20


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
@pytest.mark.parametrize("buckets", [[8], [1, 2, 3, 4, 5, 6, 7, 8]], ids=["one", "all"])
def test_tokens_equal_the_engine_without_graphs(model: Any, steps: int, buckets: list[int]) -> None:
    rng = random.Random(2)
    requests = [draw(rng, i) for i in range(24)]
    prompts, params = [p for p, _ in requests], [s for _, s in requests]
    want = make(model, graphs=False, buckets=None).generate(prompts, params)
    got = make(model, steps_per_launch=steps, buckets=buckets).generate(prompts, params)
    assert [(o.token_ids, o.finish_reason) for o in got] == [(o.token_ids, o.finish_reason) for o in want]


@pytest.mark.parametrize("steps", [1, 4])
def test_fused_steps_draw_the_tokens_of_the_engine_without_graphs(model: Any, steps: int) -> None:
    """No kernel of a fused step is launched the ordinary way; the counters that the sampler reads early must
    be this step's all the same."""
    from torchpaged.engine import SamplingParams

    rng, fused = random.Random(6), copy.deepcopy(model)
    prompts = [[rng.randrange(8, VOCAB) for _ in range(rng.choice([1, 5, 40]))] for _ in range(9)]
    params = [
        SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=1.0, top_p=0.95, seed=i)
        for i in range(9)
    ]
    want = make(fused, graphs=False, buckets=None, fuse=True).generate(prompts, params)
    for some in ([0], range(9)):  # alone, and more than the rows hold
        got = make(fused, steps_per_launch=steps, fuse=True).generate(
            [prompts[i] for i in some], [params[i] for i in some]
        )
        assert [o.token_ids for o in got] == [want[i].token_ids for i in some]


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_soak_of_ten_thousand_steps(model: Any, share_prefixes: bool) -> None:
    """Random admissions and cancellations over 10,000 steps; every request's tokens are those it
    gets alone. Requests that share blocks find room where others are put back."""
    rng = random.Random(4)
    pool = [draw(rng, i) for i in range(40)]
    alone = make(model, graphs=False, buckets=None)
    want = [alone.generate([prompt], params)[0].token_ids for prompt, params in pool]
    generator = make(model, steps_per_launch=2, num_blocks=60, share_prefixes=share_prefixes)
    asked: dict[int, int] = {}
    seen: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    for step in range(5000):
        if rng.random() < 0.35 and len(asked) - len(ended) < 12:
            choice = rng.randrange(len(pool))
            asked[generator.submit(*pool[choice])] = choice
        if rng.random() < 0.01 and (alive := [r for r in asked if r not in ended]):
            generator.cancel(rng.choice(alive))
        for event in generator.step() if step < 4999 else list(generator.stream()):
            if event.token_id is not None:
                seen.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason:
                ended[event.request_id] = event.finish_reason
    assert ended.keys() == asked.keys()
    assert len(asked) > 200
    assert generator.stats.shared_tokens > 0 if share_prefixes else generator.stats.preemptions > 0
    for request, choice in asked.items():
        got = seen.get(request, [])
        assert got == (want[choice][: len(got)] if ended[request] == "cancelled" else want[choice])
    assert generator.pool.num_free == generator.pool.num_usable


def test_reading_tokens_waits_for_what_is_ahead_of_them() -> None:
    """Tens of milliseconds of matrix products, then the tokens: read at once, they would still be zeros."""
    from torchpaged.engine.device import CopiedTokens

    tokens = torch.zeros(4, dtype=torch.int64, device="cuda")
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90
    for number in (7, 8):
        torch.cuda.synchronize()
        for _ in range(30):
            x = x @ x / 90
        tokens.fill_(number)
        assert CopiedTokens(tokens).read() == [number] * 4


@pytest.mark.parametrize("steps", [1, 3])
def test_tokens_from_inside_a_graph_are_waited_for(steps: int) -> None:
    """Milliseconds of matrix products ahead of each token: read too early, a slot would hold another launch
    or other tokens."""
    from torchpaged.custom_ops import BACKEND_OPS
    from torchpaged.engine.device import DecodeRows, RingFullError, RowState, WholeStepRunner

    rows = DecodeRows(70, 40, 16, VOCAB, "cuda", BACKEND_OPS["triton"], steps, launches_in_flight=3)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) / 90
    ids = torch.arange(VOCAB, device="cuda")[None]

    def step(input_ids: torch.Tensor, metadata: Any) -> torch.Tensor:
        best = (7 * input_ids + 3 * metadata.positions + 1) % VOCAB
        for _ in range(3):
            torch.matmul(x, x)
        return -(ids - best[:, None]).abs().float()

    runner = WholeStepRunner(step, rows, buckets=[1, 70], compile=False)
    rows.write(
        {row: RowState(row, 1, list(range(1, 41)), seed=0, counter=0, remaining=500) for row in range(70)}
    )
    want, token = [], list(range(70))
    for position in range(24 * steps):
        token = [(7 * t + 3 * position + 1) % VOCAB for t in token]
        want.append(token)
    runner.capture()
    taken: list[tuple[int, int, int]] = []
    first = 0  # steps of row 0 that were launched
    with no_synchronisation():
        for turn in range(16):
            num_rows = 1 if turn >= 8 else 70
            runner.launch(num_rows)
            taken.append((rows.ring.take(), num_rows, first))
            first += steps
            if len(taken) == 3:
                with pytest.raises(RingFullError):
                    runner.launch(num_rows)
                launch, width, begun = taken.pop(0)
                assert rows.ring.read(launch, width) == [
                    tokens[:width] for tokens in want[begun : begun + steps]
                ], turn
    for launch, width, begun in taken:
        assert rows.ring.read(launch, width) == [tokens[:width] for tokens in want[begun : begun + steps]]
