"""The prefill wrapper, and the cascade of several levels."""

import itertools

import torch

from .pages import Wrapper, attend, seq_lens_of


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


class MultiLevelCascadeAttentionWrapper:
    def __init__(self, num_levels, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        assert num_levels == 2

    def plan(
        self,
        qo_indptr_arr,
        paged_kv_indptr_arr,
        paged_kv_indices_arr,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
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
    ):
        (_, rows), (_, shared) = qo_indptr_arr[0].tolist(), paged_kv_indptr_arr[0].tolist()
        assert shared == len(paged_kv_indices_arr[0])
        assert rows == len(qo_indptr_arr[1]) - 1
        prefix, own = paged_kv_indices_arr
        indptr = paged_kv_indptr_arr[1]
        parts = [torch.cat([prefix, own[a:b]]) for a, b in itertools.pairwise(indptr)]
        self._starts, self._indices = qo_indptr_arr[1], torch.cat(parts)
        self._indptr = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).int()
        self._lens = seq_lens_of(self._indptr, paged_kv_last_page_len[1], page_size)
        self._scale = sm_scale

    def run(self, q, paged_kv_cache):
        return attend(
            q, paged_kv_cache, self._starts, self._indptr, self._indices, self._lens, scale=self._scale
        )[0]
