"""How public objects print: in one line of at most 110 columns, with plurals that fit."""

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sessions import kept_session

import torchpaged
from torchpaged import AttentionMetadata
from torchpaged.backends import Limits, attention_spec, get_backend, open_session, select_backend
from torchpaged.cache import (
    LRU,
    BlockPool,
    CheckpointedPrefixCache,
    HostBlocks,
    HostTier,
    LatentLayerSpec,
    PagedKVCache,
    PrefixCache,
    RollingBlocks,
    StateLayerSpec,
)
from torchpaged.cache.kinds import layer_kinds
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.words import WIDTH, one_line, repr_of_fields
from torchpaged.engine.device import DecodeRows, LogitsRows, RowState, WholeStepRunner
from torchpaged.fuse.fusible import PASSES
from torchpaged.fuse.report import FusionReport
from torchpaged.graphs import DecodeGraphRunner, PackedGraphRunner
from torchpaged.graphs.report import BucketReport
from torchpaged.layers import CrossMetadata
from torchpaged.metadata import HostLengths
from torchpaged.prefixes import AutomaticPrefixes, PrefixGroup, SharedPrefixes
from torchpaged.profiling.kernel_report import KernelReport
from torchpaged.testing import BATCH_SPECS, make_batch

#: Classes whose objects users are not handed: parts of a decode loop and of a runner, and what captures.
PARTS = {
    "CopiedTokens",
    "CudaCapture",
    "DecodeRows",
    "LaunchRing",
    "LogitsStage",
    "PackedBuffers",
    "SemaphoreSession",
    "TapeCapture",
    "TokenLogprobs",
}


def public_classes() -> dict[str, type]:
    """Of each package's ``__all__``, by name; no exceptions, enumerations, modules (torch prints these),
    protocols or abstract classes."""
    names = ["torchpaged"]
    for found in pkgutil.walk_packages(torchpaged.__path__, "torchpaged."):
        if found.ispkg and found.name.split(".")[1] not in ("vllm", "cli"):
            names.append(found.name)
    classes = {}
    for name in names:
        package = importlib.import_module(name)
        for each in (getattr(package, public, None) for public in getattr(package, "__all__", ())):
            if inspect.isclass(each) and each.__module__.startswith("torchpaged"):
                classes[each.__name__] = each
    others = (BaseException, enum.Enum, torch.nn.Module)
    return {
        name: each
        for name, each in classes.items()
        if not issubclass(each, others)
        and not inspect.isabstract(each)
        and not getattr(each, "_is_protocol", 0)
    }


# ----------------------------------------------------------------------------------------- the two functions
@dataclasses.dataclass
class Record:
    first: int
    second: str = "usual"
    third: list[int] = dataclasses.field(default_factory=list)
    tensor: torch.Tensor | None = None


class Pair(NamedTuple):
    left: torch.Tensor
    right: int = 3


def test_fields_that_differ_from_their_defaults() -> None:
    assert repr_of_fields(Record(1)) == "Record(first=1)"
    shown = repr_of_fields(Record(0, "x", list(range(12)), torch.zeros(2, 3)))
    assert shown == (
        "Record(first=0, second='x', third=[0, 1, 2, 3, 4, 5, 6, 7, ... 12 in all], tensor=float32[2, 3])"
    )
    assert repr_of_fields(Record(1, "y" * 99)) == f"Record(first=1, second='{'y' * 44} ...')"
    assert repr_of_fields(Pair(torch.zeros(1))) == "Pair(left=float32[1])"
    assert repr_of_fields(Pair(torch.zeros(1), True)) == "Pair(left=float32[1], right=True)"  # not an int


def test_what_has_no_room_is_left_out_from_the_end() -> None:
    for count in range(60):
        line = one_line(Record(1), *(f"fact {n}" for n in range(count)))
        assert len(line) <= WIDTH
        assert line.endswith(", ...)") == (count > 12), line
    assert one_line(Record(1), "two\nlines") == "Record(two lines)"
    assert one_line(Record(1), "long " * 99) == "Record(...)"


# --------------------------------------------------------------------------------------------- public objects
def pools(**options: Any) -> PagedKVCache:
    sizes: dict[str, Any] = {"block_size": 16, "num_blocks": 8, "dtype": torch.float32, **options}
    return PagedKVCache.uniform(2, 2, 64, **sizes)


