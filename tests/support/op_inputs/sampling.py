"""Inputs and verdicts for kernels of ``sample_tokens``, ``accept_tokens`` and ``finish_step``.

    inputs = make_sampling_inputs(SAMPLING_ROWS.values(), vocab_size=1000)
    assert_samples_close(BACKEND_OPS["triton"], inputs)

A kernel rounds differently from the float64 oracle. So its token may be another than the oracle's where a
threshold or a score decides by less than rounding, and nowhere else: it must be one that may be kept, and no
token that must be kept may score higher.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.step_end.check import NO_TOKEN
from torchpaged.custom_ops.step_end.reference import gumbel_noise, penalised_logits, random_bits

_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_DTYPES = {"top_k": torch.int32}

#: Name -> parameters of one row that differ from drawing plainly.
SAMPLING_ROWS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "greedy_ignores_the_rest": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
    "greedy_penalty": {"temperature": 0.0, "repetition_penalty": 3.0},
    "plain": {},
    "hot": {"temperature": 5.0},
    "nearly_greedy": {"temperature": 1e-30},
    "top_1": {"top_k": 1},
    "top_20": {"top_k": 20},
    "top_200": {"top_k": 200, "temperature": 3.0},
    "top_all": {"top_k": 2**30},
    "top_p": {"top_p": 0.9},
    "top_p_flat": {"top_p": 0.97, "temperature": 10.0},
    "top_p_least": {"top_p": 1e-6},
    "top_p_most": {"top_p": 0.999999},
    "min_p": {"min_p": 0.05, "temperature": 2.0},
    "min_p_one": {"min_p": 1.0},
    "top_k_top_p": {"top_k": 20, "top_p": 0.8, "temperature": 2.0},
    "everything": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5, "repetition_penalty": 1.3},
    "negative_penalty": {"repetition_penalty": 0.7, "top_p": 0.8},
}


def make_sampling_inputs(
    rows: Iterable[dict[str, float]],
    *,
    vocab_size: int = 300,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    spread: float = 3.0,
    padding: int = 0,
) -> dict[str, Tensor]:
    """The op's arguments by name, for rows like those of `SAMPLING_ROWS`.

    Logits are normal with standard deviation ``spread``; ``padding`` NaN lie between rows. A third of the
    tokens was seen; ``out`` is -7.
    """
    parameters = [{**_OFF, **row} for row in rows]
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((len(parameters), vocab_size + padding), float("nan"), dtype=torch.float32)
    memory[:, :vocab_size] = (
        torch.randn(len(parameters), vocab_size, generator=generator, dtype=torch.float32) * spread
    )
    inputs = {"logits": memory.to(dtype)[:, :vocab_size]}
    for name in _OFF:
        inputs[name] = torch.tensor([row[name] for row in parameters], dtype=_DTYPES.get(name, torch.float32))
    occurred = (
        torch.rand(len(parameters), -(-vocab_size // 32), 32, generator=generator, dtype=torch.float32)
        < 1 / 3
    )
    inputs["seen"] = (occurred * (1 << torch.arange(32))).sum(-1).to(torch.int32)
    for name in ("seeds", "counters"):
        inputs[name] = torch.randint(-(2**62), 2**62, (len(parameters),), generator=generator)
    inputs["out"] = torch.full((len(parameters),), -7)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def make_near_ties(
    count: int, *, vocab_size: int, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], Tensor]:
    """The op's arguments for ``count`` rows in which two tokens of all kinds of noise score nearly the same
    and all others less, and of each row the one that scores 2e-5 temperatures more."""
    inputs = make_sampling_inputs([{"temperature": 0.6}] * count, vocab_size=vocab_size, spread=0.3)
    noise = gumbel_noise(random_bits(inputs["seeds"], inputs["counters"], vocab_size))
    generator = torch.Generator().manual_seed(1)
    pair = torch.stack([torch.randperm(vocab_size, generator=generator)[:2] for _ in range(count)])
    # every other row: one of both noises is the largest or the smallest
    pair[::4, 0], pair[2::4, 0] = noise[::4].argmax(-1), noise[2::4].argmin(-1)
    pair[:, 1] = torch.where(pair[:, 1] == pair[:, 0], (pair[:, 0] + 1) % vocab_size, pair[:, 1])
    even = 17.0 - 0.6 * noise.gather(1, pair)
    even[:, 1] += 0.6 * 2e-5
    inputs["logits"].scatter_(1, pair, even.float())
    return {name: tensor.to(device) for name, tensor in inputs.items()}, pair[:, 1]


def kept_by_oracle(z: Tensor, row: dict[str, float], slack: float = 0.0) -> Tensor:
    """Bool ``[V]``: the tokens that sampling keeps of one row of float logits ``z [V]`` without NaN, by
    sorting in float64.

    ``slack`` of probability mass moves the thresholds of top_p and min_p: positive keeps more,
    negative fewer.
    """
    tokens = (-z).argsort(stable=True)
    ordered = z[tokens].double()
    weight = torch.where(ordered == ordered[0], 1.0, ((ordered - ordered[0]) / row["temperature"]).exp())
    count = min(int(row["top_k"]) or len(z), len(z))
    share = weight[:count] / weight[:count].sum()
    before = torch.cat([torch.zeros(1).double(), share.cumsum(0)[:-1]])
    keep = torch.zeros(len(z), dtype=torch.bool)
    keep[:count] = True if row["top_p"] == 1 else before < row["top_p"] + slack
    if row["min_p"] > 0:
        keep &= weight >= row["min_p"] * (1 - slack)
    keep[0] = True
    return torch.zeros_like(keep).index_copy(0, tokens, keep)


def assert_samples_close(ops: BackendOps, inputs: dict[str, Tensor], slack: float = 1e-5) -> Tensor:
    """Run ``ops.sample_tokens`` and judge every row's token; returns the tokens, on the CPU."""
    inputs["out"].fill_(-7)
    ops.sample_tokens(**inputs)
    cpu = {name: tensor.cpu() for name, tensor in inputs.items()}
    z = penalised_logits(cpu["logits"], cpu["repetition_penalty"], cpu["seen"])
    noise = gumbel_noise(random_bits(cpu["seeds"], cpu["counters"], z.shape[1]))
    for index, token in enumerate(cpu["out"].tolist()):
        row = {name: cpu[name][index].item() for name in _OFF}
        nothing = bool(cpu["logits"][index].isnan().any()) or bool((z[index] == float("-inf")).all())
        if row["temperature"] == 0 or nothing:
            want = NO_TOKEN if nothing else int(z[index].argmax())
            assert token == want, f"row {index} {row}: token {token}, expected {want}"
            continue
        assert 0 <= token < z.shape[1], f"row {index} {row}: token {token}"
        must, may = (kept_by_oracle(z[index], row, s) for s in (-slack, slack))
        assert bool(may[token]), (
            f"row {index} {row}: token {token} is not among the {int(may.sum())} that may be kept"
        )
        score = z[index].double() + row["temperature"] * noise[index]
        best = float(score[must].max())
        bound = best - slack * max(1.0, row["temperature"]) - 1e-6 * abs(best)
        assert best == float("inf") or float(score[token]) >= bound, (
            f"row {index} {row}: {token} scores {float(score[token])}, best {best}"
        )
    return cpu["out"]


