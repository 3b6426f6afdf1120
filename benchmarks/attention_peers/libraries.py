"""The paged peers: FlashInfer and FlashAttention-3, each called in the way that is fastest for it.

FlashInfer plans on the host; its plan and the conversion of the block table to CSR happen outside every
timing, and the plan's time is reported apart. Single-token batches go to the decode wrapper with tensor cores
(its CUDA-core decode is a weak peer), all others to the prefill wrapper. A plan for CUDA graphs is made for
any lengths to come and pads its grid; ``flashinfer-no-graph`` is planned for the lengths of the case alone,
which a captured step can't be, and fa3 is for prompts, which run eagerly. FlashAttention-3 gets scheduler
metadata computed beforehand. Both take torchpaged's cache layout uncopied.
"""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention_peers.cases import AttentionCase
from attention_peers.contender import Contender, Prepared, plan_us
from attention_peers.inputs import FP8_K_SCALE, Inputs

_FLASHINFER_WORKSPACE = 1 << 30  # bytes; its fa2 prompts of 16k tokens fail with half of it


def _import_failure(module: str, package: str) -> str | None:
    """Why ``module`` can't be imported, or None. A broken installation raises all sorts of things,
    hence Exception."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed; pip install {package}"
    except Exception as error:
        return f"import {module} fails: {type(error).__name__}: {error}"
    return None


def _gpu_only(case: AttentionCase, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"runs on CUDA devices, not on {device.type}"
    if case.dtype == torch.float32:
        return "computes in bf16 and fp16, not in fp32"
    if case.block_sparse is not None:
        return "is measured without masks that hide blocks"
    return None


# ------------------------------------------------------------------------------------------------- FlashInfer
def _csr(case: AttentionCase, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The block table in FlashInfer's form: indptr (host), indices (device), last_page_len (host),
    all int32."""
    used = [-(-length // case.block_size) for length in case.seq_lens]
    indptr = torch.tensor([0, *used]).cumsum(0).int()
    indices = torch.cat([inputs.block_table[row, :count] for row, count in enumerate(used)])
    last = torch.tensor([(length - 1) % case.block_size + 1 for length in case.seq_lens], dtype=torch.int32)
    return indptr, indices, last


def _flashinfer_why_not(backend: str, case: AttentionCase, device: torch.device) -> str | None:
    if backend == "fa3" and max(case.query_lens) <= 8:
        return "its fa3 kernels are for prefill; for decode they are 2 to 13 times slower than its fa2 ones"
    if backend == "fa3" and case.head_dim not in (64, 128, 256):
        return f"its fa3 kernels have widths of 64, 128 and 256, not {case.head_dim}"
    if backend == "fa3" and case.kv_dtype.itemsize == 1:
        return "its fa3 kernels read fp8 caches with fp8 queries only"
    widths = (64, 128, 256) if case.is_decode else (64, 96, 128, 256)
    if case.head_dim not in widths:
        return f"width {case.head_dim}: its decode at 96 reads memory that it must not, others were not tried"
    return _gpu_only(case, device)


def _flashinfer_prepare(backend: str, graphs: bool, case: AttentionCase, inputs: Inputs) -> Prepared:
    flashinfer: Any = importlib.import_module("flashinfer")
    indptr, indices, last = _csr(case, inputs)
    device, num_reqs = inputs.q.device, len(case.seq_lens)

    def buffer(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    workspace = torch.zeros(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    k_scale = FP8_K_SCALE if inputs.scales.k_scale is not None else 1.0
    common = {
        "q_data_type": case.dtype,
        "kv_data_type": case.kv_dtype,
        "sm_scale": inputs.scale * k_scale,  # v_scale is 1
    }
    heads = (case.num_heads, case.num_kv_heads, case.head_dim, case.block_size)
    layout = "HND" if inputs.heads_first else "NHD"
    pairs = list(zip(inputs.k_caches, inputs.v_caches, strict=True))
    if inputs.heads_first:
        pairs = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in pairs]
    rows: dict[str, Any] = {"indptr": buffer(num_reqs + 1), "indices": buffer(len(indices))}
    rows |= {"last_page_len": buffer(num_reqs)}
    of_graphs = {"use_cuda_graph": graphs, "backend": backend}
    if case.is_decode:
        if graphs:
            of_graphs |= {f"paged_kv_{name}_buffer": tensor for name, tensor in rows.items()}
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, layout, use_tensor_cores=True, **of_graphs
        )
        plan = partial(wrapper.plan, indptr, indices, last, *heads, **common)
    else:
        if graphs:
            of_graphs |= {f"paged_kv_{name}_buf": tensor for name, tensor in rows.items()}
            of_graphs["qo_indptr_buf"] = buffer(num_reqs + 1)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout, **of_graphs)
        starts = inputs.query_start_loc.cpu()
        plan = partial(wrapper.plan, starts, indptr, indices, last, *heads, causal=True, **common)
    plan()  # compiles
    of_plan = plan_us(plan, device)
    out = inputs.poisoned_out()

    def call(layer: int) -> Tensor:
        # without out the wrapper would zero a new one at each call
        wrapper.run(inputs.q, pairs[layer], out=out)
        return out

    return Prepared([partial(call, layer) for layer in range(inputs.num_layers)], of_plan)


# ------------------------------------------------------------------------------------------- FlashAttention-3
def _fa3_why_not(case: AttentionCase, device: torch.device) -> str | None:
    if case.kv_dtype != case.dtype:
        return "reads fp8 caches with fp8 queries only, which would be another computation"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        return "needs a GPU of compute capability 9.x"
    return _gpu_only(case, device)


def _fa3_prepare(case: AttentionCase, inputs: Inputs) -> Prepared:
    module: Any = importlib.import_module("flash_attn_interface")
    num_reqs, query_len = len(case.seq_lens), max(case.query_lens)
    ragged = len(set(case.query_lens)) > 1
    starts = inputs.query_start_loc if ragged else None
    q = inputs.q if ragged else inputs.q.view(num_reqs, query_len, case.num_heads, case.head_dim)
    metadata = module.get_scheduler_metadata(
        num_reqs,
        query_len,
        max(case.seq_lens),
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        inputs.seq_lens,
        qkv_dtype=case.dtype,
        cu_seqlens_q=starts,
        page_size=case.block_size,
        causal=True,
    )
    options = {"cu_seqlens_q": starts, "max_seqlen_q": query_len} if ragged else {}

    def call(layer: int) -> Tensor:
        out = module.flash_attn_with_kvcache(
            q,
            inputs.k_caches[layer],
            inputs.v_caches[layer],
            cache_seqlens=inputs.seq_lens,
            page_table=inputs.block_table,
            softmax_scale=inputs.scale,
            causal=True,
            scheduler_metadata=metadata,
            **options,
        )
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return Prepared([partial(call, layer) for layer in range(inputs.num_layers)])


def _flashinfer(name: str, backend: str, graphs: bool) -> Contender:
    return Contender(
        name,
        False,
        partial(_import_failure, "flashinfer", "flashinfer-python"),
        partial(_flashinfer_why_not, backend),
        partial(_flashinfer_prepare, backend, graphs),
    )


PEERS = (
    _flashinfer("flashinfer", "fa2", True),
    _flashinfer("flashinfer-no-graph", "fa2", False),
    _flashinfer("flashinfer-fa3", "fa3", False),
    Contender(
        "fa3",
        False,
        partial(_import_failure, "flash_attn_interface", "tokenspeed-fa3"),
        _fa3_why_not,
        _fa3_prepare,
    ),
)
