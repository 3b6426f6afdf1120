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
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import (
    AttentionSpec,
    Capabilities,
    Choice,
    Limits,
    Session,
    attention_spec,
    select_backend,
)
from torchpaged.backends.capabilities import used_features
from torchpaged.custom_ops import BackendOps
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.prefixes import can_read_once


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
        batch_invariant: ask for backends that give a request the same bits in any company.

    Attributes:
        choice: which backend runs and why.
        session: what it keeps open for the layers.
        ops, capabilities: the session's op handles, and what its backend declares.
        specs: what the layers ask of it, as keys.
    """

    choice: Choice
    session: Session
    ops: BackendOps
    capabilities: Capabilities

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

    def hold(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Hold a layer's call to what the backend declares; host facts only, and once per layer and kind of
        call.

        Args:
            layer: the `PagedLayer`; it remembers the kind.
            query: ``[batch, num_heads, query_len, head_dim]``.
            key, value: its pools ``[num_blocks, block_size, num_kv_heads, head_dim(_v)]``.
            causal, window, softcap, sinks, scale, alibi_slopes: the call's arguments.

        Raises:
            BackendUnavailableError: with all reasons.
        """
        if torch.compiler.is_compiling():
            if layer.asked is None:  # no eager forward has held it yet: the pools were made ahead
                self._hold_traced(
                    query.dtype,
                    key.dtype,
                    causal,
                    window,
                    softcap,
                    sinks,
                    layer.chunk,
                    alibi_slopes,
                    layer.latent,
                )
            return
        kind = (
            query.dtype,
            query.shape[1],
            query.shape[3],
            causal,
            window,
            softcap,
            sinks is None,
            scale,
            alibi_slopes is None,
        )
        if kind == layer.asked:
            return
        further = (causal, window, softcap, sinks, scale, alibi_slopes)
        spec = _spec_of_call(layer, query, key, value, *further)
        self.require(spec)
        self.give_workspace(layer, spec)
        layer.asked = kind

    def hold_spans(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        scale: float | None,
    ) -> dict[str, Tensor]:
        """Hold a layer's second call of a forward, over spans that are not causal, to what the backend
        declares; what the session keeps for it. Arguments as of `hold`.

        Raises:
            BackendUnavailableError: with all reasons.
        """
        if self.session.plans:
            raise BackendUnavailableError(
                f"backend {self.session.name!r} plans every batch of queries, and image tokens that see each "
                "other in both directions take a second one; give the PagedCache another backend"
            )
        spec = self._asks(_spec_of_call(layer, query, key, value, False, window, softcap, sinks, scale, None))
        self.require(spec)
        # There may be more spans than rows, for which a kernel makes semaphores of its own.
        return {name: x for name, x in self.session.workspace(spec).items() if name != "semaphore"}

    def _hold_traced(
        self,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        causal: bool,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        chunk: int | None,
        alibi_slopes: Tensor | None,
        latent: bool,
    ) -> None:
        used = used_features(
            causal=causal,
            window=window is not None,
            soft_cap=softcap or 0.0,
            alibi=alibi_slopes is not None,
            sinks=sinks is not None,
            chunk_size=chunk or 0,
            lse=False,
            latent=latent,
        )
        reasons = self.capabilities.reject_kind(dtype, kv_dtype, used)
        if reasons:
            raise BackendUnavailableError(
                f"backend {self.choice.name!r} cannot run this attention: {'; '.join(reasons)}; "
                "run a forward eagerly first"
            )


def _spec_of_call(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    alibi_slopes: Tensor | None,
) -> AttentionSpec:
    return attention_spec(
        device=query.device,
        dtype=query.dtype,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[2],
        head_dim=query.shape[3],
        head_dim_v=value.shape[3],
        block_size=key.shape[1],
        kv_dtype=key.dtype,
        causal=causal,
        window_size=(-1 if window is None else window - 1, -1),
        logits_soft_cap=softcap,
        sinks=sinks,
        chunk_size=layer.chunk,
        scale=scale,
        alibi_slopes=alibi_slopes,
        latent=layer.latent,
    )
