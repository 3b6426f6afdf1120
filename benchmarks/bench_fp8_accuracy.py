"""What fp8 keys and values cost a real model: perplexity of a fixed text and its logits, against the model's
own dtype.

    PYTHONPATH=. python benchmarks/bench_fp8_accuracy.py --model /folder/of/SmolLM2 --output fp8.json

The text is this repository's LICENSE. One forward over its first ``--tokens`` tokens writes every key and
value and reads it back, so that each query attends to rounded ones; scales are found in it. Of the logits:
the mean Kullback-Leibler divergence from the unrounded cache's, the share of tokens whose likeliest successor
stays, and the largest difference over the spread (standard deviation) of the logits. The last line is one
JSON document.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from decode_step.options import DTYPES
from documents import command_line, finish
from measuring import conditions
from torch import Tensor

from torchpaged.hf import PagedCache, attach

CACHES: dict[str, dict[str, Any]] = {
    "model's dtype": {},
    "e4m3 per head": {"kv_dtype": "fp8_e4m3", "kv_scales": "head"},
    "e4m3 per tensor": {"kv_dtype": "fp8_e4m3", "kv_scales": "tensor"},
    "e5m2 per head": {"kv_dtype": "fp8_e5m2", "kv_scales": "head"},
    "e5m2 per tensor": {"kv_dtype": "fp8_e5m2", "kv_scales": "tensor"},
}


def figures(logits: Tensor, exact: Tensor, ids: Tensor) -> dict[str, float]:
    """Of ``logits [num_tokens, vocab]`` float32 against ``exact``, and of the text ``ids [num_tokens]``."""
    log_p, log_q = exact.log_softmax(-1), logits.log_softmax(-1)
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
    return {
        "perplexity": float(loss.exp()),
        "mean_kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "same_likeliest": float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
        "largest_over_spread": float((logits - exact).abs().max() / exact.std()),
    }


def main() -> None:
    args = command_line(
        __doc__,
        model={"required": True, "help": "folder of a causal LM of transformers and its tokenizer"},
        dtype=("fp32", ", ".join(DTYPES)),
        tokens=1024,
        output="",
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype]).to(device).eval()
    attach(model)
    text = (Path(__file__).resolve().parents[1] / "LICENSE").read_text()
    ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt")["input_ids"][:, : args.tokens]
    ids, exact, rows = ids.to(device), None, []
    for name, options in CACHES.items():
        cache = PagedCache(model.config, 1, ids.shape[1] + 1, **options)
        with torch.no_grad():
            logits = model(ids, past_key_values=cache).logits[0].float()
        exact = logits if exact is None else exact
        rows.append({"cache": name, **figures(logits, exact, ids[0])})
        print(rows[-1], file=sys.stderr, flush=True)
    result = {
        "benchmark": "fp8 accuracy",
        "conditions": conditions.collect(device),
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "tokens": ids.shape[1],
        "rows": rows,
    }
    finish(result, args.output)


if __name__ == "__main__":
    main()
