"""Linear layers of a decode step on a GPU: the linear op of the cuda backend against torch's matrix
product (cuBLAS).

    PYTHONPATH=. python benchmarks/bench_linear.py [--models 8b,1b] [--tokens 1,8,16,32,64] [--bandwidth 4.35]

Two measurements. ``layers``: one linear layer at a time, weights rotating through more memory than the L2
cache, calls back to back in one CUDA graph; ``F.linear`` does the product alone, the op norm, gate and
residual too. ``chains``: qkv, o, gate_up and down of many layers, each reading what the one before wrote;
``composed`` is the triton backend's norm, cuBLAS product, gate and residual. Everything is compared with
float32 first. Figures are microseconds per call (per layer in a chain), and percent of the time that reading
the weights once takes at ``--bandwidth`` TB/s. The last line is one JSON document.
"""

import json
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from documents import command_line
from measuring import conditions
from measuring.timing import CudaSampler, interleave
from torch import Tensor
from torch.nn import functional as F

from torchpaged.custom_ops import BACKEND_OPS

CUDA, COMPOSED = BACKEND_OPS["cuda"].linear, BACKEND_OPS["triton"].linear
#: hidden size, query and key/value width together, intermediate size, vocabulary, layers of a chain
MODELS = {"8b": (4096, 6144, 14336, 128256, 12), "1b": (2048, 3072, 8192, 128256, 16)}
ROUND_BYTES = 400 << 20


def random(*size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16) * scale


def layers_of(model: str) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """Layer -> out and in features and what is fused: norm, gate, residual."""
    hidden, qkv, intermediate, vocabulary, _ = MODELS[model]
    return {
        "qkv": (qkv, hidden, {"norm": True}),
        "o": (hidden, hidden, {"residual": True}),
        "gate_up": (2 * intermediate, hidden, {"norm": True, "activation": "silu"}),
        "down": (hidden, intermediate, {"residual": True}),
        "lm_head": (vocabulary, hidden, {"norm": True}),
    }


def exact(x: Tensor, weight: Tensor, residual: Tensor | None, norm: bool, activation: str) -> Tensor:
    wide = x.float()
    if norm:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    y = wide @ weight.float().t()
    if activation != "none":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.float()


def bench_layer(model: str, name: str, tokens: int, bandwidth: float) -> dict[str, Any]:
    """One layer alone."""
    n, k, fused = layers_of(model)[name]
    activation = fused.get("activation", "none")
    copies = max(2, -(-ROUND_BYTES // (n * k * 2)))
    weights = [random(n, k, scale=k**-0.5) for _ in range(copies)]
    x, width = random(tokens, k), n if activation == "none" else n // 2
    out, product = (
        torch.full((tokens, width), torch.nan, device="cuda", dtype=torch.bfloat16),
        random(tokens, n),
    )
    residual = random(tokens, width) if "residual" in fused else None
    norm = torch.ones(k, device="cuda", dtype=torch.bfloat16) if "norm" in fused else None
    options = {"residual": residual, "norm_weight": norm, "activation": activation}
    CUDA(x, weights[0], out, **options)
    want = exact(x, weights[0], residual, norm is not None, activation)
    error = float((out.float() - want).norm() / want.norm())
    if not error < 6e-3:
        raise SystemExit(f"{model} {name} at {tokens} tokens: relative error {error}")
    times = interleave(
        {
            "cublas": CudaSampler([partial(torch.mm, x, w.t(), out=product) for w in weights]),
            "cuda": CudaSampler([partial(CUDA, x, w, out, **options) for w in weights]),
        },
        16,
    )
    ideal = n * k * 2 / bandwidth / 1e6
    return {
        "model": model,
        "layer": name,
        "tokens": tokens,
        "ideal_us": ideal,
        "error": error,
        **{who: asdict(t) | {"percent": 100 * ideal / t.median_us} for who, t in times.items()},
    }


def bench_chain(model: str, tokens: int, bandwidth: float) -> dict[str, Any]:
    """Whole layers without attention: o reads the query columns of qkv."""
    hidden, qkv_width, intermediate, _, layers = MODELS[model]
    shapes = {name: (n, k) for name, (n, k, _) in layers_of(model).items() if name != "lm_head"}
    weights = [{name: random(n, k, scale=k**-0.5) for name, (n, k) in shapes.items()} for _ in range(layers)]
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    start = random(tokens, hidden)
    buffers = {
        who: [start.clone(), random(tokens, hidden), random(tokens, qkv_width), random(tokens, intermediate)]
        for who in ("cuda", "composed")
    }

    def layer(op: Any, who: str, i: int) -> None:
        state, middle, qkv, act = buffers[who]
        w = weights[i]
        op(state, w["qkv"], qkv, norm_weight=norm)
        op(qkv[:, :hidden], w["o"], middle, residual=state)
        op(middle, w["gate_up"], act, norm_weight=norm, activation="silu")
        op(act, w["down"], state, residual=middle)

    for who, op in (("cuda", CUDA), ("composed", COMPOSED)):
        for i in range(layers):
            layer(op, who, i)
    ours, theirs = buffers["cuda"][0].float(), buffers["composed"][0].float()
    error = float((ours - theirs).norm() / theirs.norm())
    if not error < 5e-2:
        raise SystemExit(f"chain {model} at {tokens} tokens: {error} from the composed one")
    times = interleave(
        {
            "composed": CudaSampler([partial(layer, COMPOSED, "composed", i) for i in range(layers)]),
            "cuda": CudaSampler([partial(layer, CUDA, "cuda", i) for i in range(layers)]),
        },
        16,
    )
    ideal = sum(n * k * 2 for n, k in shapes.values()) / bandwidth / 1e6
    return {
        "model": model,
        "tokens": tokens,
        "ideal_us": ideal,
        "error": error,
        **{who: asdict(t) | {"percent": 100 * ideal / t.median_us} for who, t in times.items()},
    }


def main() -> None:
    """Print a table and the document."""
    options = command_line(
        __doc__,
        models=([*MODELS], "of " + ", ".join(MODELS)),
        tokens=[1, 8, 16, 32, 64],
        bandwidth=(4.35, "TB/s that count as 100 percent"),
    )
    torch.manual_seed(0)
    document: dict[str, Any] = {
        "conditions": conditions.collect(torch.device("cuda")),
        "bandwidth": options.bandwidth,
        "layers": [],
        "chains": [],
    }
    for kind, names in (("layers", ("qkv", "o", "gate_up", "down", "lm_head")), ("chains", ("chain",))):
        for model in options.models:
            for name in names:
                for count in options.tokens:
                    row = (
                        bench_chain(model, count, options.bandwidth)
                        if kind == "chains"
                        else bench_layer(model, name, count, options.bandwidth)
                    )
                    document[kind].append(row)
                    peer = row.get("cublas") or row["composed"]
                    print(
                        f"{model} {name:8} {count:3}  ideal {row['ideal_us']:7.2f}  torch "
                        f"{peer['median_us']:7.2f} {peer['percent']:4.0f} %"
                        f"  cuda {row['cuda']['median_us']:7.2f} {row['cuda']['percent']:4.0f} %",
                        flush=True,
                    )
    print(json.dumps(document))


if __name__ == "__main__":
    main()