def of_pools() -> list[Any]:
    """What caches, batches and backends make without a model."""
    cache = pools()
    rows = cache.allocate(3, max_seq_len=64)
    rows.append([17, 3, 1])
    host = HostTier(HostBlocks(cache, memory_budget=2**17))
    checkpointed = CheckpointedPrefixCache(BlockPool(9), 16, num_checkpoints=2, every=32)
    states = PagedKVCache([StateLayerSpec(4, 32, 2, 8, 8)], num_blocks=4, max_num_reqs=3, dtype=torch.float32)
    pin = PrefixCache(BlockPool(9), 16).pin([1, 2, 3])
    in_cache = [cache, rows, cache.pool, cache[0], cache.layers[0], host, host.blocks, checkpointed, pin]
    in_cache += [PrefixCache(BlockPool(9), 16).text([1, 2, 3])]
    in_cache += [PrefixCache(BlockPool(9), 16, host=host), LRU(), states, states[0], states.layers[0]]
    in_cache += [LatentLayerSpec(512, 64), RollingBlocks(512, 512, 16, 1), layer_kinds()[0]]
    limits = Limits(
        max_num_reqs=8, max_num_tokens=8192, max_blocks_per_req=512, num_blocks=4096, block_size=16
    )
    spec = attention_spec(
        device="cpu", dtype=torch.float32, head_dim=64, num_heads=4, num_kv_heads=2, block_size=16, sinks=True
    )
    choice = select_backend(spec, "reference")
    backend = get_backend("reference")
    backends = [limits, spec, choice, choice.route, backend, backend.capabilities, backend.ops]
    backends.append(torchpaged.BlockSparse(64, 16, 8))
    batch = make_batch(BATCH_SPECS["mixed_small"])
    metadata = AttentionMetadata.from_lists(
        [1] * 99, [9] * 99, [[n, 0] for n in range(1, 100)], block_size=16
    )
    sizes: dict[str, Any] = {"max_blocks_per_req": 8, "block_size": 16}
    buffers = SharedPrefixes.allocate(max_num_groups=2, num_reqs=4, num_tokens=8, **sizes)
    automatic = AutomaticPrefixes(num_heads=4, num_kv_heads=2, head_dim=64, kv_dtype=torch.float32, **sizes)
    batches = [batch, batch.spec, metadata, HostLengths([1] * 99, [9] * 99), buffers, automatic]
    batches += [automatic.costs, PrefixGroup(tuple(range(64)), 20), KernelReport("op", 3)]
    batches += [CrossMetadata.from_lists([1, 1], [5, 7], [[1], [2]], block_size=16)]
    batches += [FusionReport("LlamaForCausalLM", 32, PASSES, {"linear": ["model.layers.0.mlp"] * 32})]
    return in_cache + backends + batches + [open_session([spec], limits, "reference")]


def of_graphs() -> list[Any]:
    """Runners, their reports, and what their rows are given."""
    rows = DecodeRows(2, 8, 16, 99, "cpu", BACKEND_OPS["reference"], 2)
    packed: dict[str, Any] = {"max_num_reqs": 4, "max_blocks_per_req": 2, "block_size": 16, "device": "cpu"}
    runners: list[Any] = [
        DecodeGraphRunner(int, max_batch_size=512, max_blocks_per_req=2, block_size=16, device="cpu"),
        PackedGraphRunner(int, buckets=[8, 16], **packed),
        WholeStepRunner(int, rows, buckets=[2], compile=False, session=kept_session()),
    ]
    state = RowState(5, 6, list(range(40)), seed=11, counter=0, remaining=100)
    tensor = torch.zeros(4)
    reports = [BucketReport(512, 1234.56, 999.9, 2**30, 123456, 1, True), *runners[0].report()[:1]]
    return [*runners, *reports, state, LogitsRows(tensor, tensor, tensor, tensor)]


def of_engine(make_llama: Callable[..., Any]) -> list[Any]:
    """A generation, and what it hands out."""
    from torchpaged.engine import Generator, SamplingParams
    from torchpaged.hf import PagedCache, PagedEncoderDecoderCache

    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    generator = Generator(model, max_batch_size=2, max_seq_len=64, backend="reference", graphs=False)
    sampling = SamplingParams(max_new_tokens=20, temperature=0.5, seed=3, stop_token_ids=(5, 6), top_p=0.9)
    (output,) = generator.generate([list(range(1, 30))], sampling)
    generator.submit(list(range(1, 30)), sampling)
    event, phase = next(iter(generator.stream())), generator.start_report.phases[0]
    halves = transformers_bart()
    caches = [PagedCache(model.config, 1, 32), PagedEncoderDecoderCache(halves, 1, 32)]
    kept = [generator.model, generator.prefix_cache, generator.stats.prefix_cache, phase, *caches]
    return [
        generator,
        generator.stats,
        generator.start_report,
        generator.metrics(),
        sampling,
        output,
        output.times,
        event,
        *kept,
    ]


def transformers_bart() -> Any:
    """A small encoder-decoder's config."""
    import transformers

    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 99}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return transformers.BartConfig(**sizes, **heads, encoder_ffn_dim=32, decoder_ffn_dim=32)


def test_public_objects_print_in_one_line(make_llama: Callable[..., Any]) -> None:
    objects = of_pools() + of_graphs() + of_engine(make_llama)
    for each in objects:
        shown = repr(each)
        assert len(shown) <= WIDTH and "\n" not in shown, shown
        assert shown.startswith(f"{type(each).__name__}("), shown
        assert not re.search(r"\b1 ([a-z]+ )?(blocks|tokens|layers|requests|rows|replays|rings)\b", shown), (
            shown
        )
        assert " at 0x" not in shown, shown
    seen = {type(each).__name__ for each in objects}
    bases = {"LayerSpec": "KVLayerSpec", "Session": "SemaphoreSession", "BucketedGraphs": "DecodeGraphRunner"}
    missing = {name for name in public_classes() if name not in seen | PARTS | set(bases)}
    assert not missing, f"public classes of which no object is printed here: {missing}"
    assert set(public_classes()) >= PARTS
