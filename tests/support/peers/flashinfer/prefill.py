"""The prefill wrapper."""

from .pages import Wrapper, seq_lens_of


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    made = 0

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
    ):
        assert backend in ("fa2", "fa3")
        assert not use_cuda_graph
        type(self).made += 1

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
    ):
        self._starts, self._indptr, self._indices = (
            qo_indptr.clone(),
            paged_kv_indptr.clone(),
            paged_kv_indices,
        )
        self._lens = seq_lens_of(paged_kv_indptr, paged_kv_last_page_len, page_size)
        self._options = {
            "causal": causal,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap or 0.0,
            "scale": sm_scale,
        }
