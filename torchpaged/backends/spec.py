"""What an attention asks of a backend: `AttentionSpec`, and `attention_spec`, the one function that makes it
from a layer's arguments; and the largest batches that a session will see, `Limits`.

Every entry point comes through here: the module from its options, the checked functions from their arguments,
a HuggingFace cache and the engine's model from what their layers really call with. So a feature that a layer
uses and a backend lacks meet in one place."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends.features import FEATURES, GIVEN
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.checks import check_sizes, is_int
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import repr_of_fields

#: ``score_mod(score, request, head, query_position, key_position)``: tensors without dimensions, positions in
#: the sequence.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: ``mask_mod(request, head, query_position, key_position)``: whether the query sees the key.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_OF_CALLS = tuple(name for name in GIVEN if name in AttentionCall._fields)


class GraphSupport(IntEnum):
    """Which batches a backend can serve from a captured CUDA graph whose lengths change between replays.

    Declared support is proved by ``tests/testing/test_graph_conformance.py``: capture at the
    bucket's maximum, replay with others.
    """

    NEVER = 0  #: No batch, as where it reads lengths on the host.
    SINGLE_TOKEN_DECODE = 1  #: Every query_len is 1, or 0 in padding.
    UNIFORM_BATCH = 2  #: All query lengths are equal.
    ALWAYS = 3  #: Every batch.


@dataclass(frozen=True)
class AttentionSpec:
    """The attention that a caller wants to run; a backend answers with the reasons why it can't.

    Attributes:
        device: where it runs.
        dtype: of queries and outputs; of outputs alone with "fp8_queries", of queries alone with
            "output_scale"; bfloat16 with both.
        head_dim, head_dim_v: width of keys and of values (None = ``head_dim``).
        num_heads, num_kv_heads: query and kv heads.
        block_size: tokens per block; None = not known yet, the cache that comes says it.
        kv_dtype: of the pools (None = ``dtype``).
        causal: hide keys after the query.
        window_size: ``(left, right)`` keys visible besides the own one; -1 = open.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``; 0 = off.
        chunk_size: keys of the query's own chunk of that many positions only; 0 = off.
        scale: softmax scale; None = ``head_dim ** -0.5``.
        uses: those of `FEATURES` that are no value here, the names in `GIVEN`. With "latent" it attends to
            one latent of ``head_dim`` numbers per token, the first ``head_dim_v`` of which are the value.
        graphs: the least graph support it needs.
        score_mod, mask_mod: functions that change scores and hide keys, as `ScoreMod` and `MaskMod`; None =
            none. Specs with the same functions are equal.
        batch_invariant: a request's bits must not depend on the others in the batch.
        max_query_len: the most query tokens of a request; None = any number.
        deterministic: whether equal calls must give equal bits.

    Raises:
        ValueError: a name in ``uses`` that is not in `GIVEN`.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int | None = 16
    head_dim_v: int | None = None
    kv_dtype: torch.dtype | None = None
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    logits_soft_cap: float = 0.0
    chunk_size: int = 0
    uses: frozenset[str] = frozenset()
    graphs: GraphSupport = GraphSupport.NEVER
    scale: float | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    batch_invariant: bool = False
    max_query_len: int | None = None
    deterministic: bool = False

    __repr__ = repr_of_fields

    def __post_init__(self) -> None:
        require_known("uses", self.uses, GIVEN.values())

    @property
    def features(self) -> list[str]:
        """Which of `FEATURES` it uses."""
        return features_used(self.uses, self.causal, self.window_size, self.logits_soft_cap, self.chunk_size)

    @property
    def mods(self) -> bool:
        """Whether functions of the user's change scores or hide keys."""
        return self.score_mod is not None or self.mask_mod is not None


def features_used(
    uses: Collection[str], causal: bool, window_size: tuple[int, int], logits_soft_cap: float, chunk_size: int
) -> list[str]:
    """`AttentionSpec.features`, where sizes may be symbols and there is no spec: in a trace."""
    of_values = {
        "bidirectional": not causal,
        "window": window_size != (-1, -1),
        "logits_soft_cap": logits_soft_cap != 0,
        "chunked": chunk_size > 0,
    }
    return [name for name in FEATURES if name in uses or of_values.get(name, False)]


def given_in(call: AttentionCall) -> tuple[str, ...]:
    """Which names in `GIVEN` a call has."""
    given = tuple(name for name in _OF_CALLS if getattr(call, name) is not None)
    return (*given, "fp8_queries") if call.fp8_queries else given