def make_accept_inputs(
    num_reqs: int = 7,
    *,
    vocab_size: int = 70,
    num_stops: int = 3,
    device: torch.device | str = "cpu",
    seed: int = 0,
    launch: int | None = None,
    step: int = 0,
) -> dict[str, Any]:
    """``accept_tokens``' arguments by name: rows that go on, that stop for each reason, without a token, and
    padding; tables of 3 blocks of 4 tokens.

    ``launch``: also a ring of three launches of two steps, -9 in it, and this count of launches; ``step``:
    which of the two this is.
    """
    generator = torch.Generator().manual_seed(seed)
    row = torch.arange(num_reqs)
    lens = torch.where(row % 7 == 3, 0, torch.where(row % 7 == 4, 12, 1 + row % 11)).int()
    sampled = torch.randint(0, vocab_size, (num_reqs,), generator=generator)
    sampled[::5] = 31  # the sign bit of its word
    stops = torch.randint(vocab_size, 2 * vocab_size, (num_reqs, num_stops), generator=generator)
    if num_stops:
        stops[:, 0] = -1
        stops[1::7, -1] = sampled[1::7]
    sampled[6::7] = NO_TOKEN
    sampled[lens == 0] = 2**40  # never looked at
    inputs: dict[str, Any] = {
        "sampled_token_ids": sampled,
        "block_table": (torch.randperm(3 * num_reqs, generator=generator) + 1).view(num_reqs, 3).int(),
        "stop_token_ids": stops,
        "input_ids": row + 100,
        "positions": row + 200,
        "seq_lens": lens,
        "slot_mapping": row + 300,
        "counters": row + 2**40,
        "remaining": torch.where(row % 7 == 2, 1, 9).int(),
        "seen": torch.randint(-(2**31), 2**31, (num_reqs, -(-vocab_size // 32)), generator=generator).int(),
        "tokens_out": row + 400,
    }
    if launch is not None:
        inputs |= {"ring": torch.full((4, 3, num_reqs + 2), -9), "launches": torch.tensor([launch, 0])}
    options = {"block_size": 4} | ({} if launch is None else {"step": step})
    return {name: tensor.to(device) for name, tensor in inputs.items()} | options


def make_finish_inputs(
    rows: Iterable[dict[str, float]],
    *,
    vocab_size: int = 300,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    launch: int | None = None,
    step: int = 0,
) -> dict[str, Any]:
    """``finish_step``'s arguments by name: those of `make_sampling_inputs` and `make_accept_inputs`; some
    rows stop at their token."""
    sampling = make_sampling_inputs(rows, vocab_size=vocab_size, dtype=dtype, seed=seed, padding=3)
    out = sampling.pop("out")
    BACKEND_OPS["reference"].sample_tokens(**sampling, out=out)
    accept = make_accept_inputs(len(out), vocab_size=vocab_size, seed=seed, launch=launch, step=step)
    accept["stop_token_ids"][1::7, -1] = out[1::7]
    del accept["sampled_token_ids"]
    logits = sampling.pop("logits").to(device)  # as a slice of wider rows
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in (accept | sampling).items()}
    return {"logits": logits, **inputs}


def assert_finish_is_both(ops: BackendOps, inputs: dict[str, Any]) -> None:
    """``finish_step`` leaves to the bit what `sample_tokens` and `accept_tokens` leave, one after the other.
    With many rows some end."""
    want = {
        name: x.clone() if isinstance(x, Tensor) and name != "logits" else x for name, x in inputs.items()
    }
    sampling = ("logits", *_OFF, "seen", "seeds", "counters")
    sampled = torch.empty_like(want["counters"])
    ops.sample_tokens(*(want[name] for name in sampling), sampled)
    ops.accept_tokens(
        sampled, **{name: x for name, x in want.items() if name not in ("logits", "seeds", *_OFF)}
    )
    ended = int((want["seq_lens"] == 0).sum() - (inputs["seq_lens"] == 0).sum())
    assert len(sampled) < 19 or 2 < ended < 14
    ops.finish_step(**inputs)
    for name, x in inputs.items():
        assert not isinstance(x, Tensor) or name == "logits" or torch.equal(x, want[name]), name
