"""The decode wrapper and its short plan."""

from typing import Any

import torch
from signatures import takes

from torchpaged.custom_ops import BACKEND_OPS

from .pages import Wrapper, seq_lens_of

PLANS: list[str] = []


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    made = 0

    @takes(
        "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False, "
        "paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, "
        "backend='auto', jit_args=None"
    )
    def __init__(self, given):
        assert not given.float_workspace_buffer.any()
        assert given.use_cuda_graph
        assert given.use_tensor_cores
        assert given.backend == "fa2"
        self._paged_kv_indptr_buf = self._indptr = given.paged_kv_indptr_buffer
        self._paged_kv_indices_buf = self._indices = given.paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = given.paged_kv_last_page_len_buffer
        self._fixed_batch_size = len(given.paged_kv_last_page_len_buffer)
        self._plan_info: Any = None
        type(self).made += 1

    @takes(
        "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
        "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, q_data_type='float16', "
        "kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, "
        "disable_split_kv=False"
    )
    def plan(self, given):
        PLANS.append("plan")
        assert given.indptr.device.type == given.last_page_len.device.type == "cpu"
        with torch.inference_mode():
            self._paged_kv_indptr_buf.copy_(given.indptr)
            self._paged_kv_last_page_len_buf.copy_(given.last_page_len)
            self._paged_kv_indices_buf[: len(given.indices)].copy_(given.indices)
        self._schedule(given)

    def _schedule(self, given):
        assert len(given.last_page_len) == self._fixed_batch_size == len(given.indptr) - 1
        assert isinstance(given.q_data_type, torch.dtype)
        self._starts = torch.arange(self._fixed_batch_size + 1, dtype=torch.int32)
        self._lens = seq_lens_of(given.indptr, given.last_page_len, given.page_size)
        self._options = {"window_left": given.window_left, "logits_soft_cap": given.logits_soft_cap or 0.0}
        self._options["scale"] = given.sm_scale
        self._plan_info = [self._fixed_batch_size, 7]


@takes(
    "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
    "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, "
    "data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, "
    "fixed_split_size=None, disable_split_kv=False, q_len_per_req=1, global_override_indptr_cpu=None"
)
def fast_decode_plan(self, given):
    """Leaves the buffers as it finds them: they must hold this batch's pages already."""
    PLANS.append("fast")
    indices = given.indices
    assert given.global_override_indptr_cpu is not None
    assert self._plan_info is not None
    assert self._paged_kv_indptr_buf.tolist() == given.global_override_indptr_cpu.tolist()
    assert self._paged_kv_last_page_len_buf.tolist() == given.last_page_len.tolist()
    assert not len(indices) or indices.data_ptr() == self._paged_kv_indices_buf.data_ptr()
    self._schedule(given)


XQA_CALLS: list[dict[str, Any]] = []


@takes(
    "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, "
    "window_left=-1, out=None, sinks=None, kv_layout='NHD', enable_pdl=None, q_len_per_req=1, o_scale=1.0, "
    "mask=None, kv_cache_sf=None, q_cu_seq_lens=None"
)
def xqa_batch_decode_with_kv_cache(given):
    """Reads the table and the lengths where they are; a request without keys is undefined."""
    XQA_CALLS.append(vars(given))
    query, (k_cache, v_cache), table, lens = given.query, given.kv_cache, given.block_tables, given.seq_lens
    assert query.is_contiguous()
    assert table.is_contiguous()
    assert lens.dtype == torch.int32
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.dtype == query.dtype
    assert given.bmm2_scale == 1.0
    assert not given.workspace_buffer.any()
    assert given.kv_layout == "NHD"
    assert given.max_seq_len % k_cache.shape[1] == 0
    assert given.sinks is None or given.sinks.dtype == torch.float32
    y, starts = torch.empty_like(query), torch.arange(len(query) + 1, dtype=torch.int32)
    BACKEND_OPS["reference"].paged_attention(
        *(query, k_cache, v_cache, table, lens, starts, y),
        max_query_len=1,
        scale=given.bmm1_scale,
        window_left=given.window_left,
        sinks=given.sinks,
    )
    return y.masked_fill((lens <= 0)[:, None, None], float("nan"))
