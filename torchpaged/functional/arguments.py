"""What several of the functions make of their arguments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.check import check_block_sparse, check_options
from torchpaged.custom_ops.checks import check_device, check_dtype, given
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.custom_ops.pools import FP8, KVScales, check_scale
from torchpaged.custom_ops.registry import check_native_dtype, checks_arguments


def run_op(
    op: str,
    check: Callable[[], None],
    args: tuple[Any, ...],
    options: dict[str, Any],
    choose: Callable[[], BackendOps],
    native: str = "",
    **flags: bool,
) -> None:
    """Run an op whose arguments are tensors; eagerly they are checked once, by its launcher or here.

    Args:
        op: its name.
        check: refuses what the op would.
        args, options: the op's.
        choose: gives the handles; asked before anything is checked, so that what it refuses comes last.
        native: the first argument's name, where the CPU's own kernels take some dtypes alone.
        flags: further options, which can't be wrong.
    """
    if torch.compiler.is_compiling():
        handle = getattr(choose(), op)
    else:
        try:
            handle = getattr(choose(), op)
        except (BackendUnavailableError, ArgumentError, IndexError):  # a choice by shapes, which are wrong
            check()
            raise
        if not checks_arguments(handle, args[0].device):
            check()
            if native:
                check_native_dtype(handle, **{native: args[0]})
    handle(*args, **options, **flags)


def attention_call(
    *tensors: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    logits_soft_cap: float | None = None,
    chunk_size: int | None = None,
    **options: Any,
) -> AttentionCall:
    """The record of a call in a public function's words.

    Args:
        tensors: those up to ``lse`` in `AttentionCall`.
        scale: None: ``head_dim ** -0.5``.
        window_size: ``(left, right)``.
        logits_soft_cap, chunk_size: None: off.
        options: further ones, as the op has them.

    Raises:
        ArgumentError: options that are no numbers, or out of range; eagerly.
    """
    if not torch.compiler.is_compiling():
        window_size = check_options(scale, window_size, logits_soft_cap, chunk_size)
        check_block_sparse(options.get("block_sparse"))
    if scale is None:
        scale = max(tensors[0].shape[-1], 1) ** -0.5
    options["scale"], (options["window_left"], options["window_right"]) = scale, window_size
    options["logits_soft_cap"] = 0.0 if logits_soft_cap is None else logits_soft_cap
    options["chunk_size"] = 0 if chunk_size is None else chunk_size
    options["scales"] = KVScales.taken(options)
    return AttentionCall(*tensors, **options)


def scale_of_products(q: Tensor, q_scale: Tensor, num_kv_heads: int, k_scale: Tensor | None) -> Tensor:
    """What the ops take as ``k_scale`` with a scale of fp8 queries: the product of both.

    Raises:
        ArgumentError: a scale of queries that are not fp8, or a scale whose shape, dtype, device or numbers
            ``k_scale`` can't have.
    """
    if q.dtype not in FP8:
        raise ArgumentError(
            "q_scale", f"None for queries of {q.dtype}", "a tensor", "scales belong to fp8 queries"
        )
    scales = given(q_scale=q_scale, k_scale=k_scale)
    if torch.compiler.is_compiling():
        for name, scale in scales.items():  # a product might be of it nevertheless
            check_dtype(name, scale, torch.float32)
    else:
        check_device(q.device, **scales)
        for name, scale in scales.items():  # each by itself: their product may be good where they are not
            check_scale(name, scale, num_kv_heads)
    return q_scale if k_scale is None else q_scale * k_scale
