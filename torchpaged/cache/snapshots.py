"""Snapshots of a `PrefixCache`: what its blocks hold, in a safetensors file, for another process.

    save_prefixes("system.safetensors", prefixes, pools, {"model": "llama"})
    load_prefixes("system.safetensors", prefixes, pools, {"model": "llama"})  # later: texts that begin so hit

The file's metadata has a manifest: whose keys and values these are, the pools' layout, and a SHA-256 of each
tensor and of the manifest itself. Nothing is written into the pools before all of it was checked.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.cache.block_pool import NULL_BLOCK
from torchpaged.cache.kv_cache import PagedKVCache
from torchpaged.cache.prefix_cache import PrefixCache
from torchpaged.cache.runs import TOKEN_BYTES, Place, Run, Runs
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import KVScales
from torchpaged.custom_ops.whole_files import replacing

_FORMAT = 1
_TOKENS, _PARENTS = "tokens", "parents"


def save_prefixes(
    path: str | os.PathLike[str], prefixes: PrefixCache, cache: PagedKVCache, identity: Mapping[str, str]
) -> int:
    """Write what ``prefixes`` knows to a file, which is replaced as a whole or stays as it was.

    Args:
        path: of the file.
        prefixes: what the blocks hold.
        cache: their pools.
        identity: whose keys and values they are, by name; compared by `load_prefixes`.

    Returns:
        Tokens that it holds.

    Raises:
        ArgumentError: layers have states or rings, or texts were told apart by something else than strings
            and integers.
        OSError: it can't be written.
        ImportError: safetensors is not installed.
    """
    from safetensors.torch import save

    layout = _layout(prefixes, cache)
    known = _known(prefixes._runs)
    extras = [text.extra for text, _ in known]
    for extra in extras:
        if type(extra) not in (str, int, type(None)):
            raise ArgumentError("extra", "None, strings or integers in a snapshot", repr(extra))
    _settle(cache.device)
    index = torch.tensor([block for _, block in known], dtype=torch.int64, device=cache.device)
    tensors = {
        _TOKENS: _of_bytes(b"".join(text.tokens for text, _ in known)),
        _PARENTS: torch.tensor([text.parent for text, _ in known], dtype=torch.int64, device="cpu"),
    }
    for name, pool in cache.tensors().items():
        tensors[name] = pool.detach().view(torch.uint8).index_select(0, index).flatten(1).cpu()
    sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    manifest = json.dumps({"holds": {**identity, **layout}, "extras": extras, "sha256": sums})
    metadata = {"manifest": manifest, "sha256": hashlib.sha256(manifest.encode()).hexdigest()}
    with replacing(Path(path)) as beside:
        beside.write_bytes(save(tensors, metadata))
    return len(known) * cache.block_size


def load_prefixes(
    path: str | os.PathLike[str], prefixes: PrefixCache, cache: PagedKVCache, identity: Mapping[str, str]
) -> int:
    """Fill free blocks with what a file of `save_prefixes` holds, so that texts find it. What is known
    already is not read twice; blocks are given up later as others are.

    Args:
        path, prefixes, cache, identity: as in `save_prefixes`.

    Returns:
        Tokens that were not known before.

    Raises:
        ArgumentError: the file is truncated, altered or no snapshot, or of another model, dtype or layout:
            says what differs. Nothing is changed then.
        BlockPoolExhaustedError: it holds more than fits; nothing is changed then.
        OSError: it can't be read.
        ImportError: safetensors is not installed.
    """
    layout = _layout(prefixes, cache)
    manifest, tensors = _read(Path(path))
    _require_same(str(path), manifest["holds"], {**identity, **layout})
    count = len(manifest["extras"])
    pools = {name: pool.detach().view(torch.uint8) for name, pool in cache.tensors().items()}
    sizes: dict[str, tuple[int, ...]] = {name: (count, pool[0].numel()) for name, pool in pools.items()}
    sizes |= {_TOKENS: (count * cache.block_size * TOKEN_BYTES,), _PARENTS: (count,)}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != sizes:
        raise _broken(path, "other tensors than its manifest says")
    parents, ids = tensors[_PARENTS].tolist(), tensors[_TOKENS].numpy().tobytes()
    step = cache.block_size * TOKEN_BYTES
    texts = [
        _KnownBlock(parent, ids[place * step : (place + 1) * step], extra)
        for place, (parent, extra) in enumerate(zip(parents, manifest["extras"], strict=True))
    ]
    found = _find(prefixes._runs, texts)
    new = [place for place, block in enumerate(found) if block is None]
    with contextlib.ExitStack() as held:
        known = prefixes.pool.fork([block for block in found if block is not None])
        held.callback(prefixes.pool.free, known)  # else allocating might give them up
        own = prefixes.pool.allocate(len(new))
        held.callback(prefixes.pool.free, own)
        if prefixes.host is not None:
            prefixes.host.flush()
        index = torch.tensor(own, dtype=torch.int64, device=cache.device)
        for name, pool in pools.items():
            values = tensors[name][new].to(pool.device).view(len(new), *pool.shape[1:])
            pool.index_copy_(0, index, values)
        _settle(cache.device)
        taken = dict(zip(new, own, strict=True))
        _publish(
            prefixes._runs, texts, [taken[i] if block is None else block for i, block in enumerate(found)]
        )
    return len(new) * cache.block_size


class _KnownBlock(NamedTuple):
    """A block's ``tokens``, 8 bytes each; ``parent``: the place of the block in front in a list of such, -1:
    it begins a text; ``extra``: of `PrefixCache.text`."""

    parent: int
    tokens: bytes
    extra: Hashable


def _known(runs: Runs) -> list[tuple[_KnownBlock, int]]:
    """What is known, and in which block, what is in front of a block before it. Blocks whose beginning was
    given up are left out: they are not found."""
    behind: dict[Place, list[Run]] = {}
    for run in runs.by_key.values():
        behind.setdefault(run.key[:2], []).append(run)
    # Runs, with the place in `found` of what is in front.
    ahead = [(run, -1, run.key[2]) for run in behind.get(runs.origin, ())]
    found: list[tuple[_KnownBlock, int]] = []
    for run, parent, extra in ahead:  # it grows meanwhile
        for place, block in enumerate(run.blocks):
            if block == NULL_BLOCK:
                break
            tokens = bytes(run.tokens[place * runs.step : (place + 1) * runs.step])
            found.append((_KnownBlock(parent, tokens, extra), block))
            parent, extra = len(found) - 1, None
            ahead += [(child, parent, None) for child in behind.get((run, place), ())]
    return found


def _find(runs: Runs, texts: Sequence[_KnownBlock]) -> list[int | None]:
    """The blocks that hold these; None: unknown."""
    places = list[Place]()
    for text in texts:
        front = places[text.parent] if text.parent >= 0 else runs.origin
        run, place, _, key = runs.follow(front, text.tokens, 0, 1, text.extra)
        places.append((run, place) if key is None and run.block(place) else (Run(), 0))
    return [run.block(place) or None for run, place in places]


def _publish(runs: Runs, texts: Sequence[_KnownBlock], blocks: Sequence[int]) -> None:
    """Each of ``texts`` is in one of ``blocks``, which the caller holds: others find it from now on. What is
    known already stays where it is."""
    places: list[Place] = []
    for text, block in zip(texts, blocks, strict=True):
        front = places[text.parent] if text.parent >= 0 else runs.origin
        run, place, _, key = runs.follow(front, text.tokens, 0, 1, text.extra)
        if key is not None:
            run, place = runs.append(key, text.tokens, [block])
        else:
            runs.fill(run, place, [block])
        places.append((run, place))


def _layout(prefixes: PrefixCache, cache: PagedKVCache) -> dict[str, Any]:
    """What the pools' bytes mean."""
    if cache.blocks_of or prefixes.block_size != cache.block_size:
        raise ArgumentError(
            "cache",
            f"pools of blocks of {prefixes.block_size} tokens alone",
            f"blocks of {cache.block_size}, and layers {sorted(cache.blocks_of)} with states or rings",
        )
    blocks = {name: f"{list(x.shape[1:])} {x.dtype}" for name, x in cache.tensors().items()}
    numbers = (scale for pools in cache for scale in KVScales.of(pools))
    scales = [None if scale is None else scale.tolist() for scale in numbers]
    return {"format": _FORMAT, "block_size": cache.block_size, "blocks": blocks, "scales": scales}


