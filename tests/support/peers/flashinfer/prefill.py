"""The prefill wrapper."""

from signatures import takes

from .pages import Wrapper, seq_lens_of


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    made = 0

    @takes(
        "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
        "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, "
        "custom_mask_buf=None, mask_indptr_buf=None, backend='auto'"
    )
    def __init__(self, given):
        assert given.backend in ("fa2", "fa3")
        assert not given.use_cuda_graph
        type(self).made += 1

    @takes(
        "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
        "num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, "
        "causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, "
        "logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, "
        "o_data_type=None, non_blocking=True"
    )
    def plan(self, given):
        self._starts, self._indptr = given.qo_indptr.clone(), given.paged_kv_indptr.clone()
        self._indices = given.paged_kv_indices
        self._lens = seq_lens_of(given.paged_kv_indptr, given.paged_kv_last_page_len, given.page_size)
        self._options = {"causal": given.causal, "window_left": given.window_left, "scale": given.sm_scale}
        self._options["logits_soft_cap"] = given.logits_soft_cap or 0.0
