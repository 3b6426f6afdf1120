"""The backend of a paged HuggingFace cache, chosen for what its layers really ask, and the session that they
share.

A config says little about attention: soft cap, sinks, causality and each layer's widths are arguments of the
layers' calls. So a first choice is made from what is known before anything is written, and every kind of call
is then held to what the backend declares. A kind that comes anew with an eager forward may change an
automatic choice, since all backends write the same cache; a backend that was named is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchpaged.backends import (
    AttentionSpec,
    Capabilities,
    Choice,
    Limits,
    Session,
    attention_spec,
    select_backend,
)
from torchpaged.backends.spec import features_used
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.prefixes.attention import can_read_once


class LayerCall(NamedTuple):
    """What a module asks of attention over one layer of a paged cache: made once, by
    `torchpaged.hf.attention.paged_attention_forward`, of what the module, its masks and its layer say.

    Attributes:
        module: the attention module.
        query: ``[batch, num_heads, query_len, head_dim]``.
        key, value: the layer's pools ``[num_blocks, block_size, num_kv_heads, head_dim(_v)]``.
        causal: whether a query sees no token behind its own.
        window: keys visible, the own one included; None: all.
        softcap, sinks, alibi_slopes: as the op has them; None: without.
        scaling: of the scores; None: ``head_dim ** -0.5``.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    scaling: float | None = None


def config_spec(
    config: Any,
    layer: Any,
    key_states: Tensor,
    head_dim_v: int | None,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
) -> AttentionSpec:
    """What a `PagedLayer` will ask for, as far as the config and the first keys tell.

    ``key_states [batch, num_kv_heads, *, head_dim]``.
    """
    num_kv_heads, head_dim = key_states.shape[1], key_states.shape[3]
    return attention_spec(
        device=key_states.device,
        dtype=key_states.dtype,
        num_heads=getattr(config, "num_attention_heads", num_kv_heads),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        block_size=block_size,
        kv_dtype=kv_dtype,
        window_size=(-1 if layer.window is None else layer.window - 1, -1),
        chunk_size=layer.chunk,
        logits_soft_cap=getattr(config, "attn_logit_softcapping", None),
    )


class ChosenBackend:
    """The backend of one cache: none until `choose` was called.

    Args:
        asked: a name or "auto".
        limits: the largest batches of the session.
        layers: the cache's `PagedLayer`s; each is given its ``workspace``.
        batch_invariant: ask for backends that give a request the same bits in every batch.

    Attributes:
        choice: which backend runs and why.
        session: what it keeps open for the layers.
        ops, capabilities: the session's op handles, and what its backend declares.
        plans: whether the session plans some steps.
        specs: what the layers ask of it, as keys.
    """

    choice: Choice
    session: Session
    ops: BackendOps
    capabilities: Capabilities
    plans: bool

    def __init__(
        self, asked: str, limits: Limits, layers: Sequence[Any], batch_invariant: bool = False
    ) -> None:
        self._asked, self._limits, self._layers = asked, limits, layers
        self.batch_invariant = batch_invariant
        self.specs: dict[AttentionSpec, None] = {}

    def _asks(self, spec: AttentionSpec) -> AttentionSpec:
        """With what every layer of the cache asks."""
        return replace(spec, batch_invariant=True) if self.batch_invariant else spec

    def choose(self, specs: Iterable[AttentionSpec]) -> None:
        """Choose for these specs alone.

        Raises:
            BackendUnavailableError: the named backend can't run them all, or none can; the choice before
                stays.
        """
        wanted = dict.fromkeys(map(self._asks, specs))
        choice = select_backend(list(wanted), self._asked)
        before: Session | None = getattr(self, "session", None)
        device = next(iter(wanted)).device
        if before is None or before.ops is not choice.backend.ops or before.device != device:
            session = choice.backend.open(wanted, self._limits, device)
            if before is not None and before.planned is not None:  # in the middle of a step
                session.plan(before.planned)
            self.session = session
        self.choice, self.specs = choice, wanted
        self.ops, self.capabilities = self.session.ops, self.session.capabilities
        self.plans = self.session.plans
        for layer in self._layers:
            if layer.spec is not None and self._asks(layer.spec) in wanted:
                self.give_workspace(layer, layer.spec)
            else:
                layer.spec = layer.asked = None  # what it asked for elsewhere, or in another dtype

    def give_workspace(self, layer: Any, spec: AttentionSpec) -> None:
        """Give ``layer`` what the session keeps for layers of ``spec``, and say whether such layers may read
        shared prefixes once."""
        spec = self._asks(spec)
        layer.spec, layer.workspace = spec, self.session.workspace(spec)
        layer.reads_once = can_read_once(spec, self.session)

    def require(self, spec: AttentionSpec) -> None:
        """Hold the choice to one more spec; eager calls only.

        Raises:
            BackendUnavailableError: as `choose`.
        """
        if self._asks(spec) not in self.specs:
            self.choose([*self.specs, spec])

    def hold(self, layer: Any, call: LayerCall) -> None:
        """Hold a layer's call to what the backend declares; eager calls only, once per kind of call.

        Raises:
            BackendUnavailableError: with all reasons.
        """
        spec = _spec_of_call(layer, call)
        self.require(spec)
        self.give_workspace(layer, spec)

    def hold_spans(self, layer: Any, call: LayerCall) -> dict[str, Tensor]:
        """Hold a layer's second call of a forward, over spans that are not causal, to what the backend
        declares; what the session keeps for it.

        Raises:
            BackendUnavailableError: with all reasons.
        """
        if self.session.plans:
            raise BackendUnavailableError(
                f"backend {self.session.name!r} plans every batch of queries, and image tokens that see each "
                "other in both directions take a second one; give the PagedCache another backend"
            )
        spec = self._asks(_spec_of_call(layer, call))
        self.require(spec)
        # There may be more spans than rows, for which a kernel makes semaphores of its own.
        return {name: x for name, x in self.session.workspace(spec).items() if name != "semaphore"}

    def hold_traced(self, layer: Any, call: LayerCall) -> None:
        """The same in a trace, where nothing is chosen any more."""
        given = {"alibi": call.alibi_slopes, "sinks": call.sinks, "latent": layer.latent or None}
        uses = [name for name, value in given.items() if value is not None]
        sides = (-1 if call.window is None else 0, -1)
        used = features_used(uses, call.causal, sides, call.softcap or 0.0, layer.chunk or 0)
        reasons = self.capabilities.reject_kind(call.query.dtype, call.key.dtype, used)
        if reasons:
            raise BackendUnavailableError(
                f"backend {self.choice.name!r} cannot run this attention: {'; '.join(reasons)}; "
                "run a forward eagerly first"
            )


def _spec_of_call(layer: Any, call: LayerCall) -> AttentionSpec:
    return attention_spec(
        device=call.query.device,
        dtype=call.query.dtype,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[2],
        head_dim=call.query.shape[3],
        head_dim_v=call.value.shape[3],
        block_size=call.key.shape[1],
        kv_dtype=call.key.dtype,
        causal=call.causal,
        window_size=(-1 if call.window is None else call.window - 1, -1),
        logits_soft_cap=call.softcap,
        sinks=call.sinks,
        chunk_size=layer.chunk,
        scale=call.scaling,
        alibi_slopes=call.alibi_slopes,
        latent=layer.latent,
    )
