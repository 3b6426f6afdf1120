"""What launchers hand to the Triton kernels of all families: records of pointers, strides
and numbers. A record is one argument of a kernel, so that its fields have their names on both sides. No
import of Triton.
"""

from typing import Any, NamedTuple, Self

from torch import Tensor

from torchpaged.custom_ops.pools import head_stride


class Batch(NamedTuple):
    """Pointers to the batch's metadata, and its sizes; ``table_row``: stride. What a kernel is not
    specialised on is an argument by itself, None in the record that is launched, and put in by the kernel."""

    table: Any
    seq_lens: Any
    starts: Any
    num_reqs: Any = None
    num_tokens: Any = None
    table_row: Any = None


class Results(NamedTuple):
    """Pointers to ``out`` and ``lse`` (or None), and their strides of a token and a head; with one to the
    scale of an ``out`` of fp8, or None."""

    out: Any
    lse: Any
    o_token: Any
    o_head: Any
    l_token: Any
    l_head: Any
    scale: Any = None

    @classmethod
    def of(cls, call: Any) -> Self:
        """Those of a call, the record of an op with ``out``, ``lse`` and ``output_scale``."""
        return cls.of_tensors(call.out, call.lse, call.output_scale)

    @classmethod
    def of_tensors(cls, out: Tensor, lse: Tensor | None, scale: Tensor | None = None) -> Self:
        """Those tensors."""
        l_token, l_head = (0, 0) if lse is None else lse.stride()
        return cls(out, lse, out.stride(0), out.stride(1), l_token, l_head, scale)


class Matrix(NamedTuple):
    """A pointer to rows of numbers, ``[num_rows, width]``, and their stride; None and 0 where there
    are none."""

    ptr: Any
    row: Any

    @classmethod
    def of(cls, x: Tensor | None) -> Self:
        """That of a tensor."""
        return cls(None, 0) if x is None else cls(x, x.stride(0))


class Tokens(NamedTuple):
    """A pointer to heads of tokens, ``[num_tokens, num_heads, width]``, and its strides; None and 0 where
    there are none."""

    ptr: Any
    token: Any
    head: Any

    @classmethod
    def of(cls, x: Tensor | None) -> Self:
        """Those of a tensor."""
        return cls(None, 0, 0) if x is None else cls(x, *x.stride()[:2])


class Pool(NamedTuple):
    """A pointer to a pool, ``[num_blocks, block_size, num_kv_heads, width]``, and its strides; with the scale
    of what it holds, or None."""

    ptr: Any
    block: Any
    slot: Any
    head: Any
    scale: Any
    scale_head: Any

    @classmethod
    def of(cls, cache: Tensor, scale: Tensor | None) -> Self:
        """That of a tensor."""
        block, slot, head, _ = cache.stride()
        return cls(cache, block, slot, head, scale, head_stride(scale))


class KeyPool(NamedTuple):
    """A pointer to a pool of keys without heads, ``[num_blocks, block_size, 1, width]``, and its strides;
    with the scales of each key, ``[num_blocks, block_size]``, or None, and theirs."""

    ptr: Any
    block: Any
    slot: Any
    scale: Any
    scale_block: Any
    scale_slot: Any

    @classmethod
    def of(cls, cache: Tensor, scale: Tensor | None) -> Self:
        """That of a tensor."""
        scale_block, scale_slot = (0, 0) if scale is None else scale.stride()
        return cls(cache, cache.stride(0), cache.stride(1), scale, scale_block, scale_slot)
