"""top_k_indices of the ``cuda`` backend: by the Hopper kernel, in ascending order and of equal logits the
first; rows that it can't take by torch's kernels."""

import functools

import torch
from torch import Tensor

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.loaded_kernel import Kernel
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.cuda.routes import not_hopper, require_gpu
from torchpaged.custom_ops.indexer.check import check_top_k_indices

THREADS = 1024
#: Logits that a CTA holds at most, 8 x 4 of each thread in registers, and CTAs of a portable cluster.
_MOST_VECTORS, MAX_CLUSTER = 8, 8
#: Fewest logits of a CTA: what fewer save in counting, the cluster's barriers take.
_FEWEST = THREADS * 4


TOP_K = Table.of_file("indexer/cuda/top_k_config.cuh")


def top_k_indices(logits: Tensor, indices: Tensor) -> None:
    """Launch; arguments as in ``custom_ops/indexer/schema.py``. Every choice here depends on shapes."""
    require_gpu(logits.device)
    index = logits.device.index or 0
    if why_not(logits, indices, gpu.capability(index)):
        from torchpaged.custom_ops.indexer.triton.top_k_indices import top_k_indices as by_torch

        by_torch(logits, indices)
        return
    check_top_k_indices(logits, indices)
    if not indices.numel():
        return
    rows, columns = logits.shape
    config = top_k_config(rows, columns, gpu.num_sms(index))
    params = struct_of("top_k_indices.cu")(
        logits=logits.data_ptr(),
        indices=indices.data_ptr(),
        logits_row=logits.stride(0),
        indices_row=indices.stride(0),
        columns=columns,
        top_k=indices.shape[1],
    )
    grid = rows * config["CLUSTER"]
    _kernel(index, config).launch(grid, THREADS, params, early=gpu.launches_early(index))


def why_not(logits: Tensor, indices: Tensor, capability: tuple[int, int]) -> str | None:
    """Why the kernel can't take a call, or None. Shapes, strides and addresses only."""
    if reason := not_hopper(capability):
        return reason
    if logits.dim() != 2 or indices.dim() != 2:
        return "shapes that the check refuses"
    if logits.shape[1] > MAX_CLUSTER * _MOST_VECTORS * _FEWEST:
        return f"rows of {logits.shape[1]} logits, not {MAX_CLUSTER * _MOST_VECTORS * _FEWEST}"
    if logits.stride(1) != 1 or logits.stride(0) % 4 or logits.data_ptr() % 16:
        return f"logits with strides {logits.stride()}: rows must begin at multiples of 16 bytes"
    if indices.stride(1) != 1:
        return f"indices with strides {indices.stride()}: a token's positions must be contiguous"
    return None


def top_k_config(rows: int, columns: int, num_sms: int) -> Config:
    """The constants: so many CTAs for each row as fill the device, but not more than have work."""
    groups = max(1, -(-columns // _FEWEST))
    cluster = 1
    while (
        cluster < MAX_CLUSTER
        and cluster < groups
        and (rows * cluster * 2 <= num_sms or groups > cluster * _MOST_VECTORS)
    ):
        cluster *= 2
    vectors = 1
    while vectors * cluster < groups:
        vectors *= 2
    return TOP_K.config({"VECTORS": vectors, "CLUSTER": cluster})


@functools.cache
def _kernel(index: int, config: Config) -> Kernel:
    return jit.kernel(
        "top_k_indices.cu", "top_k_indices", config, torch.device("cuda", index), shared_bytes=0
    )
