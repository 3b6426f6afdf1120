"""The decode wrapper and its short plan."""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS

from .pages import Wrapper, seq_lens_of

PLANS: list[str] = []


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    made = 0

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        assert not float_workspace_buffer.any()
        assert use_cuda_graph
        assert use_tensor_cores
        assert backend == "fa2"
        self._paged_kv_indptr_buf = self._indptr = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = self._indices = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
        self._plan_info: Any = None
        type(self).made += 1

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        PLANS.append("plan")
        assert indptr.device.type == last_page_len.device.type == "cpu"
        with torch.inference_mode():
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        self._schedule(indptr, last_page_len, page_size, window_left, logits_soft_cap, sm_scale, q_data_type)

    def _schedule(self, indptr, last_page_len, page_size, window_left, cap, scale, dtype):
        assert len(last_page_len) == self._fixed_batch_size == len(indptr) - 1
        assert isinstance(dtype, torch.dtype)
        self._starts = torch.arange(self._fixed_batch_size + 1, dtype=torch.int32)
        self._lens = seq_lens_of(indptr, last_page_len, page_size)
        self._options = {"window_left": window_left, "logits_soft_cap": cap or 0.0, "scale": scale}
        self._plan_info = [self._fixed_batch_size, 7]


def fast_decode_plan(
    self,
    indptr,
    indices,
    last_page_len,
    num_qo_heads,
    num_kv_heads,
    head_dim,
    page_size,
    pos_encoding_mode="NONE",
    window_left=-1,
    logits_soft_cap=None,
    q_data_type=None,
    kv_data_type=None,
    data_type=None,
    sm_scale=None,
    rope_scale=None,
    rope_theta=None,
    non_blocking=True,
    fixed_split_size=None,
    disable_split_kv=False,
    q_len_per_req=1,
    global_override_indptr_cpu=None,
):
    """Leaves the buffers as it finds them: they must hold this batch's pages already."""
    PLANS.append("fast")
    assert global_override_indptr_cpu is not None
    assert self._plan_info is not None
    assert self._paged_kv_indptr_buf.tolist() == global_override_indptr_cpu.tolist()
    assert self._paged_kv_last_page_len_buf.tolist() == last_page_len.tolist()
    assert not len(indices) or indices.data_ptr() == self._paged_kv_indices_buf.data_ptr()
    self._schedule(indptr, last_page_len, page_size, window_left, logits_soft_cap, sm_scale, q_data_type)


XQA_CALLS: list[dict[str, Any]] = []


def xqa_batch_decode_with_kv_cache(
    query,
    kv_cache,
    workspace_buffer,
    block_tables,
    seq_lens,
    max_seq_len,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    window_left=-1,
    out=None,
    sinks=None,
    kv_layout="NHD",
    enable_pdl=None,
    q_len_per_req=1,
    o_scale=1.0,
    mask=None,
    kv_cache_sf=None,
    q_cu_seq_lens=None,
):
    """Reads the table and the lengths where they are; a request without keys is undefined."""
    XQA_CALLS.append(dict(locals()))
    k_cache, v_cache = kv_cache
    assert query.is_contiguous()
    assert block_tables.is_contiguous()
    assert seq_lens.dtype == torch.int32
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.dtype == query.dtype
    assert bmm2_scale == 1.0
    assert not workspace_buffer.any()
    assert kv_layout == "NHD"
    assert max_seq_len % k_cache.shape[1] == 0
    y = torch.empty_like(query)
    assert sinks is None or sinks.dtype == torch.float32
    BACKEND_OPS["reference"].paged_attention(
        query,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        torch.arange(len(query) + 1, dtype=torch.int32),
        y,
        max_query_len=1,
        scale=bmm1_scale,
        window_left=window_left,
        sinks=sinks,
    )
    return y.masked_fill((seq_lens <= 0)[:, None, None], float("nan"))
