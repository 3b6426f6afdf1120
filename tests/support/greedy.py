"""What a model says in generate(), greedily."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def greedy(
    model: Any,
    inputs: dict[str, Tensor],
    cache: Any = None,
    generate: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Logits of every new token ``[tokens, rows, vocab]``, and the cache behind them.

    Args:
        cache: None for the model's own.
        generate: None for the model's.
        options: of generate(), which compiles nothing unless they say so.
    """
    given: dict[str, Any] = {"do_sample": False, "disable_compile": True}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    given |= {} if cache is None else {"past_key_values": cache}
    out = (generate or model.generate)(**inputs, **given | options)
    return torch.stack(out.logits), getattr(out, "past_key_values", None)
