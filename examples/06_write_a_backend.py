"""Write a backend, prove it, and give it to everything that takes a name.

Its kernel is torch's own attention over blocks that are gathered from the pool: one request after the other,
so that it is short. It reads lengths on the host, which a CUDA graph would freeze: it declares graph support
NEVER, and the same backend that claims more is found out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import torchpaged
from torchpaged import PagedAttention
from torchpaged.backends import Backend, Capabilities, GraphSupport, register_backend
from torchpaged.backends.library_op import attention_op
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.testing import check_conformance, check_graph_support


def attend(call: AttentionCall) -> None:
    """The op's kernel: its arguments are checked, and it writes into ``call.out``."""
    block_size = call.k_cache.shape[1]
    starts, lens = call.query_start_loc.tolist(), call.seq_lens.tolist()
    call.out.zero_()  # padding, and rows that see nothing
    for request, seq_len in enumerate(lens):
        start, end = starts[request], starts[request + 1]
        if seq_len <= 0 or end == start:
            continue
        blocks = call.block_table[request, : -(-seq_len // block_size)].long()
        k, v = (
            pool[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)[None]
            for pool in (call.k_cache, call.v_cache)
        )
        query = torch.arange(seq_len - (end - start), seq_len, device=k.device)[:, None]
        key = torch.arange(seq_len, device=k.device)
        seen = (query >= 0) & (key <= query)
        q = call.q[start:end].transpose(0, 1)[None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=call.scale, enable_gqa=True)
        call.out[start:end] = y[0].transpose(0, 1).masked_fill(~seen.any(1)[:, None, None], 0.0)


def declare(support: GraphSupport) -> Backend:
    """What it can, as data: whatever it lacks is refused with the reason, at construction."""
    floats = (torch.float32, torch.bfloat16)
    return Backend(
        name="mine",
        capabilities=Capabilities(
            device_types=("cpu", "cuda"),
            dtypes=floats,
            kv_dtypes=floats,
            graph_support=support,
            features=frozenset(),
        ),
        ops=OPS,
        unavailable=lambda: None,
    )


OPS = attention_op("mine", attend)
MINE = declare(GraphSupport.NEVER)

# 1. It is right on every batch of the suite, eagerly and in a compiled call (blocks shuffled, NaN where
# was never written, against the float64 oracle), and refuses every feature that it does not declare.
batches = ("decode_edges", "mixed_padded", "left_padded")
print(check_conformance(MINE, dtype=torch.bfloat16, modes=("eager",)))
print(check_conformance(MINE, dtype=torch.bfloat16, modes=("compiled",), batches=batches, compiler="eager"))

# 2. It holds what it declares, and one that declares more does not pass. Here on a CPU: a kernel that runs
# Python again in each replay can't freeze anything, so the liar has to do it by hand.
print(check_graph_support(MINE))
frozen: list[torch.Tensor] = []


def freeze(call: AttentionCall) -> None:
    """As a graph would: the lengths of the first batch, for ever."""
    frozen.append(call.seq_lens.clone())
    lens = torch.minimum(frozen[0][:1].expand_as(call.seq_lens) // 2, call.seq_lens)
    attend(call._replace(seq_lens=lens))


OPS = attention_op("frozen", freeze)
try:
    check_graph_support(declare(GraphSupport.ALWAYS))
    raise SystemExit("a backend that freezes lengths has passed")
except AssertionError as error:
    print("refused:", str(error).split(":")[0])

# 3. Everything that takes a name takes it.
register_backend(MINE)
layer = PagedAttention(num_heads=8, head_dim=64, num_kv_heads=2, backend="mine", dtype=torch.bfloat16)
print(layer.choice)
try:
    PagedAttention(8, 64, 2, window_size=(128, -1), backend="mine", dtype=torch.bfloat16)
except torchpaged.BackendUnavailableError as error:
    print("refused:", error)
