"""Parameters that every kernel of ``mla_attention`` has."""

from typing import Any

from torchpaged.custom_ops.cuda.loaded_kernel import address
from torchpaged.custom_ops.cuda.params import steps_of
from torchpaged.custom_ops.mla.call import LatentCall

LOG2E = 1.4426950408889634


def call_params(call: LatentCall) -> dict[str, Any]:
    """Of a checked call; scores are in base 2."""
    return {
        "q": call.q.data_ptr(),
        "out": call.out.data_ptr(),
        "lse": address(call.lse),
        "table": call.block_table.data_ptr(),
        "seq_lens": call.seq_lens.data_ptr(),
        "starts": call.query_start_loc.data_ptr(),
        **steps_of(q=call.q, o=call.out, l=call.lse),
        "table_row": call.block_table.stride(0),
        "scale": call.scale * LOG2E,
        "num_reqs": call.block_table.shape[0],
    }
