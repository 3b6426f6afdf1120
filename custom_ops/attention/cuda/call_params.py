"""From a call's record to the constants and parameters of the CUDA C++ kernels."""

from typing import Any

import torch

from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.pools import KVScales, head_stride

#: Fields of a specialisation that decode and prefill are both compiled with, under their names in capitals.
_FIELDS = (
    *("dim", "dim_v", "group", "num_kv_heads", "block_size", "causal", "window_left", "window_right", "tree"),
    *("soft_cap", "alibi", "sinks", "lse", "fp8_results"),
)


def call_constants(spec: Specialisation) -> dict[str, int]:
    """The values of what decode and prefill are both compiled with."""
    named = {name.upper(): getattr(spec, name) for name in _FIELDS}
    return named | {"E5M2": spec.kv_dtype == torch.float8_e5m2, "CHUNK": spec.chunk_size}


def refuse_sinks(call: AttentionCall, spec: Specialisation) -> str | None:
    """Why neither kernel takes a call's sinks, or None."""
    if call.sinks is None or call.sinks.dtype == spec.dtype:
        return None
    return f"sinks of {call.sinks.dtype} with queries of {spec.dtype}"


def call_params(call: AttentionCall) -> dict[str, Any]:
    """The fields that ``struct Params`` of decode and of prefill have in common: addresses, strides in
    numbers, and what the call says; without those of tensors that it has not, which stay 0."""
    out, table, lse = call.out, call.block_table, call.lse
    o_token, o_head, _ = out.stride()
    fields = {
        "out": out.data_ptr(),
        "table": table.data_ptr(),
        "seq_lens": call.seq_lens.data_ptr(),
        "starts": call.query_start_loc.data_ptr(),
        "o_token": o_token,
        "o_head": o_head,
        "table_row": table.stride(0),
        "scale": call.scale,
        "soft_cap": call.logits_soft_cap,
        "num_reqs": table.shape[0],
        "num_tokens": call.q.shape[0],
    }
    if lse is not None:
        fields["lse"] = lse.data_ptr()
        fields["l_token"], fields["l_head"] = lse.stride()
    names = "slopes", "sinks", *KVScales._fields, "tree"
    for name, tensor in zip(names, call.optional, strict=True):
        if tensor is not None:
            fields[name] = tensor.data_ptr()
    if call.output_scale is not None:
        fields["output_scale"] = call.output_scale.data_ptr()
    fields["ks_head"], fields["vs_head"] = map(head_stride, call.scales[:2])
    return fields
