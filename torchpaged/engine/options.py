"""What the options of a Generator come to: checks, the paged model, and whether steps are captured
and compiled.

Each decision comes with its reason, so that ``generator.graph_reason``, ``prefill_graph_reason`` and
``compile_reason`` can say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from torchpaged.backends import Choice, GraphSupport, Limits
from torchpaged.custom_ops.checks import switch
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.numbers import as_integer, shown
from torchpaged.graphs import default_prefill_buckets

if TYPE_CHECKING:
    from torchpaged.fuse import FusionReport

DEFAULT_MAX_SEQ_LEN = 2048


def check_size(name: str, size: int, least: int = 1) -> None:
    """Refuse what is no integer of at least ``least``."""
    number = as_integer(size)
    if number is None or number < least:
        raise ArgumentError(
            name, f"{'' if number is not None else 'an integer of '}at least {least}", shown(size)
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what can't be called on text, or has no ``decode``."""
    if tokenizer is not None and not (callable(tokenizer) and callable(getattr(tokenizer, "decode", None))):
        raise ArgumentError(
            "tokenizer",
            'a tokenizer, for tokenizer(text)["input_ids"] and tokenizer.decode(ids), or None',
            shown(tokenizer),
            "without one prompts are token ids",
        )


def tokens_per_request(model: Any, max_seq_len: int | None) -> int:
    """``max_seq_len`` if the model allows it; None: the model's, at most 2048."""
    limit, why = _longest_text(model)
    if max_seq_len is not None and as_integer(max_seq_len) is None:
        raise ArgumentError("max_seq_len", "None or an integer of at least 2", repr(max_seq_len))
    chosen = min(limit or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
    if chosen < 2 or (limit is not None and chosen > limit):
        allowed = "at least 2 tokens" if limit is None else f"2 to {limit} tokens ({why})"
        raise ArgumentError("max_seq_len", allowed, str(max_seq_len))
    return chosen


def _longest_text(model: Any) -> tuple[int | None, str]:
    """Tokens of a request at most, and why."""
    inner = getattr(model, "model", model) if isinstance(model, PagedModelProtocol) else model
    found, why = getattr(model, "max_position_embeddings", None), "the model's maximum"
    if hasattr(inner, "config"):
        from torchpaged.hf.support import rotated_alike  # transformers is optional

        found = getattr(inner.config.get_text_config(decoder=True), "max_position_embeddings", None)
        most, kind = rotated_alike(inner)
        if most is not None and (found is None or most < found):
            return most, f"beyond, the longest text of a batch rotates the keys of all: {kind!r}"
    return found, why


def paged_model(
    model: Any,
    *,
    fuse: bool,
    num_blocks: int | None,
    kv_cache_memory: int | None,
    block_size: int | None,
    backend: str,
    max_batch_size: int,
    max_seq_len: int,
    prefill_chunk_size: int,
    kv_dtype: str | torch.dtype | None = None,
    kv_scales: Any = "head",
    batch_invariant: bool = False,
    rolling: bool = True,
) -> tuple[PagedModelProtocol, Callable[[], None]]:
    """``model`` itself if it is paged, else a `PagedModel` of it, fused first if asked; and what gives back
    to the model what that has set.

    Without ``num_blocks`` and ``kv_cache_memory`` the pool holds ``max_batch_size`` requests of
    ``max_seq_len`` tokens; blocks hold 16 tokens unless ``block_size`` says otherwise. A model that is fused
    already is taken as it is.

    Raises:
        ArgumentError: ``fuse``, or anything that shapes a cache or chooses a backend, with a model that is
            paged already; or its session is too small for ``max_batch_size``, ``prefill_chunk_size``
            or ``max_seq_len``, or its rings for ``prefill_chunk_size``.
        BackendUnavailableError, UnsupportedModelError: from `PagedModel` or `fuse`.
    """
    if num_blocks is not None and as_integer(num_blocks) is None:
        raise ArgumentError(
            "num_blocks", "None or an integer of at least 2 (block 0 is the null block)", repr(num_blocks)
        )
    if kv_cache_memory is not None and (as_integer(kv_cache_memory) is None or num_blocks is not None):
        raise ArgumentError(
            "kv_cache_memory",
            "None or bytes as an integer, and no num_blocks beside it",
            repr(kv_cache_memory) if num_blocks is None else f"{kv_cache_memory!r} and {num_blocks} blocks",
            "for 1 GiB give 2**30",
        )
    if isinstance(model, PagedModelProtocol):
        if fuse:
            raise ArgumentError(
                "fuse",
                "False, or a transformers model that is not paged yet",
                f"True with a {type(model).__name__}",
                "call torchpaged.hf.fuse(model) on the transformers model before you make the paged one",
            )
        given = {
            "num_blocks": num_blocks,
            "kv_cache_memory": kv_cache_memory,
            "block_size": block_size,
            "backend": None if backend == "auto" else backend,
            "kv_dtype": kv_dtype,
            "kv_scales": None if isinstance(kv_scales, str) and kv_scales == "head" else kv_scales,
        }
        for name, value in given.items():
            if value is not None:
                raise ArgumentError(
                    name,
                    f"nothing with a {type(model).__name__}, whose cache and backend are made",
                    repr(value),
                )
        if batch_invariant and not getattr(model, "batch_invariant", False):
            raise ArgumentError(
                "batch_invariant",
                f"False with a {type(model).__name__}, whose backend is chosen",
                "True",
                "give it to PagedModel",
            )
        limits = model.session.limits
        for name, size, limit in (
            ("max_batch_size", max_batch_size, "max_num_reqs"),
            ("max_batch_size", max_batch_size, "max_num_tokens"),
            ("prefill_chunk_size", prefill_chunk_size, "max_num_tokens"),
        ):
            most = getattr(limits, limit)
            if most is not None and most < size:
                raise ArgumentError(
                    name,
                    f"at most {most}, the limit of the model's session",
                    str(size),
                    f"give PagedModel limits=Limits({limit}=...)",
                )
        rings = getattr(model, "rings", None)
        if rings is not None and prefill_chunk_size > rings.blocks.step:
            raise ArgumentError(
                "prefill_chunk_size",
                f"at most {rings.blocks.step}, which the rings of the {type(model).__name__} take at once",
                str(prefill_chunk_size),
                "give PagedModel a larger sliding_step",
            )
        most, columns = limits.max_blocks_per_req, -(-max_seq_len // model.kv_cache.block_size)
        if model.session.plans and most is not None and most < columns:
            raise ArgumentError(
                "max_seq_len",
                f"at most {most} blocks, as the model's session plans for",
                f"{max_seq_len} tokens, {columns} blocks",
                "give PagedModel limits=Limits(max_blocks_per_req=...)",
            )
        return model, lambda: None
    from torchpaged.fuse import fuse as fuse_model
    from torchpaged.fuse import unfuse
    from torchpaged.hf import PagedModel, fusion_of
    from torchpaged.hf.support import require_causal_lm, require_supported
    from torchpaged.hf.wrapped import unwrapped

    model = unwrapped(model)
    require_causal_lm(model)
    require_supported(model)
    block_size = 16 if block_size is None else block_size
    if num_blocks is None and kv_cache_memory is None:
        num_blocks = max_batch_size * -(-max_seq_len // block_size) + 1
    limits = Limits(max_batch_size, max(prefill_chunk_size, max_batch_size), -(-max_seq_len // block_size))
    with ExitStack() as undo:
        if fuse and fusion_of(model) is None:
            fuse_model(model)
            undo.callback(lambda: unfuse(model) if fusion_of(model) is not None else None)
        paged = PagedModel(
            model,
            num_blocks=num_blocks,
            memory_budget=kv_cache_memory,
            block_size=block_size,
            backend=backend,
            limits=limits,
            kv_dtype=kv_dtype,
            kv_scales=kv_scales,
            batch_invariant=batch_invariant,
            sliding_step=prefill_chunk_size if rolling else None,
        )
        undo.callback(paged._give_back)
        return paged, undo.pop_all().close


def decide_sharing(share_prefixes: bool | str, batch_invariant: bool, rolls: bool) -> bool:
    """Whether requests share blocks.

    Args:
        share_prefixes: as for the engine; "auto": unless something speaks against it.
        batch_invariant: likewise.
        rolls: whether layers of the model keep rings.

    Raises:
        ArgumentError: they shall, and the keys of one are not those of another, or are gone by then.
    """
    if share_prefixes is True and rolls:
        raise ArgumentError(
            "share_prefixes",
            "'auto' or False with a model whose layers keep rings of blocks",
            "True",
            "make the PagedModel without sliding_step to share",
        )
    return not (batch_invariant or rolls) if share_prefixes == "auto" else share_prefixes is True


def require_invariant(
    *,
    use_graphs: bool,
    graph_reason: str,
    buckets: Sequence[int] | None,
    share_prefixes: bool | str,
    max_batch_size: int,
    max_seq_len: int,
    num_blocks: int,
    block_size: int,
    needs_scales: bool,
) -> None:
    """Refuse what would let a request's bits depend on the others of an engine.

    Raises:
        ArgumentError: no graphs, whose decode steps are of one size; buckets of several; shared prefixes,
            which others compute; so few blocks that a request may be put back and computed otherwise; or
            scales of fp8 pools that the first prompt would give all others.
    """
    wants = "with batch_invariant=True"
    if not use_graphs:
        raise ArgumentError("batch_invariant", "graphs: decode steps of one size", f"none ({graph_reason})")
    if buckets is not None and list(buckets) != [max_batch_size]:
        raise ArgumentError("buckets", f"None or [{max_batch_size}] {wants}", str(list(buckets)))
    if share_prefixes is True:
        raise ArgumentError("share_prefixes", f"'auto' or False {wants}", "True")
    need = max_batch_size * -(-max_seq_len // block_size) + 1
    if num_blocks < need:
        raise ArgumentError(
            "num_blocks",
            f"at least {need} {wants}: {max_batch_size} requests of {max_seq_len} tokens and the null block, "
            "so that none is put back and computed again in other steps",
            str(num_blocks),
        )
    if needs_scales:
        raise ArgumentError("kv_scales", f"scales {wants}: those found are of the first prompt", "none")


def decide_rolling(rolling: bool | str, share_prefixes: bool | str) -> bool:
    """Whether layers with a window may keep rings of blocks.

    Raises:
        ArgumentError: no switch, or requests shall share blocks, too.
    """
    switch("rolling", rolling, "auto")
    if rolling is True and share_prefixes is True:
        raise ArgumentError(
            "share_prefixes",
            "False or 'auto' with rolling=True",
            "True",
            "layers with a window keep nothing of a prefix that another request could take; give "
            "rolling=False to share",
        )
    return share_prefixes is not True if rolling == "auto" else bool(rolling)


def decide_graphs(graphs: bool | str, choice: Choice, on_gpu: bool) -> tuple[bool, str]:
    """Whether decode goes through the runner, and why."""
    if graphs is False:
        return False, "switched off by graphs=False"
    support = choice.backend.capabilities.graph_support
    if on_gpu and support == GraphSupport.NEVER:
        reason = f"backend {choice.name!r} declares graph support NEVER"
        if graphs is True:
            raise BackendUnavailableError(f"graphs=True: {reason}; choose another backend or graphs='auto'")
        return False, reason
    return (
        True,
        f"backend {choice.name!r} declares graph support {support.name}"
        if on_gpu
        else "eager capture on a CPU",
    )


def require_no_graphs(
    reason: str,
    steps_per_launch: int,
    buckets: Sequence[int] | None,
    capture: Any,
    capture_ahead: bool | str,
) -> None:
    """Refuse what only graphs could do; raises `ArgumentError`. ``reason``: why there are none."""
    for name, given, is_off, off in (
        ("steps_per_launch", steps_per_launch, steps_per_launch == 1, "1"),
        ("buckets", buckets, buckets is None, "None"),
        ("capture", capture, isinstance(capture, str) and capture == "auto", "'auto'"),
        ("capture_ahead", capture_ahead, capture_ahead is not True, "'auto' or False"),
    ):
        if not is_off:
            raise ArgumentError(name, f"{off} without graphs", shown(given), f"graphs: {reason}")


def decide_prefill_buckets(
    prefill_buckets: Sequence[int] | str | None,
    prefill_chunk_size: int,
    on_gpu: bool,
    use_graphs: bool,
    graph_reason: str,
    support: GraphSupport = GraphSupport.ALWAYS,
) -> tuple[list[int], str]:
    """Numbers of tokens for which prefills are captured, none = no such graphs, and why.

    ``support``: the backend's. On a GPU anything below ALWAYS rules prefills out: their query lengths differ
    from replay to replay.
    """
    listed = prefill_buckets is None or isinstance(prefill_buckets, Iterable)
    if isinstance(prefill_buckets, str) or not listed:
        if prefill_buckets != "auto":
            raise ArgumentError("prefill_buckets", "numbers of tokens, None or 'auto'", repr(prefill_buckets))
        if not use_graphs:
            return [], f"automatic: graphs: {graph_reason}"
        if not on_gpu:
            return [], "automatic: on a CPU a step does not wait for launches"
        if support < GraphSupport.ALWAYS:
            return [], f"automatic: the backend declares graph support {support.name}, prefills need ALWAYS"
        return default_prefill_buckets(prefill_chunk_size), "automatic: on a GPU with graphs"
    if not prefill_buckets:
        return [], f"switched off by prefill_buckets={prefill_buckets}"
    if not use_graphs:
        raise ArgumentError(
            "prefill_buckets",
            "None or 'auto' without graphs",
            str(list(prefill_buckets)),
            f"graphs: {graph_reason}",
        )
    if on_gpu and support < GraphSupport.ALWAYS:
        raise ArgumentError(
            "prefill_buckets",
            "None or 'auto' with this backend",
            str(list(prefill_buckets)),
            f"it declares graph support {support.name}, prefills need ALWAYS",
        )
    wrong = any(as_integer(bucket) is None for bucket in prefill_buckets)
    if wrong or min(prefill_buckets) < 1 or max(prefill_buckets) > prefill_chunk_size:
        raise ArgumentError(
            "prefill_buckets",
            f"numbers of tokens from 1 to {prefill_chunk_size} (prefill_chunk_size)",
            str(list(prefill_buckets)),
        )
    return sorted(set(prefill_buckets)), f"prefill_buckets={sorted(set(prefill_buckets))} was given"


def decide_compile(
    compile: bool | str, on_gpu: bool, use_graphs: bool, graph_reason: str, fusion: FusionReport | None
) -> tuple[bool, str]:
    """Whether the decode step goes through torch.compile, and why."""
    if not use_graphs:
        if compile is True:
            raise ArgumentError(
                "compile", "False or 'auto' without graphs", "True", f"graphs: {graph_reason}"
            )
        return False, "steps without graphs run eagerly"
    if compile != "auto":
        return compile is True, f"compile={compile} was given"
    if not on_gpu:
        return False, "automatic: eager on a CPU"
    if fusion is not None and fusion.complete:
        return False, "automatic: the model is fully fused, which leaves nothing to compile"
    return (
        True,
        "automatic: on a GPU"
        if fusion is None
        else "automatic: on a GPU, and fuse() left parts of the model alone",
    )
