"""Requests that fork: whatever is done to them, each reads back its own tokens, and no block is lost."""

import copy
import gc
import pickle
import random
from collections import Counter
from typing import Any

import pytest
import torch
from row_holders import row_holders

from torchpaged import AttentionMetadata, BlockPool, PagedAttention, PagedKVCache
from torchpaged.cache import KVLayerSpec, LatentLayerSpec, StateLayerSpec
from torchpaged.cache.requests import CacheRequests
from torchpaged.custom_ops.errors import ArgumentError, BlockPoolExhaustedError

BLOCK, BLOCKS = 4, 28


class Machine:
    """Requests over a pool whose blocks are a dict of tokens, beside lists of the tokens they should hold."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(BLOCKS)
        self.pool.copied_by(self.copy)
        self.known: dict[int, list[int]] = {}  # what kept blocks hold
        self.pool.watch(lambda blocks, what: [self.known.pop(block) for block in blocks] and None)
        self.memory: dict[tuple[int, int], int] = {}
        self.groups: list[tuple[CacheRequests, list[list[int]]]] = []
        self.seen: Counter[str] = Counter()
        self.last, self.fails = 0, False

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        if self.fails:
            raise RuntimeError("a launch that failed")
        sources, destinations = zip(*pairs, strict=True)
        assert len({*destinations}) == len(pairs)
        assert not {*sources} & {*destinations}
        self.seen["copied blocks"] += len(pairs)
        for source, destination in pairs:
            for offset in range(BLOCK):
                self.memory.pop((destination, offset), None)
                if (source, offset) in self.memory:
                    self.memory[destination, offset] = self.memory[source, offset]

    def allocate(self) -> None:
        rows = CacheRequests(self.pool, self.rng.randint(1, 3), BLOCK)
        self.groups.append((rows, [[] for _ in range(len(rows))]))

    def append(self, rows: CacheRequests, want: list[list[int]]) -> None:
        lens = [self.rng.choice((0, 1, 1, 1, 2, 7)) for _ in want]
        self.fails = self.rng.random() < 0.05
        before = self.state()
        try:
            metadata = rows.append(lens)
        except (BlockPoolExhaustedError, RuntimeError) as error:
            self.seen[type(error).__name__] += 1
            assert self.state() == before
            return
        finally:
            self.fails = False
        assert metadata.slot_mapping is not None
        slots = iter(metadata.slot_mapping.tolist())
        for tokens, new in zip(want, lens, strict=True):
            for _ in range(new):
                self.last += 1
                tokens.append(self.last)
                self.memory[divmod(next(slots), BLOCK)] = self.last

    def fork(self, rows: CacheRequests, want: list[list[int]]) -> None:
        parents = self.rng.choices(range(len(want)), k=self.rng.randint(1, 4))
        self.groups.append((rows.fork(parents), [list(want[parent]) for parent in parents]))

    def reorder(self, rows: CacheRequests, want: list[list[int]]) -> None:
        self.fork(rows, want)
        self.free(rows, want)

    def crop(self, rows: CacheRequests, want: list[list[int]]) -> None:
        lens = [self.rng.randint(len(tokens) // 2, len(tokens)) for tokens in want]
        lens = [0 if self.rng.random() < 0.1 else length for length in lens]  # preempted
        rows.truncate(lens)
        want[:] = [tokens[:length] for tokens, length in zip(want, lens, strict=True)]

    def keep(self, rows: CacheRequests, want: list[list[int]]) -> None:
        """Another text may find a full block later."""
        for blocks, tokens in zip(rows.block_tables, want, strict=True):
            if len(tokens) >= BLOCK and blocks[0] not in self.known:
                self.pool.keep(blocks[:1], None)
                self.known[blocks[0]] = tokens[:BLOCK]
                return

    def free(self, rows: CacheRequests, want: list[list[int]]) -> None:
        rows.free()
        self.groups = [group for group in self.groups if group[0] is not rows]

    def state(self) -> Any:
        held = [(list(rows.seq_lens), [list(t) for t in rows.block_tables]) for rows, _ in self.groups]
        return held, [self.pool.ref_count(block) for block in range(1, BLOCKS)], self.pool.num_free

    def step(self) -> None:
        act = self.rng.choice((*[self.append] * 5, self.fork, self.reorder, self.crop, self.keep, self.free))
        if not self.groups or (len(self.groups) < 3 and self.rng.random() < 0.2):
            self.allocate()
        elif act != self.fork or len(self.groups) < 6:
            act(*self.rng.choice(self.groups))
            self.seen[act.__name__] += 1

    def check(self) -> None:
        uses = row_holders(rows for rows, _ in self.groups)
        assert [self.pool.ref_count(b) for b in range(1, BLOCKS)] == [uses[b] for b in range(1, BLOCKS)]
        assert self.pool.num_used == len(uses)
        assert not {*self.pool._free, *self.pool.idle} & {*uses}
        for rows, want in self.groups:
            assert rows.seq_lens == [len(tokens) for tokens in want]
            for blocks, tokens in zip(rows.block_tables, want, strict=True):
                assert len(blocks) == -(-len(tokens) // BLOCK)
                assert [self.memory[blocks[i // BLOCK], i % BLOCK] for i in range(len(tokens))] == tokens
        for block, tokens in self.known.items():
            assert [self.memory[block, i] for i in range(BLOCK)] == tokens


@pytest.mark.slow_cases(but=("2",))
@pytest.mark.parametrize("chunk", [64, 1, 2])
def test_each_request_reads_its_own_tokens_through_20_000_changes(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchpaged.cache.requests.CHUNK", chunk)
    machine = Machine(seed=20)
    for _ in range(20_000):
        machine.step()
        machine.check()
    names = "append", "fork", "reorder", "crop", "keep", "free", "BlockPoolExhaustedError", "RuntimeError"
    assert min(machine.seen[name] for name in names) > 50, machine.seen
    assert machine.seen["copied blocks"] > 1000


def make(spec: Any, dtype: torch.dtype, layers: int = 2) -> PagedKVCache:
    return PagedKVCache([spec] * layers, block_size=BLOCK, num_blocks=12, dtype=dtype)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (KVLayerSpec(2, 16), torch.float32),
        (KVLayerSpec(1, 16, 32), torch.float8_e4m3fn),
        (LatentLayerSpec(16, 8), torch.bfloat16),
    ],
)
def test_pools_of_every_layer_are_copied_once_per_step(
    spec: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(spec, dtype)
    for tensor in cache.tensors().values():
        tensor.view(torch.uint8).copy_(torch.randint(0, 100, tensor.view(torch.uint8).shape))
    rows = cache.allocate(1)
    rows.append([6])
    forks = rows.fork([0, 0, 0])
    before = {name: tensor.view(torch.uint8).clone() for name, tensor in cache.tensors().items()}
    calls, copies = [], cache.copy_blocks
    monkeypatch.setattr(cache, "copy_blocks", lambda *args: (calls.append(args), copies(*args)))
    forks.append([1, 0, 1])
    assert len(calls) == 1
    assert forks.block_tables[1] == rows.block_tables[0]
    for name, tensor in cache.tensors().items():
        for row in (0, 2):
            own = forks.block_tables[row][1]
            assert own != rows.block_tables[0][1]
            assert torch.equal(tensor[own].view(torch.uint8), before[name][rows.block_tables[0][1]])
    rows.free()
    forks.append([0, 1, 0])  # alone with its block now
    assert len(calls) == 1


def test_samples_of_a_prompt_attend_as_if_each_were_alone() -> None:
    """In one table width, as a captured step has it, with NaN in what was never written."""
    torch.manual_seed(0)
    attention = PagedAttention(num_heads=4, head_dim=16, num_kv_heads=2, backend="reference")
    cache = make(KVLayerSpec(2, 16), torch.float32, 1)
    for tensor in cache.tensors().values():
        tensor.fill_(torch.nan)
    rows = cache.allocate(1, max_seq_len=12)

    def run(batch: AttentionMetadata, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        key_values = torch.randn(2, tokens, 2, 16)
        return attention(torch.ones(tokens, 4, 16), *key_values, cache[0], batch), key_values

    _, prompt = run(rows.append([6]), 6)
    samples, tail = rows.fork([0, 0, 0]), rows.block_tables[0][1]
    rows.free()
    texts = [prompt] * 3
    for _ in range(4):
        batch = samples.append([1, 1, 1])
        assert batch.block_table.shape == (3, 3)
        assert samples.block_tables[2][1] == tail, "the last that holds it needs no copy"
        out, new = run(batch, 3)
        texts = [torch.cat([text, new[:, row : row + 1]], 1) for row, text in enumerate(texts)]
        for row, (keys, values) in enumerate(texts):
            keys, values = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (keys, values))
            want = torch.nn.functional.scaled_dot_product_attention(torch.ones(4, 1, 16), keys, values)
            torch.testing.assert_close(out[row], want[:, 0], rtol=1e-5, atol=1e-5)
    assert cache.pool.num_used == 1 + 3 * 2  # a full block of the prompt, shared


@pytest.mark.parametrize("parents", [[], [2], [-1], [0.0], [True], 3, torch.tensor([0])])
def test_parents_that_there_are_not(parents: Any) -> None:
    cache = make(KVLayerSpec(1, 16), torch.float32)
    rows = cache.allocate(2)
    rows.append([3, 5])
    with pytest.raises(ArgumentError, match="parents"):
        rows.fork(parents)
    assert [cache.pool.ref_count(block) for block in (1, 2, 3)] == [1, 1, 1]


def test_layers_whose_states_are_no_blocks_are_refused() -> None:
    specs = [KVLayerSpec(1, 16), StateLayerSpec(4, 8)]
    cache = PagedKVCache(specs, block_size=BLOCK, num_blocks=8, max_num_reqs=4)
    with pytest.raises(ArgumentError, match="copy_requests"):
        cache.allocate(1).fork()


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_cache_copies_blocks_of_its_own(twin: Any) -> None:
    cache = make(KVLayerSpec(1, 16), torch.float32)
    rows = cache.allocate(1)
    rows.append([2])
    cache[0].k_cache[1] = 5
    other, theirs = twin((cache, rows))
    forks = theirs.fork()
    forks.append([1])
    own = forks.block_tables[0][0]
    assert own != 1
    assert other[0].k_cache[own].eq(5).all()
    assert cache[0].k_cache[own].eq(0).all()


def test_requests_do_not_keep_their_cache_alive() -> None:
    """Its pools may be most of a GPU's memory: no reference cycle holds them."""
    gc.disable()
    try:
        cache = make(KVLayerSpec(1, 16), torch.float32)
        rows = cache.allocate(1)
        rows.append([2])
        forks = rows.fork()
        del cache
        with pytest.raises(ArgumentError, match="exists"):
            forks.append([1])
        assert forks.seq_lens == [2]
    finally:
        gc.enable()


def test_a_shallow_copy_takes_nothing_from_the_first() -> None:
    cache = PagedKVCache.uniform(1, 1, 16, block_size=BLOCK, num_blocks=8, dtype=torch.float32)
    rows = cache.allocate(1)
    rows.append([3])
    twin = copy.copy(cache)
    del twin
    gc.collect()
    rows.fork().append([1])