def features_of(call: AttentionCall) -> list[str]:
    """Which of `FEATURES` a call uses."""
    uses = [GIVEN[name] for name in given_in(call)]
    window = call.window_left, call.window_right
    return features_used(uses, call.causal, window, call.logits_soft_cap, call.chunk_size)


def require_known(argument: str, names: Collection[str], known: Collection[str]) -> None:
    """Refuse names of features that are not in ``known``; raises `ArgumentError`."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(argument, f"names of {', '.join(known)}", ", ".join(unknown))


def attention_spec(
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    block_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
    window_size: tuple[int, int] = (-1, -1),
    logits_soft_cap: float | None = None,
    chunk_size: int | None = None,
    scale: float | None = None,
    **options: Any,
) -> AttentionSpec:
    """The spec of a layer that attends with these arguments.

    Args:
        device, dtype, num_heads, num_kv_heads, head_dim, head_dim_v, block_size, kv_dtype: as in
            `AttentionSpec`.
        window_size: ``(left, right)``; -1 = open.
        logits_soft_cap, chunk_size: None or 0 = off.
        scale: None = ``head_dim ** -0.5``.
        options: names in `GIVEN`, such as ``sinks``: None or False = off, anything else counts as given; and
            other fields of `AttentionSpec`, such as ``causal``.

    Raises:
        ArgumentError: a ``score_mod`` or ``mask_mod`` that can't be called, or no heads or columns.
    """
    check_mods(options.get("score_mod"), options.get("mask_mod"))
    if min(num_heads, num_kv_heads, head_dim) < 1:
        check_sizes(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    given = {name: options.pop(name) for name in GIVEN if name in options}
    return AttentionSpec(
        device=device if isinstance(device, torch.device) else torch.device(device),
        dtype=dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        kv_dtype=dtype if kv_dtype is None else kv_dtype,
        window_size=(window_size[0], window_size[1]),
        logits_soft_cap=float(logits_soft_cap or 0.0),
        chunk_size=chunk_size or 0,
        scale=head_dim**-0.5 if scale is None else float(scale),
        uses=frozenset(GIVEN[name] for name, x in given.items() if x is not None and x is not False),
        **options,
    )


def check_mods(score_mod: Any, mask_mod: Any) -> None:
    """Refuse what is neither a function nor None; raises `ArgumentError`."""
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None and not callable(mod):
            raise ArgumentError(name, "a function, or None", repr(mod))


@dataclass(frozen=True)
class Limits:
    """The largest batches that a session will see; None = not said.

    Attributes:
        max_num_reqs: requests of a batch, padding rows included.
        max_num_tokens: query tokens of a batch, padding included.
        max_blocks_per_req: columns of the block table.
        num_blocks: blocks of a pool, the null block included.
        block_size: tokens per block.
        graphs: the least graph support that is needed.

    Raises:
        ArgumentError: a limit that is no integer, or below 1.
    """

    max_num_reqs: int | None = None
    max_num_tokens: int | None = None
    max_blocks_per_req: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    graphs: GraphSupport = GraphSupport.NEVER

    __repr__ = repr_of_fields

    def __post_init__(self) -> None:
        for each in fields(self)[:5]:
            size = getattr(self, each.name)
            if size is not None and (not is_int(size) or size < 1):
                raise ArgumentError(f"limits.{each.name}", "an int of at least 1, or None", repr(size))
        if not isinstance(self.graphs, GraphSupport):
            raise ArgumentError("limits.graphs", "a GraphSupport", repr(self.graphs))

    def need(self, *names: str) -> list[int]:
        """These limits, for a session that can't do without them.

        Raises:
            ArgumentError: one was not said.
        """
        for name in names:
            if getattr(self, name) is None:
                raise ArgumentError(
                    f"limits.{name}",
                    "a number: this backend makes room for it when its session is opened",
                    "None",
                )
        return [getattr(self, name) for name in names]

    def check(self, num_reqs: int, num_tokens: int = 0, max_blocks_per_req: int = 0) -> None:
        """Refuse a batch of more requests, tokens or columns of its block table.

        Raises:
            ArgumentError: it has more than these limits say.
        """
        for name, got, what in (
            ("max_num_reqs", num_reqs, "requests"),
            ("max_num_tokens", num_tokens, "tokens"),
            ("max_blocks_per_req", max_blocks_per_req, "blocks per request"),
        ):
            most = getattr(self, name)
            if most is not None and got > most:
                raise ArgumentError(
                    "metadata",
                    f"at most {most} {what}, as the session's limits say",
                    str(got),
                    f"open it with Limits({name}=...) of the largest batch",
                )
