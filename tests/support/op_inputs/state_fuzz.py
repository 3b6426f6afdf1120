"""Random runs of ``causal_conv`` and ``linear_attention``: some calls behind each other over one pool, whose
requests come in chunks of any lengths, begin in slots that others left full of NaN, lie beside empty rows,
rows without a slot and padding, and have their last tokens taken back."""

import random
from typing import Any

import torch
from torch import Tensor

from op_inputs.state import (
    FAMILIES,
    NAN,
    Rows,
    assert_state_close,
    clone,
    make_conv_inputs,
    make_linear_inputs,
)
from torchpaged.custom_ops import BackendOps

_LENS = (0, 1, 1, 1, 2, 3, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65)  # about the borders of chunks
_WIDTHS = ((16, 24), (8, 64), (64, 16), (33, 65), (16, 1), (1, 1), (5, 1))
_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
_SLOTS, _CALLS = 9, 4


def fuzz_states(ops: BackendOps, reference: BackendOps, seed: int) -> int:
    """One such run, each call against the float64 oracle; how many calls there were."""
    r = random.Random(seed)
    op, pool, make, options = _configuration(r)
    state: Tensor | None = None
    lens: dict[int, int] = {}  # tokens behind each slot that a request has
    calls = 0
    for call in range(_CALLS):
        slots = r.sample(range(1, _SLOTS), r.randint(1, 5))
        contexts = [lens.get(slot, 0) if r.random() < 0.7 else 0 for slot in slots]
        counts = [r.choice(_LENS) for _ in slots]
        left = [
            r.randint(0, n) if not had and r.random() < 0.3 else 0
            for had, n in zip(contexts, counts, strict=True)
        ]
        void = tuple(row for row in range(len(slots)) if r.random() < 0.15)
        batch = Rows(tuple(zip(contexts, counts, strict=True)), r.choice((0, 0, 1, 5)), tuple(left), void)
        inputs = make(batch, **options, seed=1000 * seed + call, num_slots=_SLOTS)
        taken = [0 if row in void else slot for row, slot in enumerate(slots)]
        inputs["state_slots"] = torch.tensor(taken, dtype=torch.int32)
        state = torch.full_like(inputs[pool], NAN) if state is None else state
        for slot in {*range(_SLOTS)} - {s for s, had in zip(taken, contexts, strict=True) if had} - {*lens}:
            state[slot] = NAN
        for slot, had in zip(taken, contexts, strict=True):
            if slot and not had:
                state[slot] = NAN
        before, inputs[pool] = state.clone(), state
        short = _without_last(inputs, r) if r.random() < 0.5 else None
        assert_state_close(ops, reference, op, inputs)
        calls += 1
        if short is not None:  # what was there before, and the op over those that stay
            inputs, kept = short
            counts = [int(n) for n in kept]
            inputs[pool] = before
            assert_state_close(ops, reference, op, inputs)
            calls += 1
        state = inputs[pool]
        for slot, had, count, pad in zip(taken, contexts, counts, left, strict=True):
            if slot and count > pad:
                lens[slot] = had + count - pad
            elif slot and not had:
                lens.pop(slot, None)
    return calls


def _configuration(r: random.Random) -> tuple[str, str, Any, dict[str, Any]]:
    dtype = r.choice(_DTYPES)
    if r.random() < 0.4:
        options = {"channels": r.choice((1, 40, 300)), "width": r.randint(2, 8), "bias": r.random() < 0.5}
        options |= {"activation": r.choice(("none", "silu")), "gated": r.random() < 0.5, "dtype": dtype}
        return "causal_conv", "conv_state", make_conv_inputs, options
    key_dim, value_dim = r.choice(_WIDTHS)
    options = dict(FAMILIES[r.choice(list(FAMILIES))])
    options |= {"key_dim": key_dim, "value_dim": value_dim, "dtype": dtype}
    options |= {
        "state_dtype": r.choice((dtype, torch.float32)),
        "out_dtype": r.choice((dtype, torch.float32)),
    }
    return "linear_attention", "state", make_linear_inputs, options


def _without_last(inputs: dict[str, Any], r: random.Random) -> tuple[dict[str, Any], Tensor]:
    """The call without some last tokens of its rows, and how many each row keeps."""
    lens = inputs["query_start_loc"].diff()
    padding = (lens - inputs["seq_lens"]).clamp_min(0)
    cut = torch.tensor(
        [r.randint(0, min(8, int(n - p))) for n, p in zip(lens, padding, strict=True)], dtype=torch.int32
    )
    kept, starts = lens - cut, inputs["query_start_loc"][:-1].tolist()
    tokens = [t for start, n in zip(starts, kept.tolist(), strict=True) for t in range(start, start + n)]
    names = {"x", "q", "k", "v", "g", "beta", "out", "in_gate", "out_gate"}
    short = {
        name: x[tokens] if name in names and isinstance(x, Tensor) else x for name, x in clone(inputs).items()
    }
    short["seq_lens"] = inputs["seq_lens"] - cut
    short["query_start_loc"] = torch.cat((kept.new_zeros(1), kept.cumsum(0))).int()
    return short, kept
