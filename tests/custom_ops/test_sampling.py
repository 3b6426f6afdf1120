"""sample_tokens and accept_tokens: random bits by known answers, distributions, kept sets by sorting,
refusals; sample() of the engine."""

from typing import Any

import pytest
import torch
from kernels import Kernels, over
from op_inputs.sampling import (
    SAMPLING_ROWS,
    assert_finish_is_both,
    assert_samples_close,
    kept_by_oracle,
    make_accept_inputs,
    make_finish_inputs,
    make_sampling_inputs,
)
from torch import Tensor

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.step_end.call import SampleCall
from torchpaged.custom_ops.step_end.check import NO_TOKEN, check_sample_tokens
from torchpaged.custom_ops.step_end.reference import (
    gumbel_noise,
    kept_tokens,
    penalised_logits,
    philox,
    random_bits,
)
from torchpaged.engine.device.request_state import token_bits

REFERENCE, DEFAULT = BACKEND_OPS["reference"], BACKEND_OPS["default"]
ALL = SAMPLING_ROWS.values()

#: Random123's known answers for philox4x32-10 (kat_vectors): counter, key, words.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]
) -> None:
    counter_words, key_words = ([torch.tensor(word) for word in words] for words in (counter, key))
    assert tuple(int(word) for word in philox(tuple(key_words), tuple(counter_words))) == want  # type: ignore[arg-type]


def test_words_of_seed_counter_and_token() -> None:
    seed, counter = 0x299F31D0_A4093822, -0x0123456789ABCDEF
    low, high = counter & 0xFFFFFFFF, counter >> 32 & 0xFFFFFFFF
    key = (torch.tensor(0xA4093822), torch.tensor(0x299F31D0))
    bits = random_bits(torch.tensor([seed]), torch.tensor([counter]), 11)
    assert bits.shape == (1, 11)
    for token in range(11):
        words = philox(key, tuple(torch.tensor(x) for x in (token // 4, low, high, 0)))  # type: ignore[arg-type]
        assert int(bits[0, token]) == int(words[token % 4])


def test_noise_is_finite_at_both_ends() -> None:
    noise = gumbel_noise(torch.tensor([0, 1, 2**32 - 1]))
    assert bool(noise.isfinite().all())
    assert float(noise[0]) > 22
    assert float(noise[2]) < -3
    assert (
        abs(float(gumbel_noise(random_bits(torch.tensor([3]), torch.tensor([0]), 200_000)).mean()) - 0.5772)
        < 0.01
    )


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({}, 12),
        ({"temperature": 0.5}, 12),
        ({"top_k": 5}, 5),
        ({"top_p": 0.8}, 7),
        ({"min_p": 0.3}, 8),
        ({"top_k": 6, "top_p": 0.7}, 4),
    ],
    ids=str,
)
@over("default")
def test_draws_follow_the_probabilities(on: Kernels, row: dict[str, float], kept: int) -> None:
    """Chi-square against softmax over the kept tokens; 20000 draws of one seed, so always the same ones."""
    logits = torch.tensor([0.2, -1.0, 1.1, 0.0, -0.4, 0.9, -2.0, 0.5, 0.3, -0.1, 0.7, -3.0])
    keep = kept_by_oracle(logits, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **row})
    assert int(keep.sum()) == kept
    count = 20_000
    inputs = make_sampling_inputs([row] * count, vocab_size=len(logits), device=on.device)
    inputs |= {"logits": logits.to(on.device).expand(count, -1)}
    inputs["counters"].copy_(torch.arange(count))
    inputs["seeds"].fill_(99), inputs["seen"].zero_()
    on.ops.sample_tokens(**inputs)
    counts = inputs["out"].cpu().bincount(minlength=len(logits))
    assert not bool(counts[~keep].any())
    want = (logits[keep].double() / row.get("temperature", 1.0)).softmax(-1) * count
    statistic = float(((counts[keep] - want) ** 2 / want).sum())
    # four standard deviations of a chi-square over its mean
    assert statistic < kept - 1 + 4 * (2 * (kept - 1)) ** 0.5


ROWS = {
    name: {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **row}
    for name, row in SAMPLING_ROWS.items()
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row["temperature"] > 0])
def test_kept_tokens_by_sorting(name: str, dtype: torch.dtype) -> None:
    """bfloat16 logits are full of ties."""
    row = ROWS[name]
    inputs = make_sampling_inputs([row] * 3, dtype=dtype, seed=5)
    z = penalised_logits(inputs["logits"], inputs["repetition_penalty"], inputs["seen"])
    got = kept_tokens(z, inputs["temperature"], inputs["top_k"], inputs["top_p"], inputs["min_p"])
    exact = {key: inputs[key][0].item() for key in ("temperature", "top_k", "top_p", "min_p")}
    for index in range(3):
        assert torch.equal(got[index], kept_by_oracle(z[index], exact))


