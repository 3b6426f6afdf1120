"""Lengths and tables that the step's end rewrites are never read a step late by the attention behind it,
which starts early.

One row and a hidden size of 256: kernels so small that each begins while several ahead of it still run, and
the lengths that attention read in the step before are still in first-level caches. In a process of its own:
programs that disagree about lengths may hang instead of failing.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
LIMIT_S = 120  # a hang is a failure; compiling everything from empty caches takes a part of it
LAUNCHES = 5000

SCRIPT = """
import sys
import torch
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.engine.device import DecodeRows, RowState, WholeStepRunner

backend, num_launches = sys.argv[1], int(sys.argv[2])
HIDDEN, HEADS, KV_HEADS, DIM, BLOCK, VOCAB, STEPS, LAYERS, MOST = 256, 4, 2, 64, 16, 512, 8, 2, 1024
ops, reference = BACKEND_OPS[backend], BACKEND_OPS["reference"]
torch.manual_seed(0)
options = {"dtype": torch.bfloat16, "device": "cuda"}
blocks = torch.randperm(MOST // BLOCK).add(1).tolist()
embedding = torch.randn(VOCAB, HIDDEN, **options)
qkv = [torch.randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, **options) / 16 for _ in range(LAYERS)]
out = [torch.randn(HIDDEN, HEADS * DIM, **options) / 16 for _ in range(LAYERS)]
head = torch.randn(VOCAB, HIDDEN, **options) / 16
angles = torch.arange(MOST, device="cuda")[:, None] * 10000 ** (-torch.arange(DIM // 2, device="cuda") / (DIM // 2))
cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
pools = [[torch.zeros(MOST // BLOCK + 1, BLOCK, KV_HEADS, DIM, **options) for _ in range(2)] for _ in range(LAYERS)]
attended = []  # (q, pools, out) of every attention of a launch, at the addresses of the graph


def linear(x, weight):
    y = torch.empty(x.shape[0], weight.shape[0], **options)
    BACKEND_OPS["cuda"].linear(x, weight, y)
    return y


def step(input_ids, m):
    x = embedding[input_ids]
    for weight, last, (k_cache, v_cache) in zip(qkv, out, pools):
        q, k, v = linear(x, weight).view(1, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
        turned, y = torch.empty(1, HEADS, DIM, **options), torch.empty(1, HEADS, DIM, **options)
        ops.rope_write_kv(q, k, v, m.positions, cos_sin, m.slot_mapping, turned, k_cache, v_cache, are_query_tokens=True)
        ops.paged_attention(turned, k_cache, v_cache, m.block_table, m.seq_lens, m.query_start_loc, y, max_query_len=1, scale=DIM**-0.5,
                            semaphore=semaphore)
        if torch.cuda.is_current_stream_capturing():
            attended.append((turned, k_cache, v_cache, y))
        x = x + linear(y.view(1, -1), last)
    return linear(x, head)


semaphore = torch.zeros(KV_HEADS, dtype=torch.int32, device="cuda")
rows = DecodeRows(1, MOST // BLOCK, BLOCK, VOCAB, "cuda", ops, STEPS)
runner = WholeStepRunner(step, rows, buckets=[1], compile=False)
runner.capture()
table = rows.block_table[:1].clone()
table[0, : len(blocks)] = torch.tensor(blocks, device="cuda")
starts = torch.arange(2, dtype=torch.int32, device="cuda")
length, compared = MOST, 0
for launch in range(num_launches):
    if length + STEPS >= MOST:  # again from a length just below the end of a tile, of 16, 64 and 128 keys
        length = (1, 13, 61, 125)[compared % 4]
        rows.write({0: RowState(input_id=7 + compared, seq_len=length, blocks=blocks, seed=1, counter=0, remaining=MOST - length)})
    runner.launch(1)
    tokens = [token for (token,) in rows.ring.read(rows.ring.take(), 1)]
    assert not semaphore.any(), f"launch {launch}: the semaphore is not zero"
    assert min(tokens) >= 0, f"launch {launch}: {tokens}"
    if launch % 50 == 0:  # keys of the launch's earlier steps are still there, so that each of its attentions can be computed again
        for index, (q, k_cache, v_cache, y) in enumerate(attended):
            lens = torch.tensor([length + index // LAYERS], dtype=torch.int32, device="cuda")
            want = torch.empty(1, HEADS, DIM, device="cuda")
            reference.paged_attention(q.float(), k_cache.float(), v_cache.float(), table, lens, starts, want, max_query_len=1, scale=DIM**-0.5)
            torch.testing.assert_close(y.float(), want, rtol=2e-2, atol=2e-2, msg=lambda text: f"launch {launch}, attention {index}: {text}")
        compared += 1
    length += STEPS
    assert int(rows.seq_lens[0]) == length, f"launch {launch}: length {int(rows.seq_lens[0])}, expected {length}"
print("compared", compared)
"""  # noqa: E501


@pytest.mark.long
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_five_thousand_launches_of_a_small_model(backend: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, backend, str(LAUNCHES)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"backend {backend}: no end after {LIMIT_S} s: a hang. {str(expired.stderr)[-1500:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["compared", str(LAUNCHES // 50)]
