"""The ``flex`` backend: torch's FlexAttention over the paged pool (flex_call.py), with block masks made from
the batch's own metadata.

    torchpaged.select_backend(spec, "flex")                 # any head_dim; runs where it is named
    layer = PagedAttention(8, 64, score_mod=function)       # what no paged kernel takes: functions of yours
    mine = flex_backend("tanh_bias", score_mod=function)    # the same as a backend, with a name of its own

TORCHPAGED_FLEX_COMPILER=eager runs the higher-order op unfused, over the whole pool: for tests and for
debugging a mod.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, further_reasons
from torchpaged.backends.features import COMMON_FEATURES
from torchpaged.backends.flex_call import attend
from torchpaged.backends.flex_compiled import MODS, PLAIN, Mods, shared_mods
from torchpaged.backends.library_op import attention_op
from torchpaged.backends.session import Session
from torchpaged.backends.spec import AttentionSpec, GraphSupport, MaskMod, ScoreMod, check_mods
from torchpaged.custom_ops import variables
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.errors import ArgumentError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _further(spec: AttentionSpec) -> list[str]:
    device, size = spec.device.type, spec.block_size
    reasons = [f"{reason}, which FlexAttention asks for" for reason in further_reasons(spec)]
    if device == "cuda" and size is not None and (size < 16 or size & (size - 1)):
        reasons.append(
            f"block_size {size} is not a power of two of at least 16, the least tile of its GPU kernels"
        )
    narrowest = min(spec.head_dim, spec.head_dim_v or spec.head_dim)
    if device == "cuda" and narrowest < 16:
        reasons.append(f"head_dim {narrowest} is below 16, the least of its GPU kernels")
    compiled = variables.get("TORCHPAGED_FLEX_COMPILER") == "inductor"
    if device == "cpu" and compiled and not spec.uses.isdisjoint({"lse", "sinks"}):
        reasons.append("lse and sinks: torch's compiled FlexAttention returns no log-sum-exp on a CPU")
    if device == "cpu" and spec.batch_invariant:
        reasons.append("batch_invariant: torch's FlexAttention on a CPU reads keys in the pool's order")
    return reasons


CAPABILITIES = Capabilities(
    device_types=("cuda", "cpu"),
    dtypes=_FLOATS,
    kv_dtypes=_FLOATS,
    graph_support=GraphSupport.ALWAYS,
    min_compute_capability=(7, 0),
    features=COMMON_FEATURES | {"block_sparse"},
    finite_pools=True,
    mods=True,
    batch_invariant=True,
    further=_further,
)


def _unavailable() -> str | None:
    try:
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no flex_attention with AuxRequest; pip install 'torch>=2.11'"
    return None


class FlexSession(Session):
    """Gives the op what its other arguments don't tell: a layer's functions, and whether it is to be
    batch-invariant.

    Args:
        own: functions of the backend's, for all its layers; None: each layer's spec has its own, or none.
        arguments: as `Session` takes them.
    """

    def __init__(self, own: tuple[ScoreMod | None, MaskMod | None] | None, *arguments: Any) -> None:
        self._own = own
        self._mods: list[Mods] = []  # that the handles stand for
        super().__init__(*arguments)

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        score_mod, mask_mod = self._own or (spec.score_mod, spec.mask_mod)
        if score_mod is None and mask_mod is None and not spec.batch_invariant:
            return {}
        self._mods.append(shared_mods(score_mod, mask_mod, spec.batch_invariant))
        return {"mods": MODS.add(self._mods[-1])}

    def close(self) -> None:
        """Forget the functions."""
        super().close()
        self._mods = []


def _attend_plain(call: AttentionCall, mods: Tensor | None) -> None:
    attend(call, PLAIN if mods is None else MODS.of(mods))


def _attend_with_mods(call: AttentionCall, mods: Tensor | None) -> None:
    attend(call, MODS.of(mods))


BACKEND = Backend(
    name="flex",
    capabilities=CAPABILITIES,
    ops=attention_op("torchpaged_flex", _attend_plain, CAPABILITIES, "flex", mods="Tensor?"),
    unavailable=_unavailable,
    session=partial(FlexSession, None),
)
#: Of backends with mods: without their session's handle it refuses, where the plain one has nothing to add.
OPS_WITH_MODS = attention_op("torchpaged_flex_mods", _attend_with_mods, CAPABILITIES, mods="Tensor?")


def flex_backend(
    name: str,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    graph_support: GraphSupport = GraphSupport.ALWAYS,
) -> Backend:
    """A backend whose attention is changed by functions of one's own, as torch's FlexAttention takes them.

    They hold for all layers of its sessions, by whichever entry point they are called. A single layer's
    functions are arguments of `torchpaged.PagedAttention`.

    The functions get and give tensors without dimensions, and are traced once: what they read may change in
    place between calls. They come after scale, soft cap and ALiBi, and hide keys besides what causality,
    window, chunks and lengths hide. Positions are those of the sequence, not of the packed batch or the pool.

    Args:
        name: of the backend, for `torchpaged.register_backend` and messages.
        score_mod: ``(score, request, head, query_position, key_position) -> score``.
        mask_mod: ``(request, head, query_position, key_position) -> bool``.
        graph_support: what the functions allow; less than ALWAYS if they look at anything that a replay would
            not see change.

    Returns:
        A `Backend`: open a session of it, or register it. It always needs its session's workspace, which
        modules, caches and runners pass by themselves.

    Raises:
        ArgumentError: neither function was given, or one that can't be called.
    """
    check_mods(score_mod, mask_mod)
    if score_mod is None and mask_mod is None:
        raise ArgumentError(
            "score_mod, mask_mod",
            "at least one function",
            "none",
            "without them, backend 'flex' does the same",
        )
    return Backend(
        name=name,
        capabilities=replace(CAPABILITIES, graph_support=graph_support, mods=False),
        ops=OPS_WITH_MODS,
        unavailable=_unavailable,
        session=partial(FlexSession, (score_mod, mask_mod)),
    )