EQUAL = [1, 3, 4, 7, 8, 11, 15, 19]  # tokens with likelihood 1/8 each, so that all sums are exact


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"top_p": 0.5}, EQUAL[:4]),
        ({"top_p": 0.50001}, EQUAL[:5]),
        ({"top_p": 1e-9}, EQUAL[:1]),
        ({"top_k": 3}, EQUAL[:3]),
        ({"top_k": 6, "top_p": 0.5}, EQUAL[:3]),
        ({"min_p": 1.0}, EQUAL),
        ({"top_k": 10}, sorted([*EQUAL, 0, 2])),
    ],
    ids=str,
)
def test_thresholds_at_exact_edges(row: dict[str, float], kept: list[int]) -> None:
    """A token whose likelier ones hold just p is out; of equal ones the lowest are in."""
    z, full = torch.full((20,), -1000.0), {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **row}
    z[EQUAL] = 0.0
    columns = [torch.tensor([full[key]]) for key in ("temperature", "top_k", "top_p", "min_p")]
    assert kept_tokens(z[None], *columns)[0].nonzero()[:, 0].tolist() == kept
    assert kept_by_oracle(z, full).nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("overload", ["reference", "cpu", "default"])
def test_samples_close(overload: str, dtype: torch.dtype) -> None:
    assert_samples_close(BACKEND_OPS[overload], make_sampling_inputs(ALL, dtype=dtype, padding=5))


