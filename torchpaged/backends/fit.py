"""What a call of `torchpaged.PagedAttention` is held to besides the checks of its ops: pools and batches that
its session was opened for, and an output that can be written into."""

from torch import Tensor

from torchpaged.backends.session import Session
from torchpaged.custom_ops.checks import check_dims, check_tensors, given, shape_of
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.custom_ops.memory import check_apart
from torchpaged.metadata import AttentionMetadata


def require_fit(
    k_cache: Tensor, metadata: AttentionMetadata, session: Session, block_size: int | None
) -> None:
    """Refuse pools and a batch that a module's session was not opened for. It looks at shapes and dtypes
    alone, so that it runs in traced calls too.

    Args:
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, the keys' pool.
        metadata: the batch.
        session: the module's.
        block_size: that the module was built for; None: not said.

    Raises:
        ArgumentError: another block size, or more blocks than the limits say.
        BackendUnavailableError: the backend does not take such pools, or such a batch.
    """
    require_block_size(k_cache, metadata, block_size)
    if k_cache.dim() != 4:
        return  # the op's own check says what is wrong
    limits, able, num_blocks, size = session.limits, session.capabilities, k_cache.shape[0], k_cache.shape[1]
    expected, got = "", ""
    if limits.block_size is not None and size != limits.block_size:
        expected, got = f"blocks of block_size={limits.block_size} tokens", f"blocks of {size}"
    elif limits.num_blocks is not None and num_blocks > limits.num_blocks:
        expected, got = f"at most num_blocks={limits.num_blocks}", f"{num_blocks} blocks"
    if expected:
        fix = "open the session with the Limits of the pools"
        raise ArgumentError("kv_cache", f"{expected}, as the session's limits say", got, fix)
    if able.block_sizes is not None and size not in able.block_sizes:
        raise _unfit(session, f"block_size {size} is not one of {able.block_sizes}", f"block_size={size}")
    if k_cache.dtype not in able.kv_dtypes:
        raise _unfit(session, f"kv dtype {k_cache.dtype} is not one of {able.kv_dtypes}", "kv_dtype")
    for feature in metadata.features:
        if feature not in able.features:
            raise _unfit(session, f"{feature} is not supported", f"{feature}=True")


def require_dtype(query: Tensor, session: Session) -> None:
    """Refuse queries of a dtype that a module's backend does not take; raises `BackendUnavailableError`."""
    known = session.capabilities.dtypes
    if query.dtype not in known:
        reason = f"dtype {str(query.dtype).removeprefix('torch.')} is not one of {known}"
        raise _unfit(session, reason, "dtype, or call module.to(dtype)")


def _unfit(session: Session, reason: str, option: str) -> BackendUnavailableError:
    """What a module's backend was not chosen for, and the option of the module that would have told."""
    return BackendUnavailableError(
        f"backend {session.name!r} cannot run this attention: {reason}; give PagedAttention {option}, so "
        "that it chooses with it"
    )


def require_block_size(k_cache: Tensor, metadata: AttentionMetadata, block_size: int | None) -> None:
    """Refuse what is no batch, and blocks of another size than the batch or the module was made for;
    arguments as in `require_fit`.

    Raises:
        ArgumentError: no `AttentionMetadata`, or another block size.
    """
    if not isinstance(metadata, AttentionMetadata):
        raise ArgumentError(
            "metadata",
            "AttentionMetadata",
            type(metadata).__name__,
            "it comes after the cache; CacheRequests.append or AttentionMetadata.from_lists makes it",
        )
    if k_cache.dim() != 4:
        return  # the op's own check says what is wrong
    size = k_cache.shape[1]
    metadata.check_block_size(size)
    if block_size is not None and size != block_size:
        raise ArgumentError(
            "kv_cache",
            f"blocks of {block_size} tokens, as this module was built for",
            f"blocks of {size}",
            "build both with one block_size, or the module without it",
        )


def check_rows(name: str, tensor: Tensor, *sizes: int) -> None:
    """``tensor`` ends in dimensions of these sizes: heads and a width, or a width alone. The others flatten
    to tokens: heads that stand before them would be scrambled. It looks at the shape alone, in traced calls
    too; where there are as many tokens as heads, the order can't be told.

    Raises:
        ArgumentError: they differ.
    """
    shape = tensor.shape
    if shape[-len(sizes) :] == sizes:
        return
    fix = ""
    if len(sizes) == 2 and shape[-1:] == (sizes[0] * sizes[1],):
        fix = f"split the heads with .unflatten(-1, {list(sizes)})"
    elif len(sizes) == 2 and len(shape) > 2 and (shape[-3], shape[-1]) == sizes:
        fix = "put tokens before heads with .transpose(-3, -2)"
    raise ArgumentError(name, f"a shape that ends in {list(sizes)}", shape_of(tensor), fix)


def check_out(out: Tensor, query: Tensor, head_dim_v: int, key: Tensor | None, value: Tensor | None) -> None:
    """What the op's own checks can't tell of the caller's ``out``: that it is one of the result's shape, and
    apart."""
    check_tensors(out=out)
    check_dims("out", out, *query.shape[:-1], head_dim_v)
    strides = out.stride()
    for size, stride, inner, step in zip(
        out.shape[1:-2], strides[1:-2], out.shape[:-3], strides[:-3], strict=True
    ):
        if inner > 1 and step != size * stride:
            raise ArgumentError(
                "out", "leading dimensions that flatten to tokens without a copy", f"strides {strides}"
            )
    # an attention that starts early may write while keys and values are still read
    check_apart({"out": out}, given(key=key, value=value), "allocate out by itself")
