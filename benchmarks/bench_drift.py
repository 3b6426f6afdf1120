"""Long runs of linear_attention: how far outputs are from a float64 recurrence after 100,000 tokens.

    PYTHONPATH=. python benchmarks/bench_drift.py [--device cuda] [--tokens 100000] [--families gdn,mamba1]
        [--output FILE]

One request goes through the op token by token, as decodes do, and in prompts of a block each; beside it a
plain recurrence in float64, and the same in float32 with states in the op's dtype: the reference of that
dtype. ``errors`` are of the last 250 tokens before so many: ``|out - exact| / |exact|``. The last line is one
JSON document.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from documents import command_line, write_rows
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS

BLOCK, WINDOW = 500, 250


class Family(NamedTuple):
    """Sizes and rule of a family; decays from 1e-5 to 0.3 per token, so that some heads forget nothing."""

    heads: int
    key_dim: int
    value_dim: int
    delta: bool = False
    by_key: bool = False
    beta: bool = True
    constant: bool = False


FAMILIES = {
    "gdn": Family(4, 128, 128, delta=True),
    "kda": Family(4, 128, 128, delta=True, by_key=True),
    "mamba2": Family(4, 128, 64),
    "mamba1": Family(64, 16, 1, by_key=True),
    "lightning": Family(4, 96, 96, beta=False, constant=True),
    "rg_lru": Family(64, 1, 1, beta=False),
}
#: Dtypes of tokens and of states.
CASES = {
    "float32": (torch.float32, torch.float32),
    "states of float32": (torch.bfloat16, torch.float32),
    "states of bfloat16": (torch.bfloat16, torch.bfloat16),
}


def tokens_of(family: Family, block: int, device: str) -> dict[str, Tensor]:
    """``BLOCK`` tokens in float32, by numbers that bfloat16 has; ``g`` the logarithm of the decay."""
    make: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(block)}
    heads, keys, values = family[:3]
    q, k = (torch.randn(BLOCK, heads, keys, **make) for _ in range(2))
    if family.delta:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    if keys == 1:
        q, k = torch.ones_like(q), torch.ones_like(k)
    v = torch.randn(BLOCK, heads, values, **make)
    rates = (heads, keys) if family.by_key else (heads,)
    rate = torch.logspace(-5, -0.5, rates[0] * (rates[1] if family.by_key else 1), device=device).view(rates)
    g = -rate.expand(BLOCK, *rates).contiguous()
    if not family.constant:
        g = g * (0.5 + torch.rand(g.shape, **make))
    if keys == 1:
        v = v * (1 - (2 * g).exp()).sqrt()[..., None]
    found = {"q": q, "k": k, "v": v}
    if family.beta:
        found["beta"] = torch.rand(BLOCK, heads, **make)
    return {name: x.bfloat16().float() for name, x in found.items()} | {"g": g}


class Recurrence:
    """Token by token in ``dtype``, its state rounded to ``state_dtype`` behind each."""

    def __init__(self, family: Family, dtype: torch.dtype, state_dtype: torch.dtype, device: str) -> None:
        self.family, self.dtype = family, dtype
        self.state = torch.zeros(family[:3], dtype=state_dtype, device=device)

    def __call__(self, tokens: dict[str, Tensor], out: Tensor) -> None:
        """Write ``out [BLOCK, heads, value_dim]``."""
        given = {name: x.to(self.dtype) for name, x in tokens.items()}
        decays = given["g"].exp().view(BLOCK, self.family.heads, -1, 1)
        q, k = given["q"][:, :, None], given["k"][:, :, None]
        for i in range(BLOCK):
            state = self.state.to(self.dtype) * decays[i]
            u = given["v"][i][:, None]
            if self.family.delta:
                u = u - k[i] @ state
            if self.family.beta:
                u = u * given["beta"][i][:, None, None]
            state = state + k[i].mT * u
            out[i] = (q[i] @ state)[:, 0]
            self.state.copy_(state)


class Op:
    """The op by a backend, ``count`` tokens to a call."""

    def __init__(self, family: Family, backend: str, case: str, count: int, device: str) -> None:
        self.run, self.family, self.count = BACKEND_OPS[backend].linear_attention, family, count
        self.dtype, state_dtype = CASES[case]
        self.state = torch.zeros(2, *family[:3], dtype=state_dtype, device=device)
        rows = {"state_slots": [1], "seq_lens": [count + 1], "query_start_loc": [0, count]}
        self.rows = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in rows.items()}

    def __call__(self, tokens: dict[str, Tensor], out: Tensor) -> None:
        """Write ``out [BLOCK, heads, value_dim]``."""
        given = {name: x if name == "g" else x.to(self.dtype) for name, x in tokens.items()}
        rule: dict[str, Any] = {"scale": 1.0, "delta_rule": self.family.delta}
        for i in range(0, BLOCK, self.count):
            part = {name: x[i : i + self.count] for name, x in given.items()}
            options = {**part, "out": out[i : i + self.count], "max_query_len": self.count, **rule}
            self.run(state=self.state, **self.rows, **options)


def runners(family: Family, device: str, reference: bool) -> dict[tuple[str, str], Any]:
    """By case and way."""
    made: dict[tuple[str, str], Any] = {("exact", ""): Recurrence(family, *[torch.float64] * 2, device)}
    for case, (_, state_dtype) in CASES.items():
        if case != "states of float32":  # the plain recurrence of float32, whatever held the tokens
            made[case, "recurrence"] = Recurrence(family, torch.float32, state_dtype, device)
        if device == "cuda":
            made[case, "decode"] = Op(family, "triton", case, 1, device)
        else:
            made[case, "decode"] = Op(family, "reference" if reference else "cpu", case, 1, device)
        made[case, "prompts"] = Op(family, "triton" if device == "cuda" else "cpu", case, BLOCK, device)
    return made


def captured(run: Callable[..., None], tokens: dict[str, Tensor], out: Tensor, state: Tensor) -> Any:
    """A call as one graph."""
    run(tokens, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(tokens, out)
    state.zero_()
    return graph.replay


def small(family: Family) -> Family:
    """With keys and values of 16 at most, in 16 heads; of states of one number 1,024. Each head is one sample
    of a sum of roundings, and of the slowest decays it stays the same for as long as a run."""
    heads = 1024 if family.key_dim == family.value_dim == 1 else min(family.heads, 16)
    return family._replace(heads=heads, key_dim=min(family.key_dim, 16), value_dim=min(family.value_dim, 16))


def measure(name: str, family: Family, count: int, device: str, reference: bool) -> list[dict[str, Any]]:
    """Errors of one family, by case and way."""
    made = runners(family, device, reference)
    buffers = tokens_of(family, 0, device)
    outs = {
        key: torch.zeros(BLOCK, *family[0:3:2], device=device, dtype=torch.float64 if key[1] == "" else None)
        for key in made
    }
    calls = {key: lambda key=key: made[key](buffers, outs[key]) for key in made}
    if device == "cuda":
        calls = {key: captured(run, buffers, outs[key], run.state) for key, run in made.items()}
    errors: dict[tuple[str, str], dict[int, float]] = {key: {} for key in made}
    marks = {at for at in (1_000, 10_000, 100_000, 1_000_000) if at < count} | {count}
    for block in range(count // BLOCK):
        for key, x in tokens_of(family, block, device).items():
            buffers[key].copy_(x)
        for call in calls.values():
            call()
        at = (block + 1) * BLOCK
        for key in made if at in marks else ():
            exact = outs["exact", ""][-WINDOW:]
            errors[key][at] = float((outs[key][-WINDOW:].double() - exact).norm() / exact.norm())
    rows = [
        {"family": name, "case": case, "way": way, "errors": {n: float(f"{e:.3g}") for n, e in found.items()}}
        for (case, way), found in errors.items()
        if way
    ]
    for row in rows:
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    args = command_line(
        __doc__,
        device="cpu",
        tokens=100_000,
        families=[*FAMILIES],
        small=(False, "keys and values of 16 at most"),
        reference=(False, "on a CPU the reference's decodes"),
        output=str,
    )
    rows = []
    with torch.inference_mode():
        for name in args.families:
            family = small(FAMILIES[name]) if args.small else FAMILIES[name]
            rows += measure(name, family, args.tokens, args.device, args.reference)
    write_rows(rows, args.output, args.device)


if __name__ == "__main__":
    main()