def assert_native_as_reference(inputs: dict[str, Any]) -> None:
    want = torch.empty_like(inputs["out"])
    REFERENCE.sample_tokens(**{**inputs, "out": want})
    BACKEND_OPS["cpu"].sample_tokens(**inputs)
    assert inputs["out"].tolist() == want.tolist(), inputs["logits"].dtype


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("vocab_size", [1, 5, 31, 64, 65, 300, 2000])
def test_native_tokens_are_those_of_the_reference(vocab_size: int, spread: float) -> None:
    """Blocks of the vocabulary with and without a rest; spread 0: all tokens are equal, and thresholds
    exact; bfloat16 logits are full of ties."""
    cases = [(dtype, seed) for dtype in (torch.float32, torch.bfloat16, torch.float16) for seed in range(2)]
    for dtype, seed in cases:
        sizes: dict[str, Any] = {"vocab_size": vocab_size, "spread": spread, "padding": 5}
        inputs = make_sampling_inputs(ALL, dtype=dtype, seed=seed, **sizes)
        inputs["logits"][:, ::3][torch.rand(len(ALL), -(-vocab_size // 3)) < 0.05] = float("-inf")
        inputs["logits"][seed::7, -1] = float("inf")
        assert_native_as_reference(inputs)


@pytest.mark.parametrize(
    "row", [{"top_p": p, "top_k": k} for p in (0.25, 0.5, 1.0) for k in (0, 3, 6, 10)], ids=str
)
def test_native_thresholds_at_exact_edges(row: dict[str, float]) -> None:
    """Every token that the reference keeps is drawn, and no other."""
    logits = torch.full((20,), -1000.0)
    logits[EQUAL] = 0.0
    inputs = make_sampling_inputs([{**row, "temperature": 1e4}] * 600, vocab_size=20)
    inputs["logits"] = logits.expand(600, -1) * 1e4  # the others are as unlikely as before
    columns = [inputs[name][:1] for name in ("temperature", "top_k", "top_p", "min_p")]
    kept = kept_tokens(inputs["logits"][:1], *columns)[0] & (logits == 0)
    inputs["seen"].zero_()
    BACKEND_OPS["cpu"].sample_tokens(**inputs)
    assert sorted(set(inputs["out"].tolist())) == kept.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("min_p", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_native_mass_of_top_k_counts_what_min_p_leaves_out(top_p: float, min_p: float) -> None:
    """``top_p`` is a share of all the ``top_k``."""
    limits = {"temperature": 1.5, "top_k": 60, "top_p": top_p, "min_p": min_p}
    inputs = make_sampling_inputs([limits] * 400, vocab_size=130, dtype=torch.float16)
    inputs["logits"][:, :3] = 4.0
    assert_native_as_reference(inputs)


@pytest.mark.parametrize(
    ("logits", "temperature"),
    [(1.0, 1e-45), (1.0, 1e-38), (1e30, 1e29), (3e37, 1e31), (3e37, 3e38), (3e38, 3e38), (1e6, 0.01)],
)
def test_native_scores_of_extreme_numbers(logits: float, temperature: float) -> None:
    """Half of the logits have the other sign: their difference may be beyond float32, as may its quotient by
    the temperature. The others are equal; the last case's scores are closer to each other than float32 can
    tell."""
    inputs = make_sampling_inputs([{"temperature": temperature}] * 60, vocab_size=333)
    inputs["logits"] = inputs["logits"].sign() * logits
    assert_native_as_reference(inputs)


@pytest.mark.parametrize("temperature", [1e-44, 1e-39, 1e-30])
def test_native_ties_at_temperatures_next_to_0(temperature: float) -> None:
    """Noise alone decides between logits that are equal; 1 / temperature may be beyond float32."""
    inputs = make_sampling_inputs([{"temperature": temperature}] * 60, vocab_size=333)
    inputs["logits"].zero_()
    assert_native_as_reference(inputs)


def test_repetition_penalty_equals_transformers() -> None:
    process = pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 77, generator=generator)
    logits[0, 5], logits[1, 6] = 0.0, float("-inf")
    ids = torch.randint(0, 77, (4, 30), generator=generator)
    ids[0, 0], ids[1, 0], ids[2, 0], ids[3, 0] = 5, 6, 31, 76
    seen = torch.stack([token_bits(row, 3) for row in ids.tolist()])
    for penalty in (1.3, 0.8, 1.0):
        got = penalised_logits(logits, torch.full((4,), penalty), seen)
        assert torch.equal(got, process(penalty)(ids, logits.clone()))


def test_a_token_depends_on_seed_counter_and_logits_only() -> None:
    row = {"temperature": 0.9, "top_p": 0.95}
    inputs = make_sampling_inputs([row] * 9, vocab_size=500, spread=0.5)
    DEFAULT.sample_tokens(**inputs)
    want = inputs["out"].clone()
    order = torch.tensor([4, 2, 7])
    picked = {name: tensor[order] for name, tensor in inputs.items()}
    DEFAULT.sample_tokens(**picked)
    assert torch.equal(picked["out"], want[order])
    wide = torch.full((9, 1013), float("nan"))
    wide[:, :500] = inputs["logits"]
    DEFAULT.sample_tokens(**{**inputs, "logits": wide[:, :500]})
    assert torch.equal(inputs["out"], want)
    same = {**inputs, "logits": inputs["logits"][:1].expand(9, -1), "seen": inputs["seen"][:1].expand(9, -1)}
    DEFAULT.sample_tokens(**same)
    assert len(set(same["out"].tolist())) > 3, "seeds matter"
    same |= {"seeds": torch.zeros(9, dtype=torch.int64)}
    DEFAULT.sample_tokens(**same)
    assert len(set(same["out"].tolist())) > 3, "counters matter"
    same |= {"counters": torch.zeros(9, dtype=torch.int64)}
    DEFAULT.sample_tokens(**same)
    assert len(set(same["out"].tolist())) == 1


SPECIAL = {
    "nothing": ([float("-inf")] * 6, [NO_TOKEN]),
    "nan": ([float("nan")] * 6, [NO_TOKEN]),
    "one nan": ([1.0, 2.0, -3.0, 4.0, float("nan"), 7.0], [NO_TOKEN]),
    "nan beside inf": ([float("inf"), 2.0, -3.0, 4.0, float("-inf"), float("nan")], [NO_TOKEN]),
    "one": ([float("-inf"), float("-inf"), -3.0, float("-inf"), float("-inf"), float("-inf")], [2]),
    "infinite": ([1.0, 3e38, float("inf"), float("-inf"), float("inf"), float("-inf")], [2, 4]),
    "huge": ([-3e38, 3e38, 0.0, 1.0, -1.0, float("-inf")], [1]),
    "zeros": ([-1.0, -0.0, 0.0, -0.0, -1.0, -1.0], [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_logits(case: str) -> None:
    logits, allowed = SPECIAL[case]
    inputs = make_sampling_inputs(ALL, vocab_size=6)
    inputs["logits"] = torch.tensor(logits).expand(len(SAMPLING_ROWS), -1)
    inputs["seen"].zero_()
    tokens = assert_samples_close(DEFAULT, inputs).tolist()
    assert set(tokens) <= set(allowed)
    assert tokens[0] == (1 if case == "zeros" else allowed[0])


def test_no_rows() -> None:
    inputs = make_sampling_inputs([{}])
    DEFAULT.sample_tokens(**{name: tensor[:0] for name, tensor in inputs.items()})
    accept = make_accept_inputs(0)
    DEFAULT.accept_tokens(**accept)


BAD: dict[str, dict[str, Any]] = {
    "logits": {"logits": torch.zeros(2, 300, dtype=torch.float64)},
    "temperature": {"temperature": torch.tensor([1.0, -0.5])},
    "top_k": {"top_k": torch.tensor([-1, 0], dtype=torch.int32)},
    "top_p": {"top_p": torch.tensor([0.0, 1.0])},
    "min_p": {"min_p": torch.tensor([0.5, float("nan")])},
    "repetition_penalty": {"repetition_penalty": torch.tensor([0.0, 1.0])},
    "seen": {"seen": torch.zeros(2, 9, dtype=torch.int32)},
    "seeds": {"seeds": torch.zeros(2, dtype=torch.int32)},
    "counters": {"counters": torch.zeros(4, dtype=torch.int64)[::2]},
    "out": {"out": torch.zeros(3, dtype=torch.int64)},
}


@pytest.mark.parametrize("overload", ["reference", "default"])
@pytest.mark.parametrize("argument", BAD)
def test_bad_arguments_of_sample_tokens(argument: str, overload: str) -> None:
    inputs = make_sampling_inputs([{}, {}])
    with pytest.raises((ArgumentError, RuntimeError), match=argument):
        BACKEND_OPS[overload].sample_tokens(**{**inputs, **BAD[argument]})
    assert inputs["out"].tolist() == [-7, -7]


def test_more_rows_than_a_grid_of_a_gpu_has() -> None:
    """Of tensors that are not on a CPU; there is room for the last of them."""
    of_one_row = make_sampling_inputs([{}], vocab_size=32)
    for rows in (65_535, 65_536):
        inputs = {name: x.to("meta").expand(rows, *x.shape[1:]) for name, x in of_one_row.items()}
        call = SampleCall(**{name: x.contiguous() for name, x in inputs.items()})
        if rows == 65_535:
            check_sample_tokens(call)
        else:
            with pytest.raises(ArgumentError, match="^logits: expected at most 65,535 rows.*several calls"):
                check_sample_tokens(call)


def accepted_one_by_one(inputs: dict[str, Any]) -> dict[str, list[Any]]:
    """``accept_tokens`` as a plain loop over lists."""
    state = {name: x.tolist() for name, x in inputs.items() if isinstance(x, Tensor)}
    block_size = inputs["block_size"]
    for row, length in enumerate(state["seq_lens"]):
        state["slot_mapping"][row] = state["tokens_out"][row] = -1
        if length == 0:
            continue
        token = state["tokens_out"][row] = state["sampled_token_ids"][row]
        state["counters"][row] += 1
        state["remaining"][row] -= 1
        if token >= 0:
            word = state["seen"][row][token // 32] % 2**32 | 1 << token % 32
            state["seen"][row][token // 32] = word - 2**32 if word >= 2**31 else word
        full = length == len(state["block_table"][row]) * block_size
        if full or token < 0 or token in state["stop_token_ids"][row] or state["remaining"][row] <= 0:
            state["seq_lens"][row] = 0
            continue
        state["input_ids"][row], state["positions"][row], state["seq_lens"][row] = token, length, length + 1
        state["slot_mapping"][row] = (
            state["block_table"][row][length // block_size] * block_size + length % block_size
        )
    return state


@pytest.mark.parametrize("num_stops", [0, 1, 3, 20])
@pytest.mark.parametrize("num_reqs", [1, 7, 70])
def test_accept_tokens(num_reqs: int, num_stops: int) -> None:
    inputs = make_accept_inputs(num_reqs, num_stops=num_stops)
    want = accepted_one_by_one(inputs)
    ended = sum(new == 0 for new in want["seq_lens"]) - int((inputs["seq_lens"] == 0).sum())
    assert num_reqs < 7 or (0 < ended < num_reqs - 2)
    DEFAULT.accept_tokens(**inputs)
    for name, values in want.items():
        assert inputs[name].tolist() == values, name


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(("launch", "slot"), [(0, 0), (2, 2), (7, 1), (3 * 2**40 + 2, 2), (-1, 3)])
def test_accept_tokens_fills_the_ring(launch: int, slot: int, step: int) -> None:
    """Tokens in the launch's slot and the step's line, nothing elsewhere; the last step leaves the launch's
    number and counts it."""
    inputs = make_accept_inputs(launch=launch, step=step)
    without = {
        name: x.clone() if isinstance(x, Tensor) else x
        for name, x in inputs.items()
        if name not in ("ring", "launches", "step")
    }
    want = inputs["ring"].clone()
    DEFAULT.accept_tokens(**inputs)
    DEFAULT.accept_tokens(**without)
    assert all(torch.equal(inputs[name], x) for name, x in without.items() if isinstance(x, Tensor))
    want[slot, step, :7] = inputs["tokens_out"]
    if step == 1:
        want[slot, 2, 0] = launch
    assert torch.equal(inputs["ring"], want)
    assert inputs["launches"].tolist() == [launch + (step == 1 and launch >= 0), 0]


@pytest.mark.parametrize("launch", [None, 4])
def test_finish_step_is_both_ops(launch: int | None) -> None:
    inputs = make_finish_inputs(ALL, launch=launch, step=launch is not None)
    inputs["logits"][6, 7] = float("nan")
    assert_finish_is_both(DEFAULT, inputs)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("launch", [None, 4, -1])
def test_native_finish_step_leaves_what_the_reference_leaves(launch: int | None, step: int) -> None:
    inputs = make_finish_inputs(ALL, launch=launch, step=step if launch is not None else 0)
    inputs["logits"][6, 7] = float("nan")
    inputs["logits"][3] = float("nan")  # a row of seq_len 0
    want = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    REFERENCE.finish_step(**want)
    BACKEND_OPS["cpu"].finish_step(**inputs)
    for name, x in inputs.items():
        assert not isinstance(x, Tensor) or name == "logits" or torch.equal(x, want[name]), name


@pytest.mark.parametrize("overload", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("op", "launch", "argument", "value"),
    [
        *(
            ("accept_tokens", 0, *case)
            for case in (
                ("ring", torch.zeros(4, 3, 6, dtype=torch.int64)),
                ("ring", torch.zeros(1, 3, 9, dtype=torch.int64)),
                ("ring", torch.zeros(4, 3, 9, dtype=torch.int32)),
                ("ring", None),
                ("launches", None),
                ("launches", torch.zeros(1, dtype=torch.int64)),
                ("step", 2),
                ("step", -1),
            )
        ),
        *(
            ("accept_tokens", None, *case)
            for case in (
                ("stop_token_ids", torch.zeros(7, dtype=torch.int64)),
                ("remaining", torch.zeros(7, dtype=torch.int64)),
                ("sampled_token_ids", torch.full((7,), 96)),
                ("sampled_token_ids", torch.full((7,), -1)),
                ("sampled_token_ids", torch.full((7,), -3)),
                ("seq_lens", torch.full((7,), 13, dtype=torch.int32)),
                ("block_size", 0),
            )
        ),
        *(
            ("finish_step", 0, *case)
            for case in (
                ("top_k", torch.zeros(3, dtype=torch.int32)),
                ("top_p", torch.zeros(len(ALL))),
                ("block_table", torch.ones(3, 3, dtype=torch.int32)),
                ("seq_lens", torch.full((len(ALL),), 13).int()),
                ("tokens_out", torch.zeros(len(ALL))),
                ("step", 2),
            )
        ),
    ],
)
def test_bad_arguments_of_a_steps_end(
    op: str, launch: int | None, argument: str, value: Any, overload: str
) -> None:
    whole = op == "finish_step"
    inputs = make_finish_inputs(ALL, launch=launch) if whole else make_accept_inputs(launch=launch)
    kept = {
        name: x for name, x in inputs.items() if isinstance(x, Tensor) and name not in ("logits", argument)
    }
    before = {name: x.clone() for name, x in kept.items()}
    with pytest.raises((ArgumentError, RuntimeError), match=argument):
        getattr(BACKEND_OPS[overload], op)(**{**inputs, argument: value})
    assert all(torch.equal(kept[name], x) for name, x in before.items())


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("sample_tokens", make_sampling_inputs(ALL)),
        *(("accept_tokens", make_accept_inputs(launch=launch)) for launch in (None, 3)),
        *(("finish_step", make_finish_inputs(ALL, launch=launch)) for launch in (None, 3)),
    ],
)
def test_opcheck(op: str, inputs: dict[str, Any]) -> None:
    torch.library.opcheck(getattr(BACKEND_OPS["default"], op), (), inputs)


def test_token_bits() -> None:
    seen = [token_bits(tokens, 3) for tokens in ([0, 31, 31, 32], [], [64])]
    assert seen[0].dtype == torch.int32
    assert [row.tolist() for row in seen] == [[1 - 2**31, 1, 0], [0, 0, 0], [0, 0, 1]]
