"""The paged model of a Generator: the one it was given, if its sizes fit, or one made of a transformers
model."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torchpaged.backends import Limits
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.numbers import as_integer
from torchpaged.engine.options import GeneratorOptions

DEFAULT_MAX_SEQ_LEN = 2048
#: Tokens of a request per step at most where layers keep rings, which hold as many beyond the window.
_SLIDING_STEP = 512


def tokens_per_request(model: Any, max_seq_len: int | None) -> tuple[int, int | None]:
    """``max_seq_len`` if the model allows it, or for None the model's, at most 2048; and the model's."""
    limit, why = _longest_text(model)
    if max_seq_len is not None and as_integer(max_seq_len) is None:
        raise ArgumentError("max_seq_len", "None or an integer of at least 2", repr(max_seq_len))
    chosen = min(limit or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
    if chosen < 2 or (limit is not None and chosen > limit):
        allowed = "at least 2 tokens" if limit is None else f"2 to {limit} tokens ({why})"
        raise ArgumentError(
            "max_seq_len", allowed, str(max_seq_len), "leave it out for the most that the model allows"
        )
    return chosen, limit


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
    model: Any, options: GeneratorOptions, max_seq_len: int
) -> tuple[PagedModelProtocol, Callable[[], None]]:
    """``model`` itself if it is paged, else a `PagedModel` of it, fused first if asked; and what gives back
    to the model what that has set.

    Without ``num_blocks`` and ``kv_cache_memory`` the pool holds ``max_batch_size`` requests of
    ``max_seq_len`` tokens; blocks hold 16 tokens unless ``block_size`` says otherwise. A model that is fused
    already is taken as it is.

    Raises:
        ArgumentError: ``fuse``, or anything that shapes a cache or chooses a backend, with a model that is
            paged already; or its session is too small.
        BackendUnavailableError, UnsupportedModelError: from `PagedModel` or `fuse`.
    """
    if isinstance(model, PagedModelProtocol):
        _refuse_shaping(type(model).__name__, options, bool(getattr(model, "batch_invariant", False)))
        _require_room(model, options, max_seq_len)
        return model, lambda: None
    from torchpaged.fuse.held import fused_while_held
    from torchpaged.hf import PagedModel
    from torchpaged.hf.model_classes import without_wrapper
    from torchpaged.hf.support import require_causal_lm, require_supported

    model = without_wrapper(model)
    require_causal_lm(model)
    require_supported(model)
    block_size = 16 if options.block_size is None else options.block_size
    rows, columns, num_blocks = options.max_batch_size, -(-max_seq_len // block_size), options.num_blocks
    if num_blocks is None and options.kv_cache_memory is None:
        num_blocks = rows * columns + 1
    with ExitStack() as undo:
        undo.callback(fused_while_held(model, options.fuse))
        paged = PagedModel(
            model,
            num_blocks=num_blocks,
            memory_budget=options.kv_cache_memory,
            block_size=block_size,
            backend=options.backend,
            limits=Limits(rows, max(options.step_tokens, options.prompt_tokens), columns),
            kv_dtype=options.kv_dtype,
            kv_scales=options.kv_scales,
            batch_invariant=options.batch_invariant,
            sliding_step=min(options.prefill_chunk_size, _SLIDING_STEP) if options.rolls else None,
            num_checkpoints=options.checkpoints,
        )
        undo.callback(paged._give_back)
        return paged, undo.pop_all().close


def _refuse_shaping(kind: str, options: GeneratorOptions, is_invariant: bool) -> None:
    """Refuse options that a model which is paged already has decided; ``kind``: its class."""
    if options.fuse:
        raise ArgumentError(
            "fuse",
            "False, or a transformers model that is not paged yet",
            f"True with a {kind}",
            "call torchpaged.hf.fuse(model) on the transformers model before you make the paged one",
        )
    shaping = ("num_blocks", "kv_cache_memory", "block_size", "backend", "kv_dtype", "kv_scales")
    for name in (*shaping, "num_checkpoints"):
        value, default = getattr(options, name), getattr(GeneratorOptions, name)
        is_default = value is None or (isinstance(value, str) and value == default)
        if not is_default:
            raise ArgumentError(name, f"nothing with a {kind}, whose cache and backend are made", repr(value))
    if options.batch_invariant and not is_invariant:
        raise ArgumentError(
            "batch_invariant",
            f"False with a {kind}, whose backend is chosen",
            "True",
            "give it to PagedModel",
        )


def _require_room(model: PagedModelProtocol, options: GeneratorOptions, max_seq_len: int) -> None:
    """Refuse steps and requests beyond what the session of a paged model takes."""
    limits = model.session.limits
    for name, limit in (
        ("max_batch_size", "max_num_reqs"),
        ("max_batch_size", "max_num_tokens"),
        ("prefill_chunk_size", "max_num_tokens"),
    ):
        most, size = getattr(limits, limit), getattr(options, name)
        if most is not None and most < size:
            raise ArgumentError(
                name,
                f"at most {most}, the limit of the model's session",
                str(size),
                f"give PagedModel limits=Limits({limit}=...)",
            )
    most, columns = limits.max_blocks_per_req, -(-max_seq_len // model.kv_cache.block_size)
    if model.session.plans and most is not None and most < columns:
        raise ArgumentError(
            "max_seq_len",
            f"at most {most} blocks, as the model's session plans for",
            f"{max_seq_len} tokens, {columns} blocks",
            "give PagedModel limits=Limits(max_blocks_per_req=...)",
        )
