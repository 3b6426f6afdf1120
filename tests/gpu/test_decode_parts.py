"""Pairs that many CTAs share come out the same, bit for bit, whichever arrives last; those of many large
parts are merged in two steps, counted by one number.

Attentions one behind the other in a graph, so that the CTA on the multiprocessor where the last merge ran
begins late. In a process of its own: a part that is counted twice makes a merge come early, or never.
"""

import pytest
from command import printed

pytestmark = pytest.mark.gpu
LIMIT_S = 120
REPLAYS = 300

SCRIPT = """
import sys
import torch
from torchpaged.custom_ops import BACKEND_OPS

heads, kv_heads, dim, replays = (int(x) for x in sys.argv[1:5])
batches = [[int(n) for n in batch.split("+")] for batch in sys.argv[5].split(",")]
ops, reference, BLOCK = BACKEND_OPS["cuda"], BACKEND_OPS["reference"], 16
torch.manual_seed(0)
ints = {"dtype": torch.int32, "device": "cuda"}
num_reqs, columns = len(batches[0]), -(-max(max(batch) for batch in batches) // BLOCK)
caches = [torch.randn(num_reqs * columns + 1, BLOCK, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
table = (torch.randperm(num_reqs * columns, device="cuda") + 1).to(torch.int32).view(num_reqs, columns)
q = torch.randn(num_reqs, heads, dim, dtype=torch.bfloat16, device="cuda")
starts, semaphore = torch.arange(num_reqs + 1, **ints), torch.zeros(num_reqs * kv_heads, **ints)
lens = torch.tensor(batches[0], **ints)
outs = torch.empty(6, num_reqs, heads, dim, dtype=torch.bfloat16, device="cuda")


def attend():
    for out in outs:
        ops.paged_attention(q, *caches, table, lens, starts, out, max_query_len=1, scale=dim**-0.5, semaphore=semaphore)


attend()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    attend()
for batch in batches:
    lens.copy_(torch.tensor(batch))
    want = torch.empty(num_reqs, heads, dim, device="cuda")
    reference.paged_attention(q.float(), *(cache.float() for cache in caches), table, lens, starts, want, max_query_len=1, scale=dim**-0.5)
    first = None
    for replay in range(replays):
        outs.fill_(float("nan"))
        graph.replay()
        if first is None:
            first = outs[0].clone()
            torch.testing.assert_close(first.float(), want, rtol=2e-2, atol=2e-3)
        assert not semaphore.any(), f"{batch}, replay {replay}: the semaphore is not zero"
        assert (outs.view(torch.int16) == first.view(torch.int16)).all(), f"{batch}, replay {replay}: other bits"
"""  # noqa: E501


@pytest.mark.parametrize(
    ("heads", "batches"),
    [
        ((8, 1, 128), "40000+40000,60000+9000,50000+1,2100+60000"),
        ((32, 8, 128), "8192,1000,4097,30000"),
        ((9, 3, 64), "9000+8000,40+30000"),
        ((7, 1, 128), "30000+0+20000,7+40000+300"),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_who_arrives_last(heads: tuple[int, int, int], batches: str) -> None:
    printed("-c", SCRIPT, *map(str, heads), str(REPLAYS), batches, timeout=LIMIT_S)