def _require_same(path: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    if differing:
        name = differing[0]
        raise ArgumentError(
            "path",
            f"a snapshot whose {', '.join(differing)} are those of this cache; {name}: {ours[name]}",
            f"{path} with {name}: {theirs.get(name)}",
            "restore it into the set-up that made it, or make a new snapshot",
        )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Manifest and tensors of a file whose checksums are right."""
    from safetensors import SafetensorError, safe_open

    with path.open("rb"):  # its errors name what is wrong with the path
        pass
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise _broken(path, str(error)) from error
    text = metadata.get("manifest", "")
    if not text or hashlib.sha256(text.encode()).hexdigest() != metadata.get("sha256"):
        raise _broken(path, "a manifest with another checksum, or none")
    manifest: dict[str, Any] = json.loads(text)
    sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    wrong = sorted(n for n in sums.keys() | manifest["sha256"] if sums.get(n) != manifest["sha256"].get(n))
    if wrong:
        raise _broken(path, f"another checksum of {wrong[0]}")
    return manifest, tensors


def _broken(path: Any, what: str) -> ArgumentError:
    return ArgumentError("path", "a snapshot as it was written", f"{path}: {what}", "make it anew")


def _settle(device: torch.device) -> None:
    """Steps run on streams of their own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _of_bytes(content: bytes) -> Tensor:
    """``[len(content)]`` uint8."""
    if not content:  # frombuffer takes no empty one
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _checksum(tensor: Tensor) -> str:
    kind = f"{list(tensor.shape)} {tensor.dtype} ".encode()
    return hashlib.sha256(kind + tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
