"""From a call's record to the constants and parameters of the CUDA C++ kernels."""

from typing import Any

import torch

from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.cuda.config import Constant
from torchpaged.custom_ops.pools import KVScales, head_stride

#: Constants that decode and prefill are both compiled with.
CALL_CONSTANTS = (
    Constant("DIM", "int", "width of a query and of a key"),
    Constant("DIM_V", "int", "width of a value"),
    Constant("GROUP", "int", "query heads of a kv head"),
    Constant("NUM_KV_HEADS", "int", "of a layer"),
    Constant("BLOCK_SIZE", "int", "tokens of a block of the cache"),
    Constant("E5M2", "bool", "fp8 is e5m2, else e4m3"),
    Constant("CAUSAL", "bool", "no key behind a query's own position is seen"),
    Constant("WINDOW_LEFT", "int", "keys before a query's own position that it sees; -1: all"),
    Constant("WINDOW_RIGHT", "int", "keys behind it; -1: all"),
    Constant("CHUNK", "int", "positions of a chunk, whose keys alone a query sees; 0: none"),
    Constant("TREE", "bool", "of its request's query tokens a row sees those of its word (tree mask)"),
    Constant("SOFT_CAP", "bool", "scores are bent by soft_cap * tanh(score / soft_cap)"),
    Constant("ALIBI", "bool", "scores fall by a head's slope times the distance"),
    Constant("SINKS", "bool", "a head's sink has a share in the softmax"),
    Constant("LSE", "bool", "log-sum-exp is stored"),
    Constant("FP8_RESULTS", "bool", "out is e4m3, results over a scale"),
)


def call_constants(spec: Specialisation) -> dict[str, int]:
    """The values of `CALL_CONSTANTS`: fields of the same names, but for two."""
    named = {"E5M2": spec.kv_dtype == torch.float8_e5m2, "CHUNK": spec.chunk_size}
    others = [constant.name for constant in CALL_CONSTANTS if constant.name not in named]
    return named | {name: getattr(spec, name.lower()) for name in others}


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
