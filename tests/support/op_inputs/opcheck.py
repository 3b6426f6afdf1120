"""A case of every op for ``torch.library.opcheck``."""

from typing import Any

import torch

from op_inputs.channels import make_channel_inputs
from op_inputs.delta_step import make_delta_step_inputs
from op_inputs.experts import make_experts_inputs, make_route_inputs
from op_inputs.latent_writes import make_latent_writes
from op_inputs.mamba2_step import make_mamba2_step_inputs
from op_inputs.rope import ROPE_CASES, make_rope_inputs
from op_inputs.state import STATE_BATCHES, make_conv_inputs, make_linear_inputs
from op_inputs.state_gates import make_gated_norm_inputs, make_gates_inputs
from op_inputs.trees import TREE_SPECS, make_tree_batch
from torchpaged import BlockSparse
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.testing.batches import BATCH_SPECS, make_batch, on_host


@on_host()
def opcheck_cases(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Case name -> (op, args, kwargs) over which ``torch.library.opcheck`` proves every overload."""
    batch = make_batch(BATCH_SPECS["mixed_padded"], dtype=dtype, device=device, sinks=True, alibi=True)
    # opcheck compares mutated pools for equality
    (batch.k_cache.nan_to_num_(0.5), batch.v_cache.nan_to_num_(0.5))
    num_tokens, num_heads, head_dim = batch.q.shape
    kv = torch.randn(num_tokens, batch.k_cache.shape[2], head_dim, dtype=dtype, device=device)
    slots = torch.arange(num_tokens, device=device) + 20
    slots[-1] = -1
    state, lse = (
        torch.randn(7, 4, 64, dtype=dtype, device=device),
        torch.randn(7, 4, dtype=torch.float32, device=device),
    )
    lse[0] = float("-inf")
    attention = batch.tensors
    out = torch.zeros_like(batch.q)
    common = {"max_query_len": batch.max_query_len, "scale": batch.scale}
    trees = make_tree_batch(TREE_SPECS["tree_chain"], head_dim=16, dtype=dtype, device=device)
    trees.k_cache.nan_to_num_(0.5), trees.v_cache.nan_to_num_(0.5)
    tree = trees.tensors
    tree_options = {"max_query_len": trees.max_query_len, "scale": trees.scale, **trees.extras}
    latents = make_batch(
        BATCH_SPECS["mixed_padded"], num_kv_heads=1, head_dim=24, head_dim_v=16, dtype=dtype, device=device
    )
    rows = latents.k_cache.nan_to_num_(0.5)
    latent = (latents.q, rows, latents.block_table, latents.seq_lens, latents.query_start_loc)
    positions = torch.arange(latents.q.shape[0] * 3, dtype=torch.int32, device=device).view(-1, 3) % 40 - 1
    up_values = torch.randn(latents.q.shape[1], 12, latents.q.shape[2], device=device).to(dtype)
    index_pool, index_weights = rows[..., :16].contiguous(), torch.ones_like(latents.q[..., 0]).float()
    columns = latents.block_table.shape[1] * rows.shape[1]
    index_logits = index_weights[:, :1].repeat(1, columns)
    ids = torch.arange(4, device=device)
    table = torch.tensor([[3, 1], [2, 9], [4, 5], [0, 0]], dtype=torch.int32, device=device)
    lens = torch.tensor([17, 4, 32, 0], dtype=torch.int32, device=device)
    pairs = torch.tensor([[1, 3], [-1, 2], [4, 5]], device=device)
    rope = [make_rope_inputs(**ROPE_CASES[name], dtype=dtype, device=device) for name in ("smollm2", "glm4")]
    for inputs in rope:
        inputs["k_cache"].nan_to_num_(0.5), inputs["v_cache"].nan_to_num_(0.5)
    semaphore = torch.zeros(
        batch.block_table.shape[0] * batch.k_cache.shape[2], dtype=torch.int32, device=device
    )
    conv, conv_gated, delta, ssd, gates, gated_norm, ssd_gates, ssd_norm, *steps = (
        {name: x.to(device).nan_to_num_() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        for given in (
            make_conv_inputs(STATE_BATCHES["mixed_empty"], dtype=dtype),
            make_conv_inputs(STATE_BATCHES["mixed_empty"], gated=True, dtype=dtype),
            make_linear_inputs(STATE_BATCHES["mixed_empty"], dtype=dtype),
            make_linear_inputs(STATE_BATCHES["decode_padded"], delta=False, dtype=dtype),
            make_gates_inputs(dtype=dtype),
            make_gated_norm_inputs(dtype=dtype),
            make_gates_inputs(ssd=True, dtype=dtype),
            make_gated_norm_inputs(ssd=True, dtype=dtype),
            make_delta_step_inputs(STATE_BATCHES["decode_padded"], dtype=dtype),
            make_delta_step_inputs(STATE_BATCHES["mixed_empty"], dtype=dtype),
            make_mamba2_step_inputs(STATE_BATCHES["decode_padded"], dtype=dtype),
            make_channel_inputs("selective_scan", STATE_BATCHES["mixed_empty"], key_dim=16, dtype=dtype),
            make_channel_inputs("rg_lru", STATE_BATCHES["mixed_empty"], dtype=dtype),
        )
    )
    route = make_route_inputs(scoring="sigmoid", bias=True, norm_eps=1e-20, dtype=dtype, device=device)
    experts = make_experts_inputs(shared=24, shared_gate=True, residual=True, dtype=dtype, device=device)
    route["weights"].zero_(), experts["out"].zero_()
    latent_writes = make_latent_writes(normed=True, dtype=dtype, device=device)
    latent_writes["kv_cache"].nan_to_num_(0.5)
    no_groups = tuple(torch.zeros(size, dtype=torch.int32, device=device) for size in ((1, 2), (1,), (2,)))
    rows_in_order = torch.arange(batch.q.shape[0], device=device)
    cases: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
        "write": ("write_kv", (kv, kv.clone(), batch.k_cache, batch.v_cache, slots), {}),
        "write_query_tokens": (
            "write_kv",
            (kv, kv.clone(), batch.k_cache, batch.v_cache, slots),
            {"are_query_tokens": True},
        ),
        "rope": ("rope_write_kv", tuple(rope[0].values())[:9], {"are_query_tokens": True}),
        "rope_norm": ("rope_write_kv", tuple(rope[1].values())[:9], dict(list(rope[1].items())[9:])),
        "attention": ("paged_attention", (*attention, out), common),
        "attention_lse": (
            "paged_attention",
            (*attention, out, torch.zeros(num_tokens, num_heads, dtype=torch.float32, device=device)),
            common,
        ),
        "attention_full": (
            "paged_attention",
            (*attention, out),
            {**common, **batch.extras, "window_left": 9, "logits_soft_cap": 8.0},
        ),
        "attention_tree": ("paged_attention", (*tree, torch.zeros_like(tree[0])), tree_options),
        "attention_block_sparse": (
            "paged_attention",
            (*attention, out),
            {**common, "block_sparse": BlockSparse(8, 1, 3, head_step=1)},
        ),
        "attention_semaphore": ("paged_attention", (*attention, out), {**common, "semaphore": semaphore}),
        "latent": (
            "mla_attention",
            (*latent, torch.zeros_like(latents.q[..., :16])),
            {"max_query_len": latents.max_query_len, "scale": latents.scale},
        ),
        "latent_sparse": (
            "mla_attention",
            (*latent, torch.zeros_like(latents.q[..., :16])),
            {"max_query_len": latents.max_query_len, "scale": latents.scale, "indices": positions},
        ),
        "write_latent": (
            "write_latent",
            (kv[:, 0, :16].contiguous(), kv[:, 0, :8].contiguous(), rows, slots),
            {},
        ),
        "rope_latent": ("rope_write_latent", (), latent_writes),
        "up_project": (
            "up_project_values",
            (latents.q, up_values, torch.zeros_like(latents.q[..., :12])),
            {},
        ),
        "conv": ("causal_conv", (), conv),
        "conv_gated": ("causal_conv", (), conv_gated),
        "delta": ("linear_attention", (), delta),
        "delta_gates": ("delta_gates", (), gates),
        "gated_norm": ("gated_rms_norm", (), gated_norm),
        "delta_step": ("delta_step", (), steps[0]),
        "delta_step_prompts": ("delta_step", (), steps[1]),
        "mamba2_step": ("mamba2_step", (), steps[2]),
        "selective_scan": ("selective_scan", (), steps[3]),
        "rg_lru": ("rg_lru", (), steps[4]),
        "ssd": ("linear_attention", (), ssd),
        "ssd_gates": ("delta_gates", (), ssd_gates),
        "ssd_norm": ("gated_rms_norm", (), ssd_norm),
        "write_index": ("write_index_keys", (kv[:, 0, :16].contiguous(), index_pool, slots), {}),
        "index_logits": (
            "index_logits",
            (latents.q, index_weights, *latent[1:], index_logits),
            {"max_query_len": latents.max_query_len},
        ),
        "route": ("route_experts", (), route),
        "experts": ("apply_experts", (), experts),
        "top_k": ("top_k_indices", (index_logits.clone().normal_(), positions.clone()), {}),
        "merge": (
            "merge_attn_states",
            (state, lse, state.clone(), lse.clone(), torch.empty_like(state), torch.empty_like(lse)),
            {},
        ),
        "cascade": (
            "cascade_attention",
            (*attention, *no_groups, rows_in_order, rows_in_order.clone(), torch.zeros_like(out)),
            common,
        ),
        "copy": ("copy_blocks", (batch.k_cache, batch.v_cache, pairs), {}),
        "advance": (
            "advance_step",
            (ids + 7, table, ids.clone(), ids.clone(), lens, ids.clone()),
            {"block_size": 16},
        ),
    }
    return cases


def assert_as_reference(ops: BackendOps, case: str, **options: Any) -> None:
    """What a case's op writes is what the reference's writes; ``options``: of `opcheck_cases`."""
    results = []
    for each in (ops, BACKEND_OPS["reference"]):
        torch.manual_seed(1)
        op, args, kwargs = opcheck_cases(**options)[case]
        getattr(each, op)(*args, **kwargs)
        results.append(args)
    rtol = 2 * torch.finfo(options["dtype"]).eps
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-6, equal_nan=True)
