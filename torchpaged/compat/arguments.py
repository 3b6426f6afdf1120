"""What the functions of this package share: arguments of other libraries checked under their own names, and
put into our words."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_device, check_dims, check_dtype, check_tensors, is_int
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import FP8, check_scale_values

_LOG = logging.getLogger("torchpaged.compat")
_TOLD: set[tuple[str, str]] = set()


#: Our words -> FlashAttention's.
NAMES = {
    "query_start_loc": "cu_seqlens_q",
    "max_query_len": "max_seqlen_q",
    "logits_soft_cap": "softcap",
    "scale": "softmax_scale",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}


def is_eager() -> bool:
    """Whether arguments are checked: not while a call is traced, as everywhere in torchpaged."""
    return not torch.compiler.is_compiling()


def refuse(function: str, fix: str = "", expected: Any = None, **given: Any) -> None:
    """Raise for the first argument that was given, or is not as ``expected``: one that changes the result,
    and that no kernel of ours honours."""
    for name, value in given.items():
        if isinstance(value, Tensor) or value not in (None, expected):
            text = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            honoured = f"{expected} ({function} of torchpaged.compat has no kernel that honours it)"
            raise ArgumentError(name, honoured, text, fix)


def refuse_invariant_splits(num_splits: int | None) -> None:
    """Raise for ``num_splits=1``: with it FlashAttention promises the same bits for a request in every batch,
    which the kernels behind these functions do not."""
    if type(num_splits) is int and num_splits == 1:
        raise ArgumentError(
            "num_splits",
            "0 or None",
            "1, by which a request has the same bits in every batch",
            "call torchpaged.paged_attention(..., batch_invariant=True)",
        )


def note_hints(function: str, **given: Any) -> None:
    """Say once that an argument was given which can change the speed of the original and no result, and that
    nothing follows from it."""
    if not is_eager():
        return
    for name, value in given.items():
        if value is not None and (function, name) not in _TOLD:
            _TOLD.add((function, name))
            _LOG.info(
                "%s: %s tunes the kernels it was made for; torchpaged's choose by themselves, same result",
                function,
                name,
            )


def window_of(causal: bool, window_size: Any) -> tuple[bool, tuple[int, int]]:
    """FlashAttention's ``causal`` and ``window_size`` -> ours. Causal closes the right side, whatever the
    window says; None is open.

    Returns:
        Whether no key after the query is seen, and the window.
    """
    if window_size is None:
        window_size = (-1, -1)
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        raise ArgumentError(
            "window_size", "None or a pair (left, right) of numbers of keys, -1 = open", repr(window_size)
        )
    left, right = window_size
    if is_eager() and any(not is_int(side) or side < -1 for side in (left, right)):
        raise ArgumentError(
            "window_size", "a pair (left, right) of ints, numbers of keys or -1 (open)", repr(window_size)
        )
    if causal or right == 0:
        return True, (left, -1)
    return False, (left, right)


def options_of(
    scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    chunk: int = 0,
) -> dict[str, Any]:
    """FlashAttention's options -> those of `torchpaged.paged_attention`."""
    is_causal, window = window_of(causal, window_size)
    return {
        "scale": scale,
        "causal": is_causal,
        "window_size": window,
        "logits_soft_cap": softcap,
        "alibi_slopes": slopes_of(slopes, is_causal),
        "sinks": sinks,
        "chunk_size": chunk,
    }


def slopes_of(alibi_slopes: Tensor | None, causal: bool) -> Tensor | None:
    """FlashAttention's slopes ``[num_heads]`` or ``[num_reqs, num_heads]`` -> ours ``[num_heads]``.

    Raises:
        ArgumentError: requests have different slopes, or keys after the query are seen: there FlashAttention
            takes the absolute value of the distance, and our kernels the signed one.
    """
    if alibi_slopes is None:
        return None
    if is_eager():
        check_tensors(alibi_slopes=alibi_slopes)
    if not causal:
        raise ArgumentError(
            "alibi_slopes",
            "None unless causal (the bias of keys after the query would have the wrong sign)",
            "slopes",
        )
    if alibi_slopes.dim() == 2:
        if alibi_slopes.shape[0] != 1 and alibi_slopes.stride(0) != 0:
            raise ArgumentError(
                "alibi_slopes",
                "one slope per head, the same for all requests",
                f"shape {list(alibi_slopes.shape)}",
                "pass alibi_slopes[0] if the rows are equal",
            )
        return alibi_slopes[0]
    return alibi_slopes


def scale_of(
    name: str, descale: Tensor | None, num_reqs: int, num_kv_heads: int, pool: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """A descale of FlashAttention, float32 of one number or ``[num_reqs, num_kv_heads]`` -> what the kernels
    take, and what they don't.

    Returns:
        ``(scale, per_request)``: a float32 ``[1]`` or ``[num_kv_heads]`` for the kernels, or the descale
        itself, which is different for each request. Both None where there is none.
    """
    if descale is None:
        return None, None
    if is_eager():
        check_tensors(**{name: descale})
        check_dtype(name, descale, torch.float32)
        check_device(pool.device, **{name: descale})
        if descale.numel() != 1 or descale.dim() == 2:
            check_dims(name, descale, num_reqs, num_kv_heads)
        if pool.dtype not in FP8:
            raise ArgumentError(
                name, f"None for a cache of {pool.dtype}", "a tensor", "descales belong to fp8 caches"
            )
        check_scale_values(name, descale)
    if descale.dim() < 2:
        return descale.reshape(1), None
    if descale.stride(0) == 0 or descale.shape[0] == 1:  # expanded over the requests, as vLLM does it
        row = descale[0]
        return (row[:1] if row.stride(0) == 0 else row.contiguous()), None
    return None, descale


def check_out(out: Tensor, q: Tensor, width: int) -> None:
    """``out`` can be written into: the result's shape ``[*q.shape[:-1], width]``, and q's dtype, bfloat16 for
    fp8."""
    check_tensors(out=out)
    check_dims("out", out, *q.shape[:-1], width)
    check_dtype("out", out, torch.bfloat16 if q.dtype in FP8 else q.dtype)
    check_device(q.device, out=out)


def by_their_names(names: dict[str, str], call: Callable[[], Any]) -> Any:
    """``call()``, whose `ArgumentError` speaks of the caller's arguments: ours -> theirs in ``names``."""
    try:
        return call()
    except ArgumentError as error:
        argument, *parts = error.args
    raise ArgumentError(names.get(argument, argument), *parts)  # no "from": torch 2.11 can't trace it
