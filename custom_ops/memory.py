"""Checks of where tensors lie in memory: what an op writes is apart from what it reads, by addresses
alone."""

from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError


def _span(tensor: Tensor) -> tuple[int, int]:
    """The range of a tensor's addresses; of no numbers, or on meta, an empty one that meets no other."""
    count = tensor.numel()
    if not count or tensor.is_meta:
        return 0, 0
    if not tensor.is_contiguous():
        count = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + tensor.element_size() * count


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    (a_start, a_end), (b_start, b_end) = _span(a), _span(b)
    return a_start < b_end and b_start < a_end


def check_own_elements(name: str, tensor: Tensor) -> None:
    """Each element of a tensor that is written has memory of its own, as it has not after ``expand``."""
    if tensor.is_contiguous():
        return
    reach = 0  # of the dimensions of smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ArgumentError(
                name,
                "memory of its own for each element",
                f"strides {tensor.stride()}",
                "allocate it with torch.empty",
            )
        reach += (size - 1) * stride


def check_apart(written: dict[str, Tensor], read: dict[str, Tensor], fix: str) -> None:
    """The address range of nothing ``written`` meets that of anything ``read``, and no two elements of
    something written meet. Looks at addresses only, not at the device."""
    spans = {name: _span(tensor) for name, tensor in read.items()}
    for target, tensor in written.items():
        check_own_elements(target, tensor)
        start, end = _span(tensor)
        for name, (first, last) in spans.items():
            if start < last and first < end:
                raise ArgumentError(
                    name, f"memory apart from {target}'s, which the op writes", "overlapping tensors", fix
                )


def pools_meet(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether two pools ``[num_blocks, block_size, num_kv_heads, width]`` share an element.

    Pools whose address ranges meet may still be apart: keys and values side by side in one tensor. Pools of
    different strides are taken to meet where their ranges do.
    """
    if not overlap(k_cache, v_cache):
        return False
    strides = k_cache.stride()[:3]
    if strides != v_cache.stride()[:3]:
        return True
    # An element of v minus one of k: a multiple of each stride, within the sizes, and a difference
    # of columns.
    dims = sorted(
        ((s, n) for s, n in zip(strides, k_cache.shape[:3], strict=True) if n > 1 and s), reverse=True
    )
    width = max(k_cache.shape[3], v_cache.shape[3]) - 1
    reach = [width + sum((n - 1) * s for s, n in dims[i + 1 :]) for i in range(len(dims))]

    def meet(distance: int, i: int) -> bool:
        if i == len(dims):
            return 1 - v_cache.shape[3] <= distance <= k_cache.shape[3] - 1
        stride, size = dims[i]
        low, high = -((reach[i] - distance) // stride), (distance + reach[i]) // stride
        return any(
            meet(distance - step * stride, i + 1)
            for step in range(max(low, 1 - size), min(high, size - 1) + 1)
        )

    return meet((v_cache.data_ptr() - k_cache.data_ptr()) // k_cache.element_size(), 0)


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether values are declared to be the first columns of the keys: ``v_cache = k_cache[..., :n]`` with n
    below the width."""
    return (
        v_cache.data_ptr() == k_cache.data_ptr()
        and v_cache.stride() == k_cache.stride()
        and v_cache.shape[3] < k_cache.shape[3]
    )
